# SPDX-License-Identifier: Apache-2.0
"""Each fault of the lab, met by a check: the right node is named, and no other ever is.

What a fault must lead to follows from the rules of the design: a node that fails or slows others
is faulty or slow, one that cannot be measured is inconclusive, a passing trouble is neither.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.lab_support import COMMAND, DEADLINE_S, Report, Site, levels, verdict_of
from tests.lab import missing

pytestmark = [pytest.mark.lab, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

SICK = "n3"
WELL = {"n1", "n2", "n4"}
FAULTY = {"faulty"}
SLOWED = {"faulty", "slow"}
UNMEASURED = {"inconclusive"}
CODES = {"faulty": 1, "slow": 1, "inconclusive": 3, "healthy": 0}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A check of four nodes by alice: its exit code, its report, what it said meanwhile."""

    code: int
    run: Report
    said: str


def check_nodes(site: Site, meanwhile: Callable[[int], None] = lambda job: None) -> Checked:
    """Check n1 to n4; `meanwhile` is called with the job's id when the check has begun."""
    argv = ["salloc", "--no-shell", "-N4", "-wn[1-4]"]
    granted = site.lab.run(argv, user="alice").stderr
    job = int(granted.split()[-1])
    process = site.lab.popen(
        [COMMAND, "check", "--json"],
        user="alice",
        node="n1",
        env=site.job_environ(job),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        site.wait_record(job, "agents_launched")
        meanwhile(job)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
        site.lab.run(["scancel", str(job)])
    run: dict[str, Any] = json.loads(stdout)
    return Checked(code=process.returncode, run=run, said=stderr.decode())


def assert_named(checked: Checked, allowed: Collection[str]) -> None:
    """The sick node is what it may be called, with a reason; the others are nothing bad."""
    found = levels(checked.run)
    sick = found.pop(SICK)
    assert sick in allowed, checked
    assert verdict_of(checked.run, SICK)["reason"]
    assert checked.code == CODES[sick]
    assert found.keys() == WELL
    assert not set(found.values()) & SLOWED, checked
