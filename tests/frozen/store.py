# SPDX-License-Identifier: Apache-2.0
"""The files of what is frozen, one entry a line, and how they differ from what is generated."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tests.frozen import deciding, fleet, journals, node_rules, simulated, trainings

HOME = Path(__file__).parent

Entries = Mapping[str, object]

TABLES: Mapping[str, Callable[[], Iterable[tuple[str, object]]]] = {
    "after_failure": deciding.after_failure,
    "check_again": deciding.check_again,
    "decide": deciding.decide,
    "drains": deciding.drains,
    "fleet": fleet.entries,
    "journals": journals.entries,
    "logs": trainings.failures,
    "node_rules": node_rules.entries,
    "paths": deciding.paths,
    "recordings": trainings.recordings,
    "simulated_cpus": lambda: simulated.concluded(simulated.of_cpus()),
    "simulated_devices": lambda: simulated.concluded(simulated.of_devices()),
    "simulated_fabrics": lambda: simulated.concluded(simulated.of_fabrics()),
    "simulated_nodes": lambda: simulated.concluded(simulated.of_nodes()),
    "standstills": trainings.standstills,
    "unchecked": deciding.unchecked,
}


def generated(table: str) -> Entries:
    """Return what the code comes to now, as it would be read from its file.

    Raises:
        ValueError: two entries have one key.
    """
    now: dict[str, object] = {}
    for key, value in TABLES[table]():
        if key in now:
            raise ValueError(f"{table}: two entries are called {key!r}")
        now[key] = value
    return dict(json.loads(json.dumps(now)))


def frozen(table: str) -> Entries:
    """Return what stands in a table's file; nothing where there is none yet."""
    path = HOME / f"{table}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write(table: str, now: Entries) -> None:
    """Write a table's file."""
    lines = [f"{_text(key)}: {_text(value)}" for key, value in now.items()]
    (HOME / f"{table}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def differences(table: str, now: Entries) -> Iterator[str]:
    """Yield each entry that is not as it was, with what it was and what it is now."""
    before = frozen(table)
    for key in dict.fromkeys([*before, *now]):
        old = _text(before[key]) if key in before else "no entry"
        new = _text(now[key]) if key in now else "no entry"
        if old != new:
            yield f"{table}: {key}\n  old: {old}\n  new: {new}"


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
