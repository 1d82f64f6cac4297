# SPDX-License-Identifier: Apache-2.0
"""Says whether this machine can run a lab."""

import os
import shutil
from pathlib import Path

from .daemons import CLEAN_PATH
from .errors import LabUnavailable

_PACKAGES = Path(__file__).with_name("packages.txt")
_COMMANDS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "scontrol": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "iptables": "iptables",
}
_FOR_ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server-core"}
_FOR_NETWORK_FILESYSTEM = {"glusterfs": "glusterfs-client"}

_NOT_ROOT = "the lab needs root (it makes namespaces, bridges and cgroups)"


def packages() -> tuple[str, ...]:
    """The distribution's packages for every kind of lab."""
    return tuple(_PACKAGES.read_text().split())


def missing(
    *, accounting: bool = False, network_filesystem: bool = False, path: str = CLEAN_PATH
) -> str | None:
    """Why no such lab can run here, in one line; None if it can."""
    if os.geteuid() != 0:
        return _NOT_ROOT
    needed = dict(_COMMANDS)
    if accounting:
        needed |= _FOR_ACCOUNTING
    if network_filesystem:
        needed |= _FOR_NETWORK_FILESYSTEM
    absent = sorted(
        {package for command, package in needed.items() if not shutil.which(command, path=path)}
    )
    if absent:
        return f"missing packages: {' '.join(absent)} (python -m tests.lab install)"
    return None


def require(
    release: Path | None, *, accounting: bool = False, network_filesystem: bool = False
) -> None:
    """Check that such a lab can run here, with the machine's Slurm or that of a root directory."""
    if release is None:
        reason = missing(accounting=accounting, network_filesystem=network_filesystem)
        if reason is not None:
            raise LabUnavailable(reason)
        return
    require_root()
    if not (release / "usr/sbin/slurmctld").exists():
        raise LabUnavailable(f"no Slurm in {release} (python -m tests.lab make-root)")


def require_root() -> None:
    """Check that we are root."""
    if os.geteuid() != 0:
        raise LabUnavailable(_NOT_ROOT)
