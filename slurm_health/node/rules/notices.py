# SPDX-License-Identifier: Apache-2.0
"""Which events are told to whom, when, and how many in one message. Pure.

Hooks leave events on their nodes. Whoever delivers puts them together, over all nodes, in one
`Post`: what waits, what was told of late, and who is at it. A rack that fails is one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from slurm_health.node.rules.settings import Notify
from slurm_health.records.nodeset import fold

_HOUR_S = 3600.0
# A target that fails is tried again after a minute, then after twice as long each time.
_FIRST_RETRY_S = 60.0
_LAST_RETRY_S = 3600.0
# Of events that cannot be delivered; the oldest go first.
_MOST_WAITING = 500
# The next message has the others.
_MOST_IN_MESSAGE = 200


class EventKind(Enum):
    """What is told, and nothing else."""

    DRAINED = "drained"
    RELAPSE = "relapse"  # drained again within a day
    RELEASED = "released"
    BREAKER = "breaker"
    STEP_FAILED = "step_failed"  # of mending
    TICKET = "ticket"  # mending has come to its end: a person is needed
    TEST = "test"


_OF_POOL = (EventKind.DRAINED, EventKind.RELAPSE, EventKind.RELEASED)


class NodeEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened to a node. `evidence`: what a person needs to go on from there.

    It gets its `id` where it is queued.
    """

    id: str = ""
    kind: EventKind
    node: str
    time_s: float
    text: str
    checks: tuple[str, ...] = ()
    job: int = 0
    evidence: tuple[str, ...] = ()

    @property
    def _subject(self) -> str:
        """What a later event may repeat: a node that leaves the pool and comes back does not."""
        return self.node if self.kind in _OF_POOL else f"{self.node} {self.kind.value}"

    @property
    def _said(self) -> str:
        return f"{self.kind.value} {','.join(self.checks)}"


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """An event, when it was received, and the targets that it has still to be told to."""

    event: NodeEvent
    received_s: float
    targets: tuple[str, ...]


class Last(msgspec.Struct, frozen=True):
    """What was last said of a subject, and when."""

    said: str
    time_s: float


class TargetFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A target that took no message `count` times in a row, when it is next tried, and why."""

    count: int
    next_s: float
    why: str


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Who delivers, and until when others leave it to them."""

    by: str
    until_s: float


class Post(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all nodes keep together. `told`: when each target was sent its last messages."""

    waiting: tuple[Waiting, ...] = ()
    last: dict[str, Last] = {}
    told: dict[str, tuple[float, ...]] = {}
    failures: dict[str, TargetFailure] = {}
    lease: Lease | None = None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one message to one target: all of one kind."""

    target: str
    events: tuple[NodeEvent, ...]

    @property
    def nodes(self) -> str:
        """Their nodes, folded."""
        return fold(sorted({each.node for each in self.events}))


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be sent now; without that, in how many seconds something may be, None: nothing."""

    batches: tuple[Batch, ...] = ()
    wait_s: float | None = None


def accept(post: Post, events: Iterable[NodeEvent], settings: Notify, now_s: float) -> Post:
    """Return the post with events that have arrived.

    Left out is what the last event of the same node has said already, within `again_min`; and
    what no target wants.
    """
    waiting = list(post.waiting)
    known = {each.event.id for each in waiting}
    last = {
        subject: each
        for subject, each in post.last.items()
        if abs(now_s - each.time_s) < 60 * settings.again_min
    }
    for event in events:
        before = last.get(event._subject)
        if event.id in known or (before is not None and before.said == event._said):
            continue
        last[event._subject] = Last(event._said, now_s)
        targets = tuple(
            name for name, target in settings.targets.items() if target.wants(event.kind.value)
        )
        if targets:
            waiting.append(Waiting(event=event, received_s=now_s, targets=targets))
    return msgspec.structs.replace(post, waiting=tuple(waiting[-_MOST_WAITING:]), last=last)


def due(post: Post, settings: Notify, now_s: float) -> Due:
    """Return what is to be sent now, and in which messages.

    The first event of a target waits `fold_s` for others. Beyond `per_hour` messages, events wait
    and are folded until there may be another message.
    """
    if post.lease is not None and 0 < post.lease.until_s - now_s <= _HOUR_S:
        return Due(wait_s=post.lease.until_s - now_s if post.waiting else None)
    batches: list[Batch] = []
    waits: list[float] = []
    for name in settings.targets:
        mine = [each for each in post.waiting if name in each.targets]
        if not mine:
            continue
        wait_s = max(
            _left_s(mine[0].received_s, settings.fold_s, now_s),
            _retry_left_s(post.failures.get(name), now_s),
        )
        sent = _within_hour(post.told.get(name, ()), now_s)
        if len(sent) >= settings.per_hour:
            wait_s = max(wait_s, min(sent) + _HOUR_S - now_s)
        if wait_s > 0:
            waits.append(wait_s)
            continue
        batches += _batches(name, mine, settings.per_hour - len(sent))
    return Due(batches=tuple(batches), wait_s=min(waits, default=None))


def _left_s(since_s: float, span_s: float, now_s: float) -> float:
    """Return how much of a span is left; none where the clock was set back since."""
    age_s = now_s - since_s
    return span_s - age_s if 0 <= age_s < span_s else 0.0


def _retry_left_s(failure: TargetFailure | None, now_s: float) -> float:
    left_s = failure.next_s - now_s if failure is not None else 0.0
    return left_s if 0 < left_s <= _LAST_RETRY_S else 0.0


def _within_hour(times: Sequence[float], now_s: float) -> list[float]:
    return [each for each in times if 0 <= now_s - each < _HOUR_S]


def _batches(target: str, waiting: Sequence[Waiting], most: int) -> list[Batch]:
    """Return messages: one for each kind and cause, or where these are too many, for each kind."""
    by_cause: dict[object, list[NodeEvent]] = {}
    by_kind: dict[object, list[NodeEvent]] = {}
    for each in waiting:
        by_cause.setdefault((each.event.kind, each.event.checks), []).append(each.event)
        by_kind.setdefault(each.event.kind, []).append(each.event)
    groups = by_cause if len(by_cause) <= most else by_kind
    return [
        Batch(target=target, events=tuple(each[:_MOST_IN_MESSAGE]))
        for each in list(groups.values())[:most]
    ]


def lease(post: Post, by: str, until_s: float) -> Post:
    """Return the post with one who delivers."""
    return msgspec.structs.replace(post, lease=Lease(by=by, until_s=until_s))


def settle(
    post: Post, outcomes: Sequence[tuple[Batch, str]], settings: Notify, now_s: float
) -> tuple[Post, tuple[NodeEvent, ...]]:
    """Return the post after messages were sent, and the events that are given up.

    Args:
        post: as it is now; others may have added to it since.
        outcomes: each message, and why it was not taken; empty where it was.
        settings: the site's.
        now_s: the time.
    """
    told = {name: tuple(_within_hour(times, now_s)) for name, times in post.told.items()}
    failures = dict(post.failures)
    done: set[tuple[str, str]] = set()
    for batch, why_not in outcomes:
        if why_not:
            failures[batch.target] = _failed(failures.get(batch.target), why_not, now_s)
            continue
        told[batch.target] = (*told.get(batch.target, ()), now_s)
        failures.pop(batch.target, None)
        done |= {(batch.target, each.id) for each in batch.events}
    left, given_up = [], []
    for each in post.waiting:
        targets = tuple(
            name
            for name in each.targets
            if name in settings.targets and (name, each.event.id) not in done
        )
        if not targets:
            continue
        if now_s - each.received_s > _HOUR_S * settings.keep_h:
            given_up.append(each.event)
            continue
        left.append(msgspec.structs.replace(each, targets=targets))
    after = msgspec.structs.replace(
        post, waiting=tuple(left), told=told, failures=failures, lease=None
    )
    return after, tuple(given_up)


def _failed(before: TargetFailure | None, why: str, now_s: float) -> TargetFailure:
    count = before.count + 1 if before is not None else 1
    retry_s = min(_FIRST_RETRY_S * 2 ** min(count - 1, 10), _LAST_RETRY_S)
    return TargetFailure(count=count, next_s=now_s + retry_s, why=why)


def summary(post: Post) -> dict[str, int]:
    """Return how many events wait for each target."""
    counts: dict[str, int] = {}
    for each in post.waiting:
        for name in each.targets:
            counts[name] = counts.get(name, 0) + 1
    return counts
