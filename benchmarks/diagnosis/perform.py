# SPDX-License-Identifier: Apache-2.0
"""One run on a lab: the training is submitted, the fault happens, the report is read."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.diagnosis import strike
from benchmarks.diagnosis.causes import Ends
from benchmarks.diagnosis.judge import with_ended_start
from benchmarks.diagnosis.plan import RANKS, Plan
from tests.lab import DeadlinePassed, Lab
from tests.lab.installed_site import ENDED, Site
from tests.lab.played_nodes import play, submit

NODES = RANKS + 1  # one to go on with
# slurmctld gives a silent node up after this; a busy machine makes well nodes silent for seconds.
SLURMD_TIMEOUT_S = 30
PAUSE_S = 8.0  # of a checkpoint in a healthy run
HEALTHY_S = 150.0
_BEGIN_S, _STRIKE_S = 240.0, 900.0
# How long each kind is waited for at most; what is found later counts as not found.
_FOUND_S = {Ends.HANGS: 240.0, Ends.SLOWS: 480.0}
_ENDED_S = 420.0
_LOOK_S = 0.5
_LOOKS_PER_QUESTION = 8  # of files, before Slurm is asked whether the job still runs

_TRAINING = Path(__file__).with_name("training.py")
_SCRIPT = """#!/bin/bash
export OMP_NUM_THREADS=1
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000 + SLURM_HEALTH_RESTART_COUNT))
exec srun --kill-on-bad-exit=1 {python} training.py
"""
_STEP = re.compile(r"^step (\d+) at ([\d.]+) restart (\d+)$", re.MULTILINE)


@dataclass(kw_only=True)
class Seen:
    """What one run showed: times in seconds since the epoch, None for what did not come."""

    job: int
    fault_s: float
    again_s: float | None = None
    report: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    output: str = ""
    drained: dict[str, str] = field(default_factory=dict)


class Interrupted(Exception):
    """The benchmark is to end."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training runs with: `python`, and so many played GPUs on each node (0: on CPUs)."""

    python: Path = Path(sys.executable)
    gpus: int = 0


@contextmanager
def stage(trained: Trained) -> Iterator[Site]:
    """Start a lab for one run after another."""
    extra = f"SlurmdTimeout={SLURMD_TIMEOUT_S}"
    venv = trained.python.parents[1]  # which may be in somebody's home, and what it was made of
    seen = (venv, trained.python.resolve().parents[1]) if trained.gpus else ()
    with Lab.start(nodes=NODES, slurm_conf_extra=extra, gpus=trained.gpus, visible=seen) as lab:
        yield Site(lab)


class Run:
    """One run on a lab, which it leaves as it was; `stopped` is asked whether it is to end."""

    def __init__(
        self, site: Site, plan: Plan, trained: Trained, stopped: Callable[[], bool]
    ) -> None:
        self._site, self._plan, self._trained, self._stopped = site, plan, trained, stopped
        self._job = 0

    def perform(self) -> Seen:
        """Carry out the plan.

        Raises:
            LabError: the lab failed, or the training did not come to the fault.
            Interrupted: the benchmark is to end.
        """
        site = self._site
        site.lab.reset()
        self._prepare()
        with ExitStack() as mending:
            strike.before(site.lab, self._plan, mending)
            environ = {"DIAGNOSIS_PLAN": self._told()}
            self._job = submit(site, *self._options(), "train.sh", script="", env=environ)
            mending.callback(site.lab.ask, *_kill(self._job), check=False)
            seen = Seen(job=self._job, fault_s=self._fault_s(mending))
            self._await_outcome(seen)
            written = site.records(self._job, writer="post-mortem")
            diagnosed = [each for each in written if each["kind"] == "diagnosed"]
            seen.report = with_ended_start(site.report(self._job), diagnosed)
            seen.table = site.table(self._job)
            seen.output = self._output()
            seen.drained = site.drained()
        return seen

    def _prepare(self) -> None:
        site = self._site
        play(site)
        site.script("training.py", _TRAINING.read_text())
        site.script("train.sh", _SCRIPT.replace("{python}", str(self._trained.python)))
        (site.lab.home("alice") / "end").unlink(missing_ok=True)
        for node in site.lab.nodes:
            strike.lay_out(site.lab.paths.tmp(node))

    def _options(self) -> list[str]:
        options = [f"-N{RANKS}", "--ntasks-per-node=1", "--output=out-%j.txt", "--no-requeue"]
        if self._trained.gpus:
            options.append(f"--gres=gpu:{self._trained.gpus}")
        ends = self._plan.cause.ends
        if ends is Ends.GOES_ON:
            options.append("--spares=1")
        if ends in {Ends.GOES_ON, Ends.STOPS}:
            options.append("--max-restarts=1")
        return options

    def _told(self) -> str:
        plan = self._plan
        told: dict[str, Any] = {"cause": plan.cause.name, "step": plan.step, "rank": plan.rank}
        device = "cuda" if self._trained.gpus else "cpu"
        told |= {"workers": plan.workers, "pause_s": PAUSE_S, "device": device}
        return json.dumps(told)

    def _fault_s(self, mending: ExitStack) -> float:
        """Let the fault happen, or wait until it has; return when that was."""
        plan = self._plan
        self._await(lambda: bool(self._steps()), "its first step", _BEGIN_S)
        if plan.cause.ends is Ends.RUNS:
            return time.time()
        if not plan.cause.outside:
            marked = self._site.lab.home("alice") / f"fault-{self._job}"
            self._await(marked.exists, "the fault", _STRIKE_S)
            return float(marked.read_text())
        self._await(lambda: self._steps()[-1][0] >= plan.step, f"step {plan.step}", _STRIKE_S)
        fault_s = time.time()
        strike.now(self._site.lab, plan, mending)
        return fault_s

    def _await_outcome(self, seen: Seen) -> None:
        """Wait for what the cause leads to, and not longer than a user would."""
        with suppress(DeadlinePassed):  # the report shows what was found until then
            match self._plan.cause.ends:
                case Ends.HANGS | Ends.SLOWS as ends:
                    self._await(self._said, "a finding", _FOUND_S[ends], or_end=True)
                case Ends.STOPS | Ends.FAILS:
                    self._await(lambda: False, "its end", _ENDED_S, or_end=True)
                case Ends.GOES_ON:
                    self._await(lambda: self._again(seen), "a restart", _ENDED_S, or_end=True)
                case Ends.RUNS:
                    until_s = time.time() + HEALTHY_S
                    self._await(lambda: time.time() > until_s, "its time", 2 * HEALTHY_S)
                    (self._site.lab.home("alice") / "end").touch()
                    self._await(lambda: False, "its end", _ENDED_S, or_end=True)

    def _said(self) -> bool:
        return any(
            record["kind"] == "training_event"
            and record["event"] in {"hang", "straggler", "slowdown"}
            for record in self._site.records(self._job, writer="monitor")
        )

    def _again(self, seen: Seen) -> bool:
        again = [at_s for _, at_s, restart in self._steps() if restart]
        seen.again_s = again[0] if again else None
        return bool(again)

    def _await(
        self, look: Callable[[], bool], what: str, deadline_s: float, *, or_end: bool = False
    ) -> None:
        """Wait until something holds; with `or_end` until the job has ended, too.

        Raises:
            DeadlinePassed: it did not come, or the job ended before it.
            Interrupted: the benchmark is to end.
        """
        until_s = time.monotonic() + deadline_s
        looks = 0
        while not look():
            looks += 1
            if self._stopped():
                raise Interrupted
            over = time.monotonic() > until_s
            ended = looks % _LOOKS_PER_QUESTION == 0 and self._state() in ENDED
            if ended and or_end:
                return
            if over or ended:
                raise DeadlinePassed(what, deadline_s, self._output()[-500:])
            time.sleep(_LOOK_S)

    def _state(self) -> str:
        return self._site.lab.job(self._job)["JobState"]

    def _steps(self) -> list[tuple[int, float, int]]:
        found = _STEP.findall(self._output())
        return [(int(step), float(at_s), int(restart)) for step, at_s, restart in found]

    def _output(self) -> str:
        return self._site.read(f"out-{self._job}.txt")


def _kill(job: int) -> list[str]:
    return ["scancel", "--signal=KILL", "--full", str(job)]


def keep(site: Site, seen: Seen, directory: Path) -> Path:
    """Copy what explains a run out of a lab that goes on; the directory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "report.json").write_text(json.dumps(seen.report, indent=2))
    (directory / "report.txt").write_text(seen.table)
    (directory / "output.txt").write_text(seen.output)
    journal = site.run_directory(seen.job).parent
    if journal.exists():
        shutil.copytree(journal, directory / "journal", ignore_dangling_symlinks=True)
    return directory
