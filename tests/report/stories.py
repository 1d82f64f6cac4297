# SPDX-License-Identifier: Apache-2.0
"""Jobs that never were, one for each thing that a report has to tell: as journals.

What is recorded after a usual beginning is in `stories.toml`; the rest is here.
"""

import json
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from slurm_health.records.record_codec import KINDS
from slurm_health.records.records import (
    Action,
    ActionDone,
    ActionIntended,
    VerdictReached,
)
from slurm_health.records.script_records import Diagnosed
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict
from slurm_health.system import journal
from tests.support.journals import (
    Clock,
    RunJournal,
    sampled,
    write_healthy_run,
    write_requeued_job,
    write_run_with_a_faulty_node,
)

MARKUP = '<img src=x onerror="document.title=1"></style><script>document.title=2</script>&amp;'
ESCAPES = "\x1b[2J\x1b]0;title\x07line two\r"
TYPES = {kind.__struct_config__.tag: kind for kind in KINDS}


def of_records(
    root: Path,
    *,
    begins: str,
    nodes: list[str],
    written: Any,
    later_s: float = 0.0,
    script: str = "/home/ml/train.sh",
) -> float:
    """Write records after a usual beginning; return the time of the report."""
    if begins == "healthy":
        run = write_healthy_run(root)
    else:
        run = RunJournal(root, nodes=nodes)
        run.start(script=script)
    if begins == "passed":
        pairs = [nodes[at : at + 2] for at in range(0, len(nodes), 2)]
        run.begin_round(0, pairs)
        for pair in pairs:
            run.measure(0, pair)
        run.end_round(0)
    if begins in ("passed", "checked"):
        run.judge()
        run.finish("proceed")
    for row in written:
        record = msgspec.convert(row, TYPES[row["kind"]])
        run.write(row["by"], record, after_s=row.get("after_s", 0.0))
    return run.clock.now_s + later_s


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
    requeued = Diagnosed(
        cause="requeued",
        description="the job was requeued (scontrol requeue)",
        attribution="ended from outside",
        sureness="certain",
    )
    run.write(journal.POST_MORTEM, requeued)
    again = RunJournal(root, label="1", clock=run.clock)
    again.pass_check()
    again.run_script()
    return run.clock.now_s


def nothing_recorded(root: Path) -> float:
    """There is a directory, and nothing in it."""
    return RunJournal(root).clock.now_s


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


def _of_records() -> dict[str, Callable[[Path], float]]:
    text = Path(__file__).with_suffix(".toml").read_text()
    for name, value in {"MARKUP": MARKUP, "ESCAPES": ESCAPES}.items():
        text = text.replace(f"@{name}@", json.dumps(value)[1:-1])
    stories = tomllib.loads(text)
    for story in stories.values():
        del story["about"]
        story.setdefault("nodes", ["n1", "n2", "n3", "n4", "n5"])
    return {name: partial(of_records, **story) for name, story in stories.items()}


STORIES: dict[str, Callable[[Path], float]] = {
    story.__name__.replace("_", "-"): story
    for story in (
        requeued,
        moved,
        checking,
        requeued_twice,
        requeued_by_others,
        nothing_recorded,
        trouble,
        array_task,
        damaged,
        large,
    )
} | _of_records()
