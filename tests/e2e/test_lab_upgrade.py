# SPDX-License-Identifier: Apache-2.0
"""Jobs and hooks of the release before the move, which is replaced by today's under them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurm_health.records.nodeset import expand
from tests.e2e.hooks_support import (
    FLAG,
    HIDDEN,
    SLURM_CONF,
    HookedSite,
    install,
)
from tests.lab import Lab, played_nodes
from tests.lab.commands import Result
from tests.lab.installed_site import Report, accused, eventually, kinds
from tests.support import installations
from tests.support.installations import Installation

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

# Its device is not there before `open` is; every other node's worker is ready then.
LATE = "n3"
LATE_WORKER = """\
#!/bin/sh
case "$(uname -n) $*" in
{late}*worker.py*) until [ -e {opened} ]; do sleep 0.1; done ;;
esac
exec {python} "$@"
"""
TRAINS = """\
from pathlib import Path
from time import sleep
from slurm_health import heartbeat
step = 0
while not Path("go").exists():
    heartbeat.step(step := step + 1)
    sleep(0.5)
"""
FAILS_ONCE = """\
#!/bin/bash
mkdir started 2>/dev/null || exec echo well on $SLURM_JOB_NODELIST
srun {python} train.py
echo RuntimeError: lost >&2
exit 3
"""


@dataclass(frozen=True, kw_only=True)
class Wheels:
    """Of the release before, with its source, and of today."""

    source: Path
    before: Path
    today: Path


class ReplacedSite(HookedSite):
    """A cluster on which slurm-health is installed from wheels."""

    def __init__(self, lab: Lab, directory: Path, installed: Installation, wheels: Wheels) -> None:
        super().__init__(lab, directory)
        self.installation = installed
        self.wheels = wheels

    def health(self, *words: str, user: str = "alice", **options: Any) -> Result:
        command = [str(self.installation.command), *words]
        return self.lab.run(command, user=user, check=False, **options)

    def replace(self) -> None:
        """Install today's release, as a site does under running jobs."""
        self.installation.install(self.wheels.today)


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplacedSite]:
    base = tmp_path_factory.mktemp("upgrade")
    base.chmod(0o755)
    source = base / "before"
    if reason := installations.source_of(installations.BEFORE_QUARTERS, source):
        pytest.skip(reason)
    wheels = Wheels(
        source=source,
        before=installations.wheel(base / "wheel-before", source),
        today=installations.wheel(base / "wheel-today"),
    )
    installed = Installation(base / "environment")
    hooks = base / "hooks"
    hooks.mkdir()
    install(hooks, source, installed.python)
    # Of six nodes: what the release before releases a job from leaves it enough others. On a node
    # that had the attempt before, Slurm 22.05 may leave the prolog out (Client.forgets_late).
    with Lab.start(
        nodes=6, slurm_conf_extra=SLURM_CONF.format(directory=hooks), visible=[base]
    ) as lab:
        yield ReplacedSite(lab, hooks, installed, wheels)


@pytest.fixture
def site(module_site: ReplacedSite) -> Iterator[ReplacedSite]:
    """The module's cluster, with the release before installed."""
    module_site.installation.install(module_site.wheels.before)
    module_site.configure()
    played_nodes.play(module_site)
    yield module_site
    module_site.lab.reset()


def well(site: ReplacedSite, job: int, deadline_s: float = 150.0) -> Report:
    """Wait for the end of a job, which must be a good one; its report."""
    record = site.ended(job, deadline_s)
    output = site.lab.job_output(job)
    assert record["JobState"] == "COMPLETED", output
    assert "Traceback" not in output
    assert "No module named" not in output
    return site.report(job)


def ran_without(site: ReplacedSite, job: int, node: str) -> None:
    """Its second attempt ran, or a third if Slurm ended that before its script; and not there."""
    assert re.search(r"attempt [12] ran on ", site.lab.job_output(job))
    assert node not in expand(site.lab.job(job)["NodeList"])


def nothing_left(site: ReplacedSite) -> None:
    """Wait until no job is in the queue and no process on a node; the hooks' state stays."""
    eventually(site, lambda: not site.jobs() and not site.leftovers(), "nothing running")


# --- while it is checked -----------------------------------------------------------------------


@pytest.mark.heavy
def test_a_job_whose_workers_are_about_to_begin_is_checked_to_its_end(site: ReplacedSite) -> None:
    opened = site.lab.home("alice") / "opened"
    text = LATE_WORKER.format(late=LATE, opened=opened, python=site.installation.python)
    python = site.script("late/python3", text)
    job = site.submit("-N4", f"--python={python}", "--wrap", "echo ran on $SLURM_JOB_NODELIST")
    for node in ("n1", "n2", "n4"):
        site.wait_record(job, "workers_ready", writer=node)

    site.replace()
    opened.touch()

    report = well(site, job)
    assert "ran on n[1-4]" in site.lab.job_output(job)
    assert accused(report["runs"][-1]) == {}
    for node in ("n1", "n2", "n3", "n4"):
        written = kinds(site.records(job, writer=node))
        assert written["workers_failed"] == 0
        # Their workers began with the release before, and were started again where they had to be.
        assert any(
            each["kind"] == "node_reported" and each["outcome"] == "measured"
            for each in site.records(job, writer=node)
        ), site.table(job)


@pytest.mark.heavy
def test_a_job_that_is_in_its_rounds_leaves_its_bad_node_and_runs_elsewhere(
    site: ReplacedSite,
) -> None:
    played_nodes.play(site, n3=played_nodes.FAULTY)
    slowly = {"FAKE_WORKER_ROUND_S": "3"}
    job = played_nodes.submit(site, "-N4", env=slowly)
    site.wait_record(job, "round_started")

    site.replace()

    well(site, job)
    assert site.lab.job(job)["ExcNodeList"] == "n3"
    ran_without(site, job, "n3")
    assert site.drained() == {}
    nothing_left(site)


# --- while its script runs ---------------------------------------------------------------------


@pytest.mark.slow  # a minute until there are monitors
def test_a_script_that_runs_is_watched_and_started_again_after_its_failure(
    site: ReplacedSite,
) -> None:
    site.script("train.py", TRAINS)
    script = site.script("train.sh", FAILS_ONCE.format(python=site.installation.python))
    words = ("-N3", "--spares=1", "--keep-spares", "--max-restarts=1", script)
    job = played_nodes.submit(site, *words, script="")
    site.wait_record(job, "script_started", writer="supervisor")

    site.replace()

    # The process that waits beside the script began with the release before.
    today = "slurm_health.training.monitor.node"
    eventually(site, lambda: len(site.processes_with(today)) >= 3, "three monitors", 150)
    (site.lab.home("alice") / "go").touch()
    well(site, job)
    written = kinds(site.records(job, writer="supervisor"))
    assert (written["script_started"], written["script_ended"]) == (2, 2)
    assert kinds(site.records(job, writer="post-mortem"))["diagnosed"] == 1
    assert "well on n" in site.lab.job_output(job)
    nothing_left(site)


# --- between two attempts ----------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_job_that_waits_to_be_released_elsewhere_is_released(site: ReplacedSite) -> None:
    played_nodes.play(site, n3=played_nodes.FAULTY)
    job = played_nodes.submit(site, "-N4")
    site.wait_record(job, "run_started")
    site.lab.run(["scontrol", "update", "PartitionName=main", "State=DOWN"])
    try:
        eventually(site, lambda: site.lab.job(job)["JobState"] == "PENDING", "a requeue", 120)
        site.replace()
    finally:
        site.lab.run(["scontrol", "update", "PartitionName=main", "State=UP"])

    # Where a node waits in vain for its prolog (Client.forgets_late) Slurm requeues the job, which
    # waits for another two minutes and then runs elsewhere.
    well(site, job, deadline_s=330)
    ran_without(site, job, "n3")
    assert len(site.report(job)["runs"]) == 2
    nothing_left(site)


# --- shims that are installed ------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("hook", ["prolog", "healthcheck"])
def test_a_shim_of_before_still_drains_a_broken_node(site: ReplacedSite, hook: str) -> None:
    site.replace()
    site.on("n2", "touch", FLAG)

    if hook == "healthcheck":
        site.health_check("n2")
    else:
        site.lab.sbatch("#!/bin/sh\ntrue", "-wn2")

    eventually(site, lambda: site.out_of_pool().get("n2"), "the drain of n2")
    assert site.out_of_pool()["n2"].startswith("shealth:flag ")


@pytest.mark.heavy
def test_an_epilog_of_before_still_drains_a_node_that_its_own_job_accuses(
    site: ReplacedSite,
) -> None:
    site.replace()
    site.on("n1", "touch", HIDDEN)

    site.accuse("n1")

    eventually(site, lambda: site.out_of_pool().get("n1"), "the drain of n1")
    assert site.out_of_pool()["n1"].startswith("shealth:deep ")
