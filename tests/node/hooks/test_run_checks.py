# SPDX-License-Identifier: Apache-2.0
"""Checks run at once, each in a child that can be killed; some share one."""

from __future__ import annotations

import math
import os
from pathlib import Path

from slurm_health.node.checks.check import Check, CheckContext, NotApplicable, Planned
from slurm_health.node.checks.external import Command
from slurm_health.node.checks.gpu import Gpu
from slurm_health.node.checks.kernel_log import KernelLog, Xid
from slurm_health.node.checks.tasks import Load
from slurm_health.node.checks.vendors import Dcgm
from slurm_health.node.rules.finding import Finding, Status, passed
from slurm_health.node.run import confirming, run_checks

LOST = b"3,7,9990000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"


def test_of_checks_that_look_at_the_same_the_first_one_looks_for_all(tmp_path: Path) -> None:
    """A pipe gives what is in it to the first who reads."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "uptime").write_text("10000 9000\n")
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev" / "kmsg")
    log = os.open(tmp_path / "dev" / "kmsg", os.O_RDWR | os.O_NONBLOCK)
    os.write(log, LOST)
    # More of them than children, so that they would not meet in one by chance.
    light = [planned(f"load{number}", Load()) for number in range(5)]

    results = run_checks(
        [planned("xid", Xid()), *light, planned("kernel", KernelLog(fault=("^NVRM: Xid",)))],
        CheckContext(root=tmp_path),
    )
    os.close(log)

    found = {each.name: each.finding.status for each in results}
    assert found["xid"] is found["kernel"] is Status.NODE_FAULT


def planned(name: str, check: Check) -> Planned:
    return Planned(
        name=name,
        check=check,
        time_limit_s=30.0,
        severity=Status.NODE_FAULT,
        shadow=False,
        contexts=("prolog", "retest"),
    )


def test_a_gpu_that_a_job_could_not_use_is_measured_again_by_what_looks_at_gpus() -> None:
    looks_at_gpus: list[Check] = [Gpu(count=8), Xid(), Dcgm(), Command(argv=("/bin/true",))]
    checks = [planned(type(each).__name__, each) for each in [*looks_at_gpus, Load()]]
    found = confirming(checks, "device", "n1")
    assert [each.check for each in found] == looks_at_gpus


class Odd(Check, frozen=True, kw_only=True):
    """A check of another package, which may do anything."""

    def measure(self, machine: CheckContext) -> Finding:
        if machine.context == "epilog":
            raise NotApplicable("no tape robot here")
        if machine.context == "prolog":
            raise KeyError("tape")
        return passed("it runs", tapes=math.nan, robots=1)


def test_what_a_check_raises_or_measures_without_sense_does_no_harm() -> None:
    found = {
        context: run_checks([planned("odd", Odd())], CheckContext(context=context))[0].finding
        for context in ("epilog", "prolog", "healthcheck")
    }
    assert found["epilog"].status is Status.NOT_APPLICABLE
    assert found["prolog"].text == "could not be measured: 'tape'"
    assert found["healthcheck"].figures == {"robots": 1}
