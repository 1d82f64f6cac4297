# SPDX-License-Identifier: Apache-2.0
"""Hangs of a real DDP training on the lab: how often the rank and node are named, and how soon.

    python -m benchmarks.hangs                            five causes, four runs of each
    python -m benchmarks.hangs --only stopped network --runs 10 --seed 5
    python -m benchmarks.hangs --without-heartbeat        what output and the kernel tell alone
    python -m benchmarks.hangs --runs 20 --results build/hangs.jsonl    goes on where it stopped

Each run trains on three nodes and hangs one rank, at a step and in a way that the seed chooses.
With `--results` each run is kept once it is judged, and those that are kept are not run again.
LAB_RELEASE names another release of Slurm. Exits 0 if every run was located, with a heartbeat
within a minute of its last step; 1 if one was not, or another rank or node was named; 3 if one
could not be measured.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.check_table import machine_facts, machine_line
from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt, keep, kept
from tests.e2e.lab_support import Site
from tests.e2e.played_nodes import play, submit
from tests.lab import Lab, LabError

_NODES = 3
_TRAINING = Path(__file__).parents[1] / "tests" / "support" / "hanging_training.py"
_SCRIPT = """#!/bin/bash
export OMP_NUM_THREADS=1 MASTER_PORT=$((20000 + SLURM_JOB_ID))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun {python} hanging_training.py "$@"
"""
_LIMIT_S = 60.0
_DEADLINE_S = 400.0  # for a run, on a machine that is busy with other things
_STEPS = range(10, 80)
# Without a heartbeat the output must have shown a pace; then it takes minutes.
_DEADLINE_OF_OUTPUT_S = 900.0
_STEPS_OF_OUTPUT = range(220, 280)


@dataclass(frozen=True, kw_only=True)
class Hang:
    """One run: what hangs which rank at which step; its number among those of a cause and seed."""

    seed: int
    number: int
    cause: str
    rank: int
    step: int
    heartbeat: bool

    @property
    def node(self) -> str:
        """Where the rank runs."""
        return f"n{self.rank + 1}"


@dataclass(frozen=True, kw_only=True)
class Located:
    """What the monitor said of it; `wrong` is empty where that is right."""

    hang: Hang
    said: str
    stalled_s: float
    wrong: str


@dataclass(frozen=True)
class Cause:
    """How it is done, and what is to be said of it."""

    argument: str
    said: str
    inject: Callable[[Site, Hang], None] = lambda _site, _hang: None
    names_rank: bool = True
    # What may be said where no rank has a heartbeat: it depends on whether py-spy may look.
    without_heartbeat: tuple[str, ...] = ()


def _stop(site: Site, hang: Hang) -> None:
    site.lab.run(["kill", "-STOP", site.read(f"pid-{hang.rank}")], user="alice")


def _drop(site: Site, hang: Hang) -> None:
    site.lab.fault.drop(hang.node)


CAUSES = {
    "stopped": Cause("", "rank-stopped", _stop, without_heartbeat=("rank-stopped",)),
    "mismatch": Cause("mismatch", "mismatched-collective"),
    "network": Cause(
        "", "network-of-group", _drop, names_rank=False, without_heartbeat=("network-of-group",)
    ),
    "loader": Cause(
        "loader", "data-loader-stuck", without_heartbeat=("data-loader-stuck", "file-awaited")
    ),
    "killed": Cause("kill", "rank-gone"),
}


def main() -> int:
    """Measure, print the table, return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.hangs")
    parser.add_argument("--runs", type=count, default=4, help="of each cause")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=tuple(CAUSES), default=tuple(CAUSES))
    parser.add_argument("--without-heartbeat", action="store_true")
    parser.add_argument("--results", type=Path, help="where each run is kept")
    options = parser.parse_args()
    beats = not options.without_heartbeat
    causes = [name for name in options.only if beats or CAUSES[name].without_heartbeat]
    hangs = plans(causes, options.runs, options.seed, heartbeat=beats)
    located = [each for each in _located(options.results) if each.hang in hangs]
    left = [each for each in hangs if each not in {done.hang for done in located}]
    print(machine_line(machine_facts()), f"{len(located)} runs are kept, {len(left)} left")
    sys.stdout.flush()
    end_as_on_interrupt()
    unmeasured: list[str] = []
    try:
        for found in _outcomes(left):
            if isinstance(found, str):
                unmeasured.append(found)
                print(f"not measured: {found}", flush=True)
                continue
            located.append(found)
            keep(options.results, asdict(found))
            print(_line_of(found), flush=True)
    except KeyboardInterrupt:
        print("benchmarks.hangs: interrupted; the lab is down", file=sys.stderr)
        return INTERRUPTED
    print(table(located))
    if any(each.wrong for each in located):
        return 1
    return 3 if unmeasured else 0


def plans(causes: Sequence[str], runs: int, seed: int, *, heartbeat: bool) -> list[Hang]:
    """Return all runs, each cause once before any comes again; the first ones stay the same."""
    found = []
    for number in range(runs):
        for cause in causes:
            dice = random.Random(f"{seed}-{cause}-{number}")
            found.append(
                Hang(
                    seed=seed,
                    number=number,
                    cause=cause,
                    rank=dice.randrange(_NODES),
                    step=dice.choice(_STEPS if heartbeat else _STEPS_OF_OUTPUT),
                    heartbeat=heartbeat,
                )
            )
    return found


def _outcomes(left: Sequence[Hang]) -> Iterator[Located | str]:
    """Yield what was said of each hang, or why it could not be measured."""
    if not left:
        return
    with _site() as site:
        for hang in left:
            try:
                yield _run(site, hang)
            except LabError as err:
                yield f"{hang}: {err}"
            site.lab.reset()


def _located(results: Path | None) -> list[Located]:
    """Return the runs that were kept."""
    return [Located(**{**each, "hang": Hang(**each["hang"])}) for each in kept(results)]


def table(located: list[Located]) -> str:
    """Return, by cause, how many were right and how long they took."""
    rows = []
    for cause in dict.fromkeys(each.hang.cause for each in located):
        runs = [each for each in located if each.hang.cause == cause]
        times_s = [each.stalled_s for each in runs]
        right = sum(not each.wrong for each in runs)
        rows.append(
            [cause, f"{right} of {len(runs)}", f"{min(times_s):.0f} … {max(times_s):.0f} s"]
        )
    return tabulate(rows, headers=["cause", "right", "after the last step"], tablefmt="github")


@contextmanager
def _site() -> Iterator[Site]:
    with Lab.start(nodes=_NODES, name=f"{Path.cwd().name}-hangs-{os.getpid()}") as lab:
        yield Site(lab)


def _run(site: Site, hang: Hang) -> Located:
    """Have one training hang; return what was said of it.

    Raises:
        LabError: the training did not start, or nothing was said.
    """
    cause = CAUSES[hang.cause]
    for left in site.lab.home("alice").glob("pid-*"):
        left.unlink()
    site.script("hanging_training.py", _TRAINING.read_text())
    site.script("train.sh", _SCRIPT.format(python=sys.executable))
    play(site)
    options = [f"-N{_NODES}", "--ntasks-per-node=1", "--output=out-%j.txt", "--no-requeue"]
    arguments = ["train.sh", *([cause.argument, str(hang.rank)] if cause.argument else [])]
    env = {"HANGS_AT": str(hang.step), "HEARTBEAT": str(int(hang.heartbeat))}
    deadline_s = _DEADLINE_S if hang.heartbeat else _DEADLINE_OF_OUTPUT_S
    job = submit(site, *options, *arguments, script="", env=env)
    at_step = f"step {hang.step} "
    if not cause.argument:
        output = f"out-{job}.txt"
        site.lab.wait_until(lambda: at_step in site.read(output), bool, at_step, deadline_s)
        cause.inject(site, hang)
    records = site.lab.wait_until(
        lambda: [r for r in site.records(job, writer="monitor") if r["kind"] == "hang_found"],
        bool,
        f"a hang of job {job}",
        deadline_s,
    )
    return judged(hang, cause, records[0])


def judged(hang: Hang, cause: Cause, record: dict[str, Any]) -> Located:
    """Return what was said of a hang, by the record of it, and what was wrong with that."""
    found = record["found"]
    nodes, ranks = found.get("nodes", []), found.get("ranks", [])
    wrong = []
    right = (cause.said,) if hang.heartbeat else cause.without_heartbeat
    if found["cause"] not in right:
        wrong.append(f"not {' or '.join(right)}")
    if nodes != [hang.node] or (cause.names_rank and ranks != [hang.rank]):
        wrong.append(f"not rank {hang.rank} on {hang.node}")
    if hang.heartbeat and record["stalled_s"] > _LIMIT_S:
        wrong.append(f"later than {_LIMIT_S:.0f} s")
    return Located(
        hang=hang,
        said=f"{found['cause']} on {','.join(nodes)}: {found['description']}",
        stalled_s=record["stalled_s"],
        wrong="; ".join(wrong),
    )


def _line_of(each: Located) -> str:
    hang = each.hang
    verdict = f"WRONG ({each.wrong})" if each.wrong else "right"
    return (
        f"{hang.cause} of rank {hang.rank} at step {hang.step}: {verdict}, {each.stalled_s:.0f} s:"
        f" {each.said}"
    )


if __name__ == "__main__":
    sys.exit(main())
