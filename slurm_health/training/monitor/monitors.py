# SPDX-License-Identifier: Apache-2.0
"""The monitors of all nodes, as the batch host talks with them: one process, or the srun of all."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator, Sequence

from slurm_health.records.text import LineBuffer
from slurm_health.system.processes import Process, end_session
from slurm_health.training.monitor.messages import LOOK, MESSAGES, Message, NodeLook, Reader

# For all nodes to tell how their ranks are; a closer look takes longer by what it waits for.
_NOW_S, _LOOK_S = 8.0, 12.0
_MOST_LINE_BYTES = 1 << 20
_LEAVE_S, _GRACE_S = 1.0, 0.5


class Ended(Exception):
    """The script has ended, and nothing is listened for any more."""


class MonitorsEnded(Exception):
    """The monitors ended before the script."""


class Monitors:
    """Tells the monitors what to look at, and hears them.

    Args:
        process: one monitor, or the srun of all, with pipes.
        nodes: those of the job.
        control: what ends when the script does.
    """

    def __init__(self, process: Process, nodes: Sequence[str], control: int) -> None:
        self._process = process
        self._nodes = tuple(nodes)
        self._control = control
        self._lines = LineBuffer(_MOST_LINE_BYTES)
        self._reader = Reader(MESSAGES)

    def hear(self, wait_s: float) -> Iterator[Message]:
        """Yield what the monitors say for so long.

        Raises:
            Ended: the script has ended.
            MonitorsEnded: the monitors have gone.
        """
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        until_s = time.monotonic() + wait_s
        while (left_s := until_s - time.monotonic()) > 0:
            ready, _, _ = select.select([self._control, pipe], [], [], left_s)
            if self._control in ready and not os.read(self._control, 4096):
                raise Ended
            if pipe in ready:
                data = os.read(pipe, 1 << 20)
                if not data:
                    raise MonitorsEnded
                yield from self._messages(data)

    def tell(self, word: bytes) -> None:
        """Say a word to all of them."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._process.stdin.fileno(), word + b"\n")

    def ask(self, word: bytes) -> Iterator[Message]:
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
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        end_session(self._process, leave_s=_LEAVE_S, grace_s=_GRACE_S)

    def _messages(self, data: bytes) -> Iterator[Message]:
        for line in self._lines.feed(data):
            message = self._reader.take(line)
            if message is not None:
                yield message
