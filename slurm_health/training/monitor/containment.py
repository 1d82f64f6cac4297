# SPDX-License-Identifier: Apache-2.0
"""Collectors and operators, run so that one that raises or hangs costs no more than its data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.text import cut, one_line
from slurm_health.system import killable
from slurm_health.training.diagnosis.collected import Collected
from slurm_health.training.diagnosis.inference import (
    Apply,
    Inference,
    InferenceOperator,
    OperatorFailed,
    apply,
)
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.monitor.collector import (
    DataCollector,
    Enabled,
    EndedJob,
    LiveCollector,
    NothingCollected,
)

T = TypeVar("T")

# What a person who looks at a failed job waits for without thinking of it; all together take what
# the supervisor gives (POST_MORTEM_S) with room to say what was found.
COLLECT_S = 13.0
COLLECT_LIVE_S = 8.0  # while a training hangs, which is to be told soon
_ANSWER_BYTES = 16 << 20  # how far 4,096 ranks came in their groups takes 4 MB
_ROOM_S = 1.0  # of these, to come to an end by itself
OPERATOR_S = 2.0
OPERATORS_S = 5.0
_LEAST_S = 0.1  # with less than that left, none is begun
_REASON_CHARACTERS = 200
_COLLECTED, _NOTHING = b"+", b"-"


def collect(
    job: EndedJob, collectors: Sequence[DataCollector], *, limit_s: float = COLLECT_S
) -> Collected:
    """Run all collectors at once, each in a child; return what they collected in time."""
    work = [(each, _work(each.is_enabled, each.collect_data, job)) for each in collectors]
    return _collected(work, [job.end], limit_s)


def collect_live(
    environ: Mapping[str, str],
    collectors: Sequence[LiveCollector],
    known: Sequence[msgspec.Struct],
    *,
    limit_s: float = COLLECT_LIVE_S,
) -> Collected:
    """Run all live collectors at once, each in a child; return their data beside what is known."""

    def until(collector: LiveCollector) -> Callable[[Mapping[str, str]], msgspec.Struct]:
        return lambda told: collector.collect_data(told, limit_s - _ROOM_S)

    work = [(each, _work(each.is_enabled, until(each), environ)) for each in collectors]
    return _collected(work, known, limit_s)


def _collected(
    work: Sequence[tuple[DataCollector | LiveCollector, killable.Work]],
    known: Sequence[msgspec.Struct],
    limit_s: float,
) -> Collected:
    answers = killable.run_all(
        {each.name: (does, limit_s) for each, does in work}, most_bytes=_ANSWER_BYTES
    )
    data = list(known)
    missing: dict[str, str] = {}
    failed: dict[str, str] = {}
    for collector, _ in work:
        answer = answers[collector.name]
        if isinstance(answer, killable.Hung):
            failed[collector.name] = f"did not answer within {answer.limit_s:g} s"
        elif isinstance(answer, killable.Broke):
            failed[collector.name] = _reason(answer.reason)
        elif answer.data[:1] == _NOTHING:
            missing[collector.name] = _reason(answer.data[1:].decode(errors="replace"))
        else:
            try:
                data.append(from_json(answer.data[1:], collector.data))
            except (msgspec.MsgspecError, TypeError) as err:
                failed[collector.name] = _reason(f"answered with something else: {err}")
    return Collected(data, missing=missing, failed=failed)


def _work(
    is_enabled: Callable[[T], Enabled], collect_data: Callable[[T], msgspec.Struct], told: T
) -> killable.Work:
    def work() -> bytes:
        enabled = is_enabled(told)
        if not enabled:
            return _NOTHING + enabled.why_not.encode(errors="replace")
        try:
            return _COLLECTED + msgspec.json.encode(collect_data(told))
        except NothingCollected as nothing:
            return _NOTHING + str(nothing).encode(errors="replace")

    return work


def contained(
    *,
    limit_s: float = OPERATOR_S,
    total_s: float = OPERATORS_S,
    monotonic: Callable[[], float] = time.monotonic,
) -> Apply:
    """Return what applies operators: those of others each time in a child, with a time limit.

    All of them together get `total_s`.
    """
    until_s = monotonic() + total_s

    def call(
        operator: InferenceOperator, inference: Inference, data: Collected
    ) -> Sequence[Inference]:
        if operator in OPERATORS:
            try:
                return apply(operator, inference, data)
            except Exception as err:  # a boundary: what others find must still be said
                raise OperatorFailed(_reason(f"{type(err).__name__}: {err}")) from err
        left_s = min(limit_s, until_s - monotonic())
        if left_s < _LEAST_S:
            raise OperatorFailed("no time was left for it")
        return _in_child(operator, inference, data, left_s)

    return call


def _in_child(
    operator: InferenceOperator, inference: Inference, data: Collected, limit_s: float
) -> Sequence[Inference]:
    answer = killable.run_one(
        lambda: msgspec.json.encode(list(apply(operator, inference, data))), limit_s
    )
    if isinstance(answer, killable.Hung):
        raise OperatorFailed(f"did not answer within {limit_s:.1f} s")
    if isinstance(answer, killable.Broke):
        raise OperatorFailed(_reason(answer.reason))
    try:
        return from_json(answer.data, list[Inference])
    except msgspec.MsgspecError as err:
        raise OperatorFailed(_reason(f"answered with something else: {err}")) from err


def _reason(text: str) -> str:
    return cut(one_line(text), _REASON_CHARACTERS) or "it did not say why"
