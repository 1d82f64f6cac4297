# SPDX-License-Identifier: Apache-2.0
"""torchrun, whose nodes are looked at before its workers are started again after a failure.

`slurm-health run` becomes this file, in the job's own interpreter. It is torchrun, arguments and
all, with one thing put behind a failure, and before the rendezvous that follows it: the nodes that
are left come together in torchrun's own store, the one that leads asks slurm-health why they failed
and what to do, and all do it: stop, restart, or have their nodes checked first. A monitor runs
beside the workers; where it finds that they hang, they are ended as if one had failed.
Needs nothing but torch. Whatever goes wrong in here, torchrun trains and restarts its workers as it
would; a torch that this does not fit is left as it is.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # The modules beside this one must not hide others of the same name, nor those of slurm-health's
    # interpreter the job's.
    sys.path[0] = str(Path(__file__).resolve().parents[3])
from slurm_health.preflight.probes.torchrun_agents import Carrier
from slurm_health.preflight.probes.torchrun_nodes import (
    Monitor,
    Tail,
    TrainingNodes,
    become_torchrun,
    line_of,
)

if __name__ == "__main__":
    sys.path.pop(0)

VARIABLE = "SLURM_HEALTH_RESTARTS"

if __name__ == "__main__":
    gc.disable()  # it finds nothing in what is being loaded, and takes its time
try:
    from torch.distributed import DistNetworkError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousParameters,
        registry,
    )
except ImportError as err:
    if __name__ != "__main__":
        raise
    become_torchrun(VARIABLE, err)
if __name__ == "__main__":
    gc.enable()


class RunFacts(NamedTuple):
    """What `slurm-health run` knows, and the next decision needs.

    `command` is to be asked, in `environ`; `context` is its own. `node` is the name of this one,
    which has so many `processes`.
    `monitor` is the command to run beside the workers, empty where there is none; `node_agent`
    that of a node's own agent, if no srun starts these.
    """

    command: list[str]
    node: str
    leads: bool
    max_restarts: int
    processes: int
    environ: dict[str, str]
    context: Any
    monitor: tuple[str, ...] = ()
    node_agent: tuple[str, ...] = ()


class WatchedRendezvous(RendezvousHandler):
    """torchrun's rendezvous, beside which a monitor begins once the nodes have met."""

    def __init__(self, inner: Any, told: RunFacts, tail: Tail, monitor: Monitor) -> None:
        self._inner = inner
        self._told = told
        self._tail = tail
        self._monitor = monitor
        self._watched = False

    @property
    def use_agent_store(self) -> bool:
        """Whether workers share the agents' store."""
        return bool(getattr(self._inner, "use_agent_store", False))

    def get_backend(self) -> str:
        """Return the backend's name."""
        return str(self._inner.get_backend())

    def get_run_id(self) -> str:
        """Return what the nodes have in common."""
        return str(self._inner.get_run_id())

    def is_closed(self) -> bool:
        """Tell whether nobody can meet here any more."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """Let nobody meet here any more."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return how many nodes are to be let in."""
        return int(self._inner.num_nodes_waiting())

    def shutdown(self) -> bool:
        """Close the rendezvous for all."""
        return bool(self._inner.shutdown())

    def next_rendezvous(self) -> Any:
        """Meet the others; the first time all do, and later each node by itself, unseen by them."""
        found = self._inner.next_rendezvous()
        if not self._watched:
            self._watched = True
            self._watch(*_met(found))
        return found

    def _watch(self, store: Any, rank: int, count: int) -> None:
        """Have a monitor begin beside the workers."""
        told = self._told
        if not told.node_agent:
            self._monitor.begin()
            return
        try:
            carrier = Carrier(store, rank, count, told.node_agent, told.environ)
            self._monitor.begin_carried(carrier, told.node)
        except (OSError, RuntimeError) as err:
            self._say(f"no hang of this training is looked for here: {line_of(err)}")

    def _say(self, text: str) -> None:
        os.write(self._tail.real, f"slurm-health: {self._told.node}: {text}\n".encode())


class CheckedRendezvous(WatchedRendezvous):
    """One before which the nodes are looked at where workers have failed."""

    def __init__(self, inner: Any, told: RunFacts, tail: Tail, monitor: Monitor) -> None:
        super().__init__(inner, told, tail, monitor)
        self._round: TrainingNodes | None = None
        self._began_s = 0.0
        self._rank = 0
        self._restarts = 0
        self._hang: Any = None
        self._hangs_before: list[Any] = []
        self._newcomers = False
        self._leaves = False

    def num_nodes_waiting(self) -> int:
        """Return how many nodes are to be let in; one, where workers of another have failed.

        One as well where the workers hang, so that torchrun ends them on all nodes.
        """
        if self._round is not None and _answers(self._round.has_failed):
            return 1
        if self._round is not None and self._hang is None:
            self._hang = self._monitor.hang()
        if self._hang is not None:
            return 1
        waiting = super().num_nodes_waiting()
        self._newcomers = waiting > 0
        return waiting

    def shutdown(self) -> bool:
        """Close the rendezvous for all; a node that the others go on without only leaves it."""
        return True if self._leaves else super().shutdown()

    def next_rendezvous(self) -> Any:
        """Meet the others; after a failure, once it is decided how to go on.

        Raises:
            SystemExit: this node does not take part any more, or nobody does.
        """
        self._monitor.end()
        if self._round is not None and not self._lets_in(self._round):
            self._restarts += 1
            code = self._before_restart(self._round)
            if code is not None:
                raise SystemExit(code)
        self._newcomers = False
        self._tail.clear()
        found = self._inner.next_rendezvous()
        store, self._rank, count = _met(found)
        self._round = TrainingNodes(store, self._rank, count)
        self._began_s = time.monotonic()
        self._watch(store, self._rank, count)
        return found

    def workers_failed(self) -> None:
        """Have it said why the workers failed, which torchrun does not start again."""
        self._monitor.end()
        if self._round is not None:
            self._restarts = self._told.max_restarts + 1
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                self._decided(self._round)

    def _lets_in(self, now: TrainingNodes) -> bool:
        """Tell whether the nodes meet because others have come, and nothing has failed."""
        return self._newcomers and self._hang is None and not _answers(now.has_failed)

    def _before_restart(self, now: TrainingNodes) -> int | None:
        """Return the code to end with, None to go on, as is also done where nothing is decided."""
        try:
            return self._decided(now)
        except DistNetworkError as err:
            self._say(f"the training ends here: its rendezvous does not answer: {line_of(err)}")
            return 1
        except (OSError, RuntimeError, ValueError) as err:
            self._say(f"UNCHECKED: {line_of(err)}; restarting the workers anyway")
            return None

    def _decided(self, now: TrainingNodes) -> int | None:
        """Return the code to end with, None to go on."""
        now.failed()
        now.report(
            {
                "node": self._told.node,
                "rank": self._rank,
                "processes": self._told.processes,
                "text": self._tail.text(),
            }
        )
        decision = self._lead(now) if self._told.leads else now.decision()
        if decision["next"] == "stop":
            return 1
        if decision["next"] == "check":
            checked = self._ask("check", decision=decision)
            self._leaves = bool(checked["leaves"])
            code: int | None = checked["exit_code"]
            return code
        return None

    def _lead(self, now: TrainingNodes) -> dict[str, Any]:
        """Return what is to be done, and tell the others."""
        reports, silent = now.reports()
        hang, self._hang = self._hang, None
        try:
            decision = self._ask(
                "decide",
                reports=reports,
                silent=silent,
                restart=self._restarts,
                max_restarts=self._told.max_restarts,
                ran_s=time.monotonic() - self._began_s,
                hang=hang,
                hangs_before=self._hangs_before,
            )
            self._hangs_before += [] if hang is None else [hang]
        except (OSError, RuntimeError, ValueError):
            now.decide({"next": "restart"}, len(reports) - 1)
            raise
        now.decide(decision, len(reports) - 1)
        return decision

    def _ask(self, what: str, **told: Any) -> dict[str, Any]:
        """Ask slurm-health, and return its answer.

        Raises:
            RuntimeError: it has none.
        """
        question = json.dumps({"what": what, "context": self._told.context, **told})
        process = subprocess.Popen(
            self._told.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._tail.real,
            env=self._told.environ,
        )
        try:
            answer, _ = process.communicate(question.encode())
        finally:
            if process.poll() is None:  # a signal ends us
                process.terminate()
        lines = answer.splitlines()
        if process.returncode != 0 or not lines:
            raise RuntimeError(f"slurm-health ended with {process.returncode}")
        found: dict[str, Any] = json.loads(lines[-1])
        return found


def _met(found: Any) -> tuple[Any, int, int]:
    """Return the store of those that have met, this one's rank, and how many they are."""
    if isinstance(found, tuple):
        return found
    return found.store, found.rank, found.world_size


def _answers(look: Any) -> bool:
    """Tell what a look at the store says; nothing, where the store does not answer."""
    try:
        return bool(look())
    except (OSError, RuntimeError):
        return False


def prepared(argv: list[str], told: dict[str, Any], environ: dict[str, str]) -> RunFacts:
    """Return what `slurm-health run` has told, and this torchrun's own arguments.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: torch or what is told is unlike what is
            thought in here; torchrun itself may still do.
    """
    args = torchrun.parse_args(argv)
    processes = torchrun.determine_local_world_size(args.nproc_per_node)
    if not callable(registry.get_rendezvous_handler):
        raise TypeError("this torch makes its rendezvous in another way")
    return RunFacts(
        max_restarts=int(args.max_restarts), processes=int(processes), environ=environ, **told
    )


@contextlib.contextmanager
def _checked_rendezvous(told: RunFacts) -> Iterator[None]:
    """While active, torchrun's rendezvous is a checked one."""
    tail = Tail()
    monitor = Monitor(told.monitor, told.environ, tail.real)
    made: list[CheckedRendezvous] = []
    create = registry.get_rendezvous_handler

    def checked(params: RendezvousParameters) -> RendezvousHandler:
        inner = create(params)
        try:
            # The static one has a fixed set of nodes, and one store for all of its rounds.
            if inner.get_backend() == "static":
                _only_reports(told, monitor, tail)
                return WatchedRendezvous(inner, told, tail, monitor)
            made.append(CheckedRendezvous(inner, told, tail, monitor))
        except TypeError as err:  # torch's has more to it by now
            os.write(tail.real, f"slurm-health: no post-mortem: {line_of(err)}\n".encode())
            if not told.node_agent:  # without a store nothing carries their lines
                monitor.begin()
            return inner
        return made[-1]

    registry.get_rendezvous_handler = checked
    try:
        yield
    except ChildFailedError:
        for each in made:
            each.workers_failed()
        raise
    finally:
        monitor.end()
        tail.end()


def _only_reports(told: RunFacts, monitor: Monitor, tail: Tail) -> None:
    """Have a hang reported where nobody can end the workers of all nodes; say so to who asked."""
    cannot = ("stop", "restart") if told.node_agent else ("restart",)  # Slurm can end its job
    for mode in cannot:
        if f"--on-hang={mode}" in told.monitor:
            monitor.only_report()
            text = f"the static rendezvous has no --monitor={mode}: a hang is only reported"
            os.write(tail.real, f"slurm-health: {text}\n".encode())


def main() -> None:
    """Be torchrun, by the words of the command line and what `slurm-health run` says."""
    try:
        told = prepared(sys.argv[1:], json.loads(os.environ.pop(VARIABLE)), dict(os.environ))
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        become_torchrun(VARIABLE, err)
    # Workers would find what those before them left in the agents' store, such as old addresses.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        with _checked_rendezvous(told):
            torchrun.main(sys.argv[1:])
    except SignalException as err:
        if err.sigval != signal.SIGINT:
            raise
        sys.exit(128 + signal.SIGINT)  # who pressed Ctrl-C need not see where torchrun was


if __name__ == "__main__":
    main()
