# SPDX-License-Identifier: Apache-2.0
"""What a run has left behind: in Slurm, in the journal, on the nodes, in the job's output."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from slurm_health.preflight.chosen_probes import chosen_phases
from slurm_health.preflight.expectations import expectations_from
from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.session.controller import Controller
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.records.errors import SlurmHealthError
from slurm_health.records.nodeset import expand
from slurm_health.records.records import ActionDone, JobOutcome, RunStarted, VerdictReached
from slurm_health.records.verdict import Level
from slurm_health.system import journal
from tests.e2e.hooks_support import HookedSite
from tests.lab import DeadlinePassed

from .perform import HELPER, Performance
from .plan import Trouble

# A helper waits this long between two looks at its job, and slurmd may be slow to end a step.
# After its node was cut off, that took more than 40 s once (22.05.8).
_LEFT_S = 100.0
_LOST_PROLOG = "REQUEST_LAUNCH_PROLOG notification failed"


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the script: on which attempt, where it says it runs, where its tasks ran.

    `restart` counts the starts within the attempt; another start still ran at `beside`.
    """

    attempt: int
    nodes: tuple[str, ...]
    count: int
    restart: int = 0
    beside: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    ended: bool = False


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check in the journal. `problem` says why it does not read, or replays to another end."""

    attempt: int
    levels: Mapping[str, Level]
    finished: JobOutcome | None = None
    drained_twice: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All that a run is judged by. `job` is empty where Slurm has forgotten it.

    `done` is what happened, with the nodes that it happened to; `pending` never did.
    `accused` are the nodes that the history of the user's jobs holds something against.
    On the nodes of `lost_prologs`, slurmd waited in vain for the prolog of a job that soon started
    again, and Slurm drained them (22.05.8, on a busy machine).
    """

    done: tuple[Trouble, ...]
    job: Mapping[str, str]
    output: str
    starts: tuple[Start, ...]
    checks: tuple[Check, ...]
    drained: Mapping[str, str]
    lost_prologs: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    unsettled: str = ""
    report_problem: str = ""
    pending: tuple[Trouble, ...] = ()
    accused: Mapping[str, str] = field(default_factory=dict)


def look(site: HookedSite, run: Performance) -> Seen:
    """Look at what a settled run has left, before anything is tidied up."""
    user, job_id = run.plan.user, run.job_id
    left = _left(site)
    checks = _checks(site.run_directory(job_id, user=user).parent)
    output = site.lab.home(user) / f"slurm-{job_id}.out"
    return Seen(
        done=tuple(run.done),
        pending=tuple(run.pending),
        job=run.job,
        output=output.read_text(errors="replace") if output.exists() else "",
        starts=starts_in(site.read("ran", user)),
        checks=tuple(checks),
        drained=site.drained(),
        lost_prologs=tuple(n for n in site.lab.nodes if _LOST_PROLOG in site.slurmd_log(n)),
        left=left,
        unsettled=run.unsettled,
        report_problem=_report_problem(site, run) if checks else "",
        accused=_accused(site, user) if checks else {},
    )


def _left(site: HookedSite) -> tuple[str, ...]:
    try:
        site.lab.wait_until(lambda: _all_left(site), lambda left: not left, "nothing", _LEFT_S)
    except DeadlinePassed:
        return tuple(_all_left(site))
    return ()


def _all_left(site: HookedSite) -> list[str]:
    """Return what runs on the nodes, and jobs of ours in the queue: helpers that wait for ever."""
    running = [f"{node}: {' '.join(argv)}" for node, argv in site.leftovers()]
    helpers = [name for name in site.jobs() if name.startswith(HELPER)]
    return running + [f"in the queue: {name}" for name in helpers]


def _accused(site: HookedSite, user: str) -> dict[str, str]:
    """Return the nodes that history holds something against, and how much."""
    result = site.health("lemons", "--json", user=user)
    clusters = json.loads(result.stdout)["clusters"]
    return {
        node["node"]: node["level"]
        for cluster in clusters
        for node in cluster["nodes"]
        if node["level"] in {"lemon", "suspect"}
    }


def starts_in(ran: str) -> tuple[Start, ...]:
    """Read what the script has written of itself, one start after another."""
    found: list[Start] = []
    beside: tuple[str, ...] = ()
    for line in ran.splitlines():
        what, attempt, *more = line.split()
        match what:
            case "start":
                start = Start(
                    attempt=int(attempt),
                    nodes=expand(more[0]),
                    count=int(more[1]),
                    restart=int(more[2]),
                    beside=beside,
                )
                found.append(start)
                beside = ()
            case "overlap" if more == ["batch"]:
                beside = ("batch",)  # it is said before the start that it is of
            case "overlap":
                found[-1] = replace(found[-1], beside=(*found[-1].beside, *more))
            case "task":
                found[-1] = replace(found[-1], tasks=(*found[-1].tasks, *more))
            case _:
                found[-1] = replace(found[-1], ended=True)
    return tuple(found)


def _checks(job: Path) -> list[Check]:
    """Read all checks of a job, from a copy: only their owner trusts the journal itself."""
    with tempfile.TemporaryDirectory() as own:
        copies = [
            Path(shutil.copytree(path, Path(own, path.name), copy_function=shutil.copy))
            for path in sorted(job.glob("[0-9]*"))
        ]
        return [_check(copy) for copy in copies]


def _check(directory: Path) -> Check:
    attempt, _ = journal.attempt_and_check(directory.name) or (-1, 0)
    try:
        master = [entry.record for entry in journal.read_all(directory, journal.MASTER)]
        problem = _replay_problem(directory)
    except SlurmHealthError as err:
        return Check(attempt=attempt, levels={}, problem=str(err))
    verdicts = [record for record in master if isinstance(record, VerdictReached)]
    ends = [record for record in master if isinstance(record, JobOutcome)]
    drained = [
        node
        for record in master
        if isinstance(record, ActionDone) and record.action == "drain" and record.succeeded
        for node in record.nodes
    ]
    return Check(
        attempt=attempt,
        levels={node.node: node.level for each in verdicts for node in each.nodes},
        finished=ends[-1] if ends else None,
        drained_twice=tuple(sorted({node for node in drained if drained.count(node) > 1})),
        problem="several verdicts" if len(verdicts) > 1 else problem,
    )


def _replay_problem(directory: Path) -> str:
    """Say how a check's journal leads to another verdict than the one in it, if it does."""
    entries = journal.read_all(directory, journal.MASTER)
    began = [entry.record for entry in entries if isinstance(entry.record, RunStarted)]
    verdict = [entry for entry in entries if isinstance(entry.record, VerdictReached)]
    if began and str(began[0].settings["check"]).startswith("none"):
        return ""  # what a failure showed, acted on as on a check
    if not began or not verdict:
        return "" if len(began) == 1 or not entries else "it does not say how the run began"
    phases = chosen_phases(str(began[0].settings["check"]))
    controller = Controller(
        began[0].nodes,
        partial(make_localizer, prior=began[0].prior),
        TimeLimits(),
        phases,
        expectations_from({}, "built in"),
    )
    for node in began[0].nodes:
        for entry in journal.read_all(directory, node):
            if entry.time_s <= verdict[0].time_s:  # then the agents leave
                controller.state.fold(entry)
    for entry in entries[: entries.index(verdict[0])]:
        controller.state.fold(entry)
    step = controller.next_step(verdict[0].time_s)
    replayed = step[0] if isinstance(step, tuple) else step
    same = _finds(replayed) == _finds(verdict[0].record)
    return "" if same else f"replayed, the next step is {step}"


def _finds(step: object) -> object:
    """Return what a verdict finds, in no words: a record that no master had read may add some.

    On a busy machine one is written before the verdict is, and read after it.
    """
    if not isinstance(step, VerdictReached):
        return step
    nodes = [(each.node, each.level) for each in step.nodes]
    return nodes, [(each.ends, each.level) for each in (*step.paths, *step.leaves)]


def _report_problem(site: HookedSite, run: Performance) -> str:
    result = site.health("report", "--json", str(run.job_id), user=run.plan.user)
    try:
        json.loads(result.stdout)
    except ValueError:
        return f"report ends with {result.returncode}: {result.stdout[-500:]}{result.stderr[-500:]}"
    return "" if result.returncode == 0 else f"report ends with {result.returncode}"
