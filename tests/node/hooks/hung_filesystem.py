# SPDX-License-Identifier: Apache-2.0
"""A filesystem that takes requests and never answers, and what of hooks meets it, twice.

    python -m tests.node.hooks.hung_filesystem WHAT DIRECTORY STATE

In a mount namespace of its own. Whoever asks the filesystem sleeps in the kernel where SIGKILL
does not reach, until this program ends and the kernel breaks the connection off. Prints one line
of JSON.
"""

import errno
import json
import os
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from slurm_health.fleet.index import opened
from slurm_health.node import repair, shared
from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.filesystem import Filesystem
from slurm_health.node.checks.memory import Memory
from slurm_health.node.hooks.user_journal import JobEnded, Unreadable, accusations
from slurm_health.node.rules.repair import RepairAttempt, RepairStep
from slurm_health.node.rules.settings import Repair
from slurm_health.node.run import run_checks
from slurm_health.node.site import Site, Timing
from slurm_health.report import jobs
from slurm_health.system.nvml import Gpus
from tests.lab import kernel
from tests.node.checks.conftest import planned
from tests.support.sites import load_site

_GETATTR, _OPEN, _WRITE, _RELEASE, _FLUSH, _INIT, _IOCTL = 3, 14, 16, 18, 25, 26, 39
_LIMIT_S = 3.0
_NOBODY = 65534
_NOW_S = 2e9


def mount(
    place: Path, whose: str = "user_id=0,group_id=0,allow_other", *, rootmode: str = "40000"
) -> int:
    """Mount the filesystem; return the descriptor through which the kernel asks.

    `whose` are the options that say whose it is, and who may ask it. With another `rootmode` all
    of it is one file.
    """
    fuse = os.open("/dev/fuse", os.O_RDWR)
    kernel.unshare(kernel.NEW_MOUNT)
    kernel.keep_mounts_private()
    kernel.mount_fresh("fuse.hung", place, f"fd={fuse},rootmode={rootmode},{whose}")
    return fuse


_OPENED = {_INIT: struct.pack("<IIIIHHI", 7, 31, 0, 0, 12, 9, 4096).ljust(64, b"\0")}
# A file that can be opened and written, whose size is known, and which nobody can read.
UNREADABLE = _OPENED | {
    _GETATTR: struct.pack("<QIIQQQ", 3600, 0, 0, 1, 1 << 20, 0).ljust(76, b"\0")
    + struct.pack("<III", 0o100600, 1, 0).ljust(28, b"\0"),
    _OPEN: struct.pack("<QII", 0, 1, 0),  # past the page cache
    _WRITE: b"",
    _FLUSH: b"",
    _RELEASE: b"",
    _IOCTL: b"",
}


def serve(fuse: int, answers: Mapping[int, bytes] = _OPENED) -> None:
    """Answer these requests, at least the first one, which opens the connection, and no other."""
    while True:
        request = os.read(fuse, 1 << 17)
        _, opcode, unique = struct.unpack_from("<IIQ", request)
        if opcode in answers:
            body = answers[opcode]
            if opcode == _WRITE:
                body = request[56:60].ljust(8, b"\0")  # all that was to be written, is
            error = -errno.ENOTTY if opcode == _IOCTL else 0
            os.write(fuse, struct.pack("<IiQ", 16 + len(body), error, unique) + body)


def main(what: str, directory: Path, state: Path) -> None:
    """Do it beside the server, and with the server end the hang."""
    run = {
        "checks": checks,
        "command": command,
        "journal": journal,
        "ledger": ledger,
        "owners": owners,
        "trick": trick,
    }[what]
    with mounted(directory):
        print(json.dumps([[*run(directory, state), waiting()] for _ in range(2)]), flush=True)


@contextmanager
def mounted(place: Path, whose: str = "user_id=0,group_id=0,allow_other") -> Iterator[None]:
    """Have the filesystem there, served by a child."""
    fuse = mount(place, whose)
    server = os.fork()
    if server == 0:
        serve(fuse)
    os.close(fuse)
    try:
        yield
    finally:
        os.kill(server, 9)
        os.waitpid(server, 0)


def waiting() -> int:
    """Count the children that the kernel holds."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in children]
    return sum(stat.split()[0] == "D" for stat in stats)


def journal(directory: Path, state: Path) -> list[object]:
    """Read a user's journal, as the epilog does."""
    ended = JobEnded(job=7, uid=os.getuid(), gid=os.getgid(), cluster="lab", attempt=0)
    began = time.monotonic()
    try:
        accusations(site(directory, state), ended, "n3")
    except Unreadable as err:
        return [time.monotonic() - began, str(err)]
    return [0, "it was read"]


def trick(directory: Path, state: Path) -> list[object]:
    """Read the journals of three users' jobs that one mounted over, then that of a fourth's."""
    said = []
    for uid in (os.getuid(), 1, 2, _NOBODY):
        job = 8 if uid == _NOBODY else 7
        ended = JobEnded(job=job, uid=uid, gid=uid, cluster="lab", attempt=0)
        try:
            accusations(site(directory.parents[1], state), ended, "n3")
        except Unreadable as err:
            said.append(str(err))
        else:
            said.append("it was read")
    return [said]


def owners(directory: Path, state: Path) -> list[object]:
    """Have root list all jobs, and index them, where a user mounted over one of them."""
    root = directory.parents[1]
    listed = jobs.latest_jobs(root, 9, cluster=None, now_s=_NOW_S, environ={"PATH": "/"}).jobs
    with opened(None, root, now_s=_NOW_S) as index:
        return [[each.job for each in listed], index.troubles()]


def ledger(directory: Path, state: Path) -> list[object]:
    """Ask the ledger, as whoever wants to drain does."""
    began = time.monotonic()
    here = site(directory, state)
    try:
        shared.change_ledger(here, lambda ledger: (ledger, None), type(None))
    except shared.StoreSilent as err:
        return [time.monotonic() - began, str(err)]
    return [0, "it was read"]


def command(directory: Path, state: Path) -> list[object]:
    """Test the node by a command that meets the filesystem."""
    words = ["stat", str(directory / state.name)]
    settings = Repair(test=tuple(words), test_limit_min=_LIMIT_S / 60)
    begun = RepairAttempt(node="n3", step=RepairStep.TEST, time_s=1.0, drain="d")
    place = msgspec.structs.replace(site(directory, state), repair=settings)
    began = time.monotonic()
    ended = repair.take(place, begun, (), Gpus)
    return [time.monotonic() - began, ended.outcome.value, ended.text]


def site(directory: Path, state: Path) -> Site:
    """Return the settings of a site that keeps everything on the filesystem."""
    text = f"""\
journal = "{directory}"
[hooks]
state = "{state}"
[breaker]
directory = "{directory}"
"""
    timing = Timing(lock_s=0.1, journal_s=_LIMIT_S)
    return msgspec.structs.replace(load_site(state.with_name("etc"), text), timing=timing)


def checks(directory: Path, state: Path) -> list[object]:
    """Run one check that meets the filesystem and one that does not."""
    meets = Filesystem(path=str(directory), mounted=False)
    began = time.monotonic()
    results = run_checks(
        [planned(meets, "hung", _LIMIT_S), planned(Memory(), "memory", _LIMIT_S)],
        CheckContext(state=state),
    )
    elapsed_s = time.monotonic() - began
    return [elapsed_s, [[each.name, each.status.value, each.finding.text] for each in results]]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
