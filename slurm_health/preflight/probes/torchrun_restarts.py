# SPDX-License-Identifier: Apache-2.0
"""torchrun, whose nodes are looked at before its workers are started again after a failure.

`slurm-health run` becomes this file, in the job's own interpreter, where there was a check and
workers may be restarted. It is torchrun, arguments and all, with one thing put before a rendezvous
that follows a failure: the nodes that are left come together in torchrun's own store, the one that
leads asks slurm-health what to do, and all do it: stop, restart, or have their nodes checked first.
Needs nothing but torch. Whatever goes wrong in here, torchrun restarts its workers as it would.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.pop(0)  # the modules beside this one must not hide others of the same name

from torch.distributed import DistNetworkError
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    registry,
)

VARIABLE = "SLURM_HEALTH_RESTARTS"
# A node that has not noticed a failure for so long is gone: torchrun looks every 0.1 s, unless told
# otherwise, and gives a node up that is silent for 15 s.
NOTICE_S = 15.0
# torchrun gives workers 30 s to end, then kills them.
STOP_S = 60.0
# How long the others wait for a decision: as long as the leader waits, and for two of its commands.
DECIDE_S = 120.0
_HEAR_S = 5.0
_LOOK_S = 0.2
_WATCH_S = 1.0
_TAIL_BYTES = 64 * 1024
# A pipe passes on what is this short in one piece, after all that was written before.
_MARK = b"\0slurm-health\0"
_MARK_S = 1.0
_KEY = "slurm-health"


class Told(NamedTuple):
    """What `slurm-health run` knows, and the next decision needs.

    `command` is to be asked, in `environ`; `context` is its own. `node` is the name of this one.
    """

    command: list[str]
    node: str
    leads: bool
    max_restarts: int
    environ: dict[str, str]
    context: Any


class Tail:
    """The last of what this process and its workers write to standard error, which passes on."""

    def __init__(self) -> None:
        self._real = os.dup(2)
        reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        self._kept = b""
        self._lock = threading.Lock()
        self._passed_on = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, args=(reading,), daemon=True)
        self._thread.start()

    @property
    def real(self) -> int:
        """The descriptor of standard error itself."""
        return self._real

    def text(self) -> str:
        """Return what was written since `clear`, as far as it is kept."""
        sys.stderr.flush()
        self._passed_on.clear()
        os.write(2, _MARK)
        self._passed_on.wait(_MARK_S)
        with self._lock:
            return self._kept.decode(errors="replace")

    def clear(self) -> None:
        """Forget what was written."""
        with self._lock:
            self._kept = b""

    def end(self) -> None:
        """Write to standard error itself again; what a worker left behind may write is lost."""
        sys.stderr.flush()
        os.dup2(self._real, 2)
        self._thread.join(1.0)

    def _pass_on(self, reading: int) -> None:
        with contextlib.suppress(OSError):  # whoever read standard error is gone
            while data := os.read(reading, 1 << 16):
                marked = _MARK in data
                data = data.replace(_MARK, b"")
                with self._lock:
                    self._kept = (self._kept + data)[-_TAIL_BYTES:]
                if marked:
                    self._passed_on.set()
                while data:
                    data = data[os.write(self._real, data) :]


class Round:
    """The nodes that train together, until they meet again: what they tell each other.

    Args:
        store: torchrun's own, where nobody else has the same keys.
        rank: of this node among them.
        count: how many they are.
    """

    def __init__(self, store: Any, rank: int, count: int) -> None:
        self._store = store
        self._rank = rank
        self._count = count
        self._looked_s = 0.0
        self._noticed = False

    def failed(self) -> None:
        """Let the others know that workers of this node have failed."""
        self._store.set(f"{_KEY}/failed", str(self._rank))

    def has_failed(self) -> bool:
        """Tell whether workers of another node have failed; then the others hear that we know."""
        now_s = time.monotonic()
        if not self._noticed and now_s - self._looked_s >= _WATCH_S:
            self._looked_s = now_s
            self._noticed = self._there("failed")
            if self._noticed:
                self._store.set(f"{_KEY}/noticed/{self._rank}", "")
        return self._noticed

    def report(self, what: dict[str, Any]) -> None:
        """Say that the workers here have ended, and how; reports keep their order."""
        order = self._store.add(f"{_KEY}/reports", 1)
        self._store.set(f"{_KEY}/report/{self._rank}", json.dumps({**what, "order": order}))

    def reports(self) -> tuple[list[dict[str, Any]], int]:
        """Return what the nodes say that are still there, and how many say nothing."""
        begun_s = time.monotonic()
        missing = set(range(self._count))
        found: list[dict[str, Any]] = []
        while missing:
            for rank in sorted(missing):
                if self._there(f"report/{rank}"):
                    found.append(json.loads(self._store.get(f"{_KEY}/report/{rank}")))
                    missing.discard(rank)
            waited_s = time.monotonic() - begun_s
            late = {r for r in missing if waited_s > STOP_S or not self._there(f"noticed/{r}")}
            if waited_s > NOTICE_S and late == missing:
                break
            if missing:
                time.sleep(_LOOK_S)
        return sorted(found, key=lambda each: int(each["order"])), len(missing)

    def decide(self, decision: dict[str, Any], hearers: int) -> None:
        """Tell the others what is to be done; the store may end with us, so let them hear it."""
        self._store.set(f"{_KEY}/decision", json.dumps(decision))
        give_up_s = time.monotonic() + _HEAR_S
        while self._store.add(f"{_KEY}/heard", 0) < hearers and time.monotonic() < give_up_s:
            time.sleep(_LOOK_S)

    def decision(self) -> dict[str, Any]:
        """Wait for what is to be done."""
        key = f"{_KEY}/decision"
        self._store.wait([key], timedelta(seconds=DECIDE_S))
        found: dict[str, Any] = json.loads(self._store.get(key))
        self._store.add(f"{_KEY}/heard", 1)
        return found

    def _there(self, key: str) -> bool:
        return bool(self._store.check([f"{_KEY}/{key}"]))


class CheckedRendezvous(RendezvousHandler):
    """torchrun's rendezvous, before which the nodes are looked at where workers have failed."""

    def __init__(self, inner: Any, told: Told, tail: Tail, processes: int) -> None:
        self._inner = inner
        self._told = told
        self._tail = tail
        self._processes = processes
        self._round: Round | None = None
        self._rank = 0
        self._restarts = 0
        self._newcomers = False
        self._leaves = False

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
        """Return how many nodes are to be let in; one, where workers of another have failed."""
        if self._round is not None and _answers(self._round.has_failed):
            return 1
        waiting = int(self._inner.num_nodes_waiting())
        self._newcomers = waiting > 0
        return waiting

    def shutdown(self) -> bool:
        """Close the rendezvous for all; a node that the others go on without only leaves it."""
        return True if self._leaves else bool(self._inner.shutdown())

    def next_rendezvous(self) -> Any:
        """Meet the others; after a failure, once it is decided how to go on.

        Raises:
            SystemExit: this node does not take part any more, or nobody does.
        """
        if self._round is not None and not self._lets_in(self._round):
            self._restarts += 1
            code = self._before_restart(self._round)
            if code is not None:
                raise SystemExit(code)
        self._newcomers = False
        self._tail.clear()
        found = self._inner.next_rendezvous()
        store, self._rank, count = (
            found if isinstance(found, tuple) else (found.store, found.rank, found.world_size)
        )
        self._round = Round(store, self._rank, count)
        return found

    def _lets_in(self, now: Round) -> bool:
        """Tell whether the nodes meet because others have come, and nothing has failed."""
        return self._newcomers and not _answers(now.has_failed)

    def _before_restart(self, now: Round) -> int | None:
        """Return the code to end with, None to go on, as is also done where nothing is decided."""
        try:
            return self._decided(now)
        except DistNetworkError as err:
            self._say(f"the training ends here: its rendezvous does not answer: {_line(err)}")
            return 1
        except (OSError, RuntimeError, ValueError) as err:
            self._say(f"UNCHECKED: {_line(err)}; restarting the workers anyway")
            return None

    def _decided(self, now: Round) -> int | None:
        """Return the code to end with, None to go on."""
        now.failed()
        now.report(
            {
                "node": self._told.node,
                "rank": self._rank,
                "processes": self._processes,
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

    def _lead(self, now: Round) -> dict[str, Any]:
        """Return what is to be done, and tell the others."""
        reports, silent = now.reports()
        try:
            decision = self._ask(
                "decide",
                reports=reports,
                silent=silent,
                restart=self._restarts,
                max_restarts=self._told.max_restarts,
            )
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

    def _say(self, text: str) -> None:
        os.write(self._tail.real, f"slurm-health: {self._told.node}: {text}\n".encode())


def _answers(look: Any) -> bool:
    """Tell what a look at the store says; nothing, where the store does not answer."""
    try:
        return bool(look())
    except (OSError, RuntimeError):
        return False


def _line(err: Exception) -> str:
    return str(err).strip().partition("\n")[0] or type(err).__name__


@contextlib.contextmanager
def _checked_rendezvous(told: Told, nproc: str) -> Iterator[None]:
    """While active, torchrun's rendezvous is a checked one."""
    tail = Tail()
    create = registry.get_rendezvous_handler
    processes = torchrun.determine_local_world_size(nproc)

    def checked(params: RendezvousParameters) -> RendezvousHandler:
        inner = create(params)
        # The static one has a fixed set of nodes, and one store for all of its rounds.
        return (
            inner
            if inner.get_backend() == "static"
            else CheckedRendezvous(inner, told, tail, processes)
        )

    registry.get_rendezvous_handler = checked
    try:
        yield
    finally:
        tail.end()


def main(argv: list[str], told: dict[str, Any], environ: dict[str, str]) -> None:
    """Be torchrun; `told` is what `slurm-health run` says, `environ` is for its commands."""
    args = torchrun.parse_args(argv)
    known = Told(max_restarts=int(args.max_restarts), environ=environ, **told)
    with _checked_rendezvous(known, args.nproc_per_node):
        torchrun.main(argv)


if __name__ == "__main__":
    # Workers would find what those before them left in the agents' store, such as old addresses.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    said = json.loads(os.environ.pop(VARIABLE))
    main(sys.argv[1:], said, dict(os.environ))
