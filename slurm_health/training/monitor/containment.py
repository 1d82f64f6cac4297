# SPDX-License-Identifier: Apache-2.0
"""Collectors and a site's operators, run so that one that raises or hangs costs only its data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.script_records import NO_PROGRESS, SCRIPT_FAILED
from slurm_health.records.text import cut, one_line
from slurm_health.system import killable
from slurm_health.training.framework import (
    ASKS_FOR,
    Attribution,
    DataCollector,
    DataManager,
    Diagnostician,
    EventAction,
    Inference,
    InferenceOperator,
    LeaveNode,
    NoAction,
    NothingCollected,
    OperatorFailed,
    OperatorMaker,
    RestartRanks,
    StopJob,
    Sureness,
)

# All together stay within the supervisor's limit (POST_MORTEM_S), with time left for the diagnosis.
COLLECT_S = 13.0
COLLECT_LIVE_S = 8.0  # while a training hangs: its report has to come soon
OPERATOR_S = 2.0
OPERATORS_S = 5.0
_ANSWER_BYTES = 16 << 20  # the progress of 4,096 ranks in their groups takes 4 MB
_LEAST_S = 0.1  # with less time left, no operator starts
_REASON_CHARACTERS = 200
_COLLECTED, _NOTHING = b"+", b"-"
# The blame for a failure decides its action, so an action implies a blame, as surely as the action
# needs. Surer inferences prevail; equally sure ones with another blame leave it undecided.
_MEANS = {
    EventAction: (Attribution.UNDECIDED, Sureness.POSSIBLE),
    RestartRanks: (Attribution.TRANSIENT, Sureness.LIKELY),
    LeaveNode: (Attribution.NODE, Sureness.LIKELY),
    StopJob: (Attribution.USER, Sureness.LIKELY),
}


def collect(
    collectors: Sequence[DataCollector],
    environ: Mapping[str, str],
    known: Sequence[object] = (),
    *,
    limit_s: float = COLLECT_S,
) -> DataManager:
    """Run all collectors at once, every one in a child; return the data that came in time.

    Args:
        collectors: of different kinds.
        environ: of the job.
        known: data that exists already.
        limit_s: of every collector.
    """
    works = {c.kind: (partial(_work, c, environ), limit_s) for c in collectors}
    answers = killable.run_all(works, most_bytes=_ANSWER_BYTES)
    manager = DataManager(known)
    for collector in collectors:
        kind, answer = collector.kind, answers[collector.kind]
        if isinstance(answer, killable.Hung):
            manager.failed[kind] = f"did not answer within {answer.limit_s:g} s"
        elif isinstance(answer, killable.Broke):
            manager.failed[kind] = _reason(answer.reason)
        elif answer.data[:1] == _NOTHING:
            why = answer.data[1:].decode(errors="replace")
            manager.missing[kind] = _reason(why or "there is nothing")
        elif collector.data is None:
            manager.store(from_json(answer.data[1:], object), kind)
        else:
            try:
                manager.store(from_json(answer.data[1:], collector.data))
            except (msgspec.MsgspecError, TypeError) as err:
                manager.failed[kind] = _reason(f"answered with something else: {err}")
    return manager


def _work(collector: DataCollector, environ: Mapping[str, str]) -> bytes:
    collector.environ = environ
    if not collector.is_enabled():
        return _NOTHING + b"it is not enabled here"
    try:
        data = collector.collect_data()
    except NothingCollected as nothing:
        return _NOTHING + str(nothing).encode(errors="replace")
    return _NOTHING if data is None else _COLLECTED + msgspec.json.encode(data)


class Allowance:
    """The time of a site's operators together in one diagnosis, and of a single call."""

    def __init__(
        self,
        limit_s: float = OPERATOR_S,
        total_s: float = OPERATORS_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._monotonic = monotonic
        self._until_s = monotonic() + total_s

    def next_s(self) -> float:
        """Return the time limit of the next call.

        Raises:
            OperatorFailed: no time is left.
        """
        left_s = min(self._limit_s, self._until_s - self._monotonic())
        if left_s < _LEAST_S:
            raise OperatorFailed("no time was left for it")
        return left_s


class InChild(InferenceOperator):
    """A site's operator; every call makes and runs it in a new child with a time limit."""

    def __init__(
        self, data_manager: DataManager, made: OperatorMaker, name: str, allowance: Allowance
    ) -> None:
        super().__init__(data_manager)
        self.name = name
        self._made = made
        self._allowance = allowance

    def is_compatible(self, _inference: Inference) -> bool:
        """Leave it to the child."""
        return True

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Return the inferences of the operator.

        Raises:
            OperatorFailed: it raised, hung, or its answer is no list of inferences.
        """

        def work() -> bytes:
            operator = self._made(self._data_manager)
            compatible = [before for before in inferences if operator.is_compatible(before)]
            inferred = [after for before in compatible for after in operator.infer([before])]
            if not all(isinstance(after, Inference) and after.name for after in inferred):
                raise TypeError("it must return inferences that have names")
            return msgspec.json.encode(inferred)

        limit_s = self._allowance.next_s()
        answer = killable.run_one(work, limit_s)
        if isinstance(answer, killable.Hung):
            raise OperatorFailed(f"did not answer within {limit_s:.1f} s")
        if isinstance(answer, killable.Broke):
            raise OperatorFailed(_reason(answer.reason))
        try:
            return from_json(answer.data, list[Inference])
        except msgspec.MsgspecError as err:
            raise OperatorFailed(_reason(f"answered with something else: {err}")) from err


class AskedDiagnostician(InferenceOperator):
    """A site's diagnostician as a step of a chain: its action is one inference among others."""

    def __init__(self, data_manager: DataManager, diagnostician: Diagnostician) -> None:
        super().__init__(data_manager)
        self.name = type(diagnostician).__name__
        self._diagnostician = diagnostician

    def is_compatible(self, inference: Inference) -> bool:
        """Whether a script has failed, or a training hangs."""
        return inference.name in {SCRIPT_FAILED, NO_PROGRESS}

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Return its action as an inference: the decision takes all inferences into account.

        Raises:
            OperatorFailed: it failed, or its answer is no action.
        """
        action = self._diagnostician.diagnose(
            data_manager=self._data_manager, inference=inferences[0]
        )
        if isinstance(action, NoAction):
            if action.failed:
                raise OperatorFailed(action.failed)
            return []
        if type(action) not in _MEANS:
            answer = type(action).__name__
            raise OperatorFailed(f"it answered with {answer} instead of an action")
        attribution, sureness = _MEANS[type(action)]
        return [
            Inference(
                name=self.name,
                description=action.reason or f"{self.name} asks for {action.kind}",
                attribution=attribution,
                sureness=sureness,
                nodes=action.nodes,
                evidence=action.evidence,
                configs={ASKS_FOR: action.kind},
            )
        ]


def _reason(text: str) -> str:
    return cut(one_line(text), _REASON_CHARACTERS) or "without a reason"
