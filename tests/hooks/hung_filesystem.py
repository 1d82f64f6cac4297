# SPDX-License-Identifier: Apache-2.0
"""A filesystem that takes requests and never answers, and two hooks that meet it.

    python -m tests.hooks.hung_filesystem DIRECTORY STATE

In a mount namespace of its own. Whoever asks the filesystem sleeps in the kernel where SIGKILL
does not reach, until this program ends and the kernel breaks the connection off. Prints one line
of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import time
from pathlib import Path

from slurm_health.checks.check import CheckContext, Planned
from slurm_health.checks.filesystem import Filesystem
from slurm_health.checks.memory import Memory
from slurm_health.core.node.finding import Status
from slurm_health.hooks.run_checks import run_checks

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 1 << 18
_FUSE_INIT = 26
_LIMIT_S = 3.0
_libc = ctypes.CDLL(None, use_errno=True)


def mount(directory: Path) -> int:
    """Mount the filesystem; return the descriptor through which the kernel asks."""
    fuse = os.open("/dev/fuse", os.O_RDWR)
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
    _call("mount", b"hung", str(directory).encode(), b"fuse.hung", ctypes.c_ulong(0), options)
    return fuse


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def serve(fuse: int) -> None:
    """Answer the first request, which opens the connection, and no other."""
    while True:
        request = os.read(fuse, 1 << 17)
        _, opcode, unique = struct.unpack_from("<IIQ", request)
        if opcode == _FUSE_INIT:
            body = struct.pack("<IIIIHHI", 7, 31, 0, 0, 12, 9, 4096).ljust(64, b"\0")
            os.write(fuse, struct.pack("<IiQ", 16 + len(body), 0, unique) + body)


def main(directory: Path, state: Path) -> None:
    """Run the checks beside the server, then end the server and with it the hang."""
    fuse = mount(directory)
    server = os.fork()
    if server == 0:
        serve(fuse)
    os.close(fuse)
    try:
        print(json.dumps([[*run(directory, state), waiting()] for _ in range(2)]), flush=True)
    finally:
        os.kill(server, 9)
        os.waitpid(server, 0)


def waiting() -> int:
    """Count the children that the kernel holds."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in children]
    return sum(stat.split()[0] == "D" for stat in stats)


def run(directory: Path, state: Path) -> list[object]:
    """Run one check that meets the filesystem and one that does not."""
    planned = [
        Planned(
            name=name,
            check=check,
            time_limit_s=_LIMIT_S,
            severity=Status.NODE_FAULT,
            shadow=False,
            contexts=(),
        )
        for name, check in (
            ("hung", Filesystem(path=str(directory), mounted=False)),
            ("memory", Memory()),
        )
    ]
    began = time.monotonic()
    results = run_checks(planned, CheckContext(state=state))
    elapsed_s = time.monotonic() - began
    return [elapsed_s, [[each.name, each.status.value, each.finding.text] for each in results]]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
