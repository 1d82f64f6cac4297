# SPDX-License-Identifier: Apache-2.0
"""The one clock of a job's trainings: when one is due for an inspection, and whether it hangs then.

The signs of progress are the steps of heartbeats; without these, lines of output that count, and
main threads that run. `Pulse.due` compares the time since the latest sign with the pace so far.
That alone decides nothing: all agents then inspect their ranks, and `judge` returns why the
training may still go on, or that it hangs. Pure: callers pass the time, in seconds.

A start may take long: compilation uses processors, a checkpoint is read, data comes over the
network. While any rank is busy so, the start makes progress; a pause that ended by itself is usual
for it. If nothing moves at all, no rank is busy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from slurm_health.training.diagnosis.output_lines import NonFiniteLoss, StepLines
from slurm_health.training.diagnosis.samples import (
    IDLE_BYTES_PER_S,
    IN_KERNEL,
    LAUNCHERS,
    Doing,
    Look,
    NodeReport,
    RankSample,
    Standstill,
    missing_ranks,
    paths_between,
)

_FEW = 8  # steps, lines or moves: fewer make no pace
# CPU time of a main thread before it trains: torch alone takes half a second on a fast processor
# and more than a second on a slow one; a shell, or a Python without torch, takes a tenth of one.
_LOADED_S = 0.3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0  # from one inspection that shows no hang to the next


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a standstill, in seconds unless noted otherwise.

    Args:
        at_least_s: a shorter one is ignored: an evaluation, a pause of the filesystem.
        runs_s: the same for main threads that run, once there is a pace,
        lines_s: and for lines of output, which may be buffered.
        times: a training may pause for so many of its usual steps,
        pauses: or for so many times its longest pause.
        quiet_s: before it has a pace, if nothing moves on any node and all ranks are known to wait
            for each other,
        meets_s: or if they meet at one address: a name is looked up for up to 30 s if none of
            three servers answers (resolv.conf(5)), and a connection may need two names,
        loading_s: or if a rank waits for its data loader, without any reading,
        unknown_s: or if the activity of GPUs is unknown, or a rank is at a checkpoint,
        alone_s: or if a rank waits for an unknown event, such as by polling.
        first_s: if a rank may still be to come.
        storage_s: if a rank waits for storage in the kernel, which may be slow and well: NFSv4
            servers that restart let nobody go on for 90 s (nfsd's grace period),
        reading_s: and if its data loader does: no read takes so long.
        working_s: if others wait for a rank that still computes, reads or writes.
        apart_s: between two samples that are compared: less shows too little.
        suspended_s: without a report from any node, though all report every five seconds: the job
            was suspended, or its watch was.
    """

    at_least_s: float = 25.0
    runs_s: float = 40.0
    lines_s: float = 60.0
    times: float = 10.0
    pauses: float = 1.5
    quiet_s: float = 20.0
    meets_s: float = 60.0
    loading_s: float = 60.0
    unknown_s: float = 120.0
    alone_s: float = 900.0
    first_s: float = 1800.0
    storage_s: float = 100.0
    reading_s: float = 40.0
    working_s: float = 1800.0
    apart_s: float = 0.5
    suspended_s: float = 60.0

    def scaled(self, factor: float) -> Limits:
        """Return all times multiplied by a factor, for a rehearsal in which time is compressed."""
        times = {
            name: factor * getattr(self, name)
            for name in self.__struct_fields__
            if name.endswith("_s")
        }
        return msgspec.structs.replace(self, **times)


LIMITS = Limits()


class Sign(StrEnum):
    """A sign of progress."""

    STEP = "a step of its heartbeats"
    LINE = "a line of output that counts"
    RUN = "a main thread that runs"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A training without a sign of progress for `stalled_s`; a pause of `allowance_s` is usual.

    `is_young`: there are too few steps, lines or runs to compare with.
    """

    sign: Sign
    stalled_s: float
    allowance_s: float
    is_young: bool


@dataclass(kw_only=True)
class Track:
    """One rank over time.

    Args:
        sample: the latest one, compared with the one before; it came at `at_s`.
        sampled_s: its time by the clock of its node.
        ran_s: when its main thread last ran; `moved_s` is when anything of it moved.
        moves: samples at which it had run; `longest_rest_s` is the longest time between two.
        inspected: the sample of the latest inspection.
        gone: its process has ended.
    """

    sample: RankSample
    at_s: float
    sampled_s: float
    ran_s: float
    moved_s: float
    moves: int = 0
    longest_rest_s: float = 0.0
    inspected: RankSample | None = None
    gone: bool = False


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A training that hung goes on by itself, after a standstill of `stalled_s`."""

    stalled_s: float
    step: int


@dataclass(kw_only=True)
class Program:
    """The ranks of one step of the job, or of its script itself, and their progress."""

    name: str
    ranks: dict[int, Track] = field(default_factory=dict)
    stepped_s: float = -math.inf  # when any rank came to another step
    ran_s: float = -math.inf  # when any main thread ran
    moved_s: float = -math.inf  # when anything moved, in any rank
    longest_still_s: float = 0.0  # of those that ended by themselves
    runs: int = 0  # reports in a row that show a main thread at work
    hung_by: Sign | None = None
    hung_s: float = 0.0  # since when
    not_before_s: float = -math.inf  # of the next inspection
    pause_s: float = 0.0

    @property
    def samples(self) -> list[RankSample]:
        """The latest sample of each rank, in order."""
        return [
            msgspec.structs.replace(track.sample, gone=track.gone)
            for _, track in sorted(self.ranks.items())
        ]

    @property
    def step(self) -> int:
        """The latest step of any rank."""
        return max((track.sample.step for track in self.ranks.values()), default=0)

    @property
    def beats(self) -> bool:
        """Whether any rank has a heartbeat with steps."""
        return self.stepped_s > -math.inf

    @property
    def may_meet(self) -> bool:
        """Whether it is of torchruns that are not all there yet, or need no other."""
        samples = self.samples
        return samples[0].launches and len(samples) < max(2, samples[0].world)

    @property
    def has_begun(self) -> bool:
        """Whether all ranks have run for long enough to load their libraries."""
        return all(track.sample.ran_s >= _LOADED_S for track in self.ranks.values())

    def take(
        self,
        sample: RankSample,
        report: NodeReport,
        now_s: float,
        *,
        resumed: bool,
        apart_s: float = LIMITS.apart_s,
    ) -> bool:
        """Add a sample of a rank; return whether it has run. `resumed`: the job was suspended.

        A suspension stops the ranks and us alike: the time before it is no standstill. Samples that
        are less than `apart_s` apart are not compared.
        """
        track = self.ranks.get(sample.rank)
        if track is None or track.sample.pid != sample.pid or sample.steps < track.sample.steps:
            track = Track(
                sample=sample, at_s=now_s, sampled_s=report.at_s, ran_s=now_s, moved_s=now_s
            )
            self.ranks[sample.rank] = track
        window_s = report.at_s - track.sampled_s
        if report.look is not Look.BASELINE and window_s >= apart_s:
            before, sample = track.sample, sample.since(track.sample, window_s)
            if report.look is Look.INSPECTION:
                track.inspected = sample
            if not sample.rests:
                track.moves += 1
                track.longest_rest_s = max(track.longest_rest_s, track.at_s - track.ran_s)
                track.ran_s = now_s
            # While its GPU is known to wait, NCCL's threads spin beside its main one.
            gpu_waits = track.inspected is not None and track.inspected.gpu_waits
            if not sample.is_still(before, window_s) and not (sample.rests and gpu_waits):
                track.moved_s = now_s
        if resumed:
            track.ran_s = track.moved_s = now_s
        track.sample, track.at_s, track.sampled_s, track.gone = sample, now_s, report.at_s, False
        self.ran_s = max(self.ran_s, track.ran_s)
        if sample.steps:
            self.stepped_s = max(self.stepped_s, now_s if resumed else now_s - sample.age_s)
        self.move(track.moved_s)
        return track.ran_s == now_s

    def move(self, at_s: float) -> None:
        """Record movement or work at a time."""
        if at_s > self.moved_s > -math.inf:
            self.longest_still_s = max(self.longest_still_s, at_s - self.moved_s)
        self.moved_s = max(self.moved_s, at_s)


class Pulse:
    """All trainings of a job: reports and output go in, due inspections come out.

    Args:
        nodes: those of the job.
        limits: of a standstill.
    """

    def __init__(self, nodes: Sequence[str], limits: Limits = LIMITS) -> None:
        self.nodes = tuple(nodes)
        self.programs: dict[str, Program] = {}
        self._limits = limits
        self._files: dict[str, StepLines] = {}
        # By node: programs and ranks of the last report, and the received bytes at a time.
        self._on_node: dict[str, set[tuple[str, int]]] = {}
        self._received: dict[str, tuple[float, int]] = {}
        self._reported_s = math.inf
        self._formed: list[Resumed] = []

    @property
    def line(self) -> StepLines | None:
        """The output file that counted last, None if none does."""
        counting = [lines for lines in self._files.values() if lines.line]
        return max(counting, key=lambda lines: lines.last_s, default=None)

    @property
    def saved(self) -> StepLines | None:
        """The output file that named a checkpoint last, None if none does."""
        saving = [lines for lines in self._files.values() if lines.saved]
        return max(saving, key=lambda lines: lines.saved_s, default=None)

    @property
    def step(self) -> int:
        """The latest step of heartbeats or output, 0 without one."""
        steps = [program.step for program in self.programs.values()]
        return max(steps, default=0) or (self.line.step if self.line else 0)

    def read(
        self, file: str, text: str, now_s: float, *, torn: bool = False
    ) -> NonFiniteLoss | None:
        """Read the new text of a file; `torn`: a part before it is left out.

        Returns:
            that its losses have become NaN or infinite, if that is new.
        """
        lines = self._files.setdefault(file, StepLines())
        if torn:
            lines.skip()
        return lines.take(text, now_s)

    def observe(self, report: NodeReport, now_s: float) -> None:
        """Add a report of ranks: those of its node that it no longer has have ended."""
        if report.state is not None or report.reached is not None:
            return
        resumed = now_s - self._reported_s > self._limits.suspended_s
        self._reported_s = now_s
        present = {(sample.program, sample.rank) for sample in report.ranks}
        ran: dict[str, bool] = {}
        for sample in report.ranks:
            program = self.programs.setdefault(sample.program, Program(name=sample.program))
            apart_s = self._limits.apart_s
            runs = program.take(sample, report, now_s, resumed=resumed, apart_s=apart_s)
            ran[program.name] = ran.get(program.name, False) or runs
        for name, runs in ran.items():
            if report.look is not Look.BASELINE:
                self.programs[name].runs = self.programs[name].runs + 1 if runs else 0
        for name, rank in self._on_node.get(report.node, set()) - present:
            gone = self.programs[name].ranks if name in self.programs else {}
            if rank in gone and gone[rank].sample.node == report.node:
                gone[rank].gone = True
            if gone and all(track.gone for track in gone.values()):
                ended = self.programs.pop(name)
                if ended.hung_by and name.removesuffix(LAUNCHERS) in self.programs:
                    # Torchruns that waited for others have started their ranks.
                    self._formed.append(Resumed(stalled_s=now_s - ended.hung_s, step=0))
        self._on_node[report.node] = present
        if not report.received:
            return
        before_s, before_bytes = self._received.get(report.node, (report.at_s, report.received))
        self._received[report.node] = report.at_s, report.received
        most_bytes = IDLE_BYTES_PER_S * max(1.0, report.at_s - before_s)
        if report.look is Look.INSPECTION and abs(report.received - before_bytes) > most_bytes:
            for name in ran:
                self.programs[name].move(now_s)

    def due(self, now_s: float) -> Program | None:
        """Return a training that stands still for longer than usual, if there is one.

        Inspections that show no hang come later and later. A training that hangs is not due before
        it goes on.
        """
        lines_s = now_s - self.line.last_s if self.line else 0.0
        for program in self.programs.values():
            latest_s = program.stepped_s if program.beats else program.ran_s
            may_be_late = now_s - latest_s >= self._limits.at_least_s
            if program.may_meet:
                continue
            if not may_be_late and (program.beats or lines_s < self._limits.lines_s):
                program.pause_s = 0.0
                continue
            standing = self._standing(program, now_s)
            late = standing.stalled_s >= standing.allowance_s
            # A program that has not begun is no training, or none yet.
            begun = standing.sign is Sign.STEP or not standing.is_young or program.has_begun
            begun |= self.line is not None and self.line.intervals > 1
            if not late or not begun:
                program.pause_s = 0.0
            elif now_s >= program.not_before_s and program.hung_by is None:
                return program
        return None

    def put_off(self, program: Program, now_s: float, at_most_s: float = math.inf) -> None:
        """Have a program be due again after a pause, or `at_most_s` from now."""
        scale = self._limits.at_least_s / LIMITS.at_least_s
        pause_s = max(scale * _FIRST_PAUSE_S, 2 * program.pause_s)
        program.pause_s = min(pause_s, scale * _LONGEST_PAUSE_S)
        program.not_before_s = now_s + min(program.pause_s, at_most_s)

    def resumed(self, now_s: float) -> list[Resumed]:
        """Return the trainings that go on after a hang, by the sign that had shown it; once."""
        resumed, self._formed = self._formed, []
        for program in self.programs.values():
            match program.hung_by:
                case Sign.STEP:
                    again_s = program.stepped_s
                case Sign.LINE if self.line:
                    again_s = self.line.last_s
                case Sign.RUN if program.runs > 1:
                    again_s = now_s
                case Sign.RUN:
                    again_s = program.stepped_s
                case _:
                    continue
            # A late report makes the age of a step too young.
            late_s = self._limits.at_least_s / 5
            if again_s > program.hung_s + late_s and now_s - again_s < self._limits.at_least_s:
                stalled_s = again_s - program.hung_s
                program.hung_by = None
                resumed.append(Resumed(stalled_s=stalled_s, step=program.step or self.step))
        return resumed

    def judge(
        self,
        program: Program,
        reports: Mapping[str, NodeReport],
        now_s: float,
        silent: Collection[str] = (),
    ) -> Standstill:
        """Return the standstill of a program by an inspection; `why_not` is why it is no hang yet.

        Args:
            program: the one that was due.
            reports: the inspections of the nodes that answered, which were observed, too.
            now_s: the time.
            silent: the nodes that did not answer.
        """
        standing = self._standing(program, now_s)
        by_line = standing.sign is Sign.LINE and self.line is not None
        known = [
            inspected
            if (inspected := program.ranks[sample.rank].inspected)
            and sample.node in reports
            and not sample.gone
            else sample
            for sample in program.samples
        ]
        standstill = Standstill(
            stalled_s=round(standing.stalled_s, 1),
            allowance_s=round(standing.allowance_s, 1),
            step=program.step or (self.step if standing.sign is not Sign.STEP else 0),
            line=self.line.line if by_line and self.line else "",
            at_rest=standing.sign is Sign.RUN,
            nodes=self.nodes,
            ranks=(*known, *([] if silent else missing_ranks(known, self.nodes))),
            paths=paths_between(reports),
            silent=tuple(silent),
            unavailable={
                what: f"{why} ({node})"
                for node, report in reports.items()
                for what, why in report.unavailable.items()
            },
        )
        why, again_s = who_gets_on(standstill, self._limits)
        if not why and not standstill.is_definitely_hung:
            why, again_s = self._why_not(standstill, standing, program, now_s)
        if why:
            self.put_off(program, now_s, again_s)
            return msgspec.structs.replace(standstill, why_not=why)
        program.hung_by, program.runs = standing.sign, 0
        program.hung_s = now_s - standing.stalled_s
        return standstill

    def _standing(self, program: Program, now_s: float) -> Standing:
        """Return the sign that is missing, for how long, and the usual pause."""
        samples = [track.sample for track in program.ranks.values()]
        if program.beats:
            allowance_s, is_young = max(
                self._usual(Sign.STEP, sample.steps, sample.typical_s, sample.longest_s)
                for sample in samples
                if sample.steps
            )
            stalled_s = now_s - program.stepped_s
            return Standing(
                sign=Sign.STEP, stalled_s=stalled_s, allowance_s=allowance_s, is_young=is_young
            )
        # All come to rest together: the rank with the shortest rests shows the usual one.
        moves = max((track.moves for track in program.ranks.values()), default=0)
        rests = [track.longest_rest_s for track in program.ranks.values() if track.moves]
        largest = max(self.programs.values(), key=lambda other: len(other.ranks))
        lines = self.line if largest is program else None
        # Steps of little work look like a wait that polls, and are none.
        rested_s = now_s - max(program.ran_s, lines.last_s if lines else -math.inf)
        allowance_s, is_young = self._usual(Sign.RUN, moves, 0.0, min(rests, default=0.0))
        by_rest = Standing(
            sign=Sign.RUN, stalled_s=rested_s, allowance_s=allowance_s, is_young=is_young
        )
        if lines is None or (rested_s >= allowance_s and not is_young):
            return by_rest
        allowance_s, is_young = self._usual(
            Sign.LINE, lines.intervals, lines.typical_s, lines.longest_s
        )
        by_line = Standing(
            sign=Sign.LINE,
            stalled_s=now_s - lines.last_s,
            allowance_s=allowance_s,
            is_young=is_young,
        )
        return by_line if by_line.stalled_s >= allowance_s else by_rest

    def _usual(
        self, sign: Sign, count: int, typical_s: float, longest_s: float
    ) -> tuple[float, bool]:
        """Return the usual pause, and whether too few signs were counted to know it."""
        limits = self._limits
        pauses_s = limits.pauses * longest_s
        if count < _FEW:
            # The inspection decides then; lines that did not count for long are no training's.
            return limits.first_s if sign is Sign.LINE else max(limits.at_least_s, pauses_s), True
        least_s = {Sign.LINE: limits.lines_s, Sign.RUN: limits.runs_s, Sign.STEP: limits.at_least_s}
        return max(least_s[sign], limits.times * typical_s, pauses_s + typical_s), False

    def _why_not(
        self, standstill: Standstill, standing: Standing, program: Program, now_s: float
    ) -> tuple[str, float]:
        """Return why this may be no hang, and the time to the next inspection at the latest.

        The reason is empty if it hangs.
        """
        limits = self._limits
        alive = [rank for rank in standstill.ranks if not rank.gone]
        gone = [rank for rank in standstill.ranks if rank.gone]
        # A rank that does not wait for others may wait for an unknown event, as for another job's
        # file.
        apart = [r for r in alive if r.rank not in standstill.waiting and not r.gpu_waits]
        places = {rank.place.doing for rank in apart}
        if standing.sign is not Sign.STEP:
            runs = [rank for rank in alive if not rank.rests and not rank.gpu_waits]
            if runs and standing.sign is Sign.RUN:
                return f"rank {runs[0].rank} on {runs[0].node} still runs", math.inf
            files = standing.sign is Sign.LINE and any(rank.file_waits for rank in alive)
            stored = any(rank.awaits_storage for rank in alive)
            left_s = limits.storage_s - standing.stalled_s if stored else math.inf
            awaited = len(apart) < len(alive) or Doing.LOADING in places or files
            if not awaited and left_s > 0:
                return "no rank is known to wait for another", left_s
        polls = standing.sign is not Sign.STEP and any(rank.polls for rank in apart)
        # However long some have run, as to load their libraries: others may be still to come.
        meet = bool(gone) and all(r.place.meets for r in alive if r.rank in standstill.waiting)
        starts = standing.is_young or (meet and standing.sign is not Sign.STEP)
        if any(rank.pid for rank in gone) or not (starts or polls):
            return "", 0.0
        at_one = len({rank.meets for rank in alive} - {""}) < 2
        limit_s = limits.quiet_s
        if at_one and not places and all(rank.place.meets for rank in alive):
            limit_s = limits.meets_s
        elif places == {Doing.LOADING}:
            limit_s = limits.loading_s
        elif places and places <= {Doing.LOADING, Doing.CHECKPOINT}:
            limit_s = limits.unknown_s
        elif any(rank.awaits_storage for rank in apart):
            limit_s = limits.storage_s
        elif places:
            limit_s = limits.alone_s
        elif "gpu-activity" in standstill.unavailable:
            limit_s = limits.unknown_s
        still_s = now_s - program.moved_s
        left_s = max(limit_s, limits.pauses * program.longest_still_s) - still_s
        to_come = gone or standstill.silent or not any(rank.world for rank in alive)
        if starts and to_come:
            left_s = limits.first_s - standstill.stalled_s
        start = "its start may explain all of this"
        why = start if starts else "a rank polls for an unknown event"
        return (why, left_s) if left_s > 0 else ("", 0.0)


def who_gets_on(standstill: Standstill, limits: Limits) -> tuple[str, float]:
    """Return a rank that still works, or that may wait with reason, and for how long at most."""
    stalled_s, waiting = standstill.stalled_s, standstill.waiting
    if stalled_s < standstill.allowance_s:
        return "it goes on", math.inf
    alive = [rank for rank in standstill.ranks if not rank.gone]
    for rank in alive:
        if rank.is_debugged:
            return f"rank {rank.rank} on {rank.node} is held by a debugger", math.inf
    patient = stalled_s < max(limits.working_s, 10 * standstill.allowance_s)
    for rank in alive:
        if rank.works and rank.rank not in waiting and (patient or not waiting):
            lacks = rank.lacks_processor
            does = "is ready to run, and has no processor" if lacks else "still works"
            does += f" on {rank.storage}" if rank.storage else ""
            return f"rank {rank.rank} on {rank.node} {does}", math.inf
    if len(alive) < len(standstill.ranks) and not waiting:
        return "some ranks have ended, and no other is known to wait for them", math.inf
    for rank in alive:
        place = rank.place
        limit_s = limits.reading_s if place.doing is Doing.LOADING else limits.storage_s
        limit_s = max(limit_s, standstill.allowance_s)
        slow = rank.state == IN_KERNEL or place.doing is Doing.CHECKPOINT
        if (slow or rank.storage) and stalled_s < limit_s:
            what = f"storage, {rank.storage}" if rank.storage else "storage or a device"
            others = sum(bool(other.storage) for other in alive if other is not rank)
            also = f", as do {others} more" if rank.storage and others else ""
            why = f"rank {rank.rank} on {rank.node} waits for {what}{also}"
            return why, limit_s - stalled_s
    return "", math.inf
