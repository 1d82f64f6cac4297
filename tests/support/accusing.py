# SPDX-License-Identifier: Apache-2.0
"""Jobs whose journals accuse a node, for the tests of the epilog."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_health.node.rules.accusations import Accusation, from_journal
from slurm_health.records.errors import RecordTooNew
from slurm_health.records.record_codec import encode
from slurm_health.records.records import Record, RunStarted, VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system.journal import MASTER, Reader
from tests.support.journals import run_started

if TYPE_CHECKING:  # which makes stories of its nodes
    from tests.support.hooked_node import Node

UID = os.getuid() or 1
JOB = 7


def started(job: int = JOB, nodes: tuple[str, ...] = ("n3", "n4")) -> RunStarted:
    return run_started(nodes, job_id=job, partition="gpu", user="alice")


def judged(node: str = "n3", level: Level = Level.FAULTY, **changes: object) -> NodeVerdict:
    base: dict[str, object] = {
        "component": "node",
        "reason": "allgather failed with n4 and n5",
        "evidence": ("round 0 with n4", "round 1 with n5"),
        "probability": 1.0,
    }
    return NodeVerdict(node=node, level=level, **{**base, **changes})  # type: ignore[arg-type]


def lines(*records: Record) -> bytes:
    return b"".join(
        encode(each, entry_id=f"master:{number}", time_s=1.0) for number, each in enumerate(records)
    )


def journal(*nodes: NodeVerdict, job: int = JOB) -> bytes:
    return lines(started(job), VerdictReached(nodes=list(nodes or (judged(),))))


def accusation(data: bytes, node: str, job: int) -> Accusation | None:
    """Return what the master's file of one run says of a node, as the epilog reads it."""
    try:
        entries = Reader(Path("/lab/7/0"), MASTER, of_anybody=True).take(data)
    except RecordTooNew:
        return None
    return from_journal([entry.record for entry in entries], node=node, job=job)


class Story:
    """Jobs of several users on one node, whose journals accuse it."""

    def __init__(self, node: Node, root: Path) -> None:
        self.node = node
        self.root = root
        root.mkdir()
        root.chmod(0o755)
        (root / "lab").mkdir()
        (root / "lab").chmod(0o755)

    def run_directory(self, job: int = JOB, attempt: str = "0") -> Path:
        return self.root / "lab" / str(job) / attempt

    def write(self, data: bytes, *, job: int = JOB, attempt: str = "0", uid: int = UID) -> Path:
        run = self.run_directory(job, attempt)
        run.mkdir(parents=True, exist_ok=True)
        path = run / "master.jsonl"
        path.write_bytes(data)
        self.own(job, uid)
        return path

    def own(self, job: int, uid: int) -> None:
        if os.getuid() == 0:
            top = self.root / "lab" / str(job)
            for each in (top, *top.rglob("*")):
                os.chown(each, uid, uid, follow_symlinks=False)

    def ended(
        self, job: int = JOB, uid: int = UID, restarts: str | None = "0", **more: str
    ) -> bool:
        self.node.now_s += 60
        self.node.more = self.more
        extra = {"SLURM_CLUSTER_NAME": "lab", **more}
        if restarts is not None:
            extra["SLURM_JOB_RESTART_COUNT"] = restarts
        return self.node.epilog(job, uid, **extra)

    policy = "confirm"

    @property
    def more(self) -> str:
        return (
            f"[accusations]\npolicy='{self.policy}'\n"
            "[checks.flag]\ncheck='file'\npath='/broken'\nexists=false\ncontexts=['retest']\n"
        )
