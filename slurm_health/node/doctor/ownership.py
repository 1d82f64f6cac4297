# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`, the part about who can change what root runs on every node."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from slurm_health.node.checks.check import first_few
from slurm_health.node.doctor.advice import Advice, change, fine, look
from slurm_health.records.errors import SlurmError
from slurm_health.system.site_file import others_can_write
from slurm_health.system.slurm import command

_PLACES = "import os, sys; print(*filter(os.path.exists, sys.path), sep='\\n')"


def advise(
    scripts: Iterable[str], commands: Iterable[str], interpreters: Iterable[str]
) -> list[Advice]:
    """Return which hooks, interpreters and modules others than root can change.

    Args:
        scripts: what slurm.conf names.
        commands: the directories in which the shims look for commands.
        interpreters: what the shims among them run; one that others can change is not run here.
    """
    named = {path: path for path in scripts}
    named |= {path: f"the commands in {path}" for path in commands}
    found = [_advice(what, replaceable(Path(path))) for path, what in named.items()]
    for python in dict.fromkeys(interpreters):
        loose = replaceable(Path(python))
        found.append(_advice(python, loose) if loose else _modules(python))
    return [each for each in found if each is not None] or [fine("only root can change the hooks")]


def replaceable(path: Path) -> list[Path]:
    """Return which of a path, its links' target and the directories above others can change."""
    places = {each for start in (path, path.resolve()) for each in (start, *start.parents)}
    return sorted(filter(_is_loose, places))


def _is_loose(path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        # Sticky, as /tmp is: others may add names there, and replace none of root's.
        found = os.stat_result((stat.S_IFDIR, *found[1:]))
    return others_can_write(found)


def _modules(python: str) -> Advice | None:
    try:
        said = command.run([python, "-I", "-c", _PLACES], environ={"PATH": os.defpath})
    except SlurmError as err:
        text = f"who can change the modules of {python} was not looked at: {err}"
        return look(text, f"make sure that {python} runs")
    places = [Path(line) for line in said.splitlines()]
    loose = {each for place in places for each in replaceable(place)}
    loose |= {each for place in places for each in _below(place) if _is_loose(each)}
    return _advice(f"modules of {python}", sorted(loose))


def _below(top: Path) -> Iterator[Path]:
    """Yield what can be imported from a directory."""
    for directory, names, files in os.walk(top):
        names[:] = [name for name in names if not name.startswith(".")]
        yield from (Path(directory, name) for name in (*names, *files))


def _advice(what: str, loose: list[Path]) -> Advice | None:
    if not loose:
        return None
    text = f"root runs {what} on every node, and others than root can change {first_few(loose)}"
    return change(text, f"chown -R root and chmod -R go-w {first_few(loose)}, or another place")
