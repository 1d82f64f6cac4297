# SPDX-License-Identifier: Apache-2.0
"""A job leaves a slow node, or goes on without its spares, where that is cheap."""

import re
from collections.abc import Iterator

import pytest

from slurm_health.records.nodeset import expand
from tests.lab import Lab
from tests.lab.installed_site import DEADLINE_S, Site
from tests.lab.played_nodes import FAULTY, SLOW, UNREACHABLE, play, submit
from tests.support.rows import rows

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
]

# Slurm only counts them: any file of a device will do.
GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
NODES_WITH_GPUS = "GresTypes=gpu\nNodeName=DEFAULT Gres=gpu:2\n"


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """A cluster of six nodes with two GPUs each, as far as Slurm can tell."""
    with Lab.start(nodes=6, slurm_conf_extra=NODES_WITH_GPUS, gres_conf=GPUS) as lab:
        lab.run(["scontrol", "update", "NodeName=n[1-4]", "Features=fast,large"])
        lab.run(["scontrol", "update", "NodeName=n6", "Features=fast"])
        yield Site(lab)


# --- where other nodes are free ------------------------------------------------------------------


@pytest.mark.heavy
def test_a_job_moves_where_its_features_and_gpus_are(site: Site) -> None:
    play(site, n3=SLOW)
    bobs = site.lab.sbatch("#!/bin/sh\nexec sleep 600\n", "-wn5", "--gres=gpu:1", user="bob")
    site.lab.wait_job(bobs, {"RUNNING"})
    job = submit(site, "-N4", "--time=5", "-Cfast", "--gres=gpu:2")
    ended = site.ended(job)
    output = site.lab.job_output(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), output
    assert expand(ended["NodeList"]) == ("n1", "n2", "n4", "n6")
    assert "continuing with" not in output


# --- where none is -------------------------------------------------------------------------------


@pytest.mark.slow
def test_nodes_that_others_have_reserved_for_soon_are_not_free(site: Site) -> None:
    """The job runs where it is, and says why and what that may cost."""
    play(site, n3=SLOW)
    what = ["reservationname=theirs", "starttime=now+10minutes", "duration=60", "users=bob"]
    site.lab.run(["scontrol", "create", *what, "nodes=n[5-6]"])
    try:
        job = submit(site, "-N4", "--time=30")
        ended, output = site.ended(job), site.lab.job_output(job)
    finally:
        site.lab.run(["scontrol", "delete", "reservationname=theirs"])
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), output
    assert ended["NodeList"] == "n[1-4]"
    assert "it would have to wait for 1 other node: none is free" in output
    assert re.search(r"each step may take up to \d+\.\d times as long \(compute\)", output)


# --- spares ---------------------------------------------------------------------------------------


COUNTS = """\
#!/bin/sh
echo "nodes $SLURM_NNODES $SLURM_JOB_NUM_NODES $SLURM_JOB_NODELIST"
echo "tasks $SLURM_NTASKS $SLURM_TASKS_PER_NODE attempt ${SLURM_RESTART_COUNT:-0}"
echo "ran on $(srun hostname | sort | xargs)"
"""


@pytest.mark.heavy
@rows
def test_a_bad_node_is_left_behind_without_a_requeue(
    site: Site, bad: str, nodes: tuple[str, ...], kept: str
) -> None:
    script = site.script("train.sh", COUNTS)
    play(site, **{bad: UNREACHABLE})
    job = submit(site, *nodes, "-x", "n[5-6]", script, script="")
    record, output = site.ended(job), site.read(f"slurm-{job}.out")
    assert record["JobState"] == "COMPLETED", output
    assert (record["NodeList"], record["Restarts"]) == (kept, "0")
    assert f"ran on {' '.join(expand(kept))}" in output
    assert f"gave back {bad}" in site.table(job)
    assert site.drained() == {}


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
    ended = site.ended(job)
    output = site.lab.job_output(job)
    assert ended["JobState"] == "COMPLETED", output
    # Two steps in a row: srun may have to wait for the first to be cleaned up, and says so.
    noise = ("slurm-health:", "srun: Job ", "srun: Step created")
    lines = [line for line in output.splitlines() if not line.startswith(noise)]
    assert lines[0] == f"on {ended['NodeList']}"
    return lines[1:], ended["NodeList"]


@pytest.mark.slow
@rows
def test_a_job_that_gave_nodes_back_is_as_one_submitted_for_those_it_kept(
    site: Site, options: str
) -> None:
    play(site)
    script = site.script("seen.sh", SEEN)
    words = [f"-N{WANTED}", *options.split()]
    shrunk, nodes = told(site, submit(site, *words, "--spares=1", script, script=""))
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
    play(site, n5=FAULTY)
    number = submit(site, "-N3", "--array=1-2", script, script="")
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
