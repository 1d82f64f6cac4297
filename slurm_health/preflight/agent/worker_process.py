# SPDX-License-Identifier: Apache-2.0
"""The worker processes of a node: started, spoken to, listened to, killed."""

from __future__ import annotations

import contextlib
import json
import selectors
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from slurm_health.preflight.agent import node_facts
from slurm_health.preflight.agent.standstill import LOOK_S, Standstill, StandstillWatch
from slurm_health.preflight.session import worker_events
from slurm_health.records.text import LineBuffer
from slurm_health.system import processes
from slurm_health.system.signals import exit_text

WORKER = Path(__file__).parents[1] / "probes" / "worker.py"
LIGHT_NAME = "health-worker"  # what `ps` and `top` call a light one, which has its agent's words
STDERR_LINES = 20
# After the words of a C++ exception come its frames; after CUDA's come hints for programmers.
_CPP = "what():"
_FRAME, _TELLING = "frame #", (_CPP, "CUDA error:")
# One that is idle leaves at once when it is told to.
LEAVE_S = 3.0
# A killed process gives back its devices' memory first, which takes seconds at most, or it hangs.
UNKILLABLE_S = 10.0
_LOOK_S = 0.02  # how often is looked whether killed processes are gone, when others wait for that


class Worker:
    """One worker process of one device.

    `descriptors` are to be waited on; `read_events` returns what has arrived. `ready` is what it
    said when it was, None before; `torch` what it has loaded, `unusable` what its device said
    that cannot be used, `refused` why it does not use it, `no_torch` that there is none for it. The
    process dies with the agent. A light one is a fork of the agent, in its interpreter.
    """

    def __init__(
        self,
        *,
        python: str,
        local_rank: int,
        threads: int,
        devices: int,
        environ: Mapping[str, str],
        light: bool = False,
    ) -> None:
        self.local_rank = local_rank
        self.on_cpus = not devices
        self.ready: worker_events.Ready | None = None
        self.torch = ""
        self.opened = False
        self.unusable = self.refused = ""
        self.no_torch = False
        self._lines = LineBuffer()
        self._said: list[str] = []
        self._killed = False
        try:
            self._process: processes.Process | None = (
                _forked(local_rank, threads, environ)
                if light
                else processes.start_tied(
                    [python, str(WORKER), str(local_rank), str(threads), str(devices), "torch"],
                    environ=environ,
                    stdin=processes.PIPE,
                    stdout=processes.PIPE,
                )
            )
        except OSError as err:
            self._process = None
            self.no_torch = True
            self._said.append(f"cannot run {python}: {err.strerror}")
        self._watch = StandstillWatch(self._process.pid) if self._process else None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that become readable when the worker has something to say."""
        if self._process is None or self._killed:
            return ()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        return self._process.stdout.fileno(), self._process.stderr.fileno()

    def send(self, command: Mapping[str, object]) -> None:
        """Send a command. A worker that is gone is noticed when its events end."""
        if self._process is None or self._killed:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def read_events(self) -> list[worker_events.Event]:
        """Return the events that have arrived since the last call."""
        if self._process is None or self._killed:
            return []
        self._read_errors()
        lines = self._lines.feed(processes.read_available(self._process.stdout))
        return [worker_events.decode(line) for line in lines if line.startswith(b"{")]

    def hears_start(self, event: worker_events.Event) -> bool:
        """Take what the worker says before its first round; tell if that is what an event is."""
        match event:
            case worker_events.Loaded(torch=torch):
                self.torch = torch
            case worker_events.NoTorch(detail=detail):
                self.refused, self.no_torch = detail, True
            case worker_events.Opened():
                self.opened = True
            case worker_events.Unusable(detail=detail):
                self.unusable = detail
            case worker_events.Refused(detail=detail):
                self.refused = detail
            case worker_events.Ready():
                self.ready = event
            case _:
                return False
        return True

    def ended(self) -> str | None:
        """Say how the worker ended, None while it lives."""
        if self._killed:
            return "killed"
        if self._process is None:
            return self._said[-1]
        returncode = self._process.poll()
        if returncode is None:
            return None
        self._read_errors()
        telling = [line for line in self._said if any(text in line for text in _TELLING)]
        last = (telling or self._said)[-1:]
        said = f": {last[0].removeprefix(_CPP).strip()}" if last else ""
        return exit_text(returncode) + said

    def look(self, now_s: float) -> None:
        """Look whether the worker stands still, now and then."""
        if self._watch is not None and not self._killed:
            self._watch.look(now_s)

    def standstill(self) -> Standstill | None:
        """Return why the worker stands still, None unless that is proven.

        Until it is ready it reads torch, and who knows from where: only a signal stops it then.
        """
        found = self._watch.found() if self._watch is not None and not self._killed else None
        return found if found and (found.stopped or self.ready) else None

    def leave(self) -> None:
        """Tell the worker to leave. It need not be heard."""
        if self._process is None or self._killed:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the worker with all its children. `ends_within` reaps it."""
        if self._process is None or self._killed:
            return
        self._killed = True
        processes.kill_session(self._process)
        processes.close_pipes(self._process)

    def ends_within(self, wait_s: float) -> bool:
        """Wait for the end of a worker; tell whether it came in time."""
        return self._process is None or processes.ends_within(self._process, wait_s)

    def _read_errors(self) -> None:
        assert self._process is not None
        text = processes.read_available(self._process.stderr).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines()]
        self._said += [line for line in lines if line and not line.startswith(_FRAME)]
        del self._said[:-STDERR_LINES]


def _forked(local_rank: int, threads: int, environ: Mapping[str, str]) -> processes.Process:
    """Start a light worker: a fork of the agent has half of what it needs loaded already."""

    def serve() -> None:
        from slurm_health.preflight.probes import worker

        worker.serve(local_rank, threads, 0, worker.LIGHT)

    return processes.fork_tied(LIGHT_NAME, serve, environ=environ)


def end_together(
    workers: Sequence[Worker], *, leave_s: float = 0.0, wait_s: float = UNKILLABLE_S
) -> list[Worker]:
    """End workers, all at the same time; return those that are still there after `wait_s`.

    No signal ends a process that waits for a driver or a filesystem. Others may leave by
    themselves within `leave_s`, and are killed after that.
    """
    for worker in workers:
        worker.leave()
    _still_there(workers, leave_s)
    for worker in workers:
        worker.kill()
    return _still_there(workers, wait_s)


def _still_there(workers: Sequence[Worker], wait_s: float) -> list[Worker]:
    end_s = time.monotonic() + wait_s
    return [
        worker for worker in workers if not worker.ends_within(max(0.0, end_s - time.monotonic()))
    ]


class Workers:
    """All workers of this node: one for each accelerator, or `on_cpus` of them where it has none.

    Light ones see no accelerator: where they are `light`, there are `on_cpus` of them on any node.

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
        monotonic: Callable[[], float],
        gpus: int = 0,
    ) -> None:
        self._python = python
        self._on_cpus = on_cpus
        self._gpus = gpus
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
    def ready(self) -> list[worker_events.Ready]:
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
