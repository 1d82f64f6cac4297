# SPDX-License-Identifier: Apache-2.0
"""One run after another, on one cluster or on several side by side; the evidence of violations."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat

from tests.e2e.hooks_support import HookedSite, hooked_site
from tests.lab import LabError, directory, starting

from .judge import violations
from .look import Seen, look
from .perform import URGENT, Performance
from .plan import NODES, Plan, plan_of

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

    After so many minutes no further run is begun. When it is interrupted, the threads of the other
    runs are still at work.
    """
    end_s = time.monotonic() + minutes * 60
    well, wrong = 0, list[int]()
    pool = ThreadPoolExecutor(labs)
    with scratch_directory() as hooks:

        def in_time(seed: int) -> Outcome | None:
            if time.monotonic() > end_s:
                return None
            return run_one(plan_of(seed), evidence, hooks)

        try:
            runs = {pool.submit(in_time, seed): seed for seed in seeds}
            for run in as_completed(runs):
                try:
                    outcome = run.result()
                except LabError as err:
                    wrong.append(runs[run])
                    print(f"{_WRONG} seed {runs[run]}: the lab: {err}", flush=True)
                    continue
                if outcome is None:  # there was no time for it
                    continue
                well += not outcome.violations
                wrong += [runs[run]] if outcome.violations else []
                print(outcome, flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            which = f": seeds {' '.join(map(str, wrong))}" if wrong else ""
            print(f"{well + len(wrong)} runs, {len(wrong)} with violations{which}", flush=True)
    return not wrong


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


def run_one(plan: Plan, evidence: Path, scratch: Path) -> Outcome:
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
