# SPDX-License-Identifier: Apache-2.0
"""Hangs of trainings that have no line of ours: does each go on, and on the spare?

    python -m benchmarks.hang_restarts                        ten runs that are to go on; an hour
    python -m benchmarks.hang_restarts --runs 20 --results build/hang-restarts.jsonl
    python -m benchmarks.hang_restarts --own --runs 6         hangs by the script itself, which stop

Each is a DDP training over gloo on three of five nodes of the lab (`--monitor=restart --spares=1
--keep-spares`) that prints nothing; its first start hangs at a step that the seed chooses. With
`--results` each run is kept once it is judged, and those that are kept are not run again. Exits 0
if all were right, 1 if one was not, 3 if one could not be measured.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tabulate import tabulate

from benchmarks.check_table import machine_facts, machine_line
from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt, keep, kept
from tests.e2e.lab_support import Site
from tests.e2e.played_nodes import UNREACHABLE, play, submit
from tests.lab import Lab, LabError

_TRAINING = Path(__file__).parents[1] / "tests" / "support" / "hanging_training.py"
_SCRIPT = f"""#!/bin/bash
export OMP_NUM_THREADS=1 MASTER_PORT=$((20000 + 10 * SLURM_JOB_ID + SLURM_HEALTH_RESTART_COUNT))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
echo "start $SLURM_HEALTH_RESTART_COUNT"
[ "$SLURM_HEALTH_RESTART_COUNT" = 0 ] || {{ export STEPS=5; set --; }}
srun {sys.executable} hanging_training.py "$@"
"""
_NODES, _RANKS = 5, 3
_JOB = ("-N3", "--ntasks-per-node=1", "--spares=1", "--keep-spares", "-x", "n5", "--no-requeue")
_MONITOR = "slurm_health.training.monitor.node"
_DEADLINE_S = 1500.0  # for a run, on a machine that is busy with other things
_STEPS, _SILENT_STEPS, _FIRST_STEPS = range(15, 60), range(60, 90), range(2, 7)
_BY_OPTIMIZER = {"HEARTBEAT": "0", "SILENT": "1", "SLURM_HEALTH_HEARTBEAT": "auto"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a hang is made, and what is to be said of it.

    `argument` is the training's own, empty where it is made from outside.
    """

    argument: str
    said: tuple[str, ...]
    steps: range = _STEPS
    environ: Mapping[str, str] = field(default_factory=lambda: _BY_OPTIMIZER)


KINDS = {
    "stopped": Kind(argument="stop", said=("rank-stopped",)),
    "gone": Kind(argument="kill", said=("rank-gone",)),
    "network": Kind(argument="", said=("network-of-group",)),
    "stopped, no heartbeat": Kind(
        argument="stop",
        said=("rank-stopped",),
        steps=_SILENT_STEPS,
        environ={"HEARTBEAT": "0", "SILENT": "1"},
    ),
    "stopped in its start": Kind(
        argument="stop",
        said=("rank-stopped",),
        steps=_FIRST_STEPS,
        environ={**_BY_OPTIMIZER, "STEP_S": "8"},
    ),
}
OWN_KINDS = {
    "mismatch": Kind(argument="mismatch", said=("mismatched-collective",)),
    "loader": Kind(argument="loader", said=("data-loader-stuck",)),
    "own code": Kind(argument="own-code", said=("rank-elsewhere", "file-awaited")),
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one run; `wrong` is empty where that is right."""

    number: int
    seed: int
    kind: str
    rank: int
    step: int
    said: str
    stalled_s: float
    wrong: str
    load: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run: which kind of hang, of which rank, at which step. The first node stays."""

    number: int
    kind: str
    rank: int
    step: int

    @property
    def node(self) -> str:
        """Where the rank runs."""
        return f"n{self.rank + 1}"


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the job left: the hang that was told, Slurm's word on it, and what it printed."""

    cause: str
    nodes: list[str]
    stalled_s: float
    state: str
    trained_on: list[str]
    started_again: bool


def plans(runs: int, seed: int, kinds: Mapping[str, Kind]) -> list[Plan]:
    """Return so many runs, the kinds in turn: the first ones stay the same with more of them."""
    names = list(kinds)
    found = []
    for number in range(runs):
        dice = random.Random(f"{seed}-{number}")
        kind = names[number % len(names)]
        found.append(
            Plan(
                number=number,
                kind=kind,
                rank=dice.randrange(1, _RANKS),
                step=dice.choice(kinds[kind].steps),
            )
        )
    return found


def wrong_with(plan: Plan, kind: Kind, seen: Seen) -> str:
    """Return what is wrong, empty where nothing is."""
    wrong = []
    if seen.cause not in kind.said:
        wrong.append(f"{seen.cause} instead of {' or '.join(kind.said)}")
    if seen.nodes != [plan.node]:
        wrong.append(f"on {','.join(seen.nodes) or 'no node'} instead of {plan.node}")
    if plan.kind in OWN_KINDS:
        if seen.started_again or seen.state != "FAILED":
            wrong.append(f"{seen.state}, and not ended as it is to be")
        return "; ".join(wrong)
    if seen.state != "COMPLETED":
        wrong.append(f"the job is {seen.state}")
    elif plan.node in seen.trained_on:
        wrong.append(f"it went on with {plan.node}")
    return "; ".join(wrong)


def main() -> int:
    """Measure, print the table, return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.hang_restarts")
    parser.add_argument("--runs", type=count, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--own", action="store_true", help="hangs by the script itself")
    parser.add_argument("--results", type=Path, help="where each run is kept")
    options = parser.parse_args()
    kinds = OWN_KINDS if options.own else KINDS
    done = [msgspec.convert(each, Outcome) for each in kept(options.results)]
    done = [each for each in done if each.seed == options.seed]
    done = [each for each in done if each.kind in kinds and each.number < options.runs]
    left = [
        plan
        for plan in plans(options.runs, options.seed, kinds)
        if plan.number not in {each.number for each in done}
    ]
    print(machine_line(machine_facts()), f"{len(done)} runs are kept, {len(left)} left", flush=True)
    end_as_on_interrupt()
    failures = 0
    try:
        for outcome in _outcomes(left, kinds, options.seed):
            if isinstance(outcome, str):
                failures += 1
                print(f"not measured: {outcome}", flush=True)
                continue
            done.append(outcome)
            keep(options.results, msgspec.to_builtins(outcome))
            print(_line_of(outcome), flush=True)
    except KeyboardInterrupt:
        print("benchmarks.hang_restarts: interrupted; the lab is down", file=sys.stderr)
        return INTERRUPTED
    print(table(done))
    if any(each.wrong for each in done):
        return 1
    return 3 if failures else 0


def table(outcomes: Sequence[Outcome]) -> str:
    """Return, by kind, how many were right and how soon they were told."""
    rows = []
    for kind in dict.fromkeys(each.kind for each in outcomes):
        runs = [each for each in outcomes if each.kind == kind]
        right = sum(not each.wrong for each in runs)
        times_s = [each.stalled_s for each in runs]
        rows.append([kind, f"{right} of {len(runs)}", f"{min(times_s):.0f} … {max(times_s):.0f} s"])
    right = sum(not each.wrong for each in outcomes)
    rows.append(["all", f"{right} of {len(outcomes)}", ""])
    return tabulate(rows, headers=["hang", "right", "after the last step"], tablefmt="github")


def _outcomes(
    left: Sequence[Plan], kinds: Mapping[str, Kind], seed: int
) -> Iterator[Outcome | str]:
    """Yield what became of each run, or why it could not be measured."""
    if not left:
        return
    name = f"{Path.cwd().name}-restarts-{os.getpid()}"
    with Lab.start(nodes=_NODES, accounting=True, name=name) as lab:
        site = Site(lab)
        for plan in left:
            load = round(os.getloadavg()[0], 1)
            try:
                seen = _run(site, plan, kinds[plan.kind])
            except (LabError, AssertionError) as err:  # a refused submission asserts
                yield f"{plan}: {err}"
            else:
                yield Outcome(
                    number=plan.number,
                    seed=seed,
                    kind=plan.kind,
                    rank=plan.rank,
                    step=plan.step,
                    said=f"{seen.cause} on {','.join(seen.nodes)}",
                    stalled_s=seen.stalled_s,
                    wrong=wrong_with(plan, kinds[plan.kind], seen),
                    load=load,
                )
            for process in site.processes_with(_TRAINING.name):  # a killed rank's loader
                os.kill(process, signal.SIGKILL)
            lab.reset()


def _run(site: Site, plan: Plan, kind: Kind) -> Seen:
    """Have one training hang and go on, or stop; return what was seen of it.

    Raises:
        LabError: the training did not start, or did not end.
    """
    for old in site.lab.home("alice").glob("pid-*"):
        old.unlink()
    site.script(_TRAINING.name, _TRAINING.read_text())
    site.script("train.sh", _SCRIPT)
    play(site)
    words = ["train.sh", *([kind.argument, str(plan.rank)] if kind.argument else [])]
    environ = {**kind.environ, "HANGS_AT": str(plan.step)}
    options = (*_JOB, "--monitor=restart", "--output=out-%j.txt")
    job = submit(site, *options, *words, script="", env=environ)
    if not kind.argument:

        def watched() -> int:
            return len(site.processes_with(_MONITOR))

        site.lab.wait_until(watched, lambda n: n >= _RANKS, "the monitors", _DEADLINE_S)
        play(site, **{plan.node: UNREACHABLE})
        site.lab.fault.drop(plan.node)
    state = site.ended(job, _DEADLINE_S)["JobState"]
    records = site.records(job, writer="monitor")
    hangs = [each for each in records if each["kind"] == "hang_found"]
    found: dict[str, Any] = hangs[0]["found"] if hangs else {"cause": "no hang was told"}
    starts = [
        each for each in site.records(job, writer="supervisor") if each["kind"] == "script_started"
    ]
    return Seen(
        cause=found["cause"],
        nodes=found.get("nodes", []),
        stalled_s=hangs[0]["stalled_s"] if hangs else 0.0,
        state=state,
        trained_on=list(starts[-1].get("nodes", [])) if starts else [],
        started_again=len(starts) > 1,
    )


def _line_of(each: Outcome) -> str:
    verdict = f"WRONG ({each.wrong})" if each.wrong else "right"
    return (
        f"{each.number}: {each.kind}, rank {each.rank} at step {each.step}: {verdict};"
        f" {each.said} after {each.stalled_s:.0f} s; load average {each.load}"
    )


if __name__ == "__main__":
    sys.exit(main())
