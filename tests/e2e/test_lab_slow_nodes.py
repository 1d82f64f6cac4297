# SPDX-License-Identifier: Apache-2.0
"""A slow node is left where that costs seconds; otherwise the job runs, and says what it costs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from slurm_health.records.nodeset import expand
from tests.lab import Lab
from tests.lab.installed_site import DEADLINE_S, Site
from tests.lab.played_nodes import FAULTY, RAN, SLOW, play, submit

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),
]

# Slurm only counts them: any file of a device will do.
GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
NODES_WITH_GPUS = "GresTypes=gpu\nNodeName=DEFAULT Gres=gpu:2\n"
SLEEPS = "#!/bin/sh\nexec sleep 600\n"
NO_OTHERS = "Slurm promises it no other nodes: allocation failure"
STAYED = re.compile(r"each step may take up to \d+\.\d times as long \(compute\)")


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """A cluster of six nodes with two GPUs each, as far as Slurm can tell."""
    with Lab.start(nodes=6, slurm_conf_extra=NODES_WITH_GPUS, gres_conf=GPUS) as lab:
        lab.run(["scontrol", "update", "NodeName=n[1-4]", "Features=fast,large"])
        lab.run(["scontrol", "update", "NodeName=n6", "Features=fast"])
        yield Site(lab)


def update(site: Site, *words: str) -> None:
    site.lab.run(["scontrol", "update", *words])


def occupy(site: Site, nodes: str, *options: str) -> int:
    """Let another user's job run on some nodes for ten minutes."""
    count = len(expand(nodes))
    words = (f"-N{count}", f"-w{nodes}", "--time=10", *options)
    job = site.lab.sbatch(SLEEPS, *words, user="bob")
    site.lab.wait_job(job, {"RUNNING"})
    return job


def assert_stayed(site: Site, job: int | str, nodes: str, why: str) -> None:
    """The job ran where it was, and said why and what that may cost."""
    ended = site.ended(job)
    output = site.lab.job_output(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), output
    assert ended["NodeList"] == nodes
    assert re.search(why, output), output
    assert STAYED.search(output)
    assert site.drained().keys() <= {"n5", "n6"}


def assert_moved(site: Site, job: int, nodes: int, *, off: str) -> None:
    """The job was requeued once, and ran on so many nodes, none of them of those."""
    ended = site.ended(job)
    output = site.lab.job_output(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), output
    assert len(expand(ended["NodeList"])) == nodes
    assert not {*expand(ended["NodeList"])} & {*expand(off)}
    assert "continuing with" not in output


# --- where other nodes are free ------------------------------------------------------------------


def test_a_job_on_a_slow_node_moves_to_an_idle_one(site: Site) -> None:
    play(site, n3=SLOW)
    site.forget_calls()
    assert_moved(site, submit(site, "-N4", "--time=5"), 4, off="n3")
    assert site.calls()["REQUEST_JOB_WILL_RUN"] == 1


@pytest.mark.heavy
def test_a_job_whose_batch_host_is_slow_moves_to_the_nodes_that_it_has_beside(site: Site) -> None:
    play(site, n1=SLOW)
    assert_moved(site, submit(site, "-N5", "--spares=1", "--time=5"), 5, off="n1")


@pytest.mark.heavy
def test_of_a_slow_and_a_faulty_node_both_are_left_where_others_are_free(site: Site) -> None:
    play(site, n2=SLOW, n3=FAULTY)
    assert_moved(site, submit(site, "-N4", "--time=5"), 4, off="n[2-3]")


@pytest.mark.heavy
def test_a_job_moves_where_its_features_and_gpus_are(site: Site) -> None:
    play(site, n3=SLOW)
    occupy(site, "n5", "--gres=gpu:1")
    job = submit(site, "-N4", "--time=5", "-Cfast", "--gres=gpu:2")
    assert_moved(site, job, 4, off="n[3,5]")


# --- where none is -------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_job_on_all_nodes_of_its_partition_runs_on_the_slow_one(site: Site) -> None:
    play(site, n3=SLOW)
    job = submit(site, "-N6")
    assert_stayed(site, job, "n[1-6]", "partition main has 5 nodes without n3")
    assert "continuing with n3 anyway" in " ".join(site.table(job).split())


def test_nodes_that_are_drained_are_no_place_to_go_to(site: Site) -> None:
    play(site, n3=SLOW)
    update(site, "NodeName=n[5-6]", "State=DRAIN", "Reason=somebody's")
    job = submit(site, "-N4", "--time=5")
    assert_stayed(site, job, "n[1-4]", NO_OTHERS)


@pytest.mark.heavy
@pytest.mark.parametrize("start", ["now", "now+10minutes"])
def test_nodes_that_are_reserved_for_others_are_none_either(site: Site, start: str) -> None:
    play(site, n3=SLOW)
    what = ["reservationname=theirs", f"starttime={start}", "duration=60", "users=bob"]
    site.lab.run(["scontrol", "create", *what, "nodes=n[5-6]"])
    try:
        job = submit(site, "-N4", "--time=30")
        assert_stayed(site, job, "n[1-4]", f"{NO_OTHERS}|wait for 1 other node for up to")
    finally:
        site.lab.run(["scontrol", "delete", "reservationname=theirs"])


@pytest.mark.heavy
def test_nodes_without_the_feature_are_none(site: Site) -> None:
    play(site, n3=SLOW)
    job = submit(site, "-N4", "--time=5", "-Clarge")
    assert_stayed(site, job, "n[1-4]", "has 3 nodes for --constraint=large without n3, and the job")


@pytest.mark.heavy
def test_nodes_whose_gpus_are_in_use_are_none(site: Site) -> None:
    play(site, n3=SLOW)
    occupy(site, "n[5-6]", "--gres=gpu:1")
    job = submit(site, "-N4", "--time=5", "--gres=gpu:2")
    assert_stayed(site, job, "n[1-4]", "it would have to wait for 1 other node for up to")


def test_several_slow_nodes_are_left_for_as_many_idle_ones_or_not_at_all(site: Site) -> None:
    play(site, n2=SLOW, n3=SLOW)
    occupy(site, "n6")
    job = submit(site, "-N4", "--time=5")
    assert_stayed(site, job, "n[1-4]", "it would have to wait for 2 other nodes for up to")
    assert "continuing with n[2-3] anyway" in site.lab.job_output(job)


@pytest.mark.heavy
def test_a_job_that_waits_for_nodes_would_be_given_those_that_are_left(site: Site) -> None:
    play(site, n3=SLOW)
    job = submit(site, "-N4", "--time=5")
    waiting = site.lab.sbatch(SLEEPS, "-N6", "--time=10", user="bob")
    assert_stayed(site, job, "n[1-4]", f"job {waiting} waits for nodes of partition main")


@pytest.mark.heavy
def test_a_task_of_an_array_does_not_make_room_for_the_next(site: Site) -> None:
    play(site, n3=SLOW)
    job = submit(site, "-N4", "--time=5", "--array=1-2%1", "--output=%A_%a")
    for task in (1, 2):
        ended = site.ended(f"{job}_{task}")
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0" if task == 1 else "1")
    assert re.search(rf"job {job}_\S+ waits for nodes", site.lab.job_output(f"{job}_1"))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--nodelist=n[1-4]"], "it asks for n3 by name"),
        (["--no-requeue"], "it may not be requeued"),
        (["--max-requeues=0"], "the limit is 0"),
        (["--max-requeues=0", "--at-requeue-limit=hold"], "the limit is 0"),
        (["--contiguous"], "next to each other"),
    ],
)
def test_a_job_that_cannot_leave_a_slow_node_runs_on_it(
    site: Site, words: list[str], why: str
) -> None:
    play(site, n3=SLOW)
    assert_stayed(site, submit(site, "-N4", "--time=5", *words), "n[1-4]", why)


@pytest.mark.heavy
def test_of_a_slow_and_a_faulty_node_only_the_faulty_one_is_left_for_the_only_idle_one(
    site: Site,
) -> None:
    play(site, n2=SLOW, n3=FAULTY)
    occupy(site, "n6")
    job = submit(site, "-N4", "--time=5")
    ended = site.ended(job)
    output = site.lab.job_output(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), output
    assert (ended["NodeList"], ended["ExcNodeList"]) == ("n[1-2,4-5]", "n3")  # n6 is in use
    assert "continuing with n2 anyway" in output


# --- spares and smaller jobs ---------------------------------------------------------------------


@pytest.mark.heavy
def test_of_two_slow_nodes_a_spare_takes_the_place_of_one(site: Site) -> None:
    play(site, n2=SLOW, n3=SLOW)
    job = submit(site, "-N5", "--spares=1")
    ended = site.ended(job)
    output = site.lab.job_output(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), output
    assert len(expand(ended["NodeList"])) == 5
    assert {"n1", "n4", "n5", "n6"} < {*expand(ended["NodeList"])}
    assert STAYED.search(output)


@pytest.mark.heavy
def test_a_spare_takes_the_place_of_a_faulty_node_and_a_slow_one_stays(site: Site) -> None:
    play(site, n2=SLOW, n3=FAULTY)
    job = submit(site, "-N5", "--spares=1")
    ended = site.ended(job)
    output = site.lab.job_output(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), output
    assert ended["NodeList"] == "n[1-2,4-6]"
    assert STAYED.search(output)


@pytest.mark.heavy
@pytest.mark.parametrize("words", [["-N3-4"], ["-N4", "--min-nodes=3"]], ids=["range", "min-nodes"])
def test_a_job_that_makes_do_with_fewer_nodes_does_not_wait_for_one_that_others_use(
    site: Site, words: list[str]
) -> None:
    # The batch host cannot be given back, so a requeue it is.
    play(site, n1=FAULTY)
    others = occupy(site, "n[5-6]")
    job = submit(site, *words, "--time=5", "--ntasks-per-node=2", script=f"{RAN}; srun hostname")
    ended = site.ended(job, DEADLINE_S)
    output = site.lab.job_output(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), output
    assert ended["NodeList"] == "n[2-4]"
    assert [output.splitlines().count(node) for node in ("n2", "n3", "n4")] == [2, 2, 2]
    assert site.lab.job(others)["JobState"] == "RUNNING"


@pytest.mark.heavy
def test_a_job_that_keeps_its_size_waits_for_a_node_that_others_use(site: Site) -> None:
    play(site, n3=SLOW)
    others = occupy(site, "n[5-6]")
    job = submit(site, "-N4", "--min-nodes=3", "--time=5", "--on-straggler=requeue")
    site.lab.wait_until(
        lambda: site.lab.job(job),
        lambda seen: (seen["JobState"], seen["Reason"]) == ("PENDING", "Resources"),
        "the job waiting for other nodes",
        DEADLINE_S,
    )
    site.lab.run(["scancel", str(others)])
    assert_moved(site, job, 4, off="n3")
