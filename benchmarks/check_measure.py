# SPDX-License-Identifier: Apache-2.0
"""Measures one check on the lab: a job of an ordinary user, a real fault, the journal's own clock.

While a check runs, only files are polled, so that measuring does not slow it down.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from slurm_health.preflight import config
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import (
    RoundEnded,
    RoundStarted,
    VerdictReached,
)
from slurm_health.records.verdict import Level
from slurm_health.system import journal
from tests.lab import Lab, LabError

USER = "alice"
BAD = "n3"
LAB_NODES = 6
# For each node, too: on two processors a light check of 32 took 78 s.
VERDICT_DEADLINE_S, VERDICT_S_PER_NODE = 240.0, 8.0
END_DEADLINE_S = 60.0
_POLL_S, _STRIKE_POLL_S = 0.05, 0.005

Break = Callable[[Lab, str], None]

_PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"
_CHECK = f"""#!/bin/sh
PATH={_PATH}; export PATH
date +bare=%s.%N
srun python3 -I -c pass
date +start=%s.%N
slurm-health check --check=PROBES
echo "end=$?"
"""
_BARE = re.compile(r"^bare=([\d.]+)$", re.M)
_STARTED = re.compile(r"^start=([\d.]+)$", re.M)
_ENDED = re.compile(r"^end=\d+$", re.M)


class Unmeasured(Exception):
    """A run said nothing about the time of a check; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run: how long it took, and what was wrong with its verdict, empty if it was right.

    `detail` says where the time went. `bare_s` is what a step on the same nodes took just before
    that starts Python and does nothing: what Slurm and this machine at this load need for it.
    """

    elapsed_s: float
    bare_s: float | None = None
    wrong: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is broken on the bad node: for the whole run, or in rounds that the node takes part in.

    A fault that must strike at work waits for the journal to name the round, whatever the speed
    of the machine: each round, or with `once` only the first.
    """

    standing: Break | None = None
    in_round: Break | None = None
    once: bool = False
    strikes: bool = False  # it must have hit a process, or the run measured nothing


class Stage:
    """The one lab of a benchmark, started when the first case asks for it."""

    def __init__(self, nodes: int = LAB_NODES) -> None:
        self._nodes = nodes
        self._stack = ExitStack()
        self._lab: Lab | None = None
        self._failure: LabError | None = None

    def lab(self) -> Lab:
        """Return the lab, healthy and empty.

        Raises:
            LabError: it cannot run here, or could not be mended after the last run.
        """
        if self._failure is not None:
            raise self._failure
        if self._lab is None:
            try:
                self._lab = self._stack.enter_context(Lab.start(nodes=self._nodes))
            except LabError as err:
                self._failure = err
                raise
        self._lab.reset()
        return self._lab

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def wrong_in(verdict: VerdictReached, expected: Sequence[Level]) -> str:
    """Say what is wrong with a verdict: only the bad node may be, and must be, as `expected`.

    Where nothing is broken, `expected` is HEALTHY alone.
    """
    wrong = [
        f"{judged.node} {judged.level.value} ({judged.reason})"
        for judged in verdict.nodes
        if judged.level not in (expected if judged.node == BAD else (Level.HEALTHY,))
    ]
    accused = [*verdict.paths, *verdict.leaves]
    wrong += [
        f"{'-'.join(path.ends)} {path.level.value}"
        for path in accused
        if path.level in (Level.SLOW, Level.FAULTY)
    ]
    return ", ".join(wrong)


def measure_check(
    stage: Stage, nodes: int, fault: Fault, expected: Sequence[Level], probes: str
) -> Sample:
    """Time one check of n1, n2, ..., from the start of its command to the record of its verdict.

    Raises:
        Unmeasured: no verdict, or the fault struck nobody.
        LabError: the lab failed.
    """
    lab = stage.lab()
    struck = len(lab.fault.victims(BAD))
    if fault.standing is not None:
        fault.standing(lab, BAD)
    script = _CHECK.replace("PROBES", probes)
    job = lab.sbatch(script, f"--nodes={nodes}", f"--nodelist=n[1-{nodes}]", "--exclusive")
    reached = _await_verdict(lab, job, fault, nodes)
    output = _await_output(lab, job, _ENDED)
    bare, began = _BARE.search(output), _STARTED.search(output)
    if bare is None or began is None:
        raise Unmeasured(f"the job did not say when it began its check: {output[-300:]!r}")
    if fault.strikes and len(lab.fault.victims(BAD)) == struck:
        raise Unmeasured(f"the fault struck no process of {BAD}")
    assert isinstance(reached.record, VerdictReached)
    elapsed_s = reached.time_s - float(began.group(1))
    rounds, inside_s, first_s = _rounds(_master_records(lab, job))
    return Sample(
        elapsed_s=elapsed_s,
        bare_s=float(began.group(1)) - float(bare.group(1)),
        wrong=wrong_in(reached.record, expected),
        detail=f"{rounds} rounds, {elapsed_s - inside_s:.1f} s outside them,"
        f" {reached.time_s - first_s:.1f} s from the first of them",
    )


def _await_verdict(lab: Lab, job: int, fault: Fault, nodes: int = LAB_NODES) -> Entry:
    """Return the record of the first attempt's verdict; strike meanwhile as the fault says."""
    deadline_s = VERDICT_DEADLINE_S + VERDICT_S_PER_NODE * nodes
    reader: journal.Reader | None = None
    struck = False

    def look() -> Entry | None:
        nonlocal reader, struck
        reader = reader or _first_reader(lab, job)
        news = reader.read_new() if reader else []
        begun = any(_has_bad(entry.record) for entry in news)
        if fault.in_round is not None and begun and not (fault.once and struck):
            struck = True
            fault.in_round(lab, BAD)
        reached = [entry for entry in news if isinstance(entry.record, VerdictReached)]
        if not reached and _ENDED.search(output := _output(lab, job)):
            raise Unmeasured(f"the check ended without a verdict: {output[-300:]!r}")
        return reached[0] if reached else None

    end_s = time.monotonic() + deadline_s
    while (reached := look()) is None:
        if time.monotonic() > end_s:
            raise Unmeasured(f"no verdict of job {job} within {deadline_s:.0f} s")
        # A round alone takes 40 ms on a CPU, and is to be struck while it lasts.
        time.sleep(_STRIKE_POLL_S if fault.in_round is not None else _POLL_S)
    return reached


def _first_reader(lab: Lab, job: int) -> journal.Reader | None:
    root = config.default_root(lab.home(USER))
    for directory in root.glob(f"*/{job}/0"):
        return journal.Reader(directory, journal.MASTER, of_anybody=True)
    return None


def _has_bad(record: object) -> bool:
    return isinstance(record, RoundStarted) and any(BAD in group for group in record.groups)


def _rounds(entries: Iterable[Entry]) -> tuple[int, float, float]:
    """Return how many rounds there were, their time together, and when the first began."""
    began_s: list[float] = []
    inside_s = 0.0
    for entry in entries:
        if isinstance(entry.record, RoundStarted):
            began_s.append(entry.time_s)
        elif isinstance(entry.record, RoundEnded):
            inside_s += entry.time_s - began_s[-1]
    return len(began_s), inside_s, began_s[0] if began_s else float("nan")


def _master_records(lab: Lab, job: int, attempt: int = 0) -> Iterator[Entry]:
    root = config.default_root(lab.home(USER))
    for directory in root.glob(f"*/{job}/{attempt}"):
        yield from journal.read_all(directory, journal.MASTER, of_anybody=True)


def _await_output(lab: Lab, job: int, pattern: re.Pattern[str]) -> str:
    return lab.wait_until(
        lambda: _output(lab, job),
        lambda text: pattern.search(text) is not None,
        f"{pattern.pattern!r} in the output of job {job}",
        END_DEADLINE_S,
    )


def _output(lab: Lab, job: int) -> str:
    try:
        return (lab.home(USER) / f"slurm-{job}.out").read_text(errors="replace")
    except FileNotFoundError:
        return ""
