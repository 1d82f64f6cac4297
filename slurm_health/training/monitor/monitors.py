# SPDX-License-Identifier: Apache-2.0
"""The monitors of all nodes, as the batch host talks with them: one process, or the srun of all.

Outside Slurm each node's torchrun runs its own, and carries what they say (`torchrun_monitors`).
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from slurm_health.records.text import LineBuffer
from slurm_health.system.processes import Process, end_session
from slurm_health.training.monitor.messages import (
    LOOK,
    MESSAGES,
    MessageReader,
    NodeLook,
    NodeMessage,
)

# For all nodes to tell how their ranks are; a closer look takes longer by what it waits for.
_NOW_S, _LOOK_S = 8.0, 12.0
_MOST_LINE_BYTES = 1 << 20
_LEAVE_S, _GRACE_S = 1.0, 0.5
_END = b"end"
_STARTED_S = 30.0  # until all that was said before is read


class ScriptOver(Exception):
    """The script has ended, and nothing is listened for any more."""


class MonitorsEnded(Exception):
    """The monitors ended before the script."""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Where to read what monitors say, and to write to them, in place of a process of ours."""

    stdin: IO[bytes]
    stdout: IO[bytes]


class Monitors:
    """Tells the monitors what to look at, and hears them.

    Args:
        process: one monitor, or the srun of all, with pipes, or what stands for it.
        nodes: those of the job.
        control: what ends when the script does.
    """

    def __init__(self, process: Process | Carried, nodes: Sequence[str], control: int) -> None:
        self._process = process
        self._nodes = tuple(nodes)
        self._control = control
        self._lines = LineBuffer(_MOST_LINE_BYTES)
        self._reader = MessageReader(MESSAGES)

    def hear(self, wait_s: float) -> Iterator[NodeMessage]:
        """Yield what the monitors say for so long.

        Raises:
            ScriptOver: the script has ended.
            MonitorsEnded: the monitors have gone.
        """
        until_s = time.monotonic() + wait_s
        while (left_s := until_s - time.monotonic()) > 0:
            for line in self._heard(left_s):
                message = self._reader.take(line)
                if message is not None:
                    yield message

    def _heard(self, wait_s: float) -> Sequence[bytes]:
        """Return the lines that come next, none if none comes in time; raises as `hear` does."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        ready, _, _ = select.select([self._control, pipe], [], [], wait_s)
        if self._control in ready and not os.read(self._control, 4096):
            raise ScriptOver
        if pipe not in ready:
            return ()
        data = os.read(pipe, 1 << 20)
        if not data:
            raise MonitorsEnded
        return self._lines.feed(data)

    def await_start(self, number: int) -> None:
        """Have carried monitors start; what was said before that is passed over.

        Raises:
            ScriptOver: the script has ended.
            MonitorsEnded: nothing carries their words any more.
            OSError: they do not start in time.
        """
        started = b"started %d" % number
        self.tell(b"start %d" % number)
        until_s = time.monotonic() + _STARTED_S
        while (left_s := until_s - time.monotonic()) > 0:
            for line in self._heard(left_s):
                if line == started:
                    return
        raise OSError("the monitors of nodes do not start")

    def tell(self, word: bytes) -> None:
        """Say a word to all of them."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._process.stdin.fileno(), word + b"\n")

    def ask(self, word: bytes) -> Iterator[NodeMessage]:
        """Ask all monitors; yield what they say until each has answered, or the time is over."""
        self.tell(word)
        answered: set[str] = set()
        until_s = time.monotonic() + (_LOOK_S if word == LOOK else _NOW_S)
        while len(answered) < len(self._nodes) and time.monotonic() < until_s:
            for message in self.hear(min(0.2, max(0.0, until_s - time.monotonic()))):
                if word != LOOK or isinstance(message, NodeLook):
                    answered.add(message.node)
                yield message

    def end(self) -> None:
        """End them: they leave when their standard input ends."""
        if isinstance(self._process, Carried):
            self.tell(_END)
            return
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        end_session(self._process, leave_s=_LEAVE_S, grace_s=_GRACE_S)


def carried(
    reading: int, writing: int, number: int, nodes: Sequence[str], control: int
) -> Monitors:
    """Start the monitors that torchrun runs; the `number` tells this start from those before.

    Raises:
        ScriptOver: the script has ended.
        MonitorsEnded: nothing carries their words any more.
        OSError: they do not start in time.
    """
    # The files are those of the next start, too.
    to_them = open(writing, "wb", buffering=0, closefd=False)  # noqa: SIM115
    from_them = open(reading, "rb", buffering=0, closefd=False)  # noqa: SIM115
    monitors = Monitors(Carried(stdin=to_them, stdout=from_them), nodes, control)
    monitors.await_start(number)
    return monitors
