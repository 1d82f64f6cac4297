# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a check, the job ends right: nothing lost, left behind or done twice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from slurm_health.preflight.master.master import SILENCE_S
from slurm_health.system.slurm.command import OWN_STEPS
from tests.lab.installed_site import Site, accused, acts, eventually, kinds, levels
from tests.lab.played_nodes import FAKE_WORKER, NEVER_READY, STUCK, command, play, submit

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


# --- srun is killed -------------------------------------------------------------------------------


def kill(pids: list[int]) -> None:
    """Kill (SIGKILL) processes, of which some may end because others have."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def sruns(site: Site) -> list[int]:
    """The srun of the agents, first, and the process that it leaves to clean up after it."""
    return sorted(site.processes_with(f"--job-name={OWN_STEPS}step"))


def agents(site: Site) -> list[int]:
    """Agents and workers, on all nodes."""
    return [*site.processes_with("agent"), *site.processes_with(str(FAKE_WORKER))]


@pytest.mark.parametrize(
    ("how", "count"),
    [(NEVER_READY, 1), (STUCK, 2)],
    ids=["srun while agents start", "srun and its helper in a round"],
)
def test_a_check_whose_srun_is_killed_starts_its_agents_again_and_accuses_nobody(
    site: Site, how: str, count: int
) -> None:
    play(site, **dict.fromkeys(("n1", "n2", "n3", "n4"), how))
    job = submit(site, "-N4", "-wn1,n2,n3,n4")
    site.wait_record(job, "round_started" if how == STUCK else "agents_launched")
    eventually(site, lambda: len(agents(site)) >= 8, "four agents with a worker each")
    kill(sruns(site)[:count])
    site.wait_record(job, "agents_lost")
    play(site)
    ended = site.ended(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0")
    assert "attempt ran on n[1-4]" in site.lab.job_output(job)
    (run,) = site.report(job)["runs"]
    assert accused(run) == {}
    records = site.records(job)
    assert kinds(records)["agents_launched"] == 2
    (lost,) = [each["reason"] for each in records if each["kind"] == "agents_lost"]
    assert "srun ended with killed by SIGKILL" in lost
    assert site.drained() == {}
    site.assert_nothing_left()


def test_agents_that_lost_their_master_and_their_srun_leave_within_the_silence_limit(
    site: Site,
) -> None:
    """The job goes on, so that Slurm has no reason to end them."""
    nodes = ("n1", "n2", "n3", "n4")
    play(site, **dict.fromkeys(nodes, STUCK))
    job = site.lab.sbatch(
        f"#!/bin/sh\n{command(site)} &\nsleep 600\n", "-N4", f"-w{','.join(nodes)}"
    )
    site.wait_record(job, "round_started")
    eventually(site, lambda: len(agents(site)) >= 8, "four agents with a worker each")
    kill([*site.processes_with("check"), *sruns(site)])
    eventually(site, lambda: not agents(site), "no agent and no worker", SILENCE_S + 30)
    assert site.lab.job(job)["JobState"] == "RUNNING"


# --- another user lays a journal ready ------------------------------------------------------------


# Lays the next jobs' journals ready, and orders a round with a probe of its own in each that a
# check adopts. A check that trusts one of them runs that probe as its own user.
ATTACK = """
import os, pathlib, sys, time
from slurm_health.records.record_codec import encode
from slurm_health.records.records import ProbeUsed, Rendezvous, RoundStarted
root, first = pathlib.Path(sys.argv[1]), int(sys.argv[2])
os.umask(0)
payload, trap = root / "payload.py", root / "trap"
payload.write_text(
    "import pathlib\\n"
    "def measure(context):\\n"
    f"    pathlib.Path({str(root / 'stolen')!r}).write_text('run')\\n"
    "    return []\\n"
)
def lay(directory):
    directory.mkdir(parents=True)
    for writer in ("master", "n1", "n2"):
        (directory / f"{writer}.jsonl").touch()
lay(root / "lab" / str(first) / "0")
lay(trap / "0")
(root / "lab" / str(first + 1)).symlink_to(trap)
(root / "lab" / str(first + 2)).mkdir()
(root / "lab" / str(first + 2) / "0").symlink_to(trap / "0")
print("laid", flush=True)
order = RoundStarted(
    round=99, name="round 99",
    groups=[["n1"], ["n2"]], rendezvous=[Rendezvous(address="", port=1)] * 2,
    deadline_s=60, probes=[ProbeUsed(name="payload", scope="solo", path=str(payload))],
)
while True:
    for master in [*root.glob("lab/*/0/master.jsonl"), trap / "0" / "master.jsonl"]:
        if master.stat().st_size:
            with open(master, "ab") as file:
                file.write(encode(order, entry_id="master:99", time_s=time.time()))
    time.sleep(0.5)
"""


@pytest.fixture
def root(site: Site) -> Iterator[str]:
    """A directory that the administrator has made for everybody's journals, as doctor says."""
    path = site.lab.paths.root / "journals"
    site.lab.run(["install", "-d", "-m", "1777", str(path), str(path / "lab")])
    yield str(path)
    site.lab.run(["rm", "-rf", str(path)])


@contextmanager
def attack(site: Site, root: str, first: int) -> Iterator[None]:
    """Let bob take the places of three jobs to come."""
    running = site.lab.popen([sys.executable, "-c", ATTACK, root, str(first)], user="bob")
    try:
        trap = site.lab.paths.root / "journals" / "lab" / str(first + 2) / "0"
        eventually(site, trap.is_symlink, "bob's directories")
        yield
    finally:
        running.kill()
        running.wait()


@pytest.mark.heavy
@pytest.mark.torch
def test_a_directory_that_another_user_laid_ready_is_passed_by_and_nothing_in_it_is_run(
    site: Site, root: str
) -> None:
    first = site.lab.sbatch("#!/bin/sh\n", user="bob") + 1
    with attack(site, root, first):
        jobs = [
            site.submit("-N2", "-wn1,n2", f"--journal={root}", "--wrap", "echo the script ran")
            for _ in range(3)
        ]
        assert jobs == [first, first + 1, first + 2]
        for job in jobs:
            assert site.ended(job)["JobState"] == "COMPLETED"
    for job in jobs:
        said = site.lab.job_output(job)
        assert "UNCHECKED" not in said
        assert said.endswith("the script ran\n")
        report = site.health("report", "--json", f"--journal={root}", str(job))
        (run,) = json.loads(report.stdout)["runs"]
        assert levels(run).keys() == {"n1", "n2"}
        assert accused(run) == {}
    assert not (site.lab.paths.root / "journals" / "stolen").exists()
    trap = site.lab.paths.root / "journals" / "trap" / "0"
    assert {each.stat().st_size for each in trap.iterdir()} == {0}
