# SPDX-License-Identifier: Apache-2.0
"""The agent's worker processes: started, spoken to, listened to, killed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_health.processes import (
    PIPE,
    Process,
    abandon_session,
    exit_text,
    read_available,
    start_tied,
)

WORKER = Path(__file__).parents[1] / "probes" / "worker.py"
STDERR_LINES = 20
# A killed process gives back its devices' memory first, which takes seconds at most, or it hangs.
UNKILLABLE_S = 5.0


class Worker:
    """One worker process of one device.

    `events` and `errors` are non-blocking file descriptors to wait on; `read_events` returns
    what has arrived. The process dies with the agent.
    """

    def __init__(
        self,
        *,
        python: str,
        local_rank: int,
        threads: int,
        devices: int,
        environ: Mapping[str, str],
    ) -> None:
        self.local_rank = local_rank
        self.unkillable = False
        self._buffer = b""
        self._said: list[str] = []
        try:
            self._process: Process | None = start_tied(
                [python, str(WORKER), str(local_rank), str(threads), str(devices)],
                environ=environ,
                stdin=PIPE,
                stdout=PIPE,
            )
        except OSError as err:
            self._process = None
            self._said.append(f"cannot run {python}: {err.strerror}")

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that become readable when the worker has something to say."""
        if self._process is None:
            return ()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        return self._process.stdout.fileno(), self._process.stderr.fileno()

    def send(self, command: Mapping[str, object]) -> None:
        """Send a command. A worker that is gone is noticed when its events end."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def read_events(self) -> list[dict[str, Any]]:
        """Return the events that have arrived since the last call."""
        if self._process is None:
            return []
        self._read_errors()
        self._buffer += read_available(self._process.stdout)
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def ended(self) -> str | None:
        """Say how the worker ended, None while it lives."""
        if self._process is None:
            return self._said[-1]
        returncode = self._process.poll()
        if returncode is None:
            return None
        self._read_errors()
        said = f": {self._said[-1]}" if self._said else ""
        return exit_text(returncode) + said

    def kill(self) -> None:
        """Kill the worker with all its children and reap it.

        One that hangs in the kernel (a driver, a filesystem) cannot be killed: it is given up, and
        `unkillable` says so.
        """
        if self._process is None:
            return
        self.unkillable = not abandon_session(self._process, wait_s=UNKILLABLE_S)
        self._process = None
        self._said = ["killed"]

    def _read_errors(self) -> None:
        assert self._process is not None
        text = read_available(self._process.stderr).decode(errors="replace")
        self._said += [line.strip() for line in text.splitlines() if line.strip()]
        del self._said[:-STDERR_LINES]
