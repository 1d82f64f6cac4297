# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`: who can change the programs and files of root."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
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
    loose_by_name = {what: replaceable(Path(path)) for path, what in named.items()}
    advice = []
    for python in dict.fromkeys(interpreters):
        loose_by_name[python] = replaceable(Path(python))
        if loose_by_name[python]:
            continue
        try:
            output = command.run([python, "-I", "-c", _PLACES], environ={"PATH": os.defpath})
        except SlurmError as err:
            text = f"the owners of the modules of {python} were not checked: {err}"
            advice.append(look(text, f"make sure that {python} runs"))
            continue
        loose: set[Path] = set()
        for place in map(Path, output.splitlines()):
            loose.update(replaceable(place))
            for directory, names, files in os.walk(place):
                names[:] = [name for name in names if not name.startswith(".")]
                below = (Path(directory, name) for name in (*names, *files))
                loose.update(path for path in below if _is_loose(path))
        loose_by_name[f"modules of {python}"] = sorted(loose)
    for what, paths in loose_by_name.items():
        advice += loose_advice(f"root runs {what} on every node", paths)
    return advice or [fine("only root can change the hooks")]


def loose_advice(what: str, loose: list[Path]) -> list[Advice]:
    """Return the advice on paths that others can change; none if there are none."""
    if not loose:
        return []
    names = first_few(loose)
    text = f"{what}, and others than root can change {names}"
    return [change(text, f"chown -R root and chmod -R go-w {names}, or another place")]


def replaceable(path: Path) -> list[Path]:
    """Return which of a path, its links' target and the directories above others can change."""
    places = {place for start in (path, path.resolve()) for place in (start, *start.parents)}
    return sorted(filter(_is_loose, places))


def _is_loose(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        # Sticky, as /tmp is: others may add names there, and replace none of root's.
        status = os.stat_result((stat.S_IFDIR, *status[1:]))
    return others_can_write(status)
