# SPDX-License-Identifier: Apache-2.0
"""One contract for every reader: scontrol's recorded output, scontrol and pyslurm in the lab."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from slurm_health.node.rules import drain_note
from slurm_health.records.errors import SlurmCommandError, SlurmError, SlurmTimeoutError, UnknownJob
from slurm_health.system.slurm import command
from slurm_health.system.slurm.parsing import Job, JobId, Node
from slurm_health.system.slurm.reads import Reads, Run, mismatch, pyslurm_obstacle
from tests.lab import Lab
from tests.lab.errors import DeadlinePassed
from tests.support.rows import rows
from tests.support.supervised import write_executable

DATA = Path(__file__).parents[2] / "data" / "slurm-22.05"
NOTE = "slurm-health: job 3: network: allgather 95 GB/s, limit k=v"
LAB_LIMIT_S = 60.0
ODD_NAME = "a 'b\" c\nd Requeue=0 JobState=X"
ODD_COMMENT = "x\nJobId=99 y "


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A cluster: n1 is well, n2 drained with NOTE; one job holds both.

    Another was requeued once and is held without n2. All tasks of the array run, 2 is the last.
    The odd job is held, and its name and comment look like fields. `silence` makes the controller
    unreachable until it is called again.
    """

    reads: Reads
    running: int
    held: int
    array: int
    odd: int
    silence: Callable[[bool], None]


# --- the stages --------------------------------------------------------------------------------


def recorded(directory: Path) -> Stage:
    scontrol = directory / "scontrol"
    # From recorded files; what they do not have is refused in Slurm's words.
    text = f"#!/bin/sh\ncd '{DATA}'\n. ./scontrol.sh\n"
    write_executable(scontrol, text)
    says = "#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2; exit 1\n"
    environ = {"PATH": f"{directory}:/usr/bin:/bin"}

    def silence(silent: bool) -> None:
        write_executable(scontrol, says if silent else text)

    return Stage(
        reads=Reads(lambda argv: command.run(argv, environ=environ), pyslurm=False),
        running=4,
        held=5,
        array=18,
        odd=20,
        silence=silence,
    )


def run_in(lab: Lab) -> Run:
    """Return a way to run a command on the lab's login node, with the errors of a real one."""

    def run(argv: Sequence[str]) -> str:
        try:
            ran = lab.run(list(argv), check=False, deadline_s=LAB_LIMIT_S)
        except DeadlinePassed:
            raise SlurmTimeoutError(argv, LAB_LIMIT_S) from None
        if ran.returncode != 0:
            raise SlurmCommandError(argv, ran.returncode, ran.stderr)
        return ran.stdout

    return run


@pytest.fixture(scope="module")
def played() -> Iterator[tuple[Lab, Stage]]:
    # Slurm's own clients then say within seconds that nobody answers.
    with Lab.start(nodes=3, cpus=4, slurm_conf_extra="MessageTimeout=2") as lab:
        sleeps = "#!/bin/sh\nsleep 600\n"
        running = lab.sbatch(sleeps, "-wn1,n2", "-N2", "--mem=100M")
        array = lab.sbatch(sleeps, "-wn1", "--mem=100M", "--array=0-2")
        held = lab.sbatch(sleeps, "-wn3")
        jobs: list[int | str] = [running, held, *(f"{array}_{task}" for task in range(3))]
        for job in jobs:
            lab.wait_job(job, {"RUNNING"})
        lab.run(["scontrol", "requeuehold", str(held)])
        lab.wait_job(held, {"PENDING"})
        lab.run(["scontrol", "update", f"JobId={held}", "ExcNodeList=n2", "ReqNodeList="])
        named = [f"--job-name={ODD_NAME}", f"--comment={ODD_COMMENT}"]
        odd = lab.sbatch("#!/bin/sh\nhostname\n", "--hold", *named)
        lab.run(["scontrol", "update", "NodeName=n2", "State=DRAIN", f"Reason={NOTE}"])
        lab.restart_slurmctld()  # what it has saved outlives being killed
        lab.wait_node("n2", "MIXED")
        yield (
            lab,
            Stage(
                reads=Reads(run_in(lab), pyslurm=False),
                running=running,
                held=held,
                array=array,
                odd=odd,
                silence=lambda silent: lab.kill_slurmctld() if silent else lab.start_slurmctld(),
            ),
        )


@pytest.fixture(
    params=[
        "recorded",
        pytest.param("scontrol", marks=pytest.mark.lab),
        pytest.param("pyslurm", marks=pytest.mark.lab),
    ]
)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    if request.param == "recorded":
        return recorded(tmp_path)
    played: tuple[Lab, Stage] = request.getfixturevalue("played")
    return replace(played[1], reads=reader(played[0], request.param))


def reader(lab: Lab, name: str) -> Reads:
    """Return the lab's reader of that name, or skip and say why there is none."""
    run = run_in(lab)
    if name == "scontrol":
        return Reads(run, pyslurm=False)
    obstacle = pyslurm_obstacle(run)
    if obstacle:
        pytest.skip(f"{obstacle} (make test-pyslurm)")
    return Reads(run, pyslurm=True)


def task_of(job: Job) -> tuple[str, str]:
    """Return which task of which array a job is."""
    return job.value("ArrayJobId"), job.value("ArrayTaskId")


# --- the contract ------------------------------------------------------------------------------


def test_jobs_are_read_whatever_their_names_and_comments_look_like(stage: Stage) -> None:
    running, held, odd = map(stage.reads.job, (stage.running, stage.held, stage.odd))

    assert (running.job_id, running.states, running.reason) == (
        stage.running,
        frozenset({"RUNNING"}),
        "None",
    )
    assert (running.restarts, held.restarts, held.job_id) == (0, 1, stage.held)
    assert (running.nodes, running.excluded) == (("n1", "n2"), ())
    assert (held.nodes, held.excluded) == ((), ("n2",))
    assert [(job.pending, job.held) for job in (running, held, odd)] == [
        (False, False),
        (True, True),
        (True, True),
    ]
    assert odd.fields["JobId"] == str(stage.odd)
    wanted = {"Requeue": "1", "Partition": "main", "BatchFlag": "1", "Account": "(null)"}
    assert all({key: job.fields[key] for key in wanted} == wanted for job in (running, odd))


def test_a_task_of_an_array_is_told_from_the_others(stage: Stage) -> None:
    array = str(stage.array)

    job = stage.reads.job(f"{array}_1")

    assert (job.job_id, task_of(job)) == (f"{array}_1", (array, "1"))
    assert job.states == {"RUNNING"}
    assert task_of(stage.reads.job(int(job.fields["JobId"]))) == (array, "1")
    # The array's own id is that of the task which was split off last.
    assert task_of(stage.reads.job(stage.array)) == (array, "2")


def test_a_drained_node_has_its_note_and_a_well_one_none(stage: Stage) -> None:
    well, drained = (stage.reads.nodes([name])[name] for name in ("n1", "n2"))

    assert [each.name for each in (well, drained)] == ["n1", "n2"]
    assert (well.out_of_pool, well.drained, well.reason) == (False, False, "")
    assert (drained.out_of_pool, drained.drained, drained.releasable) == (True, True, True)
    assert drained.partitions == ("main",)
    assert drain_note.unsigned(drained.reason) == NOTE
    _, by, since = drain_note.signed(drained.reason)
    assert by == "root"
    assert since.startswith("20")
    some, every = stage.reads.nodes(["n1", "n2"]), stage.reads.nodes([])
    assert sorted(some) == ["n1", "n2"]
    assert set(some) <= set(every)
    assert every["n2"] == some["n2"]


def test_nodes_and_jobs_slurm_does_not_know_are_errors(stage: Stage) -> None:
    for names in (["n99"], ["n1", "n99"]):
        with pytest.raises(SlurmError, match="99"):
            stage.reads.nodes(names)
    for job_id in (999_999, "999999_1"):
        with pytest.raises(UnknownJob) as caught:
            stage.reads.job(job_id)
        assert caught.value.job_id == job_id


def test_a_controller_that_is_not_there_is_an_error(stage: Stage) -> None:
    stage.silence(True)
    try:
        with pytest.raises(SlurmError, match=r"Unable to contact slurm controller|did not end"):
            stage.reads.nodes([])
        with pytest.raises(SlurmError, match=r"Unable to contact slurm controller|did not end"):
            stage.reads.job(stage.running)
    finally:
        stage.silence(False)


# --- both readers side by side, on the real thing -----------------------------------------------

STATES = (
    ["State=DRAIN", "Reason=a note with k=v, Words=5 and [brackets] at@sign"],
    ["State=DOWN", "Reason=fan broken"],
    ["State=FAIL", "Reason=x"],
    ["State=NORESP"],
    ["Weight=7", "Reason=a note on a node in the pool"],
)


def alike(nodes: dict[str, Node]) -> dict[str, Node]:
    """Return nodes without what only scontrol tells: that jobs use a part of a node."""
    return {
        name: msgspec.structs.replace(node, state=node.state.replace("MIXED", "ALLOCATED"))
        for name, node in nodes.items()
    }


def agree(lab: Lab, ask: Callable[[Reads], dict[str, Node]]) -> None:
    """Wait until both readers say the same; states move on between two questions."""
    readers = [reader(lab, name) for name in ("scontrol", "pyslurm")]
    lab.wait_until(
        lambda: [alike(ask(each)) for each in readers],
        lambda seen: seen[0] == seen[1],
        "both readers saying the same",
    )


@pytest.mark.lab
@pytest.mark.parametrize("change", STATES, ids=lambda change: change[0])
def test_both_readers_say_the_same_of_nodes_in_every_state(
    played: tuple[Lab, Stage], change: list[str]
) -> None:
    lab, _ = played
    reader(lab, "pyslurm")
    lab.run(["scontrol", "update", "NodeName=n3", *change])
    try:
        agree(lab, lambda reads: reads.nodes([]))
        agree(lab, lambda reads: reads.nodes(["n3"]))
    finally:
        lab.run(["scontrol", "update", "NodeName=n3", "State=RESUME"], check=False)
        lab.run(["scontrol", "update", "NodeName=n3", "Reason="])
        lab.wait_node("n3", "IDLE")


@pytest.mark.lab
def test_both_readers_say_the_same_of_a_node_in_maintenance(played: tuple[Lab, Stage]) -> None:
    lab, _ = played
    scontrol, pyslurm = reader(lab, "scontrol"), reader(lab, "pyslurm")
    reservation = ["ReservationName=m", "starttime=now", "duration=60", "user=root"]
    lab.run(["scontrol", "create", *reservation, "flags=maint,ignore_jobs", "nodes=n3"])
    try:
        lab.wait_until(
            lambda: scontrol.nodes(["n3"])["n3"],
            lambda node: "MAINT" in node.state,
            "n3 in maintenance",
        )
        agree(lab, lambda reads: reads.nodes([]))
        assert pyslurm.nodes(["n3"])["n3"].out_of_pool
    finally:
        lab.run(["scontrol", "delete", "ReservationName=m"])
        lab.wait_node("n3", "IDLE")


# --- which reader is used, and what becomes of one that breaks ------------------------------------


@rows
def test_pyslurm_is_used_where_it_fits_and_was_tested(pyslurm: str, slurm: str, said: str) -> None:
    assert said in mismatch(pyslurm, slurm)
    assert bool(said) == bool(mismatch(pyslurm, slurm))


def test_a_pyslurm_that_ends_its_process_is_replaced_by_the_commands_for_good() -> None:
    asked: list[str] = []

    def run(argv: Sequence[str]) -> str:
        asked.append(argv[0])
        if argv[0] == "scontrol":
            return (DATA / "node-idle.txt").read_text()
        # What importing pyslurm does to a process where there is no slurm.conf.
        environ = {"PATH": "/usr/bin:/bin"}
        says = "echo 'fatal: Could not establish a configuration source' >&2; exit 1"
        return command.run(["sh", "-c", says], environ=environ)

    reads = Reads(run, pyslurm=True)

    assert reads.nodes(["n1"])["n1"].state == "IDLE"
    assert reads.nodes(["n1"])["n1"].state == "IDLE"
    assert asked == [sys.executable, "scontrol", "scontrol"]


def test_a_pyslurm_that_hangs_is_not_waited_for_twice() -> None:
    def run(argv: Sequence[str]) -> str:
        raise SlurmTimeoutError(argv, 8)

    with pytest.raises(SlurmTimeoutError):
        Reads(run, pyslurm=True).nodes([])


@pytest.mark.parametrize("job_id", [18, "18_1"], ids=["an id", "a task by name"])
def test_jobs_are_read_through_the_commands_though_pyslurm_is_used(job_id: JobId) -> None:
    ran: list[str] = []

    def run(argv: Sequence[str]) -> str:
        ran.append(argv[0])
        return (DATA / "job-array.txt").read_text()

    Reads(run, pyslurm=True).job(job_id)

    assert ran == ["scontrol"]


@pytest.mark.parametrize("answer", ["", "nonsense", "[1]", '[{"name": "n1"}]', "{}"])
def test_nonsense_from_pyslurms_process_is_an_error(answer: str) -> None:
    with pytest.raises(SlurmError, match="nonsense"):
        Reads(lambda _argv: answer, pyslurm=True).nodes([])
