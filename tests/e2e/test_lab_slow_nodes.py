# SPDX-License-Identifier: Apache-2.0
"""A job leaves a slow node, or goes on without its spares, where that is cheap."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from slurm_health.records.nodeset import expand
from tests.lab import Lab, played_nodes
from tests.lab.installed_site import DEADLINE_S, Site
from tests.lab.played_nodes import FAULTY, SLOW, UNREACHABLE, play, submit

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
]

# Slurm only counts them: any file of a device will do.
GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
NODES_WITH_GPUS = "GresTypes=gpu\nNodeName=DEFAULT Gres=gpu:2\n"
SLEEPS = "#!/bin/sh\nexec sleep 600\n"
NO_OTHERS = "it would have to wait for 1 other node: none is free"
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


@pytest.mark.heavy
def test_a_job_on_a_slow_node_moves_to_an_idle_one(site: Site) -> None:
    play(site, n3=SLOW)
    assert_moved(site, submit(site, "-N4", "--time=5"), 4, off="n3")


@pytest.mark.heavy
def test_a_job_moves_where_its_features_and_gpus_are(site: Site) -> None:
    play(site, n3=SLOW)
    occupy(site, "n5", "--gres=gpu:1")
    job = submit(site, "-N4", "--time=5", "-Cfast", "--gres=gpu:2")
    assert_moved(site, job, 4, off="n[3,5]")


# --- where none is -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("start", ["now", "now+10minutes"])
def test_nodes_that_are_reserved_for_others_are_none_either(site: Site, start: str) -> None:
    play(site, n3=SLOW)
    what = ["reservationname=theirs", f"starttime={start}", "duration=60", "users=bob"]
    site.lab.run(["scontrol", "create", *what, "nodes=n[5-6]"])
    try:
        job = submit(site, "-N4", "--time=30")
        assert_stayed(site, job, "n[1-4]", NO_OTHERS)
    finally:
        site.lab.run(["scontrol", "delete", "reservationname=theirs"])


# --- spares ---------------------------------------------------------------------------------------


COUNTS = """\
#!/bin/sh
echo "nodes $SLURM_NNODES $SLURM_JOB_NUM_NODES $SLURM_JOB_NODELIST"
echo "tasks $SLURM_NTASKS $SLURM_TASKS_PER_NODE attempt ${SLURM_RESTART_COUNT:-0}"
echo "ran on $(srun hostname | sort | xargs)"
"""


@pytest.mark.heavy
def test_a_bad_node_is_left_behind_without_a_requeue(site: Site) -> None:
    script = site.script("train.sh", COUNTS)
    play(site, n3=UNREACHABLE)
    job = submit(site, "-N3", "--spares=1", "-x", "n[5-6]", script, script="")
    record = site.ended(job)
    assert record["JobState"] == "COMPLETED", site.read(f"slurm-{job}.out")
    assert record["NodeList"] == "n[1-2,4]"
    assert record["Restarts"] == "0"
    assert f"ran on {' '.join(expand(record['NodeList']))}" in site.read(f"slurm-{job}.out")
    assert "gave back n3" in site.table(job)
    assert site.drained() == {}


@pytest.mark.heavy
def test_a_job_that_makes_do_with_fewer_nodes_goes_on_smaller(site: Site) -> None:
    script = site.script("train.sh", COUNTS)
    play(site, n2=UNREACHABLE)
    job = submit(site, "--nodes=3-4", "-x", "n[5-6]", script, script="")
    record = site.ended(job)
    assert record["JobState"] == "COMPLETED", site.read(f"slurm-{job}.out")
    assert record["NodeList"] == "n[1,3-4]"
    assert record["Restarts"] == "0"


# --- spares beside sbatch's other options ---------------------------------------------------------


WANTED = 2
SEEN = """\
#!/bin/sh
echo "on $SLURM_JOB_NODELIST"
env | grep -E '^(SLURM|CUDA)' | grep -vE 'JOB_?ID=|SLUID=|TIME=|PID=|NODELIST=|TOPOLOGY' | sort
srun sh -c 'echo "step $SLURM_STEP_NUM_NODES $SLURM_STEP_NUM_TASKS gpus $CUDA_VISIBLE_DEVICES"' |
    sort
srun hostname | sort | uniq -c | sed 's/ n[0-9]$//'
"""


def told(site: Site, job: int) -> tuple[list[str], str]:
    """What the script of a job saw, and the nodes that it ran on."""
    ended = site.ended(job)
    output = site.lab.job_output(job)
    assert ended["JobState"] == "COMPLETED", output
    # Two steps in a row: srun may have to wait for the first to be cleaned up, and says so.
    noise = ("slurm-health:", "srun: Job ", "srun: Step created")
    lines = [line for line in output.splitlines() if not line.startswith(noise)]
    assert lines[0] == f"on {ended['NodeList']}"
    return lines[1:], ended["NodeList"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--gres=gpu:2",
        "--exclusive",
        "--ntasks-per-node=2",
        "--gpus-per-node=1 --ntasks-per-node=2",
        "--gpus-per-task=1 --ntasks-per-node=2",
        "--ntasks-per-gpu=1 --gpus-per-node=2 --mem-per-gpu=100 --cpus-per-gpu=1",
        "--gres=gpu:1 --exclusive --mem=500 --cpus-per-task=2",
    ],
)
def test_a_job_that_gave_nodes_back_is_as_one_submitted_for_those_it_kept(
    site: Site, options: str
) -> None:
    played_nodes.play(site)
    script = site.script("seen.sh", SEEN)
    words = [f"-N{WANTED}", *options.split()]
    shrunk, nodes = told(site, played_nodes.submit(site, *words, "--spares=1", script, script=""))
    plain = site.lab.run(
        ["sbatch", "--parsable", "--open-mode=append", *words, script], user="alice"
    ).stdout
    as_asked, _ = told(site, int(plain))
    assert len(expand(nodes)) == WANTED
    assert shrunk == as_asked


@pytest.mark.slow
def test_one_task_of_an_array_moves_and_the_others_run_on(site: Site) -> None:
    # The last task has the array's own number, which for Slurm's commands means all of them.
    text = "#!/bin/sh\necho $SLURM_ARRAY_TASK_ID ${SLURM_RESTART_COUNT:-0} >> ran\nexec ./wait.sh\n"
    waits = "#!/bin/bash\nexec 3<> <(:)\nuntil [ -e go ]; do read -rt 0.2 -u 3; done\nexit 0\n"
    site.script("wait.sh", waits)
    script = site.script("task.sh", text)
    played_nodes.play(site, n5=FAULTY)
    number = played_nodes.submit(site, "-N3", "--array=1-2", script, script="")
    site.lab.wait_until(
        lambda: site.lab.job(f"{number}_2"),
        lambda job: job["JobState"] == "PENDING" and job["ExcNodeList"] == "n5",
        "the second task waiting for other nodes",
        DEADLINE_S,
    )
    assert site.lab.job(f"{number}_1")["JobState"] == "RUNNING"
    site.script("go", "")
    first, second = (site.ended(f"{number}_{task}") for task in (1, 2))
    assert (first["JobState"], first["Restarts"]) == ("COMPLETED", "0")
    assert (second["JobState"], second["Restarts"]) == ("COMPLETED", "1")
    assert site.read("ran").splitlines() == ["1 0", "2 1"]
