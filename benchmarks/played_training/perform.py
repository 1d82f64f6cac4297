# SPDX-License-Identifier: Apache-2.0
"""One run: four ranks on two played nodes, each node with a monitor, until it has ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.played_training import native_stacks
from benchmarks.played_training.causes import RANKS, RANKS_PER_NODE, STEP, Cause, node_of
from benchmarks.played_training.gpus import GpusNow
from slurm_health.system.processes import Process, kill_session
from slurm_health.training.diagnosis.rank_failures import SIGNALS
from slurm_health.training.diagnosis.rank_now import GpuUse
from slurm_health.training.monitor.messages import (
    HERE,
    LOOK,
    MESSAGES,
    NOW,
    MessageReader,
    NodeMessage,
    NodeNow,
)
from tests.played_gpu.description import VARIABLE, machine, strike, write

ROOT = Path(__file__).parents[2]
NODES = tuple(dict.fromkeys(node_of(rank) for rank in range(RANKS)))
TIMEOUT_S = 30.0  # of the process groups: the looks come before it
_BEGIN_S, _END_S = 180.0, 90.0  # loading torch on a busy machine; the watchdog's dumps and end
_SETTLE_S = 4.0  # after what happened, so that the others have come to wait
_BETWEEN_S = 4.0  # from one look to the next, in which a process that waits uses no processor
_POLL_S = 0.05
# Entries of the Flight Recorder: a few steps, so that recordings are small.
_ENTRIES = {"ddp": 32, "pipeline": 32, "fsdp": 16}
_JOB_PREFIX = "played-"


class NotPlayed(Exception):
    """A run did not come to what was to be seen."""


@dataclass(kw_only=True)
class Seen:
    """What a run left: lines as srun labels them, ends of ranks, dumps, what was told of nodes."""

    lines: list[str] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    dumps: dict[int, bytes] = field(default_factory=dict)
    messages: list[NodeMessage] = field(default_factory=list)
    gpus: list[GpusNow] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)
    ran_s: float = 0.0


class Run:
    """Plays one cause."""

    def __init__(self, cause: Cause, python: str, directory: Path) -> None:
        self._cause, self._python, self._directory = cause, python, directory
        self._job = f"{_JOB_PREFIX}{os.getpid()}-{cause.name}"
        self._seen = Seen()
        self._began_s = time.monotonic()
        self._port = _free_port()
        for node in NODES:
            write(self._description(node), machine(RANKS_PER_NODE, seed=f"training {node}"))
        os.mkfifo(directory / "pipe")
        (directory / "data").mkdir()

    def perform(self) -> Seen:
        """Run until all ranks have ended; a rank that would not, is ended.

        Raises:
            NotPlayed: the training did not come to the step.
        """
        ranks = [self._start(rank) for rank in range(RANKS)]
        readers = [
            threading.Thread(target=self._read, args=(number, rank))
            for number, rank in enumerate(ranks)
        ]
        for reader in readers:
            reader.start()
        broken = ExitStack()
        try:
            self._await_mark(ranks)
            if self._cause.device_fault or self._cause.hangs_mount:
                self._break(broken)
            if self._cause.hangs:
                self._look({rank.pid: number for number, rank in enumerate(ranks)})
            self._await_end(ranks)
            if not self._cause.hangs:
                self._seen.gpus = self._told([self._ask_gpus(node) for node in NODES])
        finally:
            for rank in ranks:
                kill_session(rank, signal.SIGKILL)
            broken.close()  # whoever waits in a mount that hangs gets an error
            for rank in ranks:
                rank.wait()
            for reader in readers:
                reader.join()
        for path in self._directory.glob("fr_*"):
            self._seen.dumps[int(path.name.removeprefix("fr_"))] = path.read_bytes()
        self._seen.ran_s = time.monotonic() - self._began_s
        return self._seen

    def _start(self, rank: int) -> Process:
        plan = {
            "cause": self._cause.name,
            "training": self._cause.training,
            "ranks": self._cause.ranks,
            "step": STEP,
            "silent": self._cause.name.endswith("silent"),
            "device_fault": self._cause.device_fault is not None,
            "timeout_s": TIMEOUT_S,
            "mark": str(self._directory / "mark"),
            "broken": str(self._directory / "broken"),
            "pipe": str(self._directory / "pipe"),
            "batch": str(self._directory / "data" / "batch"),
        }
        return subprocess.Popen(
            [self._python, "-u", "-m", "benchmarks.played_training.training"],
            env=self._environ(rank, json.dumps(plan)),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def _environ(self, rank: int, plan: str) -> Mapping[str, str]:
        local = rank % RANKS_PER_NODE
        return {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            VARIABLE: str(self._description(node_of(rank))),
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_RANK": str(local),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "SLURM_JOB_ID": self._job,
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": str(RANKS),
            "SLURMD_NODENAME": node_of(rank),
            "OMP_NUM_THREADS": "1",
            "TORCH_FR_BUFFER_SIZE": str(_ENTRIES[self._cause.training]),
            "TORCH_FR_DUMP_TEMP_FILE": str(self._directory / "fr_"),
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            # The abort comes four times as long after the dump signal.
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
            "PLAYED_TRAINING": plan,
        }

    def _description(self, node: str) -> Path:
        return self._directory / f"gpus-{node}"

    def _read(self, number: int, rank: Process) -> None:
        """Take in a rank's lines as they come, with the labels of `srun --label`."""
        assert rank.stdout is not None
        with rank.stdout:
            for line in rank.stdout:
                text = line.decode(errors="replace").rstrip("\n")
                self._seen.lines.append(f"{number}: {text}")

    def _await_mark(self, ranks: Sequence[Process]) -> None:
        give_up_s = time.monotonic() + _BEGIN_S
        while not (self._directory / "mark").exists():
            if time.monotonic() > give_up_s or all(each.poll() is not None for each in ranks):
                said = "\n".join(self._seen.lines[-5:])
                raise NotPlayed(f"{self._cause.name}: no rank came to step {STEP}: {said}")
            time.sleep(_POLL_S)

    def _break(self, mending: ExitStack) -> None:
        if self._cause.device_fault:
            strike(self._description(self._cause.broken_node), self._cause.device_fault)
        else:
            self._hang_mount(self._directory / "data", mending)
        (self._directory / "broken").touch()

    def _hang_mount(self, data: Path, mending: ExitStack) -> None:
        argv = [sys.executable, "-m", "benchmarks.diagnosis.hung_mount", str(data)]
        server = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE)
        mending.callback(subprocess.run, ["umount", "-l", str(data)], check=False)
        mending.callback(server.wait)
        mending.callback(server.kill)
        assert server.stdout is not None
        if not server.stdout.readline():
            raise NotPlayed(f"{self._cause.name}: no filesystem could be mounted (as root only)")

    def _look(self, ranks: Mapping[int, int]) -> None:
        """Have the monitors of both nodes look twice, as the watch would; ranks by process."""
        time.sleep(_SETTLE_S)
        asked = [self._ask_gpus(node, "hangs") for node in NODES]
        words = [LOOK + b"\n", HERE + b"\n", NOW + b"\n"]
        monitors = [self._monitor(node) for node in NODES]
        for word in words:
            for monitor in monitors:
                assert monitor.stdin is not None
                monitor.stdin.write(word)
                monitor.stdin.flush()
            time.sleep(_BETWEEN_S if word != words[-1] else 1.0)
        for monitor in monitors:
            said, _ = monitor.communicate()
            reader = MessageReader(MESSAGES)
            told = (reader.take(line) for line in said.splitlines())
            self._seen.messages += [each for each in told if each is not None]
        self._seen.gpus = self._told(asked)
        uses = {
            ranks[pid]: use
            for each in self._seen.gpus
            for pid, use in each.activity.by_pid.items()
            if pid in ranks
        }
        self._seen.messages = [_with_activity(each, uses) for each in self._seen.messages]
        self._seen.stacks = native_stacks.of(ranks)

    def _ask_gpus(self, node: str, *words: str) -> subprocess.Popen[bytes]:
        """Ask NVML beside the monitor, which finds no driver on this machine."""
        return subprocess.Popen(
            [self._python, "-m", "benchmarks.played_training.gpus", *words],
            env=self._environ(RANKS_PER_NODE * NODES.index(node), "{}"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )

    def _told(self, asked: Sequence[subprocess.Popen[bytes]]) -> list[GpusNow]:
        return [msgspec.json.decode(each.communicate()[0], type=GpusNow) for each in asked]

    def _monitor(self, node: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "slurm_health.training.monitor.node", self._job, node, "60"],
            env={**os.environ, "SLURM_STEP_ID": "1", "SLURMD_NODENAME": node},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _await_end(self, ranks: Sequence[Process]) -> None:
        """Wait for the ends; once all others have ended, end what does not end by itself."""
        give_up_s = time.monotonic() + TIMEOUT_S + _END_S
        left = dict(enumerate(ranks))
        while left and time.monotonic() < give_up_s:
            for number, rank in list(left.items()):
                code = rank.poll()
                if code is not None:
                    del left[number]
                    self._ended(number, code)
            if set(left) <= set(self._cause.ranks) < set(range(RANKS)):
                break
            time.sleep(_POLL_S)
        if left:
            self._seen.lines.append("srun: Terminating StepId=1.0")
        for number, rank in left.items():
            kill_session(rank, signal.SIGKILL)
            self._ended(number, rank.wait())

    def _ended(self, rank: int, code: int) -> None:
        self._seen.ends[rank] = code
        self._seen.lines.append(end_line(rank, code))


def _with_activity(message: NodeMessage, uses: Mapping[int, GpuUse]) -> NodeMessage:
    """Return what a monitor tells where it can ask NVML; `uses` of ranks."""
    if isinstance(message, NodeNow):
        return message
    reasons = {what: why for what, why in message.not_seen.items() if what != "gpu-activity"}
    looks = []
    for look in message.ranks:
        use = uses.get(look.rank, GpuUse())
        looks.append(msgspec.structs.replace(look, gpu_share=use.share, gpu_waits=use.waits))
    return msgspec.structs.replace(message, ranks=tuple(looks), not_seen=reasons)


def end_line(rank: int, code: int) -> str:
    """Return how srun tells the end of a task."""
    words = {number: name for name, number in reversed(SIGNALS.items())}
    how = f"Exited with exit code {code}" if code >= 0 else words.get(-code, f"signal {-code}")
    dumped = " (core dumped)" if -code in {signal.SIGABRT, signal.SIGSEGV} else ""
    return f"srun: error: {node_of(rank)}: task {rank}: {how}{dumped}"


def play(cause: Cause, python: str) -> Seen:
    """Play a cause in a directory of its own.

    Raises:
        NotPlayed: the training did not come to what was to be seen.
    """
    with tempfile.TemporaryDirectory(prefix="played-training-") as name:
        return Run(cause, python, Path(name)).perform()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
