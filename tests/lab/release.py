# SPDX-License-Identifier: Apache-2.0
"""Puts a lab into the root directory of another Slurm release.

The lab's mount namespace gets that directory as its root, under an overlay in memory: the directory
stays as it is, and several labs can use it at once. The checkout and the interpreter that runs
this are shown in it at their own paths, so that jobs run the project as it is here.
"""

import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from . import kernel, visibility
from .layout import LabSpec

_SCAFFOLD = Path("/run")
_SYSTEM_PROGRAMS = Path("/usr/bin")


def enter(spec: LabSpec, release: Path, wanted: Iterable[Path]) -> None:
    """Make the release's directory the root of this mount namespace."""
    kernel.mount_fresh("tmpfs", _SCAFFOLD, "mode=0755")
    upper, work, root = (_SCAFFOLD / name for name in ("upper", "work", "root"))
    for directory in (upper, work, root):
        directory.mkdir()
    kernel.mount_overlay(release, upper, work, root)
    # Before anything of the machine is mounted in there: this one also removes files.
    if sys.base_prefix == "/usr":
        _show_system_interpreter(root)
    for path in (Path("/dev"), Path("/sys"), spec.paths.root, *wanted):
        visibility.place(path, root / path.relative_to("/"))
    kernel.change_root(root)


def _show_system_interpreter(root: Path) -> None:
    """Show what a virtual environment borrows from the machine's own Python."""
    programs = root / _SYSTEM_PROGRAMS.relative_to("/")
    # Whatever is unlinked below must be the overlay's, which forgets it with the lab.
    if programs.resolve() != programs or programs.stat().st_dev != root.stat().st_dev:
        raise RuntimeError(f"{programs} is not the release's own")
    stdlib = Path(sysconfig.get_path("stdlib"))
    visibility.place(stdlib, root / stdlib.relative_to("/"))
    link = Path(sys.executable)
    while True:
        if link.parent == _SYSTEM_PROGRAMS:
            (programs / link.name).unlink(missing_ok=True)
            visibility.place(link, programs / link.name)
        if not link.is_symlink():
            return
        link = link.parent / link.readlink()
