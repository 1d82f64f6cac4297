# SPDX-License-Identifier: Apache-2.0
"""What is inferred of a failure, how sure that is, who infers it, and the walk to its cause.

Every operator that fits leads on from what others inferred, a bounded way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from slurm_health.records.script_records import Attribution, Sureness
from slurm_health.training.diagnosis.collected import Collected

__all__ = [
    "ASKS_FOR",
    "Apply",
    "Attribution",
    "ChainStep",
    "Inference",
    "InferenceChain",
    "InferenceOperator",
    "Operator",
    "OperatorFailed",
    "Sureness",
    "Walk",
    "apply",
]

ASKS_FOR = "asks for"  # in `configs` of what a diagnostician of others says: the kind of its action
# The chains that are built in have three steps; an operator of others that leads in a circle ends.
MOST_STEPS = 64


class Inference(msgspec.Struct, frozen=True, kw_only=True):
    """One step from a symptom towards its cause.

    Args:
        name: what it is, as operators know it again: `rank-failed`.
        description: the same in words, the end of a sentence.
        attribution: whose doing it is, as far as this step knows.
        sureness: how sure this step is of itself.
        nodes: where it happened. That is no accusation.
        ranks: which ranks it happened to.
        evidence: the lines and figures that it rests on.
        advice: what a person can do about it.
        configs: what an operator tells the next ones beside that.
    """

    name: str
    description: str
    attribution: Attribution = Attribution.UNDECIDED
    sureness: Sureness = Sureness.POSSIBLE
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    advice: str = ""
    configs: dict[str, str] = {}

    @property
    def accused(self) -> tuple[str, ...]:
        """The nodes that this holds at fault: none but for a likely fault of a node."""
        at_fault = self.attribution is Attribution.NODE and self.sureness >= Sureness.LIKELY
        return self.nodes if at_fault else ()


class InferenceOperator(Protocol):
    """Infers causes from one kind of inference. Pure: all it knows is what was collected."""

    @property
    def name(self) -> str:
        """What reports call it."""

    def is_compatible(self, inference: Inference, data: Collected, /) -> bool:
        """Tell whether it can lead on from this inference with the data that there is."""

    def infer(self, inference: Inference, data: Collected, /) -> Sequence[Inference]:
        """Return what may be behind an inference; nothing where this operator sees no cause."""


@dataclass(frozen=True)
class Operator:
    """An operator that is built in: what it leads on from, and the function that it is.

    Args:
        name: what reports call it.
        leads_on_from: the names of these inferences.
        cause: returns what is behind one of them, None where it sees nothing or lacks data.
    """

    name: str
    leads_on_from: frozenset[str]
    cause: Callable[[Inference, Collected], Inference | None]

    def is_compatible(self, inference: Inference, _: Collected, /) -> bool:
        """Tell whether it leads on from this inference."""
        return inference.name in self.leads_on_from

    def infer(self, inference: Inference, data: Collected, /) -> Sequence[Inference]:
        """Return what is behind an inference."""
        found = self.cause(inference, data)
        return () if found is None else (found,)


class OperatorFailed(Exception):
    """An operator raised, hung, or answered something else than inferences; says which of them."""


Apply = Callable[[InferenceOperator, Inference, Collected], Sequence[Inference]]


@dataclass(frozen=True, kw_only=True)
class ChainStep:
    """One operator led from one inference to another."""

    operator: str
    before: Inference
    after: Inference


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Where a chain led: all of its steps, and the operators that failed, with what they said."""

    symptom: Inference
    steps: tuple[ChainStep, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def ends(self) -> tuple[Inference, ...]:
        """The inferences from which nothing led on, in the order in which they were reached."""
        led_on = [step.before for step in self.steps]
        reached = [self.symptom, *(step.after for step in self.steps)]
        return tuple(inference for inference in reached if inference not in led_on)

    @property
    def conclusion(self) -> Inference:
        """The surest end; undecided where ends that are as sure name different culprits.

        Of ends that are as sure, what was inferred comes before what others ask for.
        """
        most = max(end.sureness for end in self.ends)
        surest = [end for end in self.ends if end.sureness == most]
        decided = [end for end in surest if end.attribution is not Attribution.UNDECIDED]
        if len({end.attribution for end in decided}) > 1:
            return _torn_between(decided)
        return min(decided or surest, key=lambda end: ASKS_FOR in end.configs)

    def way_to(self, end: Inference) -> tuple[ChainStep, ...]:
        """Return the steps that led to an inference, first step first."""
        way: list[ChainStep] = []
        while step := next((s for s in self.steps if s.after == end and s not in way), None):
            way.insert(0, step)
            end = step.before
        return tuple(way)


def apply(
    operator: InferenceOperator, inference: Inference, data: Collected
) -> Sequence[Inference]:
    """Return what an operator infers, if it fits."""
    return operator.infer(inference, data) if operator.is_compatible(inference, data) else ()


class InferenceChain:
    """Leads from a symptom to its causes. `apply` calls an operator, and may contain it."""

    def __init__(
        self,
        operators: Sequence[InferenceOperator],
        *,
        apply: Apply = apply,
        most_steps: int = MOST_STEPS,
    ) -> None:
        self._operators = tuple(operators)
        self._apply = apply
        self._most_steps = most_steps

    def infer(self, symptom: Inference, data: Collected) -> Walk:
        """Walk until nothing leads on. An operator that fails is named and leads nowhere."""
        steps: list[ChainStep] = []
        failed: dict[str, str] = {}
        behind: dict[str, set[str]] = {symptom.name: {symptom.name}}
        queue = deque([symptom])
        while queue and len(steps) < self._most_steps:
            before = queue.popleft()
            for operator in self._operators:
                if operator.name in failed:
                    continue
                try:
                    inferred = self._apply(operator, before, data)
                except OperatorFailed as err:
                    failed[operator.name] = str(err)
                    continue
                new = [
                    inference for inference in inferred if inference.name not in behind[before.name]
                ]
                for after in new[: self._most_steps - len(steps)]:
                    steps.append(ChainStep(operator=operator.name, before=before, after=after))
                    if after.name not in behind:
                        behind[after.name] = behind[before.name] | {after.name}
                        queue.append(after)
        failures = tuple(f"{name}: {text}" for name, text in failed.items())
        return Walk(symptom=symptom, steps=tuple(steps), failed=failures)


def _torn_between(ends: Sequence[Inference]) -> Inference:
    return Inference(
        name="contradiction",
        description="the signs contradict each other: "
        + "; or ".join(f"{end.description} ({end.attribution})" for end in ends),
        sureness=Sureness.POSSIBLE,
        evidence=tuple(line for end in ends for line in end.evidence[:2]),
        advice="read the evidence; check the nodes (slurm-health check) before the next start",
    )
