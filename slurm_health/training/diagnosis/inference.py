# SPDX-License-Identifier: Apache-2.0
"""What is inferred of a failure, how sure that is, and who infers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from slurm_health.records.script_records import Attribution, Sureness
from slurm_health.training.diagnosis.collected import Collected

__all__ = ["ASKS_FOR", "Attribution", "Inference", "InferenceOperator", "Operator", "Sureness"]

ASKS_FOR = "asks for"  # in `configs` of what a diagnostician of others says: the kind of its action


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
