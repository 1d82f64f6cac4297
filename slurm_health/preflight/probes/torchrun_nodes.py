# SPDX-License-Identifier: Apache-2.0
"""What a torchrun of `torchrun_restarts` has: its workers' words, a monitor, and the other nodes.

Needs nothing but Python's standard library: the nodes talk through a store that it is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any, NoReturn

from slurm_health.preflight.probes.torchrun_agents import Carrier

# A node that has not noticed a failure for so long is gone: torchrun looks every 0.1 s, unless told
# otherwise, and gives a node up that is silent for 15 s.
NOTICE_S = 15.0
# torchrun gives workers 30 s to end, then kills them.
STOP_S = 60.0
# How long the others wait for a decision: as long as the leader waits, and for two of its commands.
DECIDE_S = 120.0
_HEAR_S = 5.0
_LOOK_S = 0.2
_WATCH_S = 1.0
_TAIL_BYTES = 64 * 1024
# A pipe passes on what is this short in one piece, after all that was written before.
_MARK = b"\0slurm-health\0"
_MARK_S = 1.0
_END_S = 1.0  # a reader that takes nothing for so long at the end is not waited for
_PIECE_BYTES = 4096
_KEY = "slurm-health"
_HANGS = 75  # the code with which a monitor ends that has found a hang
_LEAVE_S = 3.0


def become_torchrun(variable: str, err: Exception) -> NoReturn:
    """Be torchrun and nothing else: this torch is not as it is thought to be, or what is told.

    Args:
        variable: of the environment, which is for nobody else.
        err: what is wrong.
    """
    text = f"slurm-health: this training is not monitored: {line_of(err)}\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os.environ.pop(variable, None)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *sys.argv[1:]]
    os.execv(sys.executable, torchrun)  # noqa: S606 - no shell: the user's words are as they are


def line_of(err: Exception) -> str:
    """Return the first line of what an error says."""
    return str(err).strip().partition("\n")[0] or type(err).__name__


class Tail:
    """The last of what this process and its workers write to standard error, which passes on."""

    def __init__(self) -> None:
        self._real = os.dup(2)
        reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        self._kept = b""
        self._written_bytes = 0
        self._lock = threading.Lock()
        self._passed_on = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, args=(reading,), daemon=True)
        self._thread.start()

    @property
    def real(self) -> int:
        """The descriptor of standard error itself."""
        return self._real

    def text(self) -> str:
        """Return what was written since `clear`, as far as it is kept."""
        sys.stderr.flush()
        self._passed_on.clear()
        os.write(2, _MARK)
        self._passed_on.wait(_MARK_S)
        with self._lock:
            return self._kept.decode(errors="replace")

    def clear(self) -> None:
        """Forget what was written."""
        with self._lock:
            self._kept = b""

    def end(self) -> None:
        """Write to standard error itself again, once all that was written has arrived there.

        What a worker has left behind loses its standard error when this process ends.
        """
        sys.stderr.flush()
        os.dup2(self._real, 2)
        before_bytes = -1
        while self._thread.is_alive() and self._written_bytes > before_bytes:
            before_bytes = self._written_bytes
            self._thread.join(_END_S)

    def _pass_on(self, reading: int) -> None:
        with contextlib.suppress(OSError):  # whoever read standard error is gone
            while data := os.read(reading, 1 << 16):
                marked = _MARK in data
                data = data.replace(_MARK, b"")
                with self._lock:
                    self._kept = (self._kept + data)[-_TAIL_BYTES:]
                if marked:
                    self._passed_on.set()
                self._write(data)
        # Who writes is to hear of it, not to wait for a reader.
        with contextlib.suppress(OSError):
            os.close(reading)

    def _write(self, data: bytes) -> None:
        """Write all of it, but what a full disk does not take.

        Raises:
            BrokenPipeError: whoever read standard error is gone.
        """
        while data:
            try:
                written = os.write(self._real, data[:_PIECE_BYTES])
            except BlockingIOError:  # whoever shares it may have made it so
                select.select([], [self._real], [])
                continue
            except BrokenPipeError:
                raise
            except OSError:
                return
            self._written_bytes += written
            data = data[written:]


class Monitor:
    """What watches beside the workers, if this node has it; it ends with this process.

    Where no srun starts the agents of nodes, a carrier does, on each of them.

    Args:
        command: that runs it, empty where there is none.
        environ: its environment.
        output: descriptor of what it says.
    """

    def __init__(self, command: Sequence[str], environ: dict[str, str], output: int) -> None:
        self._command, self._environ, self._output = [*command], environ, output
        self._process: subprocess.Popen[bytes] | None = None
        self._told: IO[bytes] | None = None
        self._carrier: Carrier | None = None

    def only_report(self) -> None:
        """Have it end no workers, whatever its command says."""
        if self._command:
            self._command.append("--on-hang=report")

    def begin(self) -> None:
        """Start it."""
        self._begin([], ())

    def begin_carried(self, carrier: Carrier, own: str) -> None:
        """Start it, and what carries between it and the agents of all nodes; `own` is our name.

        Raises:
            OSError, RuntimeError: the store does not answer, or not all nodes are there.
        """
        names = carrier.names(own)
        if self._command:
            reading, writing = files = carrier.serve()
            words = [f"--node={own}", f"--nodes={','.join(names)}"]
            self._begin([*words, f"--reading={reading}", f"--writing={writing}"], files)
            for file in files:
                os.close(file)
        carrier.begin()
        self._carrier = carrier

    def _begin(self, more: Sequence[str], files: Sequence[int]) -> None:
        if not self._command:
            return
        try:
            self._told = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this process
            self._process = subprocess.Popen(
                [*self._command, *more],
                pass_fds=files,
                stdin=subprocess.PIPE,
                stdout=self._told,
                stderr=self._output,
                env=self._environ,
                start_new_session=True,
            )
        except OSError as err:
            with contextlib.suppress(OSError):
                os.write(self._output, f"slurm-health: no monitor: {err}\n".encode())

    def hang(self) -> Any:
        """Return the hang for which the workers are to be ended, None without one."""
        if self._told is None or self._process is None or self._process.poll() != _HANGS:
            return None
        self._told.seek(0)
        try:
            return json.loads(self._told.read())
        except ValueError:  # what ended so is no monitor of ours
            return None

    def end(self) -> None:
        """Have it end: its standard input does."""
        process, self._process = self._process, None
        carrier, self._carrier = self._carrier, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            try:
                process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if carrier is not None:
            carrier.end()


class TrainingNodes:
    """The nodes that train together, until they meet again: what they tell each other.

    Args:
        store: torchrun's own, where nobody else has the same keys.
        rank: of this node among them.
        count: how many they are.
    """

    def __init__(self, store: Any, rank: int, count: int) -> None:
        self._store = store
        self._rank = rank
        self._count = count
        self._looked_s = 0.0
        self._noticed = False

    def failed(self) -> None:
        """Let the others know that workers of this node have failed."""
        self._store.set(f"{_KEY}/failed", str(self._rank))

    def has_failed(self) -> bool:
        """Tell whether workers of another node have failed; then the others hear that we know."""
        now_s = time.monotonic()
        if not self._noticed and now_s - self._looked_s >= _WATCH_S:
            self._looked_s = now_s
            self._noticed = self._there("failed")
            if self._noticed:
                self._store.set(f"{_KEY}/noticed/{self._rank}", "")
        return self._noticed

    def report(self, what: dict[str, Any]) -> None:
        """Say that the workers here have ended, and how; reports keep their order."""
        order = self._store.add(f"{_KEY}/reports", 1)
        self._store.set(f"{_KEY}/report/{self._rank}", json.dumps({**what, "order": order}))

    def reports(self) -> tuple[list[dict[str, Any]], int]:
        """Return what the nodes say that are still there, and how many say nothing."""
        begun_s = time.monotonic()
        missing = set(range(self._count))
        found: list[dict[str, Any]] = []
        while missing:
            for rank in sorted(missing):
                if self._there(f"report/{rank}"):
                    found.append(json.loads(self._store.get(f"{_KEY}/report/{rank}")))
                    missing.discard(rank)
            waited_s = time.monotonic() - begun_s
            late = {r for r in missing if waited_s > STOP_S or not self._there(f"noticed/{r}")}
            if waited_s > NOTICE_S and late == missing:
                break
            if missing:
                time.sleep(_LOOK_S)
        return sorted(found, key=lambda each: int(each["order"])), len(missing)

    def decide(self, decision: dict[str, Any], hearers: int) -> None:
        """Tell the others what is to be done; the store may end with us, so let them hear it."""
        self._store.set(f"{_KEY}/decision", json.dumps(decision))
        give_up_s = time.monotonic() + _HEAR_S
        while self._store.add(f"{_KEY}/heard", 0) < hearers and time.monotonic() < give_up_s:
            time.sleep(_LOOK_S)

    def decision(self) -> dict[str, Any]:
        """Wait for what is to be done.

        Raises:
            RuntimeError: nothing is decided.
        """
        give_up_s = time.monotonic() + DECIDE_S
        # In `wait` this node could not tell torchrun's rendezvous that it is there.
        while not self._there("decision"):
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"nothing was decided within {DECIDE_S:g} s")
            time.sleep(_LOOK_S)
        found: dict[str, Any] = json.loads(self._store.get(f"{_KEY}/decision"))
        self._store.add(f"{_KEY}/heard", 1)
        return found

    def _there(self, key: str) -> bool:
        return bool(self._store.check([f"{_KEY}/{key}"]))
