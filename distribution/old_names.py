# SPDX-License-Identifier: Apache-2.0
"""Files of a wheel at the places where modules stood before they moved.

What is new finds a module by its old name without them. But a process of a running job began with
the package as it was, which knows nothing of a move: it looks for the rest of itself, and for
programs that it starts by their path, where these stood.
"""

from __future__ import annotations

from pathlib import Path

from slurm_health import aliases

_PACKAGE = Path(aliases.__file__).parent
# What agents and `slurm-health run` start in the interpreter that a job trains with.
_PROGRAMS = ("probes.worker", "probes.torchrun_arguments", "probes.torchrun_restarts")

_MODULE = '''\
# SPDX-License-Identifier: Apache-2.0
"""Where a module stood before it moved: for processes that began before that."""
{program}
from slurm_health.aliases import stand_in

stand_in(__name__)
'''
_PROGRAM = """
if __name__ == "__main__":
    import os
    import sys

    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    os.execv(sys.executable, [sys.executable, os.path.join(package, {path!r}), *sys.argv[1:]])
"""


def files() -> dict[str, str]:
    """Return the text of each file, by its path below the package."""
    old = {aliases.EMPTIED, *aliases.LATE, *_old_names(_modules())}
    packages = {name.rpartition(".")[0] for name in old}
    found = {}
    for name in sorted(old):
        place = name.replace(".", "/")
        found[f"{place}/__init__.py" if name in packages else f"{place}.py"] = _text(name)
    return found


def _text(name: str) -> str:
    if name not in _PROGRAMS:
        return _MODULE.format(program="")
    moved = aliases.new_name(f"slurm_health.{name}")
    assert moved is not None
    path = moved.partition(".")[2].replace(".", "/") + ".py"
    return _MODULE.format(program=_PROGRAM.format(path=path))


def _modules() -> list[str]:
    paths = [path.relative_to(_PACKAGE).with_suffix("") for path in _PACKAGE.rglob("*.py")]
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def _old_names(modules: list[str]) -> set[str]:
    return {
        old + module.removeprefix(new)
        for old, new in aliases.MOVED.items()
        for module in modules
        if module == new or module.startswith(f"{new}.")
    }
