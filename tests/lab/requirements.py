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
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "glusterfs": "glusterfs-client",
    "scontrol": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "iptables": "iptables",
}

_NOT_ROOT = "the lab needs root (it makes namespaces, bridges and cgroups)"


def packages() -> tuple[str, ...]:
    """The distribution's packages a lab needs."""
    return tuple(_PACKAGES.read_text().split())


def missing() -> str | None:
    """Why no lab can run here, in one line; None if it can."""
    if os.geteuid() != 0:
        return _NOT_ROOT
    absent = sorted(
        {
            package
            for command, package in _COMMANDS.items()
            if shutil.which(command, path=CLEAN_PATH) is None
        }
    )
    if absent:
        return f"missing packages: {' '.join(absent)} (python -m tests.lab install)"
    return None


def require(release: Path | None) -> None:
    """Check that a lab can run here, with the machine's Slurm or that of a root directory.

    Raises:
        LabUnavailable: it cannot; says what to do.
    """
    if release is None:
        reason = missing()
        if reason is not None:
            raise LabUnavailable(reason)
        return
    require_root()
    if not (release / "usr/sbin/slurmctld").exists():
        raise LabUnavailable(f"no Slurm in {release} (python -m tests.lab make-root)")


def require_root() -> None:
    """Check that we are root.

    Raises:
        LabUnavailable: we are not.
    """
    if os.geteuid() != 0:
        raise LabUnavailable(_NOT_ROOT)
