# SPDX-License-Identifier: Apache-2.0
"""A process of the interpreter with torch: it is started, spoken to, listened to, killed.

It says what it has to say in JSON lines on its standard output; everything else it writes goes to
a file, so that it never waits for a reader.
"""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from benchmarks.gpu.machine import ROOT, Machine
from benchmarks.gpu.step import NotMeasured
from slurm_health.system.processes import (
    PIPE,
    abandon_session,
    ends_within,
    kill_session,
    read_available,
    start_tied,
)
from slurm_health.system.signals import exit_text

UNKILLABLE_S = 60.0


class Child:
    """One process that runs a module of `benchmarks.gpu.on_device`."""

    def __init__(
        self, machine: Machine, module: str, *arguments: object, environ: Mapping[str, str]
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._buffer = b""
        words = [str(argument) for argument in arguments]
        self._process = start_tied(
            [machine.python, "-m", f"benchmarks.gpu.on_device.{module}", *words],
            environ={**environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{environ.get('PYTHONPATH', '')}"},
            stdin=PIPE,
            stdout=PIPE,
            stderr=self._errors.fileno(),
        )
        self.pid = self._process.pid

    def event(self, deadline_s: float) -> dict[str, Any]:
        """Return the next thing it says.

        Raises:
            NotMeasured: it ended, or said nothing in time.
        """
        give_up = time.monotonic() + deadline_s
        assert self._process.stdout is not None
        while (found := self.latest(all_of_them=False)) is None:
            ended = self._process.poll()
            if ended is not None and b"\n" not in self._buffer:
                raise NotMeasured(f"its process ended with {exit_text(ended)}: {self._last_word()}")
            if time.monotonic() > give_up:
                raise NotMeasured(f"its process said nothing for {deadline_s:.0f} s")
            select.select([self._process.stdout], [], [], 0.05)
        return found

    def latest(self, *, all_of_them: bool = True) -> dict[str, Any] | None:
        """Return the last thing it has said by now, or the first; None if there is nothing."""
        with suppress(ValueError):  # closed: it was killed
            self._buffer += read_available(self._process.stdout)
        found = None
        while b"\n" in self._buffer and (all_of_them or found is None):
            line, _, self._buffer = self._buffer.partition(b"\n")
            found = json.loads(line)
        return found

    def tell(self, words: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(words.encode() + b"\n")
        self._process.stdin.flush()

    def signal(self) -> None:
        """Kill it, and do not wait for its end."""
        kill_session(self._process, signal.SIGKILL)

    def wait(self) -> bool:
        """Wait for its end; tell whether it came."""
        return ends_within(self._process, UNKILLABLE_S)

    def errors(self) -> str:
        """Return what it has written besides what it said."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def close(self) -> None:
        """End it, if it has not ended."""
        abandon_session(self._process, wait_s=UNKILLABLE_S)
        self._errors.close()

    def _last_word(self) -> str:
        return (self.errors().strip().splitlines() or ["without a word"])[-1]


@contextmanager
def running(children: Sequence[Child]) -> Iterator[Sequence[Child]]:
    """Provide the children and end those that are left."""
    try:
        yield children
    finally:
        for child in children:
            child.close()
