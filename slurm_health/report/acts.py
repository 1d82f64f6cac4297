# SPDX-License-Identifier: Apache-2.0
"""What a run set out to do and what came of it: intents and their results, put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from slurm_health.records.record_codec import Entry
from slurm_health.records.records import ActionDone, ActionIntended


class Progress(Enum):
    """How far an act got, as far as the journal tells."""

    INTENDED = "intended"  # begun; its end is not recorded
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Act:
    """One act on the nodes named, or on the job where there are none."""

    action: str
    progress: Progress
    nodes: tuple[str, ...] = ()
    reason: str = ""
    detail: str = ""


@dataclass(kw_only=True)
class _Intent:
    """An intent, and the results that were found for it."""

    record: ActionIntended
    results: list[ActionDone] = field(default_factory=list)

    def is_answered_by(self, done: ActionDone) -> bool:
        return done.action == self.record.action and set(done.nodes) <= set(self.record.nodes)


def acts_of(entries: Iterable[Entry]) -> tuple[Act, ...]:
    """Return the acts in the order they were intended.

    An intent written again by a master that took over counts once.

    Args:
        entries: those of the master, then those of the requeue helper. Their order counts, not
            their clocks.
    """
    intents: list[_Intent] = []
    for entry in entries:
        if isinstance(entry.record, ActionIntended):
            intents = [*_without_repeated(intents, entry.record), _Intent(record=entry.record)]
        elif isinstance(entry.record, ActionDone):
            _intent_of(intents, entry.record).results.append(entry.record)
    return tuple(act for intent in intents for act in _acts(intent))


def _without_repeated(intents: list[_Intent], again: ActionIntended) -> list[_Intent]:
    same = (again.action, again.nodes)
    return [
        intent
        for intent in intents
        if intent.results or (intent.record.action, intent.record.nodes) != same
    ]


def _intent_of(intents: list[_Intent], done: ActionDone) -> _Intent:
    """Return the newest intent that waits for this result; one is made up where there is none."""
    fitting = [intent for intent in intents if intent.is_answered_by(done)]
    waiting = [intent for intent in fitting if not intent.results]
    if waiting or fitting:
        return (waiting or fitting)[-1]
    intents.append(_Intent(record=ActionIntended(action=done.action, nodes=done.nodes)))
    return intents[-1]


def _acts(intent: _Intent) -> list[Act]:
    record = intent.record
    if not intent.results:
        return [_act(record, Progress.INTENDED, tuple(record.nodes))]
    rest = list(record.nodes)
    acts: list[Act] = []
    for done in intent.results:
        rest = [node for node in rest if node not in done.nodes]
        if _took_effect(done, record):
            if done.nodes or not record.nodes:
                acts.append(_act(record, Progress.DONE, tuple(done.nodes), detail=done.detail))
            continue
        nodes = tuple(done.nodes or rest)
        rest = rest if done.nodes else []
        acts.append(_act(record, Progress.FAILED, nodes, detail=done.detail))
    if rest:
        acts.append(_act(record, Progress.FAILED, tuple(rest), detail=intent.results[-1].detail))
    return acts


def _took_effect(done: ActionDone, intended: ActionIntended) -> bool:
    """Say whether the nodes of a result are those on which the act took effect.

    An act that failed as a whole gives a cause; one that reached only some nodes names those.
    """
    reached_some = set() < set(done.nodes) < set(intended.nodes)
    return done.succeeded or (reached_some and not done.detail)


def _act(
    record: ActionIntended, progress: Progress, nodes: tuple[str, ...], detail: str = ""
) -> Act:
    return Act(
        action=record.action, progress=progress, nodes=nodes, reason=record.reason, detail=detail
    )
