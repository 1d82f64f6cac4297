# SPDX-License-Identifier: Apache-2.0
"""The processes that outlive a job, and what they wait for; whether that answers again.

Everything is read in children that can be killed. What a process's memory lock may block, its
environment and its title, is read last, by a child for each process. No arguments are kept: they
hold secrets. Only `silent` touches what a process waits for; a child that hangs there is left alone
and recorded, and no other is started for it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec

from slurm_health.node.rules.slurm_drain import HeldProcess, Resource
from slurm_health.records.decoding import from_msgpack
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import one_line, whole_number
from slurm_health.system import proc
from slurm_health.system.killable import Answered, Broke, Hung, Stuck, run_all, run_guarded, run_one
from slurm_health.system.nvml import Gpus, read_gpus

# UnkillableStepProgram has 5 s in all; on a healthy /proc these take milliseconds.
_LIST_S, _READ_S = 1.5, 0.8
_ANSWER_S = 5.0
# Of the processes that may be the job's, so many are asked for their environment.
_MOST_ASKED = 64
_MOST_HELD = 16
_FRAMES = 8
_SIGKILL = 1 << 8
_KTHREADD = 2
_CGROUPS = "/sys/fs/cgroup"
_DAEMONS = ("slurmd", "slurmstepd")
# By the functions of the kernel that wait for it, the type of a filesystem.
_WAITS = {
    r"_*fuse_|request_wait_answer": "fuse",
    r"_*(nfs\d?_|rpc_)": "nfs",
    r"(ll|cl|osc|mdc|lov|ptlrpc|obd)_": "lustre",
    r"_*ceph": "ceph",
    r"_*(cifs|smb2?)_": "cifs",
    r"(gpfs|cxi|kx)": "gpfs",
    r"(fhgfs|Fhgfs|beegfs)": "beegfs",
    r"_*(xfs|xlog)_": "xfs",
    r"_*(ext4|jbd2)_": "ext4",
}
_GENERIC = re.compile(r"_*(io_)?schedule|wait_on_|wait_for_|do_syscall|entry_|__x64|request_wait")
# Not a place where files are.
_NO_FILES = frozenset({"fusectl", "nfsd"})


class _Process(msgspec.Struct, frozen=True):
    """One process of the list. `of_job`: its cgroup names the job."""

    stat: proc.Stat
    uid: int
    killed: bool
    of_job: bool


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of a job that are left; `unread` is why there may be more."""

    processes: tuple[HeldProcess, ...] = ()
    unread: str = ""


def left_by(job: int, *, patience: float = 1.0, root: Path = Path("/proc")) -> Left:
    """Return the processes of a job that are left; those that cannot be killed come first.

    A process is the job's by its cgroup, its process group, its environment, or the title of its
    slurmstepd. One whose environment does not answer and that SIGKILL does not end counts as well.
    Without a job (0), the processes of all jobs count. `patience` multiplies the time limits.
    """
    outcome = run_one(lambda: msgspec.msgpack.encode(_listed(root, job)), patience * _LIST_S)
    if not isinstance(outcome, Answered):
        return Left(unread="the processes could not be listed")
    processes = {one.stat.pid: one for one in from_msgpack(outcome.data, list[_Process])}
    others = _strangers(processes)
    mine = {pid for pid, one in processes.items() if one.of_job}
    names = {pid: processes[pid].stat.name for pid in others}
    # Nothing holds the memory lock of a process that no signal waits for, as a rule: one child
    # reads them all, and only if it hangs does each get its own.
    calm = [p for p in others if processes[p].stat.state != "D" and not processes[p].killed]
    single = [pid for pid in others if pid not in calm]
    together = run_one(partial(_identities, root, names, calm), patience * _READ_S)
    owners: dict[int, int] = {}
    if isinstance(together, Answered):
        owners = from_msgpack(together.data, dict[int, int])
    else:
        single += calm
    asked = single[:_MOST_ASKED]
    work = {pid: (partial(_identities, root, names, [pid]), patience * _READ_S) for pid in asked}
    unread = len(single) - len(asked)
    for pid, answer in run_all(work).items():
        if isinstance(answer, Answered):
            owners |= from_msgpack(answer.data, dict[int, int])
        elif processes[pid].killed:
            mine.add(pid)
        else:
            unread += 1
    mine |= {pid for pid, owner in owners.items() if owner and job in (0, owner)}
    groups = {processes[pid].stat.group for pid in mine} - {0}
    mine |= {pid for pid in others if processes[pid].stat.group in groups}
    mine |= {pid for pid in others if processes[pid].stat.parent in mine}
    if len(mine) > 1:  # it waits for the others, unless it is stopped or held itself
        mine -= {
            pid
            for pid in mine
            if processes[pid].stat.name == "slurmstepd" and processes[pid].stat.state in "SR"
        }
    ends = {pid: not (processes[pid].killed and processes[pid].stat.state == "D") for pid in mine}
    chosen = sorted(mine, key=lambda pid: (ends[pid], pid))[:_MOST_HELD]
    return Left(
        processes=_described(root, [processes[pid] for pid in chosen]),
        unread=f"some processes could not be read ({unread})" if unread else "",
    )


def _listed(root: Path, job: int) -> list[_Process]:
    """Return all processes but the kernel's; no reading here takes a process's memory lock."""
    processes = []
    for entry in root.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            stat = proc.stat(entry)
            if _KTHREADD in (stat.pid, stat.parent):
                continue
            lines = (entry / "status").read_text(errors="replace").splitlines()
            fields = {key: text for key, _, text in (line.partition(":") for line in lines)}
            cgroup = (entry / "cgroup").read_text(errors="replace")
            killed = any(int(fields.get(key, "0"), 16) & _SIGKILL for key in ("SigPnd", "ShdPnd"))
            uid = int(fields.get("Uid", "0").split()[0])
            of_job = job > 0 and f"/job_{job}/" in cgroup + "/"
            processes.append(_Process(stat, uid, killed, of_job))
    return processes


def _strangers(processes: Mapping[int, _Process]) -> list[int]:
    """Return the processes that may be a job's: users' own, and descendants of Slurm's daemons.

    This process, its children and what started it are none.
    """

    def lineage(pid: int) -> Iterator[int]:
        while pid in processes:
            yield pid
            pid = processes[pid].stat.parent

    ours = {os.getpid()}
    for pid in lineage(os.getppid()):
        if processes[pid].stat.name in _DAEMONS:
            break
        ours.add(pid)
    return [
        pid
        for pid, one in processes.items()
        if one.stat.name != "slurmd"
        and pid not in ours
        and os.getpid() not in lineage(pid)
        and (one.uid or any(processes[up].stat.name in _DAEMONS for up in lineage(pid)))
    ]


def _identities(root: Path, names: Mapping[int, str], pids: Iterable[int]) -> bytes:
    """Read the jobs of processes, 0 for none."""
    owners: dict[int, int] = {}
    for pid in pids:
        process = root / str(pid)
        with contextlib.suppress(OSError):  # it has ended
            if names[pid] == "slurmstepd":
                title = (process / "cmdline").read_bytes().decode(errors="replace")
                match = re.search(r"\[(\d+)\.", title)
                owners[pid] = int(match[1]) if match else 0
                continue
            environ = proc.environ_of(process)
            owners[pid] = whole_number(environ.get("SLURM_JOB_ID", "")) or 0
    return msgspec.msgpack.encode(owners)


def _described(root: Path, chosen: list[_Process]) -> tuple[HeldProcess, ...]:
    """Return what each process waits for and holds."""
    work: dict[int, tuple[Callable[[], bytes], float]] = {
        one.stat.pid: (partial(_detail, root, one), _READ_S) for one in chosen
    }
    if chosen:  # 0 is no process: the GPUs
        work[0] = (lambda: msgspec.msgpack.encode(read_gpus()), _LIST_S)
    outcomes = run_all(work)
    gpus = outcomes.get(0)
    devices = from_msgpack(gpus.data, Gpus).devices if isinstance(gpus, Answered) else ()
    held = []
    for one in chosen:
        outcome, pid = outcomes[one.stat.pid], one.stat.pid
        detail = (
            from_msgpack(outcome.data, HeldProcess)
            if isinstance(outcome, Answered)
            else _plain(one)
        )
        used = [device for device in devices if pid in (device.processes or ())]
        detail = msgspec.structs.replace(
            detail,
            resources=(
                *detail.resources,
                *(Resource(name=f"GPU {gpu.index}", gpu=gpu.index) for gpu in used),
            ),
            gpu_bytes=sum(gpu.memory_of.get(pid, 0) for gpu in used),
        )
        held.append(detail)
    return tuple(held)


def _plain(one: _Process) -> HeldProcess:
    return HeldProcess(
        pid=one.stat.pid,
        start_ticks=one.stat.start_ticks,
        name=one_line(one.stat.name),
        uid=one.uid,
        state=one.stat.state,
        killed=one.killed,
    )


def _detail(root: Path, one: _Process) -> bytes:
    """Read where a process waits in the kernel. What is closed to this user stays empty."""
    process = root / str(one.stat.pid)
    frames = [re.sub(r"^\[<\S+>\] |\+0x.*$", "", line) for line in _lines(process / "stack")]
    wchan = "".join(_lines(process / "wchan")).strip("0")
    functions = frames or ([wchan] if wchan else [])
    kind, wait = "", next((f for f in functions if not _GENERIC.match(f)), wchan)
    for pattern, fstype in _WAITS.items():
        if own := [frame for frame in functions if re.match(pattern, frame)]:
            kind, wait = fstype, own[-1]
            break
    file = ""
    words = "".join(_lines(process / "syscall")).split()
    if len(words) > 1 and words[1].startswith("0x"):
        with contextlib.suppress(OSError, ValueError):
            file = str((process / "fd" / str(int(words[1], 16))).readlink())  # opens nothing
    plain = _plain(one)
    detail = msgspec.structs.replace(
        plain,
        state="F" if _is_frozen(process) else plain.state,
        wait=wait,
        stack=tuple(frames[:_FRAMES]),
        file=one_line(file) if file.startswith("/") else "",
        resources=tuple(_mounts_waited_for(process, kind, file)),
    )
    return msgspec.msgpack.encode(detail)


def _is_frozen(process: Path) -> bool:
    """Return whether the process's cgroup is frozen, by version 1 or 2."""
    for line in _lines(process / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if "freezer" in controllers.split(","):
            state = _lines(Path(f"{_CGROUPS}/freezer{path}/freezer.state"))
        else:
            state = [] if controllers else _lines(Path(f"{_CGROUPS}{path}/cgroup.events"))
        if not {"FROZEN", "frozen 1"}.isdisjoint(state):
            return True
    return False


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").splitlines()
    return []


def _mounts_waited_for(process: Path, kind: str, file: str) -> list[Resource]:
    """Return the mount of the open file, else those of the type that the kernel waits for."""
    if not kind:
        return []
    mounts = {
        point: Resource(name=point, kind=mount.kind, source=mount.source)
        for point, mount in proc.mounted(process / "mounts").items()
        if mount.kind.startswith(kind) and mount.kind not in _NO_FILES
    }
    if not file:
        with contextlib.suppress(OSError):
            file = str((process / "cwd").readlink())
    above = (str(place) for place in (Path(file), *Path(file).parents))
    point = next((place for place in above if place in mounts), None)
    return list(mounts.values())[:4] if point is None else [mounts[point]]


# --- whether it is over --------------------------------------------------------------------------


def alive(held: Iterable[HeldProcess], root: Path = Path("/proc")) -> list[HeldProcess]:
    """Return the processes that are still there, a later one of the same number not."""
    left = []
    for one in held:
        with contextlib.suppress(OSError, ValueError):
            if proc.stat(root / str(one.pid)).start_ticks == one.start_ticks:
                left.append(one)
    return left


def silent(state: Path, resources: Iterable[Resource]) -> dict[str, str]:
    """Return why resources do not answer, by their words. A mount that is gone holds nothing up.

    A job in a container may see a mount elsewhere than this process does.
    """
    trouble: dict[str, str] = {}
    mounts = proc.mounted()
    for item in resources:
        points = [p for p, m in mounts.items() if (m.kind, m.source) == (item.kind, item.source)]
        if points:
            why = _mount_trouble(state, item.name if item.name in points else points[0])
        else:
            why = "" if item.gpu is None else _gpu_trouble(state, item.gpu)
        if why:
            trouble[item.text] = why
    return trouble


def _mount_trouble(state: Path, point: str) -> str:
    def work() -> bytes:
        os.statvfs(point)
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.stat(f"{point}/.slurm-health.{os.urandom(8).hex()}")  # noqa: PTH116 - no cache
        return b""

    match run_guarded(state, f"mount {point.replace('/', '-')}", work, _ANSWER_S):
        case Answered():
            return ""
        case Broke(reason=reason):
            return f"does not work: {reason}"
        case Hung() | Stuck():
            return "does not answer"


def _gpu_trouble(state: Path, index: int) -> str:
    def work() -> bytes:
        try:
            return msgspec.msgpack.encode(read_gpus())
        except Unmeasured as err:
            raise RuntimeError(f"cannot be asked: {err}") from err

    match run_guarded(state, "GPUs of a held process", work, _ANSWER_S):
        case Answered(data=data):
            gpu = next((g for g in from_msgpack(data, Gpus).devices if g.index == index), None)
        case Broke(reason=reason):
            return reason
        case Hung() | Stuck():
            return "does not answer"
    if gpu is None or gpu.lost or gpu.processes is None:
        return "does not report its processes"
    return f"is in use by {', '.join(map(str, gpu.processes))}" if gpu.processes else ""
