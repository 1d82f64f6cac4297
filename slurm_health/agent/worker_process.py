# SPDX-License-Identifier: Apache-2.0
"""The worker processes of a node: started, spoken to, listened to, killed."""

from __future__ import annotations

import contextlib
import json
import selectors
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurm_health.agent import node_facts
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

    `descriptors` are to be waited on; `read_events` returns what has arrived. `ready` is what it
    said when it was, empty before. The process dies with the agent.
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
        self.ready: dict[str, Any] = {}
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


class Workers:
    """All workers of this node: one for each accelerator, or `on_cpus` of them where it has none.

    `address` is that of the node for the others of the job, `gpus` how many the job has here, as
    far as that is known.
    """

    def __init__(
        self,
        *,
        python: str,
        on_cpus: int,
        address: str,
        environ: Mapping[str, str],
        gpus: int = 0,
    ) -> None:
        self._python = python
        self._on_cpus = on_cpus
        self._gpus = gpus
        self._threads_of_all = node_facts.usable_cpus(environ)
        self._environ = _worker_environ(environ, address)
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._hanging = ""

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        """Yield them by local rank."""
        return iter(self._workers)

    @property
    def ready(self) -> list[dict[str, Any]]:
        """What each said when it was ready, in their order; empty until all are."""
        said = [worker.ready for worker in self._workers]
        return said if all(said) else []

    def start(self) -> str:
        """(Re)place them all. Return what stands in the way, empty if nothing does."""
        self.stop()
        devices = node_facts.device_count(self._environ)
        obstacle = self._hanging or node_facts.missing_devices(
            self._environ, devices, gpus=self._gpus
        )
        if obstacle:
            return obstacle
        count = devices or self._on_cpus
        for local_rank in range(count):
            worker = Worker(
                python=self._python,
                local_rank=local_rank,
                threads=max(1, self._threads_of_all // count),
                devices=devices,
                environ=self._environ,
            )
            for descriptor in worker.descriptors:
                self._selector.register(descriptor, selectors.EVENT_READ)
            self._workers.append(worker)
        return ""

    def wait(self, timeout_s: float) -> None:
        """Return when one has something to say, or after this time."""
        self._selector.select(timeout_s)

    def stop(self) -> None:
        """Kill them all. Where one cannot be killed, no others can be started any more."""
        for worker in self._workers:
            for descriptor in worker.descriptors:
                self._selector.unregister(descriptor)
            worker.kill()
            if worker.unkillable:
                self._hanging = (
                    f"the check process of device {worker.local_rank} hangs in the kernel and"
                    " cannot be killed"
                )
        self._workers = []


def _worker_environ(environ: Mapping[str, str], address: str) -> dict[str, str]:
    changed = dict(environ)
    interface = node_facts.interface_of(address)
    if interface:
        # Otherwise gloo resolves the host name, which may be a loopback address.
        changed.setdefault("GLOO_SOCKET_IFNAME", interface)
    # What a worker says last explains its end; torch warns of names it cannot look up.
    changed.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return changed
