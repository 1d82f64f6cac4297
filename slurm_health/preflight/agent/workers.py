# SPDX-License-Identifier: Apache-2.0
"""All workers of a node: started, once more where that makes sense, waited on, ended.

And what is said of it in the node's file.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Iterator, Mapping, Sequence

from slurm_health.preflight.agent import node_facts
from slurm_health.preflight.agent.worker_process import (
    LOOK_S,
    UNKILLABLE_S,
    Ready,
    Worker,
    end_together,
)
from slurm_health.records import records

# One that is idle leaves at once when it is told to.
LEAVE_S = 3.0
_LOOK_S = 0.02  # how often is looked whether killed processes are gone, when others wait for that
STARTS_PER_LAUNCH = 2  # a worker that ends before it is ready gets one more try
# Eight GPUs are opened within this. One whose driver keeps no state between processes may take
# longer, and is not accused for it where the drivers of other nodes do.
OPEN_S = 20.0


class Workers:
    """All workers of this node: one for each accelerator, or `on_cpus` of them where it has none.

    Light ones use no accelerator: where they are `light`, there are `on_cpus` of them on any node.

    `address` is that of the node for the others of the job, `gpus` how many the job has here, as
    far as that is known.
    """

    def __init__(
        self,
        *,
        python: str,
        on_cpus: int = 1,
        address: str,
        environ: Mapping[str, str],
        monotonic: Callable[[], float],
        gpus: int = 0,
    ) -> None:
        self._python = python
        self._on_cpus = on_cpus
        self._gpus = gpus
        self._address = address
        self._threads_of_all = node_facts.usable_cpus(environ)
        self._environ = _worker_environ(environ, address)
        self._selector = selectors.DefaultSelector()
        self._monotonic = monotonic
        self.light = False
        self.accelerators = 0  # that this node had when they were started
        self._workers: list[Worker] = []
        self._killed: list[Worker] = []  # and not known to be gone
        self._give_up_s: float | None = None  # set while new ones are to be started

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        """Yield them by local rank."""
        return iter(self._workers)

    @property
    def ready(self) -> list[Ready]:
        """What each said when it was ready, in their order; empty until all are."""
        said = [worker.ready for worker in self._workers if worker.ready is not None]
        return said if len(said) == len(self._workers) else []

    def replace(self) -> None:
        """Kill them all; `start_due` starts others as soon as these are gone."""
        self.kill()
        self._give_up_s = self._monotonic() + UNKILLABLE_S

    def start_due(self) -> str:
        """Start those that are due. Return what stands in the way, empty if nothing does.

        Nobody waits here: a killed process may need seconds to give back the memory of its device,
        which the next one needs.
        """
        if self._give_up_s is None:
            return ""
        self._killed = [worker for worker in self._killed if not worker.ends_within(0.0)]
        if self._killed and self._monotonic() < self._give_up_s:
            return ""
        self._give_up_s = None
        return _hanging(self._killed) or self._start()

    def _start(self) -> str:
        devices = node_facts.device_count(self._environ)
        obstacle = node_facts.missing_devices(self._environ, devices, gpus=self._gpus)
        if obstacle:
            return obstacle
        self.accelerators = devices
        devices = 0 if self.light else devices
        count = devices or self._on_cpus
        for local_rank in range(count):
            worker = Worker(
                python=self._python,
                local_rank=local_rank,
                threads=max(1, self._threads_of_all // count),
                devices=devices,
                environ=self._environ,
                light=self.light,
                address=self._address,
            )
            for descriptor in worker.descriptors:
                self._selector.register(descriptor, selectors.EVENT_READ)
            self._workers.append(worker)
        return ""

    def wait(self, timeout_s: float, also: int | None = None) -> None:
        """Return when one has something to say or stands still, or after this time.

        Or when there is something to read from the descriptor `also`.
        """
        with contextlib.ExitStack() as stack:
            if also is not None:
                self._selector.register(also, selectors.EVENT_READ)
                stack.callback(self._selector.unregister, also)
            self._await_news(timeout_s)

    def _await_news(self, timeout_s: float) -> None:
        until_s = self._monotonic() + timeout_s
        while True:
            now_s = self._monotonic()
            for worker in self._workers:
                worker.look(now_s)
            if any(worker.standstill() for worker in self._workers):
                return
            due = self._give_up_s is not None
            left_s = until_s - now_s
            if self._selector.select(min(max(0.0, left_s), _LOOK_S if due else LOOK_S)):
                return
            if due or left_s <= LOOK_S:
                return

    def kill(self) -> None:
        """Kill them all, and wait for none."""
        self._forget()
        for worker in self._killed:
            worker.kill()

    def end(self) -> str:
        """End them all: who is idle leaves. Return who cannot be killed, empty if nobody is."""
        self._forget()
        self._killed = end_together(self._killed, leave_s=LEAVE_S)
        return _hanging(self._killed)

    def _forget(self) -> None:
        """Listen to none of them any more."""
        self._give_up_s = None
        for worker in self._workers:
            for descriptor in worker.descriptors:
                self._selector.unregister(descriptor)
        self._killed += self._workers
        self._workers = []


def _hanging(workers: Sequence[Worker]) -> str:
    """Say which workers hang, empty if none does."""
    if not workers:
        return ""
    numbers = ", ".join(str(worker.local_rank) for worker in workers)
    several = len(workers) > 1
    of = "" if workers[0].on_cpus else f" of device{'s' if several else ''}"
    which = "" if workers[0].on_cpus and not several else f"{of} {numbers}"
    return (
        f"the check process{'es' if several else ''}{which}"
        f" hang{'' if several else 's'} in the kernel and cannot be killed"
    )


# torch would end the process when NCCL reports an error, and the death of a partner's process be
# taken for a fault of this node. The second of these turns the first on again.
_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DESYNC_DEBUG": "0"}
# Nor is a Flight Recorder's dump of ours to replace that of a training. Where there is
# one to write, an abort waits for it: the watchdog imports torch._inductor for the stacks, and then
# sleeps for a minute so that other ranks can write theirs. Both names of the buffer are in use.
_NO_DUMPS = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "10",  # the watchdog sleeps four times as long
}


# Nodes that share NVLink (GB200 NVL72) would exchange over it, several times faster than others:
# their network would not be tested, and pairs across domains would look slow beside them.
_NETWORK_ONLY = {"NCCL_MNNVL_ENABLE": "0"}

# torch 2.6 keeps its events in a cache of the thread that made them, and gives them back to it when
# that thread has ended, as those in which groups are formed have: the heap is corrupted then.
_NO_EVENT_CACHE = {"TORCH_NCCL_CUDA_EVENT_CACHE": "0"}


def _worker_environ(environ: Mapping[str, str], address: str) -> dict[str, str]:
    changed = {**environ, **_NO_WATCHDOG, **_NO_DUMPS, **_NETWORK_ONLY, **_NO_EVENT_CACHE}
    interface = node_facts.interface_of(address)
    if interface:
        # Otherwise gloo resolves the host name, which may be a loopback address.
        changed.setdefault("GLOO_SOCKET_IFNAME", interface)
    # What a worker says last explains its end; torch warns of names it cannot look up.
    changed.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return changed


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
                accelerators=self._workers.accelerators,
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
