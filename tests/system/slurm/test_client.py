# SPDX-License-Identifier: Apache-2.0
"""What Slurm's own output means, and what is asked of its commands."""

import os
import time
from pathlib import Path

import pytest

from slurm_health.records.errors import (
    SlurmCommandError,
    SlurmCommandMissing,
    SlurmError,
    SlurmTimeoutError,
    UnknownJob,
)
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.command import clean_environ, run
from slurm_health.system.slurm.last_word import became, in_output
from slurm_health.system.slurm.parsing import Job, Node, parse_pairs
from tests.support.fake_slurm import FakeSlurm
from tests.support.rows import rows
from tests.support.supervised import eventually, write_executable

DATA = Path(__file__).parents[2] / "data" / "slurm-22.05"


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.run_job(12, ["n1", "n2"])
    return slurm


@pytest.fixture
def client(slurm: FakeSlurm) -> Client:
    return Client(slurm.environ())


def client_that_prints(tmp_path: Path, recorded: str) -> Client:
    """Return a client whose scontrol prints a recorded file whatever it is asked."""
    write_executable(tmp_path / "scontrol", f"#!/bin/sh\ncat '{DATA / recorded}'\n")
    return Client({"PATH": f"{tmp_path}:{os.environ['PATH']}"})


# --- recorded output ---------------------------------------------------------------------------


@rows
def test_a_job_as_slurm_shows_it_is_understood(
    tmp_path: Path,
    recorded: str,
    states: frozenset[str],
    reason: str,
    pending: bool,
    held: bool,
    excluded: tuple[str, ...],
    nodes: tuple[str, ...],
) -> None:
    job = client_that_prints(tmp_path, recorded).job(4)

    assert (job.states, job.reason) == (states, reason)
    assert (job.pending, job.held) == (pending, held)
    assert (job.excluded, job.nodes) == (excluded, nodes)


@rows
def test_a_job_has_ended_where_slurm_says_nothing_else_of_it(states: str, ended: bool) -> None:
    job = Job(job_id=4, states=frozenset(states.split()), reason="", fields={})

    assert job.ended is ended


@rows
def test_a_node_that_somebody_took_out_of_use_is_told_by_its_state(state: str, out: bool) -> None:
    assert Node(name="n1", state=state).out_of_pool is out


@pytest.mark.parametrize(("uid", "may"), [(64030, True), (4242, False)])
def test_slurms_own_user_may_drain(tmp_path: Path, uid: int, may: bool) -> None:
    assert client_that_prints(tmp_path, "config.txt").may_drain(uid) is may


def test_a_reason_changes_no_state_and_a_node_list_that_cannot_be_read_is_never_no_nodes() -> None:
    line = "NodeName=n1 State=IDLE+DRAIN Reason=see State=IDLE [root@2026-11-20T18:00:00]"
    assert parse_pairs(line)["State"] == "IDLE+DRAIN"

    job = Job(job_id=1, states=frozenset(), reason="", fields={"ExcNodeList": "n[1-"})
    with pytest.raises(SlurmError, match="cannot be read"):
        _ = job.excluded


# --- commands ----------------------------------------------------------------------------------


@rows
def test_nodes_forget_an_attempt_late_before_2302_where_prologs_run_at_allocation(
    slurm: FakeSlurm, client: Client, release: str, flags: str, late: bool
) -> None:
    slurm.set(release=release, prolog_flags=flags)

    assert client.forgets_late() is late


@pytest.mark.parametrize(("level", "may"), [("Administrator", True), ("None", False)])
def test_root_and_an_administrator_of_the_accounting_may_drain(
    slurm: FakeSlurm, tmp_path: Path, level: str, may: bool
) -> None:
    slurm.set(accounting="accounting_storage/slurmdbd")
    write_executable(tmp_path / "sacctmgr", f"#!/bin/sh\necho '{level}'\n")
    environ = slurm.environ()

    client = Client({**environ, "PATH": f"{tmp_path}:{environ['PATH']}"})

    assert client.may_drain(0)
    assert slurm.calls() == []  # of root nobody is even asked
    assert client.may_drain(65534) is may


def test_comments_are_whole_and_drains_one_call(slurm: FakeSlurm, client: Client) -> None:
    assert client.comment(12) == ""
    slurm.change_job(12, Comment="mine: JobState=RUNNING  it's  odd")
    assert client.comment(12) == "mine: JobState=RUNNING  it's  odd"

    slurm.set(admin=True)
    reason = "slurm-health: job 12: a reason of words"
    client.drain(["n2", "n3"], reason)
    words = ["scontrol", "update", "NodeName=n[2-3]", "State=DRAIN", f"Reason={reason}"]
    assert slurm.calls("scontrol", "update") == [words]
    assert all(node.out_of_pool for node in client.nodes(["n2", "n3"]).values())


def test_a_submitted_jobs_id_is_read_beside_its_clusters_name(
    slurm: FakeSlurm, client: Client, tmp_path: Path
) -> None:
    arguments = ["--job-name=helper", f"--chdir={tmp_path}", "--exclude=n2"]

    job_id = client.submit(arguments, "#!/bin/sh\ntrue\n", slurm.environ())

    assert job_id == 13
    assert slurm.job(13)["script"] == "#!/bin/sh\ntrue\n"
    assert client.jobs_named("helper", 0) == [13]
    # Where the node cannot look up their owner.
    assert client.jobs_named("helper", 4_000_000_000) == [13]
    client.cancel(13)
    assert client.jobs_named("helper", 0) == []


def test_an_answer_that_is_no_job_id_is_an_error(tmp_path: Path) -> None:
    write_executable(tmp_path / "sbatch", "#!/bin/sh\ncat > /dev/null; echo Submitted\n")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    with pytest.raises(SlurmError, match="answered 'Submitted', expected a job id"):
        Client(environ).submit([], "#!/bin/sh\n", environ)


def test_a_controller_that_restarts_is_asked_again(tmp_path: Path) -> None:
    write_executable(
        tmp_path / "scontrol",
        f"""#!/bin/sh
[ -e '{tmp_path}/up' ] && exec echo JobId=4 JobState=RUNNING
touch '{tmp_path}/up'
echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2
exit 1
""",
    )
    slept: list[float] = []
    client = Client({"PATH": f"{tmp_path}:{os.environ['PATH']}"}, sleep=slept.append)

    assert client.job(4).states == {"RUNNING"}
    assert len(slept) == 1


def test_a_controller_that_stays_away_is_given_up(tmp_path: Path) -> None:
    # Its version scontrol tells without a controller.
    says = "[ $1 = --version ] || { echo 'Unable to contact slurm controller' >&2; exit 1; }"
    write_executable(tmp_path / "scontrol", f"#!/bin/sh\n{says}\n")
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += 10 * seconds

    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    client = Client(environ, patience_s=30.0, monotonic=lambda: now_s, sleep=sleep)

    with pytest.raises(SlurmCommandError, match="Unable to contact"):
        client.job(4)
    assert now_s == 30.0


def test_nothing_is_asked_once_the_time_for_it_is_over(tmp_path: Path) -> None:
    write_executable(tmp_path / "scontrol", "#!/bin/sh\nexec sleep 60\n")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    began_s = time.monotonic()
    client = Client.for_hook(environ, limit_s=30.0, give_up_s=began_s + 1.0)

    with pytest.raises(SlurmError, match="did not answer within"):
        client.drain(["n1"], "slow")
    with pytest.raises(SlurmError, match="no time is left to ask: scontrol update NodeName=n1"):
        client.drain(["n1"], "slow")

    assert time.monotonic() - began_s < 20


@rows
def test_sacct_is_advised_where_it_would_tell(tmp_path: Path, accounting: str, told: str) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.set(accounting=accounting)

    with pytest.raises(UnknownJob, match=told):
        Client(slurm.environ(), patience_s=0).job(99)


# --- running a command ----------------------------------------------------------------------------


ENVIRON = dict(os.environ)


def test_the_path_of_the_environment_counts_and_any_text_is_an_answer(tmp_path: Path) -> None:
    with pytest.raises(SlurmCommandMissing, match="no-such-command not found on PATH"):
        run(["no-such-command"], environ=ENVIRON)
    write_executable(tmp_path / "scontrol", "#!/bin/sh\nprintf 'mine \\377'\n")
    assert run(["scontrol"], environ={"PATH": f"{tmp_path}:/bin:/usr/bin"}) == "mine \ufffd"


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    began = time.monotonic()

    with pytest.raises(SlurmTimeoutError, match=r"did not answer within 0\.3 s"):
        run(
            ["sh", "-c", f"trap '' TERM; sleep 100 & echo $! > {pid_file}; wait"],
            environ=ENVIRON,
            deadline_s=0.3,
        )

    assert time.monotonic() - began < 60
    pid = int(pid_file.read_text())
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the child's end")

    # Nor does a child stay that a command leaves behind.
    run(["sh", "-c", f"sleep 100 >&- 2>&- & echo $! > {pid_file}"], environ=ENVIRON)
    left = int(pid_file.read_text())
    eventually(lambda: not Path(f"/proc/{left}").exists(), "the child's end")


def test_what_the_surrounding_job_or_its_user_set_does_not_reach_slurms_commands() -> None:
    set_by_others = (
        "SLURM_JOB_ID SLURM_NTASKS_PER_NODE SBATCH_EXCLUDE SALLOC_X SRUN_DEBUG SLURMD_NODENAME"
        " PMI_RANK PMIX_RANK SQUEUE_STATES SCANCEL_INTERACTIVE SCONTROL_FUTURE SACCT_FORMAT"
        " SINFO_PARTITION"
    )
    kept = {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "SLURMLIKE": "mine"}

    assert clean_environ({**dict.fromkeys(set_by_others.split(), "1"), **kept}) == kept


# --- what became of a job that Slurm ended --------------------------------------------------------


NOW_S = 1_700_000_000.0


def line(due_to: str = "", *, job: int = 12, time_s: float = NOW_S) -> bytes:
    """Return what slurmstepd writes, as of Slurm 22.05."""
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time_s))
    return f"slurmstepd-n1: error: *** JOB {job} ON n1 CANCELLED AT {when}{due_to} ***\n".encode()


@rows
def test_slurms_line_in_the_output_tells(due_to: str, told: str) -> None:
    assert in_output(b"step 1\n" + line(due_to) + b"Terminated\n", "12", now_s=NOW_S) == told
    assert in_output(line(due_to), "13", now_s=NOW_S) == ""  # of another job
    assert in_output(line(due_to), "12", now_s=NOW_S + 3600) == ""  # of an earlier attempt
    assert in_output(b"*** JOB 12 ON n1 CANCELLED AT 2026-99-99T99:99:99 ***", "12", now_s=0) == ""


def test_a_line_counts_in_any_time_zone_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's daemons write the machine's time."""
    monkeypatch.delenv("TZ", raising=False)
    time.tzset()
    written = line()
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        assert in_output(written, "12", now_s=NOW_S) == "the job was cancelled"
        assert in_output(written, "12", now_s=NOW_S + 3600) == ""
        assert in_output(line(), "12", now_s=NOW_S) == "the job was cancelled"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_where_the_output_does_not_tell_slurm_is_asked(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.run_job(12, ["n1"], state="CANCELLED")
    environ = {**slurm.environ(), "SLURM_JOB_ID": "12"}
    with (tmp_path / "out").open("w+b") as output:
        assert became(environ, now_s=NOW_S, output=output.fileno()) == "the job was cancelled"
        output.write(line(" DUE TO JOB REQUEUE"))
        output.flush()
        assert became(environ, now_s=NOW_S, output=output.fileno()) == "the job was requeued"
        for outside in ({}, {"SLURM_JOB_ID": "13", "PATH": "/nonexistent"}):
            assert became(outside, now_s=NOW_S, output=output.fileno()) == ""
