# SPDX-License-Identifier: Apache-2.0
"""One job on the lab, from its verdict to the first line of its script.

Until the script runs, only files are polled, so that measuring does not slow the job down.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.check_measure import Stage, Unmeasured
from slurm_health.preflight import config
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import RunStarted, VerdictReached
from slurm_health.records.verdict import Level
from slurm_health.system import journal
from tests.lab import Lab
from tests.lab.site_files import let_root_drain

BAD = "n3"
DEADLINE_S = 240.0
_FAKE_WORKER = Path(__file__).parents[1] / "tests" / "support" / "fake_worker.py"

_PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"
_SCRIPT = """#!/bin/sh
date "+first-line=%s.%N attempt=${SLURM_RESTART_COUNT:-0} nodes=$(scontrol show hostnames | xargs)"
"""
_FIRST_LINE = re.compile(r"^first-line=([\d.]+) attempt=(\d+) nodes=(.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way for a job to go on from its verdict. `attempt` is the one whose script runs."""

    name: str
    title: str
    target: str
    words: tuple[str, ...]
    nodes: int
    attempt: int = 0
    broken: bool = True
    user: str = "alice"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run: verdict to first line, and how much of it was not a check of other nodes.

    `wrong` says in what the job did not end as it should, empty if it did.
    """

    elapsed_s: float
    acting_s: float
    load_average: float
    wrong: str = ""


CASES = (
    Case(
        name="no-action",
        title="nothing to do, 4 nodes",
        target="≤ 0.5 s",
        words=("--nodes=4",),
        nodes=4,
        broken=False,
    ),
    Case(
        name="spare",
        title="a bad node and a spare, 4 of 5 nodes",
        target="≤ 2 s",
        words=("--nodes=4", "--spares=1"),
        nodes=4,
    ),
    Case(
        name="requeue",
        title="requeue without rights, 4 nodes",
        target="≤ 8 s",
        words=("--nodes=4",),
        nodes=4,
        attempt=1,
    ),
    Case(
        name="requeue-root",
        title="drain and requeue as root, 4 nodes",
        target="≤ 8 s",
        words=("--nodes=4",),
        nodes=4,
        attempt=1,
        user="root",
    ),
)


def measure(stage: Stage, case: Case, *, played: bool, load_average: float) -> Measured:
    """Submit one job, and time it.

    With `played`, agents and Slurm are real and the process that would measure with torch is
    told how to behave: a check of a second leaves acting alone, and many runs take little time.

    Raises:
        Unmeasured: it did not meet the bad node, or its check did not find it.
        LabError: the lab failed, or the script never began.
    """
    lab = stage.lab()
    script = lab.home(case.user) / "first-line.sh"
    script.write_text(_SCRIPT)
    environ = {"PATH": _PATH}
    if case.user == "root":
        environ |= let_root_drain(lab.home(case.user))
    argv = ["slurm-health", "sbatch", "--parsable", "--exclusive", "--open-mode=append"]
    if played:
        environ["FAKE_WORKER_DIR"] = str(_play(lab, case))
        argv.append(f"--python={_FAKE_WORKER}")
    elif case.broken:
        lab.fault.drop(BAD)
    answer = lab.run([*argv, *case.words, script.name], user=case.user, env=environ)
    job = int(answer.stdout)
    found = _await_first_line(lab, case, job)
    attempts = [_entries(lab, case, job, attempt) for attempt in range(case.attempt + 1)]
    first = _verdict(attempts[0])
    _require_the_fault(case, first)
    elapsed_s = float(found[1]) - first.time_s
    return Measured(
        elapsed_s=elapsed_s,
        acting_s=elapsed_s - sum(map(_check_s, attempts[1:])),
        load_average=load_average,
        wrong=_wrong(lab, case, int(found[2]), found[3].split()),
    )


def _play(lab: Lab, case: Case) -> Path:
    """Say how each node is to behave, where its fake worker looks."""
    directory = lab.home(case.user) / "played"
    directory.mkdir(exist_ok=True)
    for node in lab.nodes:
        (directory / node).write_text("dies" if case.broken and node == BAD else "well")
    home = lab.home(case.user).stat()
    os.chown(directory, home.st_uid, home.st_gid)
    return directory


def _await_first_line(lab: Lab, case: Case, job: int) -> re.Match[str]:
    path = lab.home(case.user) / f"slurm-{job}.out"

    def look() -> re.Match[str] | None:
        return _FIRST_LINE.search(path.read_text(errors="replace")) if path.exists() else None

    what = f"the first line of job {job}'s script"
    found = lab.wait_until(look, lambda seen: seen is not None, what, DEADLINE_S)
    assert found is not None
    return found


def _entries(lab: Lab, case: Case, job: int, attempt: int) -> list[Entry]:
    root = config.default_root(lab.home(case.user))
    for directory in root.glob(f"*/{job}/{attempt}"):
        return [
            *journal.read_all(directory, journal.MASTER, of_anybody=True),
            *journal.read_all(directory, journal.SUPERVISOR, of_anybody=True),
        ]
    raise Unmeasured(f"attempt {attempt} of job {job} has no journal")


def _verdict(entries: list[Entry]) -> Entry:
    reached = [entry for entry in entries if isinstance(entry.record, VerdictReached)]
    if not reached:
        raise Unmeasured("there is no verdict: the script ran unchecked")
    return reached[-1]


def _check_s(entries: list[Entry]) -> float:
    """Return how long the check of a later attempt took: what any job on other nodes would pay."""
    (began,) = [entry for entry in entries if isinstance(entry.record, RunStarted)]
    return _verdict(entries).time_s - began.time_s


def _require_the_fault(case: Case, reached: Entry) -> None:
    assert isinstance(reached.record, VerdictReached)
    unwell = [node for node in reached.record.nodes if node.level is not Level.HEALTHY]
    if [node.node for node in unwell] != ([BAD] if case.broken else []):
        said = ", ".join(f"{node.node} {node.level.value}" for node in unwell) or "all well"
        raise Unmeasured(f"the check found {said}, which is another case")


def _wrong(lab: Lab, case: Case, attempt: int, nodes: list[str]) -> str:
    if case.broken and BAD in nodes:
        return f"the script ran on {BAD}"
    if len(nodes) != case.nodes:
        return f"the script ran on {len(nodes)} nodes, asked for were {case.nodes}"
    if attempt != case.attempt:
        return f"the script ran in attempt {attempt}, expected was {case.attempt}"
    drained = "DRAIN" in lab.node_state(BAD)["State"]
    if drained != (case.broken and case.user == "root"):
        return f"{BAD} is {'' if drained else 'not '}drained"
    return ""
