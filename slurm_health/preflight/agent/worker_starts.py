# SPDX-License-Identifier: Apache-2.0
"""How the workers of a node get ready: started, started once more, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable

from slurm_health.preflight.agent.worker_process import Worker, Workers
from slurm_health.records import records

STARTS_PER_LAUNCH = 2  # a worker that ends before it is ready gets one more try
# Eight GPUs are opened within this. One whose driver keeps no state between processes may take
# longer, and is not accused for it where the drivers of other nodes do.
OPEN_S = 20.0


class WorkerStarts:
    """Starts the workers of one node, as often as that makes sense, and says how it went.

    Args:
        workers: those that it starts.
        say: writes a record of the node's.
        node: its name.
        launch: of the node's agent.
        interface: over which network interface workers of a backend reach other nodes.
        monotonic: a clock that never goes back.
    """

    def __init__(
        self,
        workers: Workers,
        say: Callable[[records.Record], None],
        *,
        node: str,
        launch: int,
        interface: Callable[[str], str],
        monotonic: Callable[[], float],
    ) -> None:
        self._workers = workers
        self._say = say
        self._node = node
        self._launch = launch
        self._interface = interface
        self._monotonic = monotonic
        self._starts = 0
        self._device_failures = 0
        self._loaded_s: float | None = None
        self.ended = ""  # how the last one did that was ready and in no round, until all are ready

    def replace(self) -> None:
        """Have others in the place of all, as soon as these are gone."""
        self._loaded_s = None
        self._workers.replace()
        self.start_due()

    def start_due(self) -> None:
        """Start those that are due, or say why that cannot be."""
        obstacle = self._workers.start_due()
        if obstacle:
            self._fail(obstacle)

    def loaded(self) -> None:
        """Note that all have loaded torch: their devices open next."""
        self._loaded_s = self._monotonic()

    def succeeded(self) -> None:
        """Note that they were ready: those that are started next have all tries again."""
        self._starts = self._device_failures = 0

    def starting(self) -> records.WorkersStarting:
        """Return the record that workers are being replaced."""
        return records.WorkersStarting(node=self._node, launch=self._launch)

    def say_ready(self) -> None:
        """Say that all are ready, and what they work with."""
        ready = self._workers.ready
        first = ready[0]
        self.ended = ""
        self._say(
            records.WorkersReady(
                node=self._node,
                launch=self._launch,
                store_port=first.store_port,
                torch=first.torch,
                backend=first.backend,
                devices=[event.device for event in ready],
                collective_library=first.collective_library,
                start_ms=max(event.start_ms for event in ready),
                model=" and ".join(dict.fromkeys(event.model for event in ready)),
                free_bytes=min(event.free_bytes for event in ready),
                interface=self._interface(first.backend),
                ports_gbit_per_s=first.ports_gbit_per_s,
                gflop_per_s=min(event.gflop_per_s for event in ready),
                memory_gb_per_s=min(event.memory_gb_per_s for event in ready),
                nvlink_domain=first.nvlink_domain,
                gpus=first.gpus,
            )
        )

    def say_unopened(self) -> None:
        """Say once which devices do not open, when they should have."""
        unopened = [worker for worker in self._workers if not worker.opened]
        if self._loaded_s is None or not unopened:
            return
        waited_s = self._monotonic() - self._loaded_s
        if waited_s < OPEN_S:
            return
        self._loaded_s = None
        self._say(
            records.DevicesUnopened(
                node=self._node,
                launch=self._launch,
                devices=[worker.local_rank for worker in unopened],
                waited_s=round(waited_s, 1),
                torch=unopened[0].torch,
            )
        )

    def again(self, worker: Worker, how: str) -> None:
        """Start the workers again because of how one ended, unless that has been tried before."""
        self._starts += 1
        self._device_failures += bool(worker.unusable)
        self.ended = self.ended or (how if worker.ready else "")
        if self._starts < STARTS_PER_LAUNCH and not worker.no_torch:
            self._say(self.starting())
            self.replace()
            return
        self._workers.kill()
        self._fail(
            worker.unusable or worker.refused or how,
            device_failed=self._device_failures == self._starts,
            torch=worker.torch,
            no_torch=worker.no_torch,
        )

    def _fail(
        self,
        reason: str,
        *,
        device_failed: bool = False,
        torch: str = "",
        no_torch: bool = False,
    ) -> None:
        """Say that this node can take part in no round."""
        self._say(
            records.WorkersFailed(
                node=self._node,
                launch=self._launch,
                reason=reason,
                device_failed=device_failed,
                torch=torch,
                no_torch=no_torch,
                accelerators=self._workers.accelerators,
            )
        )
