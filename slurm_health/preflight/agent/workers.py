# SPDX-License-Identifier: Apache-2.0
"""All workers of a node: started, once more where that makes sense, waited on, ended.

Nobody else owns a worker's life. How it goes until all are ready is said in the node's file.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health.preflight.agent import node_facts
from slurm_health.preflight.agent.worker_process import (
    LOOK_S,
    UNKILLABLE_S,
    Gone,
    InRound,
    Ready,
    State,
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
_ENVIRON = {
    # torch would end the process when NCCL reports an error, and the death of a partner's process
    # be taken for a fault of this node. The second of these turns the first on again.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    # Nor is a Flight Recorder's dump of ours to replace that of a training. Where there is one to
    # write, an abort waits for it: the watchdog imports torch._inductor for the stacks, and then
    # sleeps for a minute so that other ranks can write theirs. Both names of the buffer are in use.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "10",  # the watchdog sleeps four times as long
    # Nodes that share NVLink (GB200 NVL72) would exchange over it, several times faster than
    # others: their network would not be tested, and pairs across domains would look slow beside
    # them.
    "NCCL_MNNVL_ENABLE": "0",
    # torch 2.6 keeps its events in a cache of the thread that made them, and gives them back to it
    # when that thread has ended, as those in which groups are formed have: the heap is corrupted.
    "TORCH_NCCL_CUDA_EVENT_CACHE": "0",
    # Threads that wait for one another at every product are not to burn what others have of the
    # processors meanwhile: beside them the same product takes three times the processor time.
    "OMP_WAIT_POLICY": "PASSIVE",
}


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the master tells an agent on its command line.

    `gpus` is how many the job has on this node, by Slurm; 0 if Slurm does not say. `programs` are
    the only files of a site's own probes that a round may name, None for any.
    """

    node: str
    directory: Path
    run_id: str
    launch: int
    python: str
    poll_s: float
    silence_s: float
    gpus: int = 0
    programs: tuple[str, ...] | None = None


class Workers:
    """All workers of this node: one for each accelerator, one where it has none.

    Light ones use no accelerator: where they are `light`, there is one on any node.

    Args:
        settings: the agent's: the node, and the job's interpreter.
        address: that of the node for the others of the job.
        environ: of the agent.
        say: writes a record of the node's.
        monotonic: a clock that never goes back.
        make: makes a worker.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        address: str,
        environ: Mapping[str, str],
        say: Callable[[records.Record], None],
        monotonic: Callable[[], float],
        make: Callable[..., Worker] = Worker,
    ) -> None:
        self.light = False
        self.ended = ""  # how the last one did that was ready and in no round, until all are ready
        self._node, self._launch = settings.node, settings.launch
        self._python, self._gpus, self._address = settings.python, settings.gpus, address
        self._given_environ = environ
        self._environ = {**environ, **_ENVIRON}
        if interface := node_facts.interface_of(address):
            # Otherwise gloo resolves the host name, which may be a loopback address.
            self._environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # What a worker says last explains its end; torch warns of names it cannot look up.
        self._environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._say, self._monotonic, self._make = say, monotonic, make
        self._accelerators = 0  # that this node had when they were started
        self._workers: list[Worker] = []
        self._killed: list[Worker] = []  # and not known to be gone
        self._give_up_s: float | None = None  # set while new ones are to be started
        self._starts = self._device_failures = 0
        self._loaded_s: float | None = None

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        """Yield them by local rank."""
        return iter(self._workers)

    @property
    def ready(self) -> list[Ready]:
        """What each said when it was ready, in their order; empty until all are."""
        lines = [worker.ready for worker in self._workers if worker.ready is not None]
        return lines if len(lines) == len(self._workers) else []

    def starting(self) -> records.WorkersStarting:
        """Return the record that workers are being replaced."""
        return records.WorkersStarting(node=self._node, launch=self._launch)

    def replace(self) -> None:
        """Kill them all, and start others as soon as these are gone."""
        self._loaded_s = None
        self._kill()
        self._give_up_s = self._monotonic() + UNKILLABLE_S
        self.tick()

    def tick(self) -> None:
        """Start those that are due, and say once which devices do not open; never wait.

        A killed process may need seconds to give back the memory of its device, which the next one
        needs.
        """
        if self._give_up_s is not None:
            self._killed = [worker for worker in self._killed if not worker.ends_within(0.0)]
            if not self._killed or self._monotonic() >= self._give_up_s:
                self._give_up_s = None
                if obstacle := _hanging(self._killed) or self._start():
                    self._fail(obstacle)
        unopened = [worker for worker in self._workers if "opened" not in worker.states]
        waited_s = 0.0 if self._loaded_s is None else self._monotonic() - self._loaded_s
        if unopened and waited_s >= OPEN_S:
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

    def _start(self) -> str:
        """Start one for each device; return what stands in the way."""
        devices = node_facts.device_count(self._environ)
        obstacle = node_facts.missing_devices(self._environ, devices, gpus=self._gpus)
        if obstacle:
            return obstacle
        self._accelerators = devices
        devices = 0 if self.light else devices
        count = devices or 1
        threads = max(1, node_facts.usable_cpus(self._given_environ) // count)
        self._workers = [
            self._make(
                python=self._python,
                local_rank=local_rank,
                threads=threads,
                devices=devices,
                environ=self._environ,
                light=self.light,
                address=self._address,
            )
            for local_rank in range(count)
        ]
        return ""

    def wait(self, timeout_s: float, *also: int | None) -> None:
        """Return when one has something to say or stands still, or after this time.

        Or when there is something to read from one of the descriptors `also`.
        """
        poll = select.poll()
        for worker in self._workers:
            for descriptor in worker.descriptors:
                poll.register(descriptor, select.POLLIN)
        for other in also:
            if other is not None:
                poll.register(other, select.POLLIN)
        until_s = self._monotonic() + timeout_s
        while True:
            now_s = self._monotonic()
            for worker in self._workers:
                worker.look(now_s)
            if any(gone.still for worker in self._workers if (gone := worker.gone())):
                return
            due = self._give_up_s is not None
            left_s = max(0.0, until_s - now_s)
            if poll.poll(min(left_s, _LOOK_S if due else LOOK_S) * 1e3):
                return
            if due or left_s <= LOOK_S:
                return

    def lines(self) -> Iterator[tuple[Worker, InRound | Gone]]:
        """Yield what they have said in their round, and at last how one is gone, if one is.

        Whoever handles a line may have all of them replaced.
        """
        for worker in list(self._workers):
            if worker not in self._workers:
                return
            # In this order: what a worker said before it ended is read before its end is noted.
            gone = worker.gone()
            for line in worker.read_lines():
                if isinstance(line, Ready):
                    if self.ready:
                        self.say_ready()
                elif isinstance(line, State):
                    if line.state == "loaded" and all(w.torch for w in self._workers):
                        self._loaded_s = self._monotonic()  # their devices open next
                elif isinstance(line, InRound):
                    yield worker, line
            if gone is not None:
                yield worker, gone
                return

    def say_ready(self) -> None:
        """Say that all are ready, and what they work with."""
        ready = self.ready
        first = ready[0]
        self.ended = ""
        self._say(
            records.WorkersReady(
                node=self._node,
                launch=self._launch,
                store_port=first.store_port,
                torch=first.torch,
                backend=first.backend,
                devices=[line.device for line in ready],
                collective_library=first.collective_library,
                start_ms=max(line.start_ms for line in ready),
                model=" and ".join(dict.fromkeys(line.model for line in ready)),
                free_bytes=min(line.free_bytes for line in ready),
                interface=node_facts.chosen_interface(
                    self._given_environ, self._address, first.backend
                ),
                ports_gbit_per_s=first.ports_gbit_per_s,
                gflop_per_s=min(line.gflop_per_s for line in ready),
                memory_gb_per_s=min(line.memory_gb_per_s for line in ready),
                nvlink_domain=first.nvlink_domain,
                accelerators=self._accelerators,
            )
        )

    def succeeded(self) -> None:
        """Note that they were ready: those that are started next have all tries again."""
        self._starts = self._device_failures = 0

    def again(self, worker: Worker, gone: Gone) -> None:
        """Start them again because one is gone, unless that has been tried before."""
        how = f"its check process stands still: {gone.how}" if gone.still else gone.how
        states = worker.states
        self._starts += 1
        self._device_failures += "unusable" in states
        self.ended = self.ended or (how if worker.ready else "")
        if self._starts < STARTS_PER_LAUNCH and "no_torch" not in states:
            self._say(self.starting())
            self.replace()
            return
        self._kill()
        reasons = [
            states[name].detail for name in ("unusable", "refused", "no_torch") if name in states
        ]
        self._fail(
            next(filter(None, reasons), how),
            device_failed=self._device_failures == self._starts,
            torch=worker.torch,
            no_torch="no_torch" in states,
        )

    def _fail(
        self, reason: str, *, device_failed: bool = False, torch: str = "", no_torch: bool = False
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
                accelerators=self._accelerators,
            )
        )

    def end(self) -> str:
        """End them all: who is idle leaves. Return who cannot be killed, empty if nobody is."""
        self._give_up_s = None
        self._killed = end_together([*self._killed, *self._workers], leave_s=LEAVE_S)
        self._workers = []
        return _hanging(self._killed)

    def _kill(self) -> None:
        self._give_up_s = None
        for worker in self._workers:
            worker.kill()
        self._killed += self._workers
        self._workers = []


def _hanging(workers: Sequence[Worker]) -> str:
    """Say which workers hang, empty if none does."""
    if not workers:
        return ""
    several = len(workers) > 1
    which = ""
    if several or not workers[0].on_cpus:
        of = "" if workers[0].on_cpus else f" of device{'s' if several else ''}"
        which = f"{of} {', '.join(str(worker.local_rank) for worker in workers)}"
    return (
        f"the check process{'es' if several else ''}{which}"
        f" hang{'' if several else 's'} in the kernel and cannot be killed"
    )
