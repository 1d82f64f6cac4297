# SPDX-License-Identifier: Apache-2.0
"""One run after another, on one cluster or on several side by side; the evidence of violations."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat

from tests.e2e.hooks_support import HookedSite, hooked_site
from tests.lab import LabError

from .judge import violations
from .look import Seen, look
from .perform import Performance
from .plan import NODES, Plan, plan_of

_WRONG = "VIOLATION"
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
        never = [str(each) for each in self.plan.troubles if each not in self.seen.done]
        text = f"seed {self.plan.seed}: {self.duration_s:.1f} s, {state}, {self.plan}"
        text += f" (which never came: {', '.join(never)})" if never else ""
        if not self.violations:
            return text
        lines = [f"{_WRONG} {text}", *(f"  {each}" for each in self.violations)]
        return "\n".join([*lines, f"  evidence: {self.evidence}"])


def run_many(seeds: Iterable[int], *, labs: int, evidence: Path, minutes: float) -> bool:
    """Run the plans of these seeds, print how each went; tell whether nothing was wrong.

    After so many minutes, and once it is interrupted, no further run is begun.
    """
    end_s = time.monotonic() + minutes * 60
    well: list[int] = []
    wrong: list[int] = []

    def in_time(seed: int) -> Outcome | None:
        return None if time.monotonic() > end_s else run_one(plan_of(seed), evidence)

    pool = ThreadPoolExecutor(labs)
    try:
        runs = {pool.submit(in_time, seed): seed for seed in seeds}
        for run in as_completed(runs):
            said = _said(run, runs[run])
            if said:
                print(said, flush=True)
                (wrong if said.startswith(_WRONG) else well).append(runs[run])
    finally:
        pool.shutdown(cancel_futures=True)
    which = f": seeds {' '.join(map(str, wrong))}" if wrong else ""
    print(f"{len(well) + len(wrong)} runs, {len(wrong)} with violations{which}")
    return not wrong


def _said(run: Future[Outcome | None], seed: int) -> str:
    """Return what there is to say of a run; nothing of one for which there was no time."""
    try:
        outcome = run.result()
    except LabError as err:
        return f"{_WRONG} seed {seed}: the lab: {err}"
    return str(outcome or "")


def run_one(plan: Plan, evidence: Path) -> Outcome:
    """Carry out one plan on a cluster of its own, and judge what it leaves."""
    began_s = time.monotonic()
    extra = f"SlurmdTimeout={_LOST_S}\n" if plan.loses_a_node else ""
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as hooks,
        hooked_site(Path(hooks), nodes=len(NODES), slurm_conf_extra=extra) as site,
    ):
        run = Performance(site, plan)
        run.play()
        seen = look(site, run)
        found = violations(plan, seen)
        kept = _keep(site, plan, seen, evidence / str(plan.seed)) if found else None
    duration_s = time.monotonic() - began_s
    return Outcome(plan=plan, seen=seen, violations=found, duration_s=duration_s, evidence=kept)


def _keep(site: HookedSite, plan: Plan, seen: Seen, directory: Path) -> Path:
    """Copy what explains a violation out of a cluster that is about to vanish."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    shutil.copytree(site.lab.paths.log, directory / "log")
    shutil.copytree(site.lab.home(plan.user), directory / "home", symlinks=True)
    for node in site.lab.nodes:
        (directory / f"hooks.{node}.log").write_text(site.hook_log(node))
    (directory / "seen").write_text(f"{plan}\n{pformat(seen)}\n{seen.output}")
    return directory
