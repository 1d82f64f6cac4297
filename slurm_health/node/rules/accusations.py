# SPDX-License-Identifier: Apache-2.0
"""What an ended job's own check says against a node, and the marks it leaves: trusting nothing.

A journal is its owner's: every byte may have been written to have a node drained. So only one
shape of it counts, about one node and one job. An accusation that no local check confirms is kept
as a mark, and marks count only if different users leave them.

A test of one node cannot see what is wrong between nodes: a marked node is due in the next sweep,
with partners.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from slurm_health.node.rules.settings import Accusations
from slurm_health.records.records import Record, RunStarted, VerdictReached
from slurm_health.records.text import counted, plain
from slurm_health.records.verdict import Level

_TEXT = 160
_DAY_S = 86_400.0
_MOST_MARKS = 200
# After a week a mark expires.
_MARK_S = 7 * _DAY_S

Short = Annotated[str, msgspec.Meta(max_length=_TEXT)]


class Accusation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The verdict of one check of a job about this node. Texts are cut, without control characters.

    `level` is FAULTY, SLOW, or HEALTHY, which takes back the job's earlier accusations. SLOW is
    worth a test and nothing else: slowness is decided by comparison, and a healthy node among
    faster ones is slow too.
    """

    node: Annotated[str, msgspec.Meta(max_length=255)]
    job: Annotated[int, msgspec.Meta(ge=1)]
    component: Annotated[str, msgspec.Meta(max_length=32, pattern=r"^[\w-]*$")]
    reason: Short
    level: Level = Level.FAULTY

    @property
    def slow(self) -> bool:
        """Whether it only calls the node slow."""
        return self.level is Level.SLOW

    @property
    def text(self) -> str:
        """The component and what is wrong with it."""
        return f"{self.component}: {self.reason}"


def from_journal(records: Iterable[Record | None], *, node: str, job: int) -> Accusation | None:
    """Return the last verdict about a node in the master's records of one run; None for none.

    The run of another job, or without this node, has none; nor has one whose verdict is undecided
    about the node, or names it twice. Raises nothing.
    """
    started: RunStarted | None = None
    reached: VerdictReached | None = None
    for record in records:
        if isinstance(record, RunStarted) and started is None:
            started = record
        elif isinstance(record, VerdictReached):
            reached = record
    if started is None or started.job_id != job or node not in started.nodes or reached is None:
        return None
    verdicts = [verdict for verdict in reached.nodes if verdict.node == node]
    if len(verdicts) != 1 or verdicts[0].level is Level.INCONCLUSIVE:
        return None
    (verdict,) = verdicts
    if not 0 <= verdict.probability <= 1:  # nan as well
        return None
    # "compute device 3" is about compute, which chooses the tests here.
    component = verdict.component.partition(" ")[0]
    if not component.replace("-", "").isalnum() or not component.isascii():
        component = "node"
    return Accusation(
        node=node,
        job=job,
        component=component[:32],
        reason=_short(verdict.reason),
        level=verdict.level,
    )


def effective(accusations: Sequence[Accusation]) -> Accusation | None:
    """Return the accusation of one job that counts, None for none.

    A later healthy verdict takes back the earlier ones. Faulty counts more than slow.

    Args:
        accusations: of the job's checks, the earliest first.
    """
    kept: list[Accusation] = []
    for accusation in accusations:
        kept = [] if accusation.level is Level.HEALTHY else [*kept, accusation]
    faulty = [accusation for accusation in kept if not accusation.slow]
    return next(reversed(faulty or kept), None)


def _short(text: str) -> str:
    return plain(text[: 4 * _TEXT])[:_TEXT].rstrip()


class NodeMark(msgspec.Struct, frozen=True, kw_only=True):
    """One job's unconfirmed accusation of a node."""

    job: int
    uid: int
    component: str
    text: str
    time_s: float


def add(marks: Sequence[NodeMark], mark: NodeMark, settings: Accusations) -> tuple[NodeMark, ...]:
    """Return the marks with one more, without expired ones.

    A job marks a node once, however often it is started again. Of one user only as many are kept
    as could ever count, so that one user's marks cannot push out those of others.
    """
    kept = [
        other
        for other in alive(marks, mark.time_s)
        if (other.job, other.uid) != (mark.job, mark.uid)
    ]
    own = [other for other in kept if other.uid == mark.uid]
    surplus = own[: max(0, len(own) + 1 - settings.jobs)]
    return (*(other for other in kept if other not in surplus), mark)[-_MOST_MARKS:]


def alive(marks: Sequence[NodeMark], now_s: float) -> tuple[NodeMark, ...]:
    """Return the marks that have not expired; one of a later day has the time of a wrong clock."""
    return tuple(mark for mark in marks if -_DAY_S <= now_s - mark.time_s <= _MARK_S)


def quorum_reached(marks: Sequence[NodeMark], settings: Accusations) -> bool:
    """Return whether the marks are of enough different users and enough different jobs.

    One user alone never reaches the quorum, whatever the number of jobs.
    """
    if settings.users == 0:
        return False
    users = {mark.uid for mark in marks}
    jobs = {mark.job for mark in marks}
    return len(users) >= settings.users and len(jobs) >= settings.jobs


def summary(marks: Sequence[NodeMark]) -> str:
    """Return how many jobs and users accuse the node, and the text of the last mark."""
    users, jobs = {mark.uid for mark in marks}, {mark.job for mark in marks}
    last = f"; the last: {marks[-1].text}" if marks else ""
    by = f"{counted(len(jobs), 'job')} of {counted(len(users), 'user')}"
    return f"accused by {by}, unconfirmed here{last}"
