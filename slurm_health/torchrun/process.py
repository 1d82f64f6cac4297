# SPDX-License-Identifier: Apache-2.0
"""One torchrun from its start to its end, with a monitor beside it.

It has a session of its own, and ends with this process. What it and its workers write to standard
error passes through this process, which keeps the last of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slurm_health.preflight.supervisor.monitor_process import running
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ConfigError, JournalError
from slurm_health.records.script_records import TrainingEvent
from slurm_health.system.processes import (
    Process,
    abandon_session,
    close_pipes,
    ends_within,
    start_tied,
)
from slurm_health.torchrun.step import SIGN_OF_LIFE_S

# Signals that end torchrun, in order. Slurm sends them to all processes of a step by itself.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STOP_S = 60.0  # torchrun gives workers 30 s to end, then kills them
_TAIL_BYTES, _PIECE_BYTES = 64 << 10, 4096
_END_S = 1.0  # a reader that takes nothing for so long at the end is not waited for


@dataclass(frozen=True, kw_only=True)
class TorchrunEnd:
    """How torchrun ended.

    Args:
        code: its exit code, 128+n after signal n.
        output: the last that it and its workers wrote to standard error, before we ended them.
        ran_s: how long it ran.
        ended_s: when it ended, in seconds since the epoch.
        stopped: we ended it, because of a `hang` if there is one.
        hang: what the monitor has noticed.
    """

    code: int
    output: str
    ran_s: float
    ended_s: float
    stopped: bool = False
    hang: TrainingEvent | None = None

    @property
    def interrupted(self) -> int:
        """The signal from outside that ended it, 0 for none."""
        number = self.code - 128
        return number if number in _ENDING and not self.stopped else 0


def run_torchrun(
    argv: Sequence[str],
    environ: Mapping[str, str],
    monitor: Sequence[str],
    is_over: Callable[[], bool],
    interval_s: float,
    show_life: Callable[[], None],
) -> TorchrunEnd:
    """Run torchrun to its end; end it if the monitor notices a hang, or if `is_over`.

    Args:
        argv: its command line.
        environ: its environment, and the monitor's.
        monitor: the command of the monitor, empty without one.
        is_over: asked every `interval_s`.
        interval_s: seconds.
        show_life: called every two seconds while torchrun is being ended.

    Raises:
        ConfigError: it cannot be executed.
        Exception: whatever `is_over` raises, after it has ended.
    """
    began_s = time.monotonic()
    try:
        # Its standard input and output are ours.
        process = start_tied(
            argv, environ=environ, stdin=None, stdout=None, on_our_death=signal.SIGTERM
        )
    except OSError as err:
        raise ConfigError("--python", argv[0], f"cannot be run: {err.strerror}") from err
    tail = _Tail(process)
    hang: TrainingEvent | None = None
    stopped, output = False, ""
    with _forwarded(process, environ), _monitored(monitor, environ) as hangs:
        try:
            while not stopped and not ends_within(process, interval_s):
                hang = hangs()
                stopped = hang is not None or is_over()
        finally:
            if process.returncode is None:
                output = tail.text()
                process.send_signal(signal.SIGTERM)
                until_s = time.monotonic() + STOP_S
                while not ends_within(process, SIGN_OF_LIFE_S) and time.monotonic() < until_s:
                    with contextlib.suppress(JournalError):
                        show_life()
                if process.returncode is None:
                    abandon_session(process, wait_s=STOP_S)
    tail.end()
    return TorchrunEnd(
        code=process.returncode if process.returncode >= 0 else 128 - process.returncode,
        output=output or tail.text(),
        ran_s=time.monotonic() - began_s,
        ended_s=time.time(),
        stopped=stopped,
        hang=hang,
    )


@contextlib.contextmanager
def _forwarded(process: Process, environ: Mapping[str, str]) -> Iterator[None]:
    """While active, signals that would end us end torchrun, and we wait for it."""

    def forward(number: int, _: object) -> None:
        if "SLURM_STEP_ID" not in environ:
            process.send_signal(number)

    before = {
        number: signal.signal(number, forward)
        for number in _ENDING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _monitored(
    command: Sequence[str], environ: Mapping[str, str]
) -> Iterator[Callable[[], TrainingEvent | None]]:
    """While active, the monitor runs; provide what returns the hang that it has noticed."""
    if not command:
        yield lambda: None
        return
    with (
        tempfile.TemporaryFile() as noticed,
        running(command, environ=environ, stdout=noticed.fileno()) as monitoring,
    ):

        def hang() -> TrainingEvent | None:
            if not monitoring.script_hangs():
                return None
            noticed.seek(0)
            return from_json(noticed.read(), TrainingEvent)

        yield hang


class _Tail:
    """Passes on what torchrun writes to standard error, and keeps the last of it."""

    def __init__(self, process: Process) -> None:
        assert process.stderr is not None
        self._reading = process.stderr.fileno()
        os.set_blocking(self._reading, True)
        self._kept = b""
        self._passed_bytes = 0
        self._thread = threading.Thread(target=self._pass_on, args=(process,), daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return the last that was written."""
        return self._kept.decode(errors="replace")

    def end(self) -> None:
        """Wait for what was written to arrive; a process that a worker left behind may go on."""
        before_bytes = -1
        while self._thread.is_alive() and self._passed_bytes > before_bytes:
            before_bytes = self._passed_bytes
            self._thread.join(_END_S)

    def _pass_on(self, process: Process) -> None:
        with contextlib.suppress(OSError):  # the reader of our standard error is gone
            while data := os.read(self._reading, 1 << 16):
                self._kept = (self._kept + data)[-_TAIL_BYTES:]
                self._write(data)
        close_pipes(process)  # a writer gets an error instead of waiting for a reader

    def _write(self, data: bytes) -> None:
        """Write all of it, except what a full disk does not take.

        Raises:
            BrokenPipeError: the reader of standard error is gone.
        """
        while data:
            try:
                written = os.write(2, data[:_PIECE_BYTES])
            except BlockingIOError:  # a process that shares it has made it so
                select.select([], [2], [])
                continue
            except BrokenPipeError:
                raise
            except OSError:
                return
            self._passed_bytes += written
            data = data[written:]
