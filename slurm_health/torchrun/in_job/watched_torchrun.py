# SPDX-License-Identifier: Apache-2.0
"""torchrun with a monitor beside its workers, and a decision before it starts them again.

`slurm-health run` becomes this file, in the job's own interpreter. It is torchrun, arguments and
all, with one step between a failure and the rendezvous that follows it. The nodes that are left
report in torchrun's own store; the one that leads asks slurm-health why the workers failed and what
to do; all do it: stop, restart, or have their nodes checked first. If the monitor finds a hang, the
workers are ended as if one had failed.

The first argument is the number of an open file with what `run` knows, as JSON. Whatever goes wrong
in here, torchrun trains and restarts its workers as it would by itself.
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
from typing import Any, NamedTuple, NoReturn

if __name__ == "__main__":
    # The modules beside this one must not hide others of the same name, nor must those of
    # slurm-health's interpreter hide the job's.
    sys.path[0] = str(Path(__file__).resolve().parents[3])
from slurm_health.torchrun.in_job.monitor import Monitor
from slurm_health.torchrun.in_job.nodes import Tail, TrainingNodes

if __name__ == "__main__":
    sys.path.pop(0)


def _first_line(err: Exception) -> str:
    return str(err).strip().partition("\n")[0] or type(err).__name__


def _become_torchrun(err: Exception) -> NoReturn:
    """Be torchrun and nothing else: this torch, or what `run` handed over, is not as expected."""
    text = f"slurm-health: this training is not monitored: {_first_line(err)}\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    torchrun = [sys.executable, "-m", "torch.distributed.run", *sys.argv[2:]]
    os.execv(sys.executable, torchrun)  # noqa: S606 - no shell: the user's words are as they are


if __name__ == "__main__":
    gc.disable()  # there is no garbage in what is being loaded, and the search takes time
try:
    from torch.distributed import DistNetworkError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
except ImportError as err:
    if __name__ != "__main__":
        raise
    _become_torchrun(err)
if __name__ == "__main__":
    gc.enable()


class RunFacts(NamedTuple):
    """What `slurm-health run` knows, and a decision needs.

    Args:
        max_restarts, processes: of this torchrun, the latter on this node.
        environ: the environment of all commands.
        command: is asked what to do; `context` is its own.
        node: the name of this node.
        leads: whether this node asks for all.
        monitor: runs the monitor, empty on other nodes.
        node_agent: runs this node's agent, empty where srun starts the agents.
    """

    max_restarts: int
    processes: int
    environ: dict[str, str]
    command: list[str]
    node: str
    leads: bool
    context: Any
    monitor: tuple[str, ...] = ()
    node_agent: tuple[str, ...] = ()


class Watched:
    """torchrun's rendezvous with a monitor, and with a decision before workers start again.

    The static rendezvous has a fixed set of nodes and one store for all of its rounds, and each
    node repeats it by itself: there, a hang or a failure is only reported.
    """

    def __init__(self, rendezvous: Any, facts: RunFacts, tail: Tail, monitor: Monitor) -> None:
        self._facts, self._tail, self._monitor = facts, tail, monitor
        self._meet = rendezvous.next_rendezvous
        self._count_waiting = rendezvous.num_nodes_waiting
        self._shut_down = rendezvous.shutdown
        self._nodes: TrainingNodes | None = None
        self._rank = self._restarts = 0
        self._began_s = 0.0
        self._hang: Any = None
        self._hangs_before: list[Any] = []
        self._newcomers = self._leaves = False
        # Attributes of this one object: a class of ours would lack what a later torch asks for.
        if rendezvous.get_backend() == "static":
            rendezvous.next_rendezvous = self.meet_once
            self._only_report()
        else:
            rendezvous.next_rendezvous = self.meet
            rendezvous.num_nodes_waiting = self.count_waiting
            rendezvous.shutdown = self.shut_down

    def _only_report(self) -> None:
        """Have a hang reported where no one can end the workers of all nodes, and say so."""
        can_stop = not self._facts.node_agent  # Slurm can end its job
        for mode in ("restart",) if can_stop else ("stop", "restart"):
            if f"--on-hang={mode}" in self._monitor.command:
                self._monitor.command.append("--on-hang=report")
                self._say(f"the static rendezvous has no --monitor={mode}: a hang is only reported")

    def meet_once(self) -> Any:
        """Meet the others, and start the monitor the first time."""
        rendezvous = self._meet()
        if not self._began_s:
            self._watch(*_members(rendezvous))
        return rendezvous

    def meet(self) -> Any:
        """Meet the others; after a failure, once it is decided how to go on.

        Raises:
            SystemExit: this node does not take part any more, or none does.
        """
        self._monitor.end()
        nodes = self._nodes
        lets_in = self._newcomers and self._hang is None
        if nodes is not None and not (lets_in and not nodes.has_failed()):
            self._restarts += 1
            code = self._before_restart(nodes)
            if code is not None:
                raise SystemExit(code)
        self._newcomers = False
        self._tail.clear()
        rendezvous = self._meet()
        store, self._rank, count = _members(rendezvous)
        self._nodes = TrainingNodes(store, self._rank, count)
        self._watch(store, self._rank, count)
        return rendezvous

    def count_waiting(self) -> int:
        """Return how many nodes are to be let in; 1 if workers hang or have failed elsewhere.

        torchrun then ends the workers of this node.
        """
        if self._nodes is not None and self._nodes.has_failed():
            return 1
        if self._nodes is not None and self._hang is None:
            self._hang = self._monitor.hang()
        if self._hang is not None:
            return 1
        waiting = int(self._count_waiting())
        self._newcomers = waiting > 0
        return waiting

    def shut_down(self) -> bool:
        """Close the rendezvous for all; a node that the others go on without only leaves it."""
        return True if self._leaves else bool(self._shut_down())

    def workers_failed(self) -> None:
        """Have the cause reported of a failure after which torchrun starts no workers again."""
        self._monitor.end()
        if self._nodes is not None:
            self._restarts = self._facts.max_restarts + 1
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                self._follow_decision(self._nodes)

    def _watch(self, store: Any, rank: int, count: int) -> None:
        self._began_s = time.monotonic()
        try:
            self._monitor.begin(store, rank, count)
        except (OSError, RuntimeError) as err:
            self._say(f"no hang of this training is looked for here: {_first_line(err)}")

    def _before_restart(self, nodes: TrainingNodes) -> int | None:
        """Return the code to end with, None to go on, as is also done if nothing is decided."""
        try:
            return self._follow_decision(nodes)
        except DistNetworkError as err:
            self._say(f"the training ends here: its rendezvous does not answer: {_first_line(err)}")
            return 1
        except (OSError, RuntimeError, ValueError) as err:
            self._say(f"UNCHECKED: {_first_line(err)}; restarting the workers anyway")
            return None

    def _follow_decision(self, nodes: TrainingNodes) -> int | None:
        """Report, get the decision or make it; return the code to end with, None to go on."""
        nodes.report(
            {
                "node": self._facts.node,
                "rank": self._rank,
                "processes": self._facts.processes,
                "text": self._tail.text(),
            }
        )
        decision = self._lead(nodes) if self._facts.leads else nodes.decision()
        if decision["next"] == "stop":
            return 1
        if decision["next"] == "check":
            code: int | None = self._ask(decision=decision)["exit_code"]
            self._leaves = code == 0  # the others go on without this node
            return code
        return None

    def _lead(self, nodes: TrainingNodes) -> dict[str, Any]:
        """Return what all are to do, and publish it."""
        reports, silent = nodes.reports()
        hang, self._hang = self._hang, None
        try:
            decision = self._ask(
                reports=reports,
                silent=silent,
                restart=self._restarts,
                max_restarts=self._facts.max_restarts,
                ran_s=time.monotonic() - self._began_s,
                hang=hang,
                hangs_before=self._hangs_before,
            )
            self._hangs_before += [] if hang is None else [hang]
        except (OSError, RuntimeError, ValueError):
            nodes.decide({"next": "restart"}, len(reports) - 1)
            raise
        nodes.decide(decision, len(reports) - 1)
        return decision

    def _ask(self, **question: Any) -> dict[str, Any]:
        """Ask slurm-health, and return its answer.

        Raises:
            RuntimeError: it has none.
        """
        text = json.dumps({"context": self._facts.context, **question})
        process = subprocess.Popen(
            self._facts.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._tail.real,
            env=self._facts.environ,
        )
        try:
            answer, _ = process.communicate(text.encode())
        finally:
            if process.poll() is None:  # a signal ends us
                process.terminate()
        lines = answer.splitlines()
        if process.returncode != 0 or not lines:
            raise RuntimeError(f"slurm-health ended with {process.returncode}")
        decoded: dict[str, Any] = json.loads(lines[-1])
        return decoded

    def _say(self, text: str) -> None:
        os.write(self._tail.real, f"slurm-health: {self._facts.node}: {text}\n".encode())


def _members(rendezvous: Any) -> tuple[Any, int, int]:
    """Return the store of the nodes that have met, this one's rank, and how many they are."""
    if isinstance(rendezvous, tuple):  # before torch 2.5
        return rendezvous
    return rendezvous.store, rendezvous.rank, rendezvous.world_size


def read_facts(argv: list[str], handed_over: int, environ: dict[str, str]) -> RunFacts:
    """Return what `slurm-health run` has handed over, and this torchrun's own arguments.

    Raises:
        AttributeError, KeyError, OSError, TypeError, ValueError: torch, or what was handed over, is
            not as expected; torchrun itself may still work.
    """
    with os.fdopen(handed_over, "rb") as file:
        facts = json.loads(file.read())
    args = torchrun.parse_args(argv)
    processes = torchrun.determine_local_world_size(args.nproc_per_node)
    if not callable(registry.get_rendezvous_handler):
        raise TypeError("this torch makes its rendezvous in another way")
    return RunFacts(
        max_restarts=int(args.max_restarts), processes=int(processes), environ=environ, **facts
    )


@contextlib.contextmanager
def watched_rendezvous(facts: RunFacts) -> Iterator[None]:
    """While active, torchrun's rendezvous is a watched one."""
    tail = Tail()
    monitor = Monitor(facts.monitor, facts.node_agent, facts.node, facts.environ, tail.real)
    watched: list[Watched] = []
    create = registry.get_rendezvous_handler

    def watch(params: RendezvousParameters) -> Any:
        rendezvous = create(params)
        watched.append(Watched(rendezvous, facts, tail, monitor))
        return rendezvous

    registry.get_rendezvous_handler = watch
    try:
        yield
    except ChildFailedError:
        for rendezvous in watched:
            rendezvous.workers_failed()
        raise
    finally:
        monitor.end()
        tail.end()


def main() -> None:
    """Be torchrun, with what `slurm-health run` has handed over."""
    argv = sys.argv[2:]
    try:
        facts = read_facts(argv, int(sys.argv[1]), dict(os.environ))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as err:
        _become_torchrun(err)
    # Workers would find what those before them left in the agents' store, such as old addresses.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        with watched_rendezvous(facts):
            torchrun.main(argv)
    except SignalException as err:
        if err.sigval != signal.SIGINT:
            raise
        sys.exit(128 + signal.SIGINT)  # Ctrl-C: without a traceback from inside torchrun


if __name__ == "__main__":
    main()
