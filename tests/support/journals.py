# SPDX-License-Identifier: Apache-2.0
"""Journals of runs that never were, written record by record by the journal's own writer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from slurm_health.records.records import (
    Action,
    ActionDone,
    ActionIntended,
    AgentsLaunched,
    AgentStarted,
    Disposition,
    GroupAborted,
    JobOutcome,
    NodeReported,
    Record,
    Rendezvous,
    RoundEnded,
    RoundStarted,
    RunStarted,
    Sampled,
    VerdictReached,
    WorkersReady,
)
from slurm_health.records.script_records import ScriptEnded, ScriptStarted
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict, Outcome
from slurm_health.system import journal

STARTED_S = 1_700_000_000.0
_ALLGATHER_BYTES = 64_000_000
_MATMUL_FLOP = 2.0e9


class Clock:
    """A clock that stands still until it is told otherwise."""

    def __init__(self, now_s: float = STARTED_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class RunJournal:
    """The journal of one check, to be written in any order by any of its writers."""

    def __init__(
        self,
        root: Path,
        *,
        cluster: str = "lab",
        job: int | str = 12,
        label: str = "0",
        nodes: Sequence[str] = ("n1", "n2", "n3", "n4", "n5"),
        clock: Clock | None = None,
    ) -> None:
        self.directory = journal.job_directory(root, cluster, job) / label
        self.nodes = tuple(nodes)
        self.cluster = cluster
        self.job = job
        self.attempt = int(label.partition("-")[0])
        self.clock = clock or Clock()
        journal.create(self.directory, [journal.MASTER, journal.SUPERVISOR, *nodes])

    def write(self, writer: str, *records: Record, after_s: float = 0.0) -> None:
        """Let `writer` append records, `after_s` seconds after what was written last."""
        self.clock.now_s += after_s
        journal.Writer(self.directory, writer, self.clock).append(*records)

    def master(self, *records: Record, after_s: float = 0.0) -> None:
        self.write(journal.MASTER, *records, after_s=after_s)

    def start(
        self,
        *,
        script: str = "/home/ml/train.sh",
        array: str = "",
        job_name: str = "",
        start_time_s: int | None = None,
        submit_time_s: int | None = None,
    ) -> None:
        """Begin the check: every node's agent and workers are there after half a second."""
        started = RunStarted(
            run_id=f"{self.job}.{self.attempt}",
            job_id=int(str(self.job).partition("_")[0]),
            attempt=self.attempt,
            cluster=self.cluster,
            partition="main",
            nodes=list(self.nodes),
            master_node=self.nodes[0],
            user="ml",
            script=script,
            job_name=job_name,
            array=array,
            start_time_s=start_time_s,
            submit_time_s=submit_time_s,
        )
        if array:
            journal.link_array_task(self.directory.parents[2], started)
        self.master(
            started,
            AgentsLaunched(launch=0, nodes=list(self.nodes)),
        )
        self.clock.now_s += 0.5
        for index, node in enumerate(self.nodes):
            address = f"10.0.0.{index + 1}"
            self.write(
                node,
                AgentStarted(node=node, launch=0, hostname=node, address=address),
                WorkersReady(
                    node=node,
                    launch=0,
                    store_port=29500,
                    torch="2.6.0",
                    backend="gloo",
                    devices=["cpu"],
                ),
            )

    def begin_round(self, index: int, groups: Sequence[Sequence[str]]) -> None:
        """Let the master begin a round, with a deadline of 20 s."""
        meet = Rendezvous(address="10.0.0.1", port=29500)
        self.master(
            RoundStarted(
                round=index,
                name=f"round {index}",
                groups=[list(group) for group in groups],
                rendezvous=[meet] * len(groups),
                deadline_s=20.0,
            )
        )

    def measure(
        self,
        index: int,
        group: Sequence[str],
        *,
        allgather_gb_per_s: float | None = 0.4,
        matmul_gflop_per_s: float = 48.0,
        outcome: Outcome = Outcome.MEASURED,
    ) -> None:
        """Let the members of one group record what they measured; no allgather where None."""
        ranks = len(group)
        for node in group:
            samples = [
                sampled(node, index, group, "matmul", _MATMUL_FLOP / (matmul_gflop_per_s * 1e6))
            ]
            if allgather_gb_per_s is not None:
                share = (ranks - 1) / ranks
                elapsed_ms = _ALLGATHER_BYTES * share / (allgather_gb_per_s * 1e6)
                samples.append(sampled(node, index, group, "allgather", elapsed_ms))
            reported = NodeReported(node=node, round=index, outcome=outcome, elapsed_ms=1600.0)
            self.write(node, *samples, reported)

    def end_round(self, index: int, *, after_s: float = 1.0) -> None:
        self.master(RoundEnded(round=index), after_s=after_s)

    def judge(
        self, *bad: NodeVerdict, paths: Sequence[LinkVerdict] = (), after_s: float = 0.1
    ) -> None:
        """Let the master reach its verdict: `bad` as they are, all others healthy."""
        judged = {node: NodeVerdict(node=node, level=Level.HEALTHY) for node in self.nodes}
        judged |= {judgement.node: judgement for judgement in bad}
        self.master(VerdictReached(nodes=list(judged.values()), paths=list(paths)), after_s=after_s)

    def act(self, action: str, nodes: Sequence[str] = (), *, by: str = journal.MASTER) -> None:
        """Record an act and that it succeeded, each by its writer."""
        self.master(ActionIntended(action=Action(action), nodes=list(nodes)))
        self.write(
            by, ActionDone(action=Action(action), succeeded=True, nodes=list(nodes)), after_s=0.1
        )

    def finish(self, disposition: str, *, exit_code: int = 0, reason: str = "") -> None:
        self.master(
            JobOutcome(disposition=Disposition(disposition), exit_code=exit_code, reason=reason)
        )

    def pass_check(self) -> None:
        """Let all nodes pass at once, and the job go on."""
        self.start()
        self.judge()
        self.finish("proceed")

    def run_script(
        self,
        *,
        duration_s: float = 41.0,
        exit_code: int = 0,
        signal: int = 0,
        nodes: Sequence[str] = (),
    ) -> None:
        """Let the supervisor run the user's script to its end, on all nodes or on these."""
        started = ScriptStarted(script="/home/ml/train.sh", pid=200, nodes=list(nodes))
        self.write(journal.SUPERVISOR, started)
        self.write(
            journal.SUPERVISOR,
            ScriptEnded(exit_code=exit_code, signal=signal, duration_s=duration_s),
            after_s=duration_s,
        )


def sampled(node: str, index: int, group: Sequence[str], probe: str, elapsed_ms: float) -> Sampled:
    return Sampled(
        node=node,
        round=index,
        group=list(group),
        probe=probe,
        iteration_ms=[[elapsed_ms] * 3],
        world_size=len(group),
        total_bytes=_ALLGATHER_BYTES if probe == "allgather" else 0,
        flop=_MATMUL_FLOP if probe == "matmul" else 0.0,
        scope="pair" if probe == "allgather" else "solo",
    )


def write_started_script(root: Path, script: str = "/home/ml/train.sh") -> RunJournal:
    """Write the check of a job whose nodes were found healthy and whose script runs."""
    run = RunJournal(root)
    run.pass_check()
    run.write(journal.SUPERVISOR, ScriptStarted(script=script, pid=1))
    return run


def write_healthy_run(
    root: Path,
    *,
    job: int | str = 12,
    label: str = "0",
    nodes: Sequence[str] = ("n1", "n2", "n4", "n5", "n6"),
    cluster: str = "lab",
    array: str = "",
    clock: Clock | None = None,
) -> RunJournal:
    """Write a check of two rounds that finds every node healthy, after which the script ran.

    At least two nodes. Their figures spread: allgather 0.38 to 0.41 GB/s, matmul 46 to
    49 GFLOP/s.
    """
    run = RunJournal(root, cluster=cluster, job=job, label=label, nodes=nodes, clock=clock)
    run.start(array=array)
    for index, order in enumerate((list(nodes), [*nodes[1:], nodes[0]])):
        groups = [order[start : start + 2] for start in range(0, len(order) - 1, 2)]
        run.begin_round(index, groups)
        for number, group in enumerate(groups):
            run.measure(
                index,
                group,
                allgather_gb_per_s=(0.38, 0.41, 0.40)[(number + index) % 3],
                matmul_gflop_per_s=(46.0, 49.0, 48.0)[(number + index) % 3],
            )
        run.end_round(index, after_s=2.1)
    run.judge(after_s=0.1)
    run.act("proceed", nodes)
    run.finish("proceed")
    run.run_script()
    return run


def write_run_with_a_faulty_node(
    root: Path,
    *,
    job: int | str = 12,
    label: str = "0",
    cluster: str = "lab",
    clock: Clock | None = None,
    drains: bool = True,
) -> RunJournal:
    """Write a check of n1 to n5 in which n3 never completes an allgather.

    It is measured with n4, then with n1, drained if the job may, and the job requeued without it.
    """
    run = RunJournal(root, cluster=cluster, job=job, label=label, clock=clock)
    run.start()
    rounds = (
        ((("n1", "n2"), 0.40), (("n3", "n4"), None)),
        ((("n1", "n3"), None), (("n2", "n4"), 0.39)),
        ((("n1", "n4"), 0.41), (("n2", "n5"), 0.38)),
    )
    for index, groups in enumerate(rounds):
        run.begin_round(index, [group for group, _ in groups])
        for group, allgather_gb_per_s in groups:
            failed = allgather_gb_per_s is None
            run.measure(
                index,
                group,
                allgather_gb_per_s=allgather_gb_per_s,
                outcome=Outcome.TIMED_OUT if failed else Outcome.MEASURED,
            )
            if failed:
                run.master(
                    GroupAborted(
                        round=index, group=list(group), reason="deadline passed", timed_out=True
                    )
                )
        run.end_round(index, after_s=1.8)
    run.judge(
        NodeVerdict(
            node="n3",
            level=Level.FAULTY,
            probability=0.99,
            component="network",
            reason="no allgather with n4, n1 (timed out)",
            evidence=("round 0 with n4: timed_out", "round 1 with n1: timed_out"),
        ),
        after_s=0.2,
    )
    run.act("exclude", ["n3"])
    if drains:
        run.act("drain", ["n3"])
    run.finish("requeue", exit_code=1)
    run.act("requeue", by=journal.REQUEUE)
    return run


def write_requeued_job(
    root: Path, *, job: int | str = 12, started_s: float = STARTED_S, drains: bool = True
) -> tuple[RunJournal, RunJournal]:
    """Write a job whose first attempt leaves n3 behind, and whose second one is healthy."""
    clock = Clock(started_s)
    first = write_run_with_a_faulty_node(root, job=job, clock=clock, drains=drains)
    clock.now_s += 5.0
    return first, write_healthy_run(root, job=job, label="1", clock=clock)


def run_started(nodes: Sequence[str], **more: Any) -> RunStarted:
    """Return how the journal of job 12 on these nodes begins, but for what is said otherwise."""
    usual = RunStarted(
        run_id="r",
        job_id=12,
        attempt=0,
        cluster="lab",
        partition="main",
        nodes=list(nodes),
        master_node=nodes[0],
        user="ml",
    )
    return replace(usual, **more)
