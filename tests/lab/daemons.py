# SPDX-License-Identifier: Apache-2.0
"""Starts daemons in the namespaces of the calling process: munged, slurmctld, slurmd."""

import os
import pwd
import shutil
import socket
import subprocess
import time
from pathlib import Path

from .layout import LabSpec

_DEADLINE_S = 60
CLEAN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": CLEAN_PATH, "LANG": "C.UTF-8"}


def slurm_version() -> tuple[int, int]:
    """The release of the slurmd at hand, e.g. (22, 5)."""
    result = subprocess.run(
        ["slurmd", "-V"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
        timeout=_DEADLINE_S,
    )
    major, minor = result.stdout.split()[1].split(".")[:2]
    return int(major), int(minor)


def start_munged(spec: LabSpec) -> None:
    """Start munged with a key of the lab's own; it answers when this returns."""
    directory = spec.paths.root / "munge"
    socket_directory = Path("/run/munge")
    socket_directory.mkdir()
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    user = pwd.getpwnam("munge")
    for path in (directory, key, socket_directory):
        shutil.chown(path, user.pw_uid, user.pw_gid)
    run(
        [
            "munged",
            f"--key-file={key}",
            f"--log-file={directory}/munged.log",
            f"--seed-file={directory}/seed",
            f"--pid-file={socket_directory}/munged.pid",
            f"--socket={socket_directory}/munge.socket.2",
        ],
        user=user.pw_uid,
        group=user.pw_gid,
    )


def start_slurmctld() -> None:
    """Start slurmctld; it may not listen yet when this returns."""
    run(["slurmctld"])


def start_slurmd(node: str) -> None:
    """Start this node's slurmd; it may not have registered yet when this returns."""
    run(["slurmd", "-N", node])


def run(
    argv: list[str], user: int | None = None, group: int | None = None, stdin: str = ""
) -> None:
    """Run a program that ends, or that leaves a daemon behind."""
    result = subprocess.run(
        argv,
        env=ENVIRONMENT,
        cwd="/",
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=_DEADLINE_S,
        user=user,
        group=group,
        extra_groups=None if user is None else [],
    )
    if result.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with {result.returncode}: {result.stderr.strip()}")


def await_answer(address: str | tuple[str, int], who: str) -> None:
    """Wait until somebody listens on a port, or on a socket of this machine."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    end_s = time.monotonic() + _DEADLINE_S
    while True:
        with socket.socket(family) as client:
            try:
                client.connect(address)
            except OSError:
                if time.monotonic() > end_s:
                    raise RuntimeError(f"{who} does not listen on {address}") from None
                time.sleep(0.02)
            else:
                return
