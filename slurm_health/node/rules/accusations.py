# SPDX-License-Identifier: Apache-2.0
"""What an ended job's own check says against a node, and the marks it leaves: trusting nothing.

A journal is its owner's: every byte may have been written to have a node drained. So only one
shape of it counts, about one node and one job. What no local check confirms is kept as a mark, and
marks count only when they are from different users.

Root's test of what users say costs the other jobs of the node time, so it is limited too.

What is wrong between nodes no test of one node can see: a marked node is due in the next sweep,
with partners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from slurm_health.node.rules.settings import Accusations
from slurm_health.records.record_codec import NewerVersion, decode
from slurm_health.records.records import RunStarted, VerdictReached
from slurm_health.records.text import counted, plain
from slurm_health.records.verdict import Level

_TEXT = 160
_EVIDENCE = 8
_MOST_LINES = 200_000
# What an accusation needs to stand alone, where a site trusts its users.
_STRONG_PROBABILITY = 0.99
_STRONG_EVIDENCE = 2
_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S
_MOST_MARKS = 200
# After a week a mark expires.
_MARK_S = 7 * _DAY_S
# A test takes processors or GPUs from other jobs.
TESTS_PER_USER_HOUR = 2

Short = Annotated[str, msgspec.Meta(max_length=_TEXT)]


class Accusation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one check of a job says of this node. Texts are cut and free of control characters.

    `level` is FAULTY, SLOW, or HEALTHY, which takes back what the job's earlier checks said. One of
    slowness is worth a test and nothing else: what is slow is decided by comparison, and a healthy
    node among faster ones is slow too.
    """

    node: Annotated[str, msgspec.Meta(max_length=255)]
    job: Annotated[int, msgspec.Meta(ge=1)]
    component: Annotated[str, msgspec.Meta(max_length=32, pattern=r"^[\w-]*$")]
    reason: Short
    probability: Annotated[float, msgspec.Meta(ge=0, le=1)]
    evidence: Annotated[tuple[Short, ...], msgspec.Meta(max_length=_EVIDENCE)]
    level: Level = Level.FAULTY

    @property
    def slow(self) -> bool:
        """Whether it only calls the node slow."""
        return self.level is Level.SLOW

    @property
    def strong(self) -> bool:
        """Whether it brings evidence of its own, from more than one test."""
        certain = self.probability >= _STRONG_PROBABILITY
        return certain and not self.slow and len(set(self.evidence)) >= _STRONG_EVIDENCE


def from_journal(data: bytes, *, node: str, job: int) -> Accusation | None:
    """Return what the master's file of one run says of a node; None for nothing.

    Nothing is said by a file of another job, of a run without this node, of a newer version, or
    without a verdict. The last verdict counts. Raises nothing.
    """
    started: RunStarted | None = None
    verdict: VerdictReached | None = None
    for line in data.splitlines()[:_MOST_LINES]:
        try:
            record = decode(line).record
        except NewerVersion:
            return None
        except ValueError:
            continue  # torn or foreign: says nothing
        if isinstance(record, RunStarted) and started is None:
            started = record
        elif isinstance(record, VerdictReached):
            verdict = record
    if started is None or started.job_id != job or node not in started.nodes or verdict is None:
        return None
    return _of_node(verdict, node, job)


def _of_node(verdict: VerdictReached, node: str, job: int) -> Accusation | None:
    judged = [each for each in verdict.nodes if each.node == node]
    if len(judged) != 1 or judged[0].level is Level.INCONCLUSIVE:
        return None
    (found,) = judged
    if not 0 <= found.probability <= 1:  # nan as well
        return None
    # "compute device 3" is about compute: what a test here is chosen by.
    kind = found.component.partition(" ")[0]
    component = kind if kind.replace("-", "").isalnum() else "node"
    evidence = tuple(_short(each) for each in found.evidence[:_EVIDENCE])
    return Accusation(
        node=node,
        job=job,
        component=component[:32] if component.isascii() else "node",
        reason=_short(found.reason),
        probability=found.probability,
        evidence=evidence,
        level=found.level,
    )


def standing(said: Sequence[Accusation]) -> Accusation | None:
    """Return what counts of what the checks of one job say, the earliest first; None for nothing.

    What was said before a check found the node healthy does not. Faulty counts more than slow.
    """
    kept: list[Accusation] = []
    for each in said:
        kept = [] if each.level is Level.HEALTHY else [*kept, each]
    faulty = [each for each in kept if not each.slow]
    return next(reversed(faulty or kept), None)


Tested = dict[int, tuple[float, ...]]


def with_test(
    tested: Mapping[int, Sequence[float]],
    uid: int,
    now_s: float,
    most: int = TESTS_PER_USER_HOUR,
) -> Tested | None:
    """Count one more test of this node because of a user; None when they have had enough.

    Args:
        tested: when the node was tested because of which user.
        uid: the user.
        now_s: seconds since the epoch.
        most: how many a user gets within an hour.
    """
    recent = {
        each: tuple(time_s for time_s in times if abs(now_s - time_s) <= _HOUR_S)
        for each, times in tested.items()
    }
    own = recent.get(uid, ())
    if len(own) >= most:
        return None
    return {each: times for each, times in recent.items() if times} | {uid: (*own, now_s)}


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
    """Return the marks with one more, without those that are too old.

    A job marks a node once, however often it is started again. Of one user only as many are kept
    as could ever count, so that nobody's marks push out those of others.
    """
    kept = [
        each for each in alive(marks, mark.time_s) if (each.job, each.uid) != (mark.job, mark.uid)
    ]
    own = [each for each in kept if each.uid == mark.uid]
    surplus = own[: max(0, len(own) + 1 - settings.jobs)]
    return (*(each for each in kept if each not in surplus), mark)[-_MOST_MARKS:]


def alive(marks: Sequence[NodeMark], now_s: float) -> tuple[NodeMark, ...]:
    """Return the marks that are not too old, nor of a later day, by a clock that is wrong."""
    return tuple(each for each in marks if -_DAY_S <= now_s - each.time_s <= _MARK_S)


def convict(marks: Sequence[NodeMark], settings: Accusations) -> bool:
    """Tell whether the marks are from enough different users and enough different jobs.

    One user alone never gets there, whatever number of jobs they run.
    """
    if settings.users == 0:
        return False
    users = {each.uid for each in marks}
    jobs = {each.job for each in marks}
    return len(users) >= settings.users and len(jobs) >= settings.jobs


def summary(marks: Sequence[NodeMark]) -> str:
    """Say how many accuse, and what the last of them says."""
    users, jobs = {each.uid for each in marks}, {each.job for each in marks}
    last = f"; the last: {marks[-1].text}" if marks else ""
    by = f"{counted(len(jobs), 'job')} of {counted(len(users), 'user')}"
    return f"accused by {by}, unconfirmed here{last}"
