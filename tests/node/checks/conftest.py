# SPDX-License-Identifier: Apache-2.0
"""A recorded machine that is well."""

import tomllib
from pathlib import Path

import pytest

from slurm_health.node.checks.check import Check, CheckContext, Planned
from slurm_health.node.rules.finding import Finding, capped
from slurm_health.node.run import measure
from tests.support.sites import tree
from tests.support.supervised import write_executable

WELL: dict[str, str] = tomllib.loads(
    (Path(__file__).parents[2] / "data" / "well_machine.toml").read_text()
)
STAT = "{pid} ({name}) {state} 1 {pid} {pid} 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 {pid}00 0 0 0\n"
IB = "/sys/class/infiniband/mlx5_{n}/ports/1"


def process(pid: int, name: str, state: str = "S", uid: int = 0) -> dict[str, str]:
    return {
        f"/proc/{pid}/stat": STAT.format(pid=pid, name=name, state=state),
        f"/proc/{pid}/status": f"Name:\t{name}\nUid:\t{uid}\t0\t0\t0\n",
    }


@pytest.fixture
def well(tmp_path: Path) -> CheckContext:
    """A node that is well, as files under a directory, and a state of its own."""
    context = tree(tmp_path / "machine", WELL)
    return CheckContext(root=context.root, now_s=context.now_s, state=tmp_path / "state")


def planned(
    check: Check, name: str = "check", limit_s: float = 60, contexts: tuple[str, ...] = ()
) -> Planned:
    """Return a check as a site would have configured it."""
    return Planned(
        name=name,
        check=check,
        time_limit_s=limit_s,
        severity=check.SEVERITY,
        shadow=False,
        contexts=contexts,
    )


def find_out(check: Check, context: CheckContext) -> Finding:
    """Run a check as its child does, and cap what it finds."""
    return capped(measure(planned(check), context), check.SEVERITY)


def printing(directory: Path, name: str, answers: dict[str, str], code: int = 0) -> str:
    """Write a program that prints what belongs to the first word in its arguments; its path."""
    lines = ["#!/bin/sh", 'case " $* " in']
    for number, (words, text) in enumerate(answers.items()):
        (directory / f"{name}.{number}").write_text(text)
        lines.append(f"*' {words} '*) cat {directory}/{name}.{number}; exit {code} ;;")
    lines += [f"*) echo '{name}: cannot do that' >&2; exit 1 ;;", "esac"]
    return str(write_executable(directory / name, "\n".join(lines) + "\n"))
