# SPDX-License-Identifier: Apache-2.0
"""One run after another, on one cluster or on several side by side; the evidence of violations."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from pprint import pformat

from tests.e2e.hooks_support import HookedSite, hooked_site
from tests.lab import LabError, directory, starting

from .judge import violations
from .look import Seen, look
from .perform import URGENT, Performance
from .plan import ENDINGS, NODES, WHILE_IT_TRAINS, Deed, Plan, Trouble, plan_of

_WRONG = "VIOLATION"
# A partition over the same nodes that all others give way to.
_PREEMPTS = """\
PreemptType=preempt/partition_prio
PreemptMode={plan.preempt_mode}
PartitionName=DEFAULT GraceTime={plan.grace_s}
PartitionName={urgent} Nodes=ALL PriorityTier=10
"""
_LABS_END_S = 60
_LOST_S = 15  # a node that is silent for so long is lost, where one may be


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run went; `evidence` is where its files lie, where something was wrong."""

    plan: Plan
    seen: Seen
    violations: list[str]
    duration_s: float
    evidence: Path | None = None

    def __str__(self) -> str:
        state = self.seen.job.get("JobState", "forgotten")
        never = [str(each) for each in self.seen.pending]
        text = f"seed {self.plan.seed}: {self.duration_s:.1f} s, {state}, {self.plan}"
        text += f" (which never came: {', '.join(never)})" if never else ""
        if not self.violations:
            return text
        lines = [f"{_WRONG} {text}", *(f"  {each}" for each in self.violations)]
        return "\n".join([*lines, f"  evidence: {self.evidence}"])


def run_many(seeds: Iterable[int], *, labs: int, evidence: Path, minutes: float) -> bool:
    """Run the plans of these seeds, print how each went; tell whether nothing was wrong.

    After so many minutes no further run is begun.

    Raises:
        KeyboardInterrupt: it was interrupted. What has ended by then is summed up; the threads of
            the other runs are still at work.
    """
    end_s = time.monotonic() + minutes * 60
    tally = _Tally()
    pool = ThreadPoolExecutor(labs)
    with scratch_directory() as hooks:

        def in_time(seed: int) -> Outcome | None:
            if time.monotonic() > end_s:
                return None
            return run_one(plan_of(seed), evidence, hooks)

        try:
            runs = {pool.submit(in_time, seed): seed for seed in seeds}
            for run in as_completed(runs):
                said = tally.add(run, runs[run])
                if said:
                    print(said, flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            print(tally, flush=True)
    return not tally.wrong


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory that goes when this process and its labs have ended, however they end.

    Interrupted, threads and hooks write on until then: what this process removes would come back.
    """
    path = Path(tempfile.mkdtemp(prefix="chaos-"))
    own = starting.own_prefix()
    watch, alive = os.pipe()
    remover = os.fork()
    if remover == 0:
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.close(alive)
            os.read(watch, 1)
            directory.await_none(own, _LABS_END_S)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os._exit(0)
    os.close(watch)
    yield path
    os.close(alive)
    os.waitpid(remover, 0)


@dataclass
class _Tally:
    """What came of all runs that have ended."""

    well: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    deaths_planned: int = 0
    deaths: Counter[Deed] = field(default_factory=Counter)
    endings: Counter[Deed] = field(default_factory=Counter)
    started_again: int = 0

    def add(self, run: Future[Outcome | None], seed: int) -> str:
        """Count a run; return what there is to say of it, nothing if there was no time for it."""
        try:
            outcome = run.result()
        except LabError as err:
            self.wrong.append(seed)
            return f"{_WRONG} seed {seed}: the lab: {err}"
        if outcome is None:
            return ""
        (self.wrong if outcome.violations else self.well).append(seed)
        self.deaths_planned += len(_deaths(outcome.plan.troubles))
        self.deaths.update(_deaths(outcome.seen.done))
        self.endings.update(each.deed for each in outcome.seen.done if each.deed in ENDINGS)
        self.started_again += sum(start.restart > 0 for start in outcome.seen.starts)
        return str(outcome)

    def __str__(self) -> str:
        which = f": seeds {' '.join(map(str, self.wrong))}" if self.wrong else ""
        came = ", ".join(f"{deed} {self.deaths[deed]}" for deed in WHILE_IT_TRAINS)
        return (
            f"{len(self.well) + len(self.wrong)} runs, {len(self.wrong)} with violations{which}\n"
            f"while scripts trained: {came} (of {self.deaths_planned} planned);"
            f" {self.started_again} starts again\n"
            f"ended from outside: {', '.join(f'{deed} {self.endings[deed]}' for deed in ENDINGS)}"
        )


def _deaths(troubles: Iterable[Trouble]) -> list[Deed]:
    return [each.deed for each in troubles if each.deed in WHILE_IT_TRAINS]


def run_one(plan: Plan, evidence: Path, scratch: Path) -> Outcome:
    """Carry out one plan on a cluster of its own, and judge what it leaves."""
    began_s = time.monotonic()
    extra = f"SlurmdTimeout={_LOST_S}\n" if plan.loses_a_node else ""
    extra += _PREEMPTS.format(plan=plan, urgent=URGENT) if plan.preempt_mode else ""
    hooks = Path(tempfile.mkdtemp(dir=scratch))
    with hooked_site(hooks, nodes=len(NODES), slurm_conf_extra=extra) as site:
        run = Performance(site, plan)
        run.play()
        seen = look(site, run)
        found = violations(plan, seen)
        kept = _keep(site, plan, seen, evidence / str(plan.seed)) if found else None
    shutil.rmtree(hooks)
    duration_s = time.monotonic() - began_s
    return Outcome(plan=plan, seen=seen, violations=found, duration_s=duration_s, evidence=kept)


def _keep(site: HookedSite, plan: Plan, seen: Seen, place: Path) -> Path:
    """Copy what explains a violation out of a cluster that is about to vanish."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    shutil.copytree(site.lab.paths.log, place / "log")
    shutil.copytree(site.lab.home(plan.user), place / "home", symlinks=True)
    for node in site.lab.nodes:
        (place / f"hooks.{node}.log").write_text(site.hook_log(node))
    (place / "seen").write_text(f"{plan}\n{pformat(seen)}\n{seen.output}")
    return place
