# SPDX-License-Identifier: Apache-2.0
"""The watch on the batch host: hears the monitors of all nodes, and says where a training hangs."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from slurm_health import journal
from slurm_health.core.diagnosis.chain import InferenceChain
from slurm_health.core.diagnosis.collected import Collected, FlightRecords
from slurm_health.core.diagnosis.diagnostician import (
    Diagnostician,
    observe_hang,
    observe_slowdown,
)
from slurm_health.core.diagnosis.explain import lines_of
from slurm_health.core.diagnosis.names import SLOWER_STEPS
from slurm_health.core.diagnosis.pace import PATIENCE, Patience
from slurm_health.core.diagnosis.seen import Standstill, paths_by_node
from slurm_health.core.diagnosis.slow_network import Slowdown, speeds_of
from slurm_health.core.diagnosis.slow_steps import Longer
from slurm_health.core.diagnosis.stragglers import Slower
from slurm_health.core.diagnosis.watched import Program, RankLook, RankNow, Watched
from slurm_health.core.records import HangFound, HangOver, Record, SlowdownFound, StragglerFound
from slurm_health.errors import JournalError
from slurm_health.monitor import registry
from slurm_health.monitor.containment import contained
from slurm_health.monitor.messages import HERE, LOOK, NOW, Message, NodeLook, Reader
from slurm_health.processes import Process, end_session

_TICK_S = 5.0
_HERE_S = 10.0
_WINDOW_S = 20.0  # of the comparison of ranks with each other, and of steps with earlier ones
_ANSWER_S = 8.0  # for all nodes to tell what they see
_PATHS_S = 15.0  # some steps of which each takes seconds
_BETWEEN_S = 4.0  # two looks, in which whoever works can be seen to
_MOST_LINE_BYTES = 1 << 20
_LEAVE_S, _GRACE_S = 1.0, 0.5
_TITLE_WIDTH = 8

OnHang = Callable[[HangFound], None]
"""What is done about a hang beside saying it."""


class Ended(Exception):
    """The script has ended: nobody listens any more."""


class MonitorsEnded(Exception):
    """The monitors ended before the script; says how."""


class Watch:
    """Hears the monitors, which `process` starts and passes lines to and from.

    Args:
        process: one monitor, or the srun of all.
        nodes: those of the job.
        directory: of the run in the journal, None where there is none.
        on_hang: is called once a hang was said and recorded.
        control: what ends when the script does.
        patience: what a standstill is measured against.
        out: where it is said.
    """

    def __init__(
        self,
        process: Process,
        nodes: Sequence[str],
        directory: Path | None,
        *,
        on_hang: OnHang,
        control: int = 0,
        patience: Patience = PATIENCE,
        out: TextIO = sys.stderr,
    ) -> None:
        self._process = process
        self._nodes = tuple(nodes)
        self._directory = directory
        self._on_hang = on_hang
        self._control = control
        self._out = out
        self._watched = Watched(nodes, patience)
        self._buffer = b""
        self._reader = Reader()
        self._here_s = self._window_s = time.monotonic()

    def run(self) -> None:
        """Watch.

        Raises:
            Ended: the script has ended.
            MonitorsEnded: nothing can be watched any more.
        """
        while True:
            for _ in self._hear(_TICK_S):
                pass
            now_s = time.monotonic()
            if now_s - self._here_s >= _HERE_S:
                self._here_s = now_s
                self._tell(HERE)
            if now_s - self._window_s >= _WINDOW_S:
                self._window_s = now_s
                for node, slower in self._watched.window():
                    self._name_straggler(node, slower)
                for _, longer in self._watched.slower():
                    self._look_at_paths(longer)
            suspect = self._watched.suspect(now_s)
            if suspect is not None:
                self._look_at(suspect)

    def end(self) -> None:
        """End the monitors: they leave when their standard input ends."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        end_session(self._process, leave_s=_LEAVE_S, grace_s=_GRACE_S)

    # --- the monitors --------------------------------------------------------------------------

    def _hear(self, wait_s: float) -> Iterator[Message]:
        """Take in what the monitors say for so long, and yield it."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        until_s = time.monotonic() + wait_s
        while (left_s := until_s - time.monotonic()) > 0:
            ready, _, _ = select.select([self._control, pipe], [], [], left_s)
            if self._control in ready and not os.read(self._control, 4096):
                raise Ended
            if pipe in ready:
                data = os.read(pipe, 1 << 20)
                if not data:
                    raise MonitorsEnded
                yield from self._messages(data)

    def _messages(self, data: bytes) -> Iterator[Message]:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _MOST_LINE_BYTES:
            self._buffer = b""
        for line in lines:
            message = self._reader.take(line)
            if message is None:
                continue
            now = message.now if isinstance(message, NodeLook) else message.ranks
            now_s = time.monotonic()
            for program in self._watched.hear(message.node, now, now_s):
                self._name_end(program, now_s)
            yield message

    def _tell(self, word: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._process.stdin.fileno(), word + b"\n")

    def _ask(self, word: bytes) -> dict[str, Message]:
        """Ask all monitors; return what they answered in time, by node."""
        self._tell(word)
        found: dict[str, Message] = {}
        until_s = time.monotonic() + _ANSWER_S
        while len(found) < len(self._nodes) and time.monotonic() < until_s:
            for message in self._hear(min(0.2, max(0.0, until_s - time.monotonic()))):
                if word != LOOK or isinstance(message, NodeLook):
                    found[message.node] = message
        return found

    # --- hangs ---------------------------------------------------------------------------------

    def _look_at(self, program: Program) -> None:
        """See what the ranks of a program do, twice; say where it hangs, if it does."""
        looked = {
            node: each for node, each in self._ask(LOOK).items() if isinstance(each, NodeLook)
        }
        before: dict[int, RankNow] = {}
        looks: dict[int, RankLook] = {}
        for each in looked.values():
            before |= {now.rank: now for now in each.now if now.program == program.name}
            looks |= {look.rank: look for look in each.ranks if look.program == program.name}
        began_s = time.monotonic()
        for _ in self._hear(_BETWEEN_S):
            pass
        heard = self._ask(NOW)
        addresses = {address: node for node, each in looked.items() for address in each.addresses}
        now_s = time.monotonic()
        judged = self._watched.judge(
            program,
            before,
            looks,
            window_s=now_s - began_s,
            now_s=now_s,
            paths=paths_by_node({node: each.broken for node, each in looked.items()}, addresses),
            silent=tuple(n for n in self._nodes if n not in looked and n not in heard),
        )
        if not isinstance(judged, str):
            self._name_hang(*judged)

    def _name_hang(self, standstill: Standstill, flights: FlightRecords) -> None:
        used = registry.registered()
        data = Collected([standstill, flights], failed=used.failed)
        chain = InferenceChain(used.operators, apply=contained())
        found = Diagnostician(observe_hang, chain).diagnose(data).diagnosed
        if found is None:
            return
        hang = HangFound(
            stalled_s=round(standstill.stalled_s, 1),
            allowance_s=round(standstill.allowance_s, 1),
            step=standstill.step,
            found=found,
        )
        self._say(
            f"monitor: no step for {hang.stalled_s:.0f} s, the last was {hang.step}; the training"
            " hangs",
            *(f"  {title:{_TITLE_WIDTH}}  {text}" for title, text in lines_of(found)),
        )
        self._record(hang)
        self._on_hang(hang)

    # --- slow steps ----------------------------------------------------------------------------

    def _look_at_paths(self, longer: Longer) -> None:
        """See how fast connections are, for a while; say which are slow, if that explains it."""
        looks = []
        for _ in range(2):
            looked = self._ask(LOOK)
            looks.append({n: each for n, each in looked.items() if isinstance(each, NodeLook)})
            if len(looks) == 1:
                for _ in self._hear(_PATHS_S):
                    pass
        before, after = ({n: each.sent for n, each in look.items()} for look in looks)
        addresses = {address: n for n, each in looks[1].items() for address in each.addresses}
        slowdown = Slowdown(
            step_ms=round(longer.now.step_ms, 1),
            usual_ms=round(longer.usual.step_ms, 1),
            own_ms=round(longer.now.own_ms, 1),
            nodes=self._nodes,
            speeds=speeds_of(before, after, addresses, self._nodes),
        )
        used = registry.registered()
        chain = InferenceChain(used.operators, apply=contained())
        data = Collected([slowdown], failed=used.failed)
        found = Diagnostician(observe_slowdown, chain).diagnose(data).diagnosed
        if found is None or found.cause == SLOWER_STEPS:
            return  # longer batches, an evaluation: it may be as it should
        self._say(
            f"monitor: a step takes {slowdown.step_ms:.0f} ms instead of {slowdown.usual_ms:.0f}",
            *(f"  {title:{_TITLE_WIDTH}}  {text}" for title, text in lines_of(found)),
        )
        self._record(
            SlowdownFound(step_ms=slowdown.step_ms, usual_ms=slowdown.usual_ms, found=found)
        )

    def _name_end(self, program: Program, now_s: float) -> None:
        assert program.hung_s is not None
        stalled_s = now_s - program.stalled_s(now_s) - program.hung_s
        program.hung_s = None
        self._say(f"monitor: the training goes on after {stalled_s:.0f} s, at step {program.step}")
        self._record(HangOver(stalled_s=round(stalled_s, 1), step=program.step))

    def _name_straggler(self, node: str, slower: Slower) -> None:
        self._say(
            f"monitor: rank {slower.rank} on {node} is slower than the others:"
            f" {slower.own_ms:.0f} ms of its own per step, {slower.usual_ms:.0f} ms usual"
        )
        self._record(
            StragglerFound(
                node=node,
                rank=slower.rank,
                ratio=round(slower.ratio, 3),
                own_ms=round(slower.own_ms, 1),
                usual_ms=round(slower.usual_ms, 1),
            )
        )

    # --- who hears of it -----------------------------------------------------------------------

    def _say(self, *lines: str) -> None:
        with contextlib.suppress(OSError):
            print(
                *(f"slurm-health: {line}" for line in lines), sep="\n", file=self._out, flush=True
            )

    def _record(self, record: Record) -> None:
        if self._directory is None:
            return
        try:
            journal.Writer(self._directory, journal.MONITOR, time.time).append(record)
        except JournalError as err:
            self._say(f"monitor: this is not recorded: {err}")
