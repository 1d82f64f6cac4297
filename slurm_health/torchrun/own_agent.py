# SPDX-License-Identifier: Apache-2.0
"""The agent of this process's own node."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping, Sequence

from slurm_health.preflight.master.launcher import LEAVE_S, AgentCommand
from slurm_health.preflight.orders import Ringers, ring_all
from slurm_health.records.records import AgentsLost
from slurm_health.system.processes import (
    PIPE,
    Process,
    close_pipes,
    end_session,
    read_available,
    start_tied,
)
from slurm_health.system.signals import exit_text

_READ_BYTES = 1 << 16


class OwnAgent:
    """A `Launcher` that leaves the agents of the other nodes to their own processes."""

    def __init__(self, node: str, command: AgentCommand, environ: Mapping[str, str]) -> None:
        self._node = node
        self._command = command
        self._environ = environ
        self._launch = -1
        self._process: Process | None = None
        self._said = b""
        self._ringers = Ringers()
        self._deaf = False

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        """Start the agent if this node is meant, in place of an earlier one."""
        if self._node in nodes:
            self.stop(0.0)
            self._launch = launch
            self._process = start_tied(
                self._command(launch, self._node), environ=self._environ, stdin=PIPE, stdout=PIPE
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            self._ringers, self._deaf = Ringers(), False

    def poll(self) -> list[AgentsLost]:
        """Return the agent's end, once."""
        if self._process is None:
            return []
        returncode = self._process.poll()
        self._said += read_available(self._process.stderr)
        if returncode is None:
            return []
        said = self._said.decode(errors="replace").strip().splitlines()[-1:]
        close_pipes(self._process)
        self._process, self._said = None, b""
        reason = f"its agent ended: {': '.join([exit_text(returncode), *said])}"
        return [AgentsLost(launch=self._launch, nodes=[self._node], reason=reason)]

    @property
    def descriptor(self) -> int | None:
        """What becomes readable when the agent rings; None while it cannot."""
        if self._process is None or self._process.stdout is None or self._deaf:
            return None
        return self._process.stdout.fileno()

    def hear(self) -> set[str]:
        """Return this node if the agent has rung since the last call."""
        if (bell := self.descriptor) is None:
            return set()
        try:
            data = os.read(bell, _READ_BYTES)
        except BlockingIOError:
            return set()
        self._deaf = not data
        return {self._node}.intersection(self._ringers.rung(data))

    def ring(self) -> None:
        """Tell the agent that there are orders; the others look by themselves."""
        if self._process is not None and self._process.stdin is not None:
            ring_all(self._process.stdin.fileno())

    def wait(self, timeout_s: float, gather_s: float) -> set[str]:  # noqa: ARG002 - only one rings
        """Wait for the agent's ring."""
        if (bell := self.descriptor) is None:
            time.sleep(timeout_s)
            return set()
        ready, _, _ = select.select([bell], [], [], timeout_s)
        return self.hear() if ready else set()

    def stop(self, leave_s: float = LEAVE_S) -> None:
        """Let the agent leave, which frees the devices, or end it."""
        if self._process is not None:
            end_session(self._process, leave_s=leave_s, grace_s=1.0)
            self._process, self._said = None, b""
