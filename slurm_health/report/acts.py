# SPDX-License-Identifier: Apache-2.0
"""Acts on nodes and jobs, from the intents and results in a journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from slurm_health.records import records
from slurm_health.records.record_codec import Entry
from slurm_health.report.story import Act, Progress


def acts_of(entries: Iterable[Entry]) -> list[Act]:
    """Return the acts in the order they were intended, those of a master before its helper's.

    An intent written again by a master that took over counts once.
    """
    intents: list[tuple[records.ActionIntended, list[records.ActionDone]]] = []
    for entry in entries:
        match entry.record:
            case records.ActionIntended() as intent:
                same = (intent.action, intent.nodes)
                intents = [i for i in intents if i[1] or (i[0].action, i[0].nodes) != same]
                intents.append((intent, []))
            case records.ActionDone() as done:
                fitting = [
                    results
                    for intent, results in intents
                    if intent.action == done.action and {*done.nodes} <= {*intent.nodes}
                ]
                if not fitting:
                    made_up = records.ActionIntended(action=done.action, nodes=done.nodes)
                    fitting = [[]]
                    intents.append((made_up, fitting[0]))
                waiting = [results for results in fitting if not results]
                (waiting or fitting)[-1].append(done)
    return [act for intent, results in intents for act in _acts(intent, results)]


def _acts(intent: records.ActionIntended, results: Sequence[records.ActionDone]) -> Iterator[Act]:
    """Yield the acts that an intent came to: some nodes may have failed."""

    def act(progress: Progress, nodes: Iterable[str], detail: str = "") -> Act:
        return Act(
            action=intent.action,
            progress=progress,
            nodes=tuple(nodes),
            reason=intent.reason,
            detail=detail,
        )

    if not results:
        yield act(Progress.INTENDED, intent.nodes)
        return
    rest = list(intent.nodes)
    for done in results:
        rest = [node for node in rest if node not in done.nodes]
        # An act that failed as a whole gives a cause; one that reached only some names those.
        reached_some = set() < {*done.nodes} < {*intent.nodes}
        if done.succeeded or (reached_some and not done.detail):
            if done.nodes or not intent.nodes:
                yield act(Progress.DONE, done.nodes, done.detail)
        else:
            yield act(Progress.FAILED, done.nodes or rest, done.detail)
            rest = rest if done.nodes else []
    if rest:
        yield act(Progress.FAILED, rest, results[-1].detail)
