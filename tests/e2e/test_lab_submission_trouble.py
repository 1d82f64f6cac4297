# SPDX-License-Identifier: Apache-2.0
"""What users ask for beside a check that may get in its way: right, or refused with what to do."""

import re
from collections.abc import Iterator

import pytest

from tests.lab import Lab, played_nodes
from tests.lab.installed_site import DEADLINE_S, Site, eventually
from tests.lab.played_nodes import FAULTY

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(400),  # a check takes seconds, on a machine that is busy a minute
]

PARTITIONS = """\
PartitionName=small Nodes=n[1-3] State=UP
PartitionName=capped Nodes=ALL MaxNodes=4 State=UP
PartitionName=large Nodes=ALL MinNodes=2 State=UP
PartitionName=short Nodes=ALL MaxTime=10 State=UP
EnforcePartLimits=ALL
"""
BAD = "n2"
RAN = '#!/bin/sh\necho "attempt ${SLURM_RESTART_COUNT:-0} ran on" $(srun hostname | sort)\n'


def submit_with_a_bad_node(site: Site, *words: str, user: str = "alice") -> int:
    played_nodes.play(site, user, n2=FAULTY)
    return played_nodes.submit(site, *words, user=user, script="")


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """A cluster whose partitions do not give everything to everybody."""
    with Lab.start(nodes=6, slurm_conf_extra=PARTITIONS) as lab:
        yield Site(lab)


@pytest.fixture
def reservation(site: Site) -> Iterator[str]:
    """A reservation of the whole cluster for both users: nothing starts outside of it."""
    words = "ReservationName=mine Users=alice,root StartTime=now Duration=60 Nodes=ALL"
    site.lab.run(["scontrol", "create", "reservation", *words.split()])
    yield "mine"
    site.lab.run(["sh", "-c", "scancel --state=PENDING; scancel --state=RUNNING; true"])
    site.lab.wait_until(site.jobs, lambda jobs: not jobs, "an empty queue", 40)
    site.lab.run(["scontrol", "delete", "ReservationName=mine"])


# --- fixed nodes, reservations, partitions -----------------------------------------------------


def assert_moved(site: Site, number: int) -> None:
    job = site.ended(number, DEADLINE_S)
    output = site.lab.job_output(number)
    assert (job["JobState"], job["Restarts"], job["ExcNodeList"]) == ("COMPLETED", "1", BAD)
    assert "attempt 1 ran on" in output
    assert BAD not in output.rpartition("ran on")[2].split()


@pytest.mark.heavy
def test_a_job_in_a_reservation_of_the_whole_cluster_moves_within_it(
    site: Site, reservation: str
) -> None:
    script = site.script("train.sh", RAN)
    assert_moved(site, submit_with_a_bad_node(site, "-N4", f"--reservation={reservation}", script))


@pytest.mark.parametrize(
    ("words", "user"),
    [
        # Its jobs end sooner than the helper may elsewhere.
        ("--partition=short --time=5", "alice"),
        ("--partition=short --time=5", "root"),
        pytest.param("--partition=large", "alice", marks=pytest.mark.heavy),
    ],
)
def test_a_job_in_a_partition_with_limits_moves_within_it(
    site: Site, words: str, user: str
) -> None:
    script = site.script("train.sh", RAN, user)
    assert_moved(site, submit_with_a_bad_node(site, "-N4", *words.split(), script, user=user))


# --- jobs that wait for others -----------------------------------------------------------------


# --- names -------------------------------------------------------------------------------------

ODD_NAME = "a 'b' \"c\" $(d)\nJobState=FAILED Requeue=0 e"
ODD_DIRECTORY = "dir 'x' \"y\"\nz $HOME"


@pytest.mark.heavy
def test_odd_names_of_jobs_scripts_and_directories_are_kept_when_the_job_moves(site: Site) -> None:
    where = site.directory(ODD_DIRECTORY)
    script = site.script(f"{ODD_DIRECTORY}/train 'it' \"now\"\n.sh", RAN)
    words = ["-N4", "--job-name", ODD_NAME, f"--chdir={where}", "--output=%j.out"]
    number = submit_with_a_bad_node(site, *words, script, "one 'two'\nthree")
    site.lab.wait_until(
        lambda: site.read(f"{ODD_DIRECTORY}/{number}.out"),
        lambda text: "attempt 1 ran on" in text,
        "the second attempt",
        DEADLINE_S,
    )
    site.assert_nothing_left()
    name = site.lab.run(["squeue", "-h", "-t", "all", "-j", str(number), "-o", "%j"]).stdout
    assert name.rstrip("\n") == ODD_NAME
    assert "--chdir" not in site.read(f"{ODD_DIRECTORY}/{number}.out")
    assert site.report(number)["runs"][1]["script"]["exit_code"] == 0


@pytest.mark.slow
def test_a_time_limit_too_short_for_the_check_is_named_and_the_script_does_not_run(
    site: Site,
) -> None:
    # Slurm counts in minutes: nodes that never answer keep the check busy for longer than one.
    played_nodes.play(site, **dict.fromkeys(site.lab.nodes, "stuck"))
    number = played_nodes.submit(site, "-N2", "--time=1", script="echo ran")
    job = site.ended(number, 3 * DEADLINE_S)
    assert (job["JobState"], job["Restarts"]) == ("TIMEOUT", "0")
    # Slurm 22.05 does not tell a job when its time is over.
    why = re.compile(r"ended the check, so the script did not run.*time.*--time")
    eventually(site, lambda: why.search(site.lab.job_output(number)), "a word about the limit")
    assert "ran" not in site.lab.job_output(number).splitlines()
    site.assert_nothing_left()
