# SPDX-License-Identifier: Apache-2.0
"""Jobs that never were, one for each thing that a report has to tell: as journals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from slurm_health.records.records import (
    Action,
    ActionDone,
    ActionIntended,
    GroupAborted,
    MasterStopped,
    NodeReported,
    Unchecked,
    VerdictReached,
    WorkersReady,
)
from slurm_health.records.script_records import (
    Diagnosed,
    EventKind,
    FailurePlanned,
    ProgressSeen,
    ScriptEnded,
    ScriptStarted,
    TrainingEvent,
)
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict, Outcome
from slurm_health.system import journal
from tests.support.journals import (
    Clock,
    RunJournal,
    sampled,
    write_healthy_run,
    write_requeued_job,
    write_run_with_a_faulty_node,
    write_started_script,
)

MARKUP = '<img src=x onerror="document.title=1"></style><script>document.title=2</script>&amp;'
ESCAPES = "\x1b[2J\x1b]0;title\x07line two\r"
BAD_LABEL = Diagnosed(
    cause="program-error",
    description="ValueError: bad label 17 in batch (rank 1 on n1, ddp.py:28)",
    attribution="user error",
    sureness="likely",
    error="ValueError: bad label 17 in batch",
    place="ddp.py:28",
    nodes=["n1"],
    ranks=[1],
    first="rank 1 on n1 raised ValueError first",
    evidence=["rank 1: ValueError: bad label 17 in batch (ddp.py:28)"],
    advice="look at this place in the script and at the data of this rank",
    not_collected=["flight-recorder: the script's PyTorch does not record"],
)
KILLED = Diagnosed(
    cause="killed",
    description="rank 1 on n3 was killed by SIGKILL",
    attribution="transient",
    sureness="likely",
    nodes=["n3"],
    ranks=[1],
    evidence=["srun: error: n3: task 1: Killed"],
)
STOPPED = Diagnosed(
    cause="rank-stopped",
    description="rank 1 on n2 has been stopped by a signal",
    attribution="undecided",
    sureness="certain",
    nodes=["n2"],
    ranks=[1],
    evidence=["rank 1 on n2: state T (stopped)"],
    advice="let it go on: kill -CONT 17 on n2",
    advises_process=True,
)
CANCELLED = Diagnosed(
    cause="ended-from-outside",
    description="the job was cancelled",
    attribution="ended from outside",
    sureness="certain",
)
LOST = Diagnosed(
    cause="node-lost",
    description="Slurm lost n2 while the job ran",
    attribution="node fault",
    sureness="certain",
    nodes=["n2"],
    accused=["n2"],
    evidence=["Slurm calls n2 DOWN*"],
    advice="start again without n2",
)
REQUEUED = Diagnosed(
    cause="requeued",
    description="the job was requeued (scontrol requeue)",
    attribution="ended from outside",
    sureness="certain",
)
HANG = TrainingEvent(
    event=EventKind.HANG,
    step=35,
    nodes=["n2"],
    ranks=[1],
    stalled_s=37.0,
    usual_s=30.0,
    diagnosed=STOPPED,
)


def _passed(root: Path) -> RunJournal:
    """Write a check of one round in which all pairs were as fast."""
    run = RunJournal(root, nodes=["n1", "n2", "n3", "n4"])
    run.start()
    run.begin_round(0, [["n1", "n2"], ["n3", "n4"]])
    for pair in (["n1", "n2"], ["n3", "n4"]):
        run.measure(0, pair)
    run.end_round(0)
    run.judge()
    run.finish("proceed")
    return run


def requeued(root: Path) -> float:
    """Moved away from a faulty node, then finished."""
    return write_requeued_job(root)[1].clock.now_s


def moved(root: Path) -> float:
    """The same job of a user, who drains no node: the example of the documentation."""
    jobs = write_requeued_job(root, started_s=1795860960.0, drains=False)
    return jobs[1].clock.now_s


def checking(root: Path) -> float:
    """The second attempt is being checked."""
    clock = Clock()
    write_run_with_a_faulty_node(root, clock=clock)
    run = RunJournal(root, label="1", nodes=["n1", "n2", "n4", "n5", "n6"], clock=clock)
    run.start()
    run.begin_round(0, [["n1", "n2"], ["n4", "n5"]])
    run.measure(0, ["n1", "n2"])
    return clock.now_s + 3


def running(root: Path) -> float:
    """A script runs, and its steps are seen."""
    run = write_started_script(root)
    for step, after_s in ((555, 110.0), (595, 8.0)):
        line = f"step {step}/1000 loss 0.31"
        seen = ProgressSeen(node="n1", ranks=2, step=step, line=line)
        run.write(journal.MONITOR, seen, after_s=after_s)
    saving = "Saving model checkpoint to out/checkpoint-590"
    waits = "rank 1 on n2 still works"
    seen = replace(seen, saved=saving, saved_age_s=3.0, waits=waits)
    run.write(journal.MONITOR, seen, after_s=1.0)
    return run.clock.now_s + 11.0


def rank_stopped(root: Path) -> float:
    """A rank of a running script is stopped, on another node than the batch host."""
    run = write_started_script(root)
    seen = ProgressSeen(node="n1", ranks=2, step=5, stopped=[1], stopped_on=["n2"])
    run.write(journal.MONITOR, seen, after_s=110.0)
    return run.clock.now_s + 12.0


def watched_in_part(root: Path) -> float:
    """The watch of a script ended, came back, and ended again before the script did."""
    run = write_started_script(root)
    for step, after_s in ((10, 60.0), (20, 60.0), (300, 1680.0), (310, 60.0)):
        seen = ProgressSeen(node="n1", ranks=2, step=step, line=f"step {step}/1000")
        run.write(journal.MONITOR, seen, after_s=after_s)
    ended = ScriptEnded(exit_code=0, signal=0, duration_s=3000.0)
    run.write(journal.SUPERVISOR, ended, after_s=1140.0)
    return run.clock.now_s


def hangs(root: Path) -> float:
    """A script hangs, and something was slow before."""
    run = write_started_script(root)
    slow = TrainingEvent(
        event=EventKind.STRAGGLER, nodes=["n4"], ranks=[3], ratio=1.5, took_ms=150.0, usual_ms=100.0
    )
    run.write(journal.MONITOR, slow, HANG, after_s=90.0)
    return run.clock.now_s + 5.0


def hung_and_cancelled(root: Path) -> float:
    """Somebody cancelled a job that hung."""
    run = write_started_script(root)
    run.write(journal.MONITOR, HANG, after_s=90.0)
    ended = ScriptEnded(exit_code=0, signal=15, duration_s=120.0)
    run.write(journal.SUPERVISOR, ended, after_s=30.0)
    run.write(journal.POST_MORTEM, CANCELLED)
    return run.clock.now_s


def hung_for_a_while(root: Path) -> float:
    """A hang was over by itself; a rank, a link, a stage and the loss were not well."""
    run = write_started_script(root)
    why = {
        EventKind.STRAGGLER: "rank 3 on n4 is slow because it waits for its data loader",
        EventKind.SLOWDOWN: "the network link of n2 is slow",
        EventKind.UNEVEN: "stage 3 has more to compute than the other roles",
        EventKind.LOSS: "the loss is NaN from step 8 on",
    }
    events = [
        TrainingEvent(
            event=kind,
            nodes=["n4"],
            ranks=[3],
            ratio=1.5,
            took_ms=150.0,
            usual_ms=100.0,
            line="step 8 loss nan" if kind is EventKind.LOSS else "",
            diagnosed=Diagnosed(
                cause=kind.value,
                description=text,
                attribution="undecided",
                sureness="likely",
                advice=f"look into it: {text}",
            ),
        )
        for kind, text in why.items()
    ]
    over = TrainingEvent(event=EventKind.HANG_OVER, stalled_s=80.0, step=36)
    run.write(journal.MONITOR, HANG, over, *events, after_s=90.0)
    run.write(journal.SUPERVISOR, ScriptEnded(exit_code=0, duration_s=200.0), after_s=110.0)
    return run.clock.now_s


def failed(root: Path) -> float:
    """A rank raised an exception."""
    run = _passed(root)
    run.run_script(exit_code=1)
    run.write(journal.POST_MORTEM, BAD_LABEL)
    return run.clock.now_s


def all_ranks_failed(root: Path) -> float:
    """All ranks raised the same exception."""
    run = _passed(root)
    run.run_script(exit_code=1)
    wrong = Diagnosed(
        cause="no-interface",
        description="ib9 is no network interface of any node; the check used eth0",
        attribution="user error",
        sureness="certain",
        error="RuntimeError: Unable to find interface for: ib9",
        nodes=["n1", "n2", "n3", "n4"],
        ranks=list(range(8)),
        evidence=["rank 0: RuntimeError: Unable to find interface for: ib9"],
        advice="correct GLOO_SOCKET_IFNAME",
    )
    run.write(journal.POST_MORTEM, wrong)
    return run.clock.now_s


def restarted(root: Path) -> float:
    """A rank was killed once; the script was started again and finished."""
    run = write_healthy_run(root)
    run.write(journal.POST_MORTEM, KILLED)
    again = FailurePlanned(plan="restart", reason="transient", restart=1, max_restarts=3)
    run.write(journal.RESTART, again)
    started = ScriptStarted(script="/home/ml/train.sh", pid=2, restart=1)
    run.write(journal.SUPERVISOR, started, after_s=2.0)
    run.write(journal.SUPERVISOR, ScriptEnded(exit_code=0, duration_s=300.0), after_s=300.0)
    return run.clock.now_s


def lost_node(root: Path) -> float:
    """Slurm lost a node; the job is to leave it behind."""
    run = RunJournal(root)
    run.pass_check()
    run.run_script(signal=9)
    run.write(journal.POST_MORTEM, LOST)
    plan = FailurePlanned(
        plan="leave", reason=LOST.description, restart=1, max_restarts=3, nodes=["n2"]
    )
    run.write(journal.RESTART, plan)
    return run.clock.now_s


def requeued_twice(root: Path) -> float:
    """Two attempts left a node behind each, the third one finished."""
    clock = Clock()
    write_run_with_a_faulty_node(root, clock=clock)
    second = RunJournal(root, label="1", nodes=["n1", "n2", "n4"], clock=clock)
    second.start()
    second.judge(NodeVerdict(node="n4", level=Level.FAULTY, reason="lost", evidence=("round 0",)))
    second.act("exclude", ["n4"])
    second.act("requeue", by=journal.REQUEUE)
    second.finish("requeue")
    return write_healthy_run(
        root, label="2", nodes=["n1", "n2", "n5", "n6"], clock=clock
    ).clock.now_s


def requeued_by_others(root: Path) -> float:
    """Somebody requeued the job while its script ran."""
    run = RunJournal(root)
    run.pass_check()
    run.run_script(signal=15, duration_s=25.0)
    run.write(journal.POST_MORTEM, REQUEUED)
    again = RunJournal(root, label="1", clock=run.clock)
    again.pass_check()
    again.run_script()
    return run.clock.now_s


def stopped(root: Path) -> float:
    """The job was cancelled during its check."""
    run = RunJournal(root)
    run.start()
    run.begin_round(0, [["n1", "n2"], ["n3", "n4"]])
    run.master(MasterStopped(reason="SIGTERM", job="the job was cancelled"))
    return run.clock.now_s


def nothing_recorded(root: Path) -> float:
    """There is a directory, and nothing in it."""
    return RunJournal(root).clock.now_s


def no_verdict(root: Path) -> float:
    """No agent could be started, and the script failed for another reason."""
    run = RunJournal(root)
    run.start()
    run.finish("proceed", exit_code=3, reason="no agent could be started: srun: Invalid account")
    run.run_script(exit_code=3)
    return run.clock.now_s


def unchecked(root: Path) -> float:
    """The nodes could not be checked at all."""
    run = RunJournal(root)
    reason, remedy = "journal /scratch: No space left on device", "name another with --journal DIR"
    run.start()
    run.master(Unchecked(reason=reason, remedy=remedy))
    run.finish("stop", exit_code=4, reason=reason)
    return run.clock.now_s


def not_connected(root: Path) -> float:
    """Two nodes cannot exchange data, and nothing shows which is at fault."""
    run = RunJournal(root, nodes=["n1", "n2"])
    run.start()
    for node in run.nodes:
        ready = WorkersReady(
            node=node,
            launch=0,
            store_port=1,
            torch="2",
            backend="gloo",
            devices=["cpu"],
            interface="eth0",
        )
        run.write(node, ready)
    run.begin_round(0, [["n1", "n2"]])
    for node in run.nodes:
        report = NodeReported(node=node, round=0, outcome=Outcome.FAILED, detail="no route to host")
        run.write(node, report)
    run.end_round(0)
    bad = [NodeVerdict(node=n, level=Level.INCONCLUSIVE, reason="no partner") for n in run.nodes]
    run.judge(*bad)
    run.finish("proceed")
    return run.clock.now_s


def kept_slow(root: Path) -> float:
    """A slow node was kept: there was no other."""
    run = RunJournal(root)
    run.start()
    reason = "matmul 2.00x slower than its peers"
    slow = NodeVerdict(
        node="n3",
        level=Level.SLOW,
        slowdown=2.0,
        probability=0.97,
        component="compute",
        reason=reason,
        evidence=("round 0",),
    )
    run.judge(slow)
    run.finish("proceed", reason=f"n3: {reason}; continuing with n3: no other node is free")
    run.run_script()
    return run.clock.now_s


def trouble(root: Path) -> float:
    """Several kinds of trouble at once; the job is held."""
    run = RunJournal(root, nodes=[f"gpu{index:02}" for index in range(1, 13)])
    run.start()
    run.begin_round(0, [run.nodes[start : start + 2] for start in range(0, 12, 2)])
    for start in range(0, 12, 2):
        group = run.nodes[start : start + 2]
        run.measure(0, group, allgather_gb_per_s=329.0, matmul_gflop_per_s=738_000.0 + start * 500)
        for node in group:
            run.write(node, sampled(node, 0, group, "gpt", 118.0 + start))
    run.end_round(0)
    slow = "matmul 1.6 times slower than the healthy nodes, alone and in two rounds of pairs"
    judged = {node: NodeVerdict(node=node, level=Level.HEALTHY) for node in run.nodes}
    for node in ("gpu05", "gpu06"):
        judged[node] = NodeVerdict(node=node, level=Level.SLOW, reason=slow, evidence=("round 0",))
    judged["gpu09"] = NodeVerdict(
        node="gpu09", level=Level.INCONCLUSIVE, reason="no partner passed to re-test it with"
    )
    judged["gpu12"] = NodeVerdict(
        node="gpu12", level=Level.FAULTY, reason="no report from its agent", evidence=("round 0",)
    )
    run.master(
        VerdictReached(
            nodes=list(judged.values()),
            paths=[LinkVerdict(ends=("gpu01", "gpu04"), level=Level.SLOW, reason="95 of 329 GB/s")],
            leaves=[LinkVerdict(ends=("leaf2",), level=Level.SLOW, reason="its uplink is shared")],
            floors={"matmul": 0.12},
            unseen="light probes (--check=light): processors, memory and the network only",
        )
    )
    run.master(
        ActionIntended(action=Action.DRAIN, nodes=["gpu12"]),
        ActionDone(
            action=Action.DRAIN,
            succeeded=False,
            nodes=["gpu12"],
            detail='left alone: drained by an administrator: "bad fan"',
        ),
    )
    run.finish(
        "stop", exit_code=1, reason="already requeued 2 times because of bad nodes, the limit is 2"
    )
    return run.clock.now_s


def array_task(root: Path) -> float:
    """Two checks in one attempt of a task of an array."""
    clock = Clock()
    write_healthy_run(root, clock=clock, job=13, array="12_3")
    write_healthy_run(root, label="0-2", clock=clock, job=13, array="12_3", nodes=["n1", "n2"])
    (root / "lab" / "12").symlink_to("13")
    return clock.now_s


def one_rank(root: Path) -> float:
    """A job of one rank on one node, whose script has ended well."""
    run = RunJournal(root, nodes=["n1"])
    run.pass_check()
    run.run_script()
    return run.clock.now_s


def damaged(root: Path) -> float:
    """Lines are damaged, of a newer version, or missing."""
    run = write_healthy_run(root)
    for writer, line in (
        ("n1", b"{torn\n"),
        ("n2", b'{"v":99,"id":"a:1","time_s":1,"kind":"x"}\n'),
    ):
        with journal.path_of(run.directory, writer).open("ab") as file:
            file.write(line)
    journal.path_of(run.directory, "n4").unlink()
    return run.clock.now_s


def hostile(root: Path) -> float:
    """Every text is markup, or acts on a terminal."""
    run = RunJournal(root, nodes=["n1", "n2"])
    run.start(script=f"/home/ml/{MARKUP}{ESCAPES}")
    run.begin_round(0, [["n1", "n2"]])
    run.master(GroupAborted(round=0, group=["n1", "n2"], reason=MARKUP + ESCAPES, timed_out=True))
    run.end_round(0)
    bad = NodeVerdict(
        node="n1",
        level=Level.FAULTY,
        component=MARKUP,
        reason=MARKUP + ESCAPES,
        evidence=(MARKUP + ESCAPES,),
    )
    path = LinkVerdict(ends=(MARKUP, "n2"), level=Level.SLOW, reason=MARKUP, evidence=(MARKUP,))
    judged = [bad, NodeVerdict(node=MARKUP, level=Level.SLOW)]
    run.master(VerdictReached(nodes=judged, paths=[path]))
    run.finish("stop", exit_code=1, reason=MARKUP)
    died = Diagnosed(
        cause="x",
        description=MARKUP + ESCAPES,
        attribution="user error",
        sureness="likely",
        error=MARKUP + ESCAPES,
        place=MARKUP,
        nodes=[MARKUP],
        ranks=[0],
        evidence=[MARKUP + ESCAPES],
        advice=MARKUP + ESCAPES,
    )
    run.write(journal.POST_MORTEM, died)
    return run.clock.now_s


def large(root: Path, count: int = 4096) -> float:
    """A check of many nodes, some of them bad; the report is one screen."""
    run = RunJournal(root, nodes=[f"gpu{number:04}" for number in range(1, count + 1)])
    run.start()
    for index in range(2):
        order = [run.nodes[(number * (2 * index + 1)) % count] for number in range(count)]
        pairs = [order[start : start + 2] for start in range(0, count, 2)]
        run.begin_round(index, pairs)
        for pair in pairs[:24]:
            run.measure(index, pair, allgather_gb_per_s=100.0 if "gpu0018" in pair else 330.0)
        run.end_round(index)
    bad = [
        NodeVerdict(
            node=f"gpu{number:04}",
            level=Level.FAULTY,
            reason=f"no allgather with gpu{number + 1:04}",
            evidence=tuple(f"round {index} failed" for index in range(9)),
        )
        for number in range(18, count, 197)
    ]
    run.judge(*bad)
    run.finish("stop", exit_code=1, reason="21 nodes are faulty, and 16 may be left behind")
    return run.clock.now_s


STORIES: dict[str, Callable[[Path], float]] = {
    story.__name__.replace("_", "-"): story
    for story in (
        requeued,
        moved,
        checking,
        running,
        rank_stopped,
        watched_in_part,
        hangs,
        hung_and_cancelled,
        hung_for_a_while,
        failed,
        all_ranks_failed,
        restarted,
        lost_node,
        requeued_twice,
        requeued_by_others,
        stopped,
        nothing_recorded,
        no_verdict,
        unchecked,
        not_connected,
        kept_slow,
        trouble,
        array_task,
        one_rank,
        damaged,
        hostile,
        large,
    )
}
