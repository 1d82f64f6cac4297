# SPDX-License-Identifier: Apache-2.0
"""What a node does about a drain that Slurm has set by itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from slurm_health.node import held, shared, slurm_drains, state
from slurm_health.node.hooks import nodes as listing
from slurm_health.node.hooks import unkillable
from slurm_health.node.hooks.user_journal import JobEnded, append_held
from slurm_health.node.notify import EventKind
from slurm_health.node.rules.slurm_drain import HeldProcess, Resource, SlurmDrain
from slurm_health.node.slurm_drains import SlurmList
from slurm_health.records.record_codec import decode
from slurm_health.records.records import NodeHeld
from slurm_health.system import proc
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import CompletingJob
from tests.node.hooks.test_healthcheck import pass_after_pass
from tests.support.hooked_node import Node
from tests.support.hooked_slurm import HookedSlurm
from tests.support.notified import into_file, received
from tests.support.rows import rows

LIFT = '[recovery]\nslurm_drains = "lift"\n'
NOBODY = 65534
JOB = 900_000_000 + os.getpid()  # tests run side by side
# With a job that has left nothing: this machine may run others.
KILL = "Kill task failed (JobId=987654321 StepId=0)"


def drained_by_slurm(
    node: Node, *names: str, reason: str = KILL, state: str = "IDLE+DRAIN"
) -> None:
    """Let Slurm drain nodes now, and a look at all nodes see it."""
    signed = f"{reason} [root@{datetime.fromtimestamp(node.now_s).isoformat()}]"
    node.slurm.set(dict.fromkeys(names or (node.name,), (state, signed)))
    look(node)


def look(node: Node) -> SlurmList:
    client = Client.for_hook(node.environ(), limit_s=30)
    return slurm_drains.look_at_all(node.site, client, node.now_s, node.environ())


@contextmanager
def left_behind(job: int = JOB) -> Iterator[HeldProcess]:
    """A stopped process of an ordinary user with a job's environment, as Slurm could leave it."""
    environ = {"SLURM_JOB_ID": str(job)}
    # Not a child of ours: a hook does not take its own children for a job's.
    argv = ["/usr/bin/setsid", "--fork", "/bin/sleep", "1000"]
    subprocess.run(argv, env=environ, user=NOBODY, check=True)
    while not (left := held.left_by(job, patience=20).processes):
        pass
    os.kill(left[0].pid, signal.SIGSTOP)
    while (left := held.left_by(job, patience=20).processes)[0].state != "T":
        pass
    try:
        yield left[0]
    finally:
        os.kill(left[0].pid, signal.SIGKILL)
        while held.alive(left):
            pass


def listed(node: Node, *ending: CompletingJob) -> tuple[listing.Listing, str]:
    """Return what `nodes` lists, and its text."""
    found = listing.listing(node.site, Client(node.environ()).nodes(), node.now_s, ending)
    return found, listing.text(found, node.now_s)


def drain_of(node: Node, name: str = "", **changes: object) -> SlurmDrain:
    record = SlurmDrain(
        node=name or node.name,
        reason="",
        retest=(),
        time_s=node.now_s,
        kind="kill-task-failed",
        job=JOB,
        uid=NOBODY,
    )
    return msgspec.structs.replace(record, **changes)


def share(node: Node, name: str, job: int = JOB) -> None:
    """Let Slurm drain a node, with the job that it is drained for in the shared directory."""
    since = datetime.fromtimestamp(node.now_s).isoformat()
    slurm_drains._share(node.site, drain_of(node, name, reason=KILL, since=since, job=job))
    drained_by_slurm(node, name)


def test_a_well_node_asks_slurm_nothing_and_one_of_all_looks_for_all(node: Node) -> None:
    pass_after_pass(node, 3)
    assert node.slurm.calls() == []
    (node.shared / "slurm.look").rmdir()
    assert shared.claim_look(node.shared, "n3", 2e9) == (True, b"")
    assert shared.claim_look(node.shared, "n4", 0.0) == (False, b"")  # one looks
    assert shared.claim_look(node.shared, "n4", 3e9) == (True, b"")  # it died


@pytest.mark.heavy
@rows
def test_a_node_returns_after_two_health_checks_if_its_reason_allows_it(
    node: Node, more: str, reason: str, shown: str, after: str
) -> None:
    node.more = more
    drained_by_slurm(node, reason=reason, state=shown)
    pass_after_pass(node, 1)
    assert node.state == shown
    if after == "IDLE":  # and stays out while its checks fail
        node.break_it()
        pass_after_pass(node, 2)
        assert node.state == shown
        node.mend()
        pass_after_pass(node, 1)
    pass_after_pass(node, 1 if after == "IDLE" else 4)
    assert node.state == (after or shown)


@pytest.mark.parametrize(("by_us", "shown"), [(True, 1), (False, 0)])
def test_a_node_that_we_returned_is_listed_for_a_day(node: Node, by_us: bool, shown: int) -> None:
    node.more = LIFT if by_us else ""
    drained_by_slurm(node)
    pass_after_pass(node, 2)
    advised = "may return now: scontrol update NodeName=n3 State=RESUME" in node.said
    assert advised is not by_us
    node.slurm.set({"n3": ("IDLE", "")})
    pass_after_pass(node, 1)

    _, text = listed(node)
    assert text.count("returned: n3") == shown
    assert text.count("returned by slurm-health") == shown
    assert listing.listing(node.site, {}, node.now_s + 86_400).returned == {}


def test_an_edited_note_is_its_editors(node: Node) -> None:
    node.more = LIFT
    drained_by_slurm(node)
    pass_after_pass(node, 1)
    node.now_s += 100
    drained_by_slurm(node)  # the same text, set anew
    pass_after_pass(node, 3)
    drained_by_slurm(node, reason="DIMM 3")
    pass_after_pass(node, 2)
    drained_by_slurm(node)
    pass_after_pass(node, 3)
    assert node.state == "IDLE+DRAIN"
    assert "someone has set or edited its reason" in node.said


def test_a_second_return_within_a_day_is_an_administrators(node: Node) -> None:
    node.more = LIFT
    for _ in range(2):
        drained_by_slurm(node)
        pass_after_pass(node, 4)
    assert node.state == "IDLE+DRAIN"
    assert "returned once within a day" in node.said
    node.now_s += 86_400
    node.slurm.set({"n3": ("IDLE", "")})
    pass_after_pass(node, 1)
    drained_by_slurm(node)
    pass_after_pass(node, 2)
    assert node.state == "IDLE"


def test_a_wave_returns_no_node_and_counts(node: Node, slurm: HookedSlurm) -> None:
    node.more = LIFT
    drained_by_slurm(node, "n3", "n4", "n5", "n7")
    pass_after_pass(node, 4)
    assert node.state == "IDLE+DRAIN"
    assert "4 nodes within the hour" in node.said
    (group,) = listed(node)[0].by_slurm
    assert (group.nodes, group.needs_administrator) == ("n[3-5,7]", True)
    slurm.set({"n6": ("IDLE", "")})
    other = Node(node.directory.parent, "n6", slurm, node.shared)
    other.now_s = node.now_s
    other.break_it()
    other.healthcheck()
    assert other.state == "IDLE"
    assert "would be drained, now or within 60 min: 5 of 20" in other.said


def test_a_drain_of_ours_that_slurm_overwrote_is_over_first(drained: Node) -> None:
    drained.more = LIFT
    drained.now_s += 10
    drained_by_slurm(drained)
    pass_after_pass(drained, 2)
    assert drained.state == "IDLE+DRAIN"
    assert "drained by slurm-health before" in drained.said
    pass_after_pass(drained, 2)
    assert drained.state == "IDLE"
    assert state.load_record(drained.site.state) is None


@pytest.mark.root
def test_the_processes_that_a_job_leaves_are_named_and_must_end(node: Node) -> None:
    node.more = LIFT
    environ = {"SLURM_JOB_ID": str(JOB), "SLURM_STEP_ID": "0"}
    with left_behind() as process:
        assert (process.name, process.uid) == ("sleep", NOBODY)
        hook = node.hook("unkillable", {**node.environ(), **environ})
        while state.load_slurm(node.site.state, "n3") is None:  # a busy machine takes longer
            assert not unkillable.run(hook)
        node.epilog(JOB, NOBODY)
        record = state.load_slurm(node.site.state, "n3")
        assert record is not None
        assert (record.job, [one.key for one in record.held]) == (JOB, [process.key])
        drained_by_slurm(node, reason="Kill task failed")
        pass_after_pass(node, 3)
        assert node.state == "IDLE+DRAIN"
        assert f"Kill task failed, job {JOB} of nobody): sleep({process.pid}) stopped" in node.said
        assert f"sleep({process.pid})" in listed(node)[1]
    pass_after_pass(node, 2)
    assert node.state == "IDLE"


@pytest.mark.root
def test_the_journal_says_why_a_node_is_not_free(node: Node, public_path: Path) -> None:
    root = public_path / "journals"
    run = root / "lab" / str(JOB) / "0"
    run.mkdir(parents=True)
    for place in (run, run.parent):
        os.chown(place, NOBODY, NOBODY)
        place.chmod(0o700)
    node.journal = str(root)
    ended = JobEnded(job=JOB, uid=NOBODY, gid=NOBODY, cluster="lab", attempt=0)
    append_held(node.site, ended, "n3", "python(81) waits for /scratch")
    (line,) = (run / "n3.jsonl").read_bytes().splitlines()
    assert decode(line).record == NodeHeld(node="n3", text="python(81) waits for /scratch")


@pytest.mark.root
def test_our_own_release_waits_for_processes_that_a_job_has_left(drained: Node) -> None:
    with left_behind() as process:
        state.save(drained.site.state, slurm=drain_of(drained, held=(process,)))
        pass_after_pass(drained, 4)
        assert drained.state == "IDLE+DRAIN"
        assert "not released: sleep" in drained.said
    pass_after_pass(drained, 1)
    assert drained.state == "IDLE"


def test_a_process_that_has_ended_and_a_mount_that_is_gone_hold_nothing_up(node: Node) -> None:
    start_ticks = proc.stat(Path("/proc/self")).start_ticks
    here = HeldProcess(pid=os.getpid(), start_ticks=start_ticks, name="x")
    assert held.alive([here]) == [here]
    assert held.alive([msgspec.structs.replace(here, start_ticks=start_ticks + 1)]) == []
    gone = Resource(name="/nowhere", kind="nfs4", source="nfs1")
    assert held.silent(node.site.state, [gone]) == {}


def test_a_job_that_stays_in_completing_is_listed(node: Node) -> None:
    node.slurm.set({"n3": ("IDLE+COMPLETING", "")})
    ends = CompletingJob(job=7, array=7, uid=NOBODY, ended_s=int(node.now_s) - 300, nodes=("n3",))
    shown, text = listed(node, ends)
    assert "n3  job 7 of nobody ended 5 min ago and stays in COMPLETING" in text
    assert shown.needs_administrator
    young = msgspec.structs.replace(ends, ended_s=int(node.now_s) - 30)
    assert not listed(node, young)[0].by_slurm


def test_a_node_in_inval_is_never_advised_to_be_released(drained: Node) -> None:
    drained.slurm.set({"n3": ("IDLE+DRAIN+INVALID_REG", drained.reason)})
    _, text = listed(drained)
    assert "INVAL: Slurm refuses what the node registers" in text
    assert "nodes release" not in text


def test_each_drain_is_notified_once_with_the_job_that_costs_two(node: Node) -> None:
    node.more = into_file(node)
    for name in ("n3", "n4"):
        share(node, name)
    look(node)
    events = received(node)
    kinds = [event.kind for event in events]
    assert kinds.count(EventKind.SLURM_DRAINED) == 2
    (culprit,) = [event for event in events if event.kind is EventKind.CULPRIT]
    assert culprit.node == "n[3-4]"
    assert f"job {JOB} left 2 nodes unusable" in culprit.text


def test_the_look_at_all_nodes_is_a_process_of_its_own(node: Node) -> None:
    drained_by_slurm(node)
    (node.shared / "slurm.json").unlink()
    argv = [sys.executable, "-m", "slurm_health.node.slurm_drains", node.site.path]
    subprocess.run(argv, env=node.environ(), check=True)
    assert b'"node":"n3"' in (node.shared / "slurm.json").read_bytes()
    assert not (node.shared / "slurm.look").exists()
