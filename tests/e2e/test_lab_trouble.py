# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a check, the job ends right: nothing lost, left behind or done twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab.installed_site import Site, acts, eventually, levels

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]

BAD = "n3"
DONE = ["--wrap", "echo the script ran >> ran"]
# States of a check, by the record that begins them.
LAUNCHING, MEASURING = "agents_launched", "round_started"


def ran(site: Site) -> int:
    """How often the script has run."""
    return site.read("ran").count("the script ran")


@pytest.fixture(autouse=True)
def forget_runs(site: Site) -> None:
    (site.lab.home("alice") / "ran").unlink(missing_ok=True)


# --- scancel -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [LAUNCHING, MEASURING])
def test_a_job_cancelled_during_the_check_leaves_nothing(site: Site, state: str) -> None:
    site.lab.fault.drop(BAD)
    number = site.submit("-N4", *DONE)
    site.wait_record(number, state)
    site.lab.run(["scancel", str(number)], user="alice")
    job = site.ended(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    site.assert_nothing_left()
    assert (site.drained(), ran(site)) == ({}, 0)
    assert acts(site.records(number)) == []

    def stopped() -> bool:
        """A master that was killed before it could say so is given up once it is silent."""
        return all(each["state"] == "stopped" for each in site.report(number)["runs"])

    eventually(site, stopped, "a report of what has stopped", 150)
    (attempt,) = site.report(number)["runs"]
    # The second, where Slurm does not say at once what ended the master.
    told = ("the job was cancelled", "stopped by SIGTERM", "the master stopped")
    assert attempt["note"].startswith(tuple(f"{each} before " for each in told)), attempt["note"]
    assert set(levels(attempt).values()) == {None}


# --- slurmctld goes away -----------------------------------------------------------------------


def restart(site: Site, number: int) -> None:
    site.lab.restart_slurmctld()


def kill_until_the_verdict(site: Site, number: int) -> None:
    """Kill slurmctld (SIGKILL) once it has saved the job: Slurm forgets what it has not saved."""
    began_s = site.wait_record(number, "run_started")["time_s"]
    saved = site.lab.paths.root / "state" / "job_state"
    site.lab.wait_until(lambda: saved.stat().st_mtime, lambda s: s > began_s, "a saved state")
    site.lab.kill_slurmctld()
    site.wait_record(number, "verdict_reached")
    site.lab.start_slurmctld()


@pytest.mark.parametrize("trouble", [restart, kill_until_the_verdict])
def test_a_check_outlives_its_slurmctld(site: Site, trouble: Callable[[Site, int], None]) -> None:
    site.lab.fault.drop(BAD)
    number = site.submit("-N4", *DONE)
    site.wait_record(number, MEASURING)
    trouble(site, number)
    job = site.ended(number)
    assert (job["JobState"], job["Restarts"], job["ExcNodeList"]) == ("COMPLETED", "1", BAD)
    assert ran(site) == 1
    site.assert_nothing_left()


# --- what the check needs is missing or broken -------------------------------------------------


def assert_ran_unchecked(site: Site, number: int, *said: str) -> None:
    """The job ran to its end on its first attempt, and its output says why it was not checked."""
    job = site.ended(number)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0")
    output = site.lab.job_output(number)
    assert all(words in output for words in said), output
    assert ran(site) == 1
    site.assert_nothing_left()


def test_a_job_runs_where_srun_is_missing(site: Site) -> None:
    tools = site.directory("tools")
    link = f'for each in /usr/bin/* /bin/*; do ln -sf "$each" {tools}/; done; rm {tools}/srun'
    site.lab.run(["sh", "-c", link])
    number = site.submit("-N2", *DONE, env={"PATH": tools})
    assert_ran_unchecked(site, number, "srun not found on PATH")


@pytest.mark.parametrize("text", ["echo no luck >&2; exit 1", "exec sleep 1000"])
def test_a_job_runs_where_srun_fails_or_hangs(site: Site, text: str) -> None:
    site.directory("tools/bin")
    site.script("tools/bin/srun", f"#!/bin/sh\n{text}\n")
    path = f"{site.lab.home('alice')}/tools/bin:/usr/bin:/bin"
    number = site.submit("-N2", *DONE, env={"PATH": path})
    assert_ran_unchecked(site, number, "n[1-2]")
    (attempt,) = site.report(number)["runs"]
    assert set(levels(attempt).values()) == {"inconclusive"}


def test_a_journal_that_other_nodes_do_not_see_is_named_with_them(site: Site) -> None:
    # Every node has a /tmp of its own.
    number = site.submit("-N3", "--journal=/tmp/journal", *DONE)
    assert_ran_unchecked(site, number, "n[2-3]", "--journal")
