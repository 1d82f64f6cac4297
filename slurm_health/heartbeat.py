# SPDX-License-Identifier: Apache-2.0
"""Tell the monitor beside a job how far its training has come: one line in the training loop.

    from slurm_health import heartbeat

    for step, batch in enumerate(loader):
        heartbeat.step(step)

With `heartbeat.loading(loader)` in the place of `loader`, it also tells how long the rank waits for
its data, and when that ends. With `heartbeat.role(...)` and the tokens of each step, a rank is
compared with those that have the same work to do.

The heartbeat is an anonymous file in the memory of the rank itself, which the monitor finds through
/proc: no path, nothing to clean up, gone with the process. A step costs some microseconds. A thread
that sleeps until the monitor asks answers, when training stands still, where the main thread is and
which collectives PyTorch's Flight Recorder has recorded.

It needs the standard library only, and none of slurm-health's other modules: this file may be
copied beside a training script. What fails in here never reaches the training.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

# What the monitor looks for among a rank's open files, and what stands there: serial, rank, step,
# steps so far; in seconds by CLOCK_MONOTONIC the third and the latest step, the longest pause
# between two since the third; what steps took by themselves in seconds, and how many; the seconds
# that the rank waited for its data, how many batches that gave, and whether it has ended; the open
# files by which to ask and to be answered; the serial again, which differs while it is written.
NAME = "slurm-health-heartbeat"
LAYOUT = struct.Struct("<8sQqqQddddQdQ?iiQ")
MAGIC = b"shbeat1\0"
# Behind it, for monitors that know it: the tokens of all steps so far, the replica of the model,
# the role, and the serial once more.
WORK_LAYOUT = struct.Struct("<dq48sQ")
UNKNOWN_RANK = UNKNOWN_REPLICA = -1

# What PyTorch has process groups described as, by Megatron and by DeviceMesh. Ranks at the same
# place of the first three compute the same; the last ones are replicas, with batches of their own.
_SAME_WORK = {
    "pipeline": ("pipeline_model_parallel_group", "mesh_pp"),
    "expert": ("expert_model_parallel_group", "mesh_ep"),
    "context": ("context_parallel_group", "mesh_cp"),
}
_REPLICAS = ("data_parallel_group", "data_parallel_group_with_cp", "mesh_dp")

WARM_UP_STEPS = 2  # the first ones compile, allocate and fill caches
_FRAMES = 40
_RECORD_S = 2.0  # a second question is not to wait for longer than this
_MOST_ENTRIES = 2000  # of the Flight Recorder; what torch keeps unless told otherwise

_T = TypeVar("_T")


class _Data:
    """What this process has waited for its data so far: it may load some before its first step."""

    waited_s = 0.0
    batches = 0
    ended = False


class _Work:
    """What this process has to do: its part of the model, and the tokens of its steps."""

    role = ""
    replica = UNKNOWN_REPLICA
    told = False
    tokens = 0.0


class _Heartbeat:
    """This process's heartbeat."""

    def __init__(self) -> None:
        self._serial = 0
        self._number = self._count = 0
        self._first_s = self._last_s = self._longest_s = 0.0
        self._own_s, self._own_steps = 0.0, 0
        self._file = os.memfd_create(NAME)
        self._answer = os.memfd_create(NAME + "-answer")
        self._asked, self._ask = os.pipe()
        threading.Thread(target=self._serve, name=NAME, daemon=True).start()

    def step(self, number: int, own_s: float | None) -> None:
        now_s = time.monotonic()
        self._number = number
        self._count += 1
        if self._count <= WARM_UP_STEPS + 1:
            self._first_s = now_s
            _look_for_role()  # by now it has made its process groups
        else:
            self._longest_s = max(self._longest_s, now_s - self._last_s)
        self._last_s = now_s
        if own_s is not None:
            self._own_s += own_s
            self._own_steps += 1
        self.tell()

    def tell(self) -> None:
        """Write what is known."""
        self._serial += 1
        data = LAYOUT.pack(
            MAGIC,
            self._serial,
            _rank(),
            self._number,
            self._count,
            self._first_s,
            self._last_s,
            self._longest_s,
            self._own_s,
            self._own_steps,
            _data.waited_s,
            _data.batches,
            _data.ended,
            self._ask,
            self._answer,
            self._serial,
        )
        role = _work.role.encode()[:48]
        data += WORK_LAYOUT.pack(_work.tokens, _work.replica, role, self._serial)
        os.pwrite(self._file, data, 0)

    def close(self) -> None:
        """Let go of the files, in a process that is not the one they tell of."""
        for file in (self._file, self._answer, self._asked, self._ask):
            with contextlib.suppress(OSError):
                os.close(file)

    def _serve(self) -> None:
        """Answer each byte of the pipe with what this process is doing, for as long as it lives."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        recording = threading.Thread()
        while asked := os.read(self._asked, 1):
            with contextlib.suppress(Exception):
                # The stack at once: with a driver that hangs, the record may never come.
                answer: dict[str, Any] = {"asked": asked[0], "stack": _stack()}
                self._say(answer)
                if not recording.is_alive():
                    recording = threading.Thread(target=self._record, args=(answer,), daemon=True)
                    recording.start()
                    recording.join(_RECORD_S)

    def _record(self, answer: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):
            self._say({**answer, "flight": _flight_record()})

    def _say(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        # A reader that comes between the two finds what is no JSON, and reads again.
        os.ftruncate(self._answer, 0)
        os.pwrite(self._answer, data, 0)


_mine: _Heartbeat | None = None
_data = _Data()
_work = _Work()
_broken = False
_by_script = False  # whether the script tells its steps


def step(number: int, own_s: float | None = None, tokens: float | None = None) -> None:
    """Say that this rank has come to a step; call it once in every step, on every rank.

    Args:
        number: the step.
        own_s: what the rank spent in this step by itself, in seconds, without waiting for others:
            forward and backward pass without communication, and without what `loading` counts.
            With it, ranks that are slower than the others are found. Optional.
        tokens: what the rank computed in this step, in tokens or in another measure that its time
            grows with. With it, a rank with more of them is not taken for a slow one. Optional.
    """
    global _by_script  # noqa: PLW0603 - one heartbeat per process
    _by_script = True
    _step(number, own_s, tokens)


def step_of_optimizer(number: int) -> None:
    """Say a step for a script that says none itself: `--heartbeat=auto` calls this."""
    if not _by_script:
        _step(number, None, None)


def stop() -> None:
    """Let go of the heartbeat of this process, as another one of it has begun."""
    global _broken  # noqa: PLW0603
    _broken = True
    _forget()


def _step(number: int, own_s: float | None, tokens: float | None) -> None:
    global _mine, _broken  # noqa: PLW0603
    if _broken:
        return
    try:
        if _mine is None:
            _mine = _Heartbeat()
        if own_s is not None and tokens is not None:
            _work.tokens += float(tokens)
        _mine.step(int(number), None if own_s is None else float(own_s))
    except Exception as err:  # training is worth more than its heartbeat
        _broken = True
        print(f"slurm-health: no heartbeat: {err}", file=sys.stderr, flush=True)


def role(name: str, replica: int = UNKNOWN_REPLICA) -> None:
    """Say which part of the model this rank computes; ranks with the same name are compared.

    Call it before the first step. Without it, the role follows from the places of the rank in
    PyTorch's pipeline, expert and context groups, if their descriptions say what they are for, as
    those of Megatron and of DeviceMesh do; a rank that has no such place is compared with all.

    Args:
        name: such as `stage 2`; of the longest, 48 bytes count.
        replica: which copy of the model the rank belongs to: all parts of a copy have the same
            data, so that longer sequences are known by their being slower together. Optional.
    """
    _work.role, _work.replica, _work.told = str(name), int(replica), True


def place_in(groups: Mapping[str, Sequence[int]], rank: int) -> tuple[str, int]:
    """Return a rank's role and replica by the descriptions and the ranks of its process groups.

    The role is empty and the replica -1 where no group tells them.
    """
    places = {
        description.lower(): list(ranks).index(rank)
        for description, ranks in groups.items()
        if rank in ranks and len(ranks) > 1
    }
    parts = [
        f"{part} {places[name]}"
        for part, names in _SAME_WORK.items()
        for name in names
        if name in places
    ]
    replicas = [places[name] for name in _REPLICAS if name in places]
    return ", ".join(parts), (replicas[0] if replicas else UNKNOWN_REPLICA)


def _look_for_role() -> None:
    """Take role and replica from PyTorch's process groups, unless the script has said them."""
    if _work.told:
        return
    with contextlib.suppress(Exception):  # another version, no process group
        c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
        groups = {
            str(group.group_desc): sorted(ranks)
            for group, ranks in c10d._world.pg_group_ranks.items()
            if hasattr(group, "group_desc")  # else this rank is not in it
        }
        _work.role, _work.replica = place_in(groups, c10d.get_rank())


def loading(batches: Iterable[_T]) -> Iterator[_T]:
    """Yield what a data loader gives, and tell how long this rank waits for it.

    A rank that is slow because of its data, or whose data ends earlier or later than that of the
    others, is then known as that.
    """
    given = iter(batches)
    while True:
        began_s = time.monotonic()
        try:
            batch = next(given)
        except StopIteration:
            _loaded(began_s, ended=True)
            return
        _loaded(began_s, ended=False)
        yield batch


def _loaded(began_s: float, *, ended: bool) -> None:
    _data.waited_s += time.monotonic() - began_s
    _data.batches += not ended
    _data.ended = ended
    if _mine is not None:
        with contextlib.suppress(Exception):  # training is worth more than its heartbeat
            _mine.tell()


def _forget() -> None:
    """In a forked child, such as a data loader's worker: the heartbeat is the parent's alone."""
    global _mine  # noqa: PLW0603
    if _mine is not None:
        _mine.close()
        _mine = None


os.register_at_fork(after_in_child=_forget)


def _rank() -> int:
    """Return the rank: by torchrun's variable, which scripts that srun starts also set."""
    text = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or ""
    return int(text) if text.isdigit() else UNKNOWN_RANK


def _stack() -> list[list[Any]]:
    """Return where the main thread is, outermost first: file, line and function."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    walked = [] if frame is None else list(traceback.walk_stack(frame))
    frames = [[f.f_code.co_filename, line, f.f_code.co_name] for f, line in walked[:_FRAMES]]
    return frames[::-1]


def _flight_record() -> dict[str, Any]:
    """Return what the Flight Recorders of a torch that is loaded have; NCCL has one of its own."""
    c10d = getattr(sys.modules.get("torch._C"), "_distributed_c10d", None)
    entries = []
    groups: dict[str, Any] = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(Exception):  # a build without NCCL, another version
            record = json.loads(getattr(c10d, name)())
            entries += record.get("entries", [])[-_MOST_ENTRIES:]
            groups |= record.get("pg_config") or {}
    return {"entries": entries, "pg_config": groups}
