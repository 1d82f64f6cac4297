# SPDX-License-Identifier: Apache-2.0
"""Operators that others write, and the chain that runs them until nothing new follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import msgspec

from slurm_health.training.diagnosis import inference as inferring
from slurm_health.training.diagnosis.collected import Collected
from slurm_health.training.diagnosis.inference import Attribution, Sureness
from slurm_health.training.diagnosis.inference import Inference as Inside
from slurm_health.training.diagnosis.inference import InferenceOperator as InsideOperator
from slurm_health.training.plugins.data import DataManager

__all__ = [
    "Attribution",
    "Inference",
    "InferenceChain",
    "InferenceOperator",
    "Sureness",
    "from_inside",
    "to_inside",
]

_WORDS = "attributed to"  # in `configs` inside: what others attribute it to in words of their own


@dataclass
class Inference:
    """A problem, a failure, or what is behind it: one step towards the cause.

    Attributes:
        name: what it is, as operators know it again: `rank-failed`.
        attribution: whose doing it is, by an `Attribution`. Words of your own are kept for your
            operators, belong to what an inference is known by, and blame nobody.
        description: the same in words, the end of a sentence.
        configs: what an operator tells the next ones beside that.
        sureness: how sure this step is of itself.
        nodes: where it happened. That is no accusation.
        ranks: which ranks it happened to.
        evidence: the lines and figures that it rests on.
        advice: what a person can do about it.
    """

    name: str = ""
    attribution: str = ""
    description: str = ""
    configs: dict[str, str] = field(default_factory=dict)
    _: KW_ONLY
    sureness: Sureness = Sureness.POSSIBLE
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    advice: str = ""


class InferenceOperator(ABC):
    """Infers what is behind an inference, from what was collected. It may raise.

    Attributes:
        name: what reports call it; its class's name unless set.
    """

    name: str = ""

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        cls.name = cls.__dict__.get("name") or cls.__name__

    def __init__(self, data_manager: DataManager) -> None:
        self._data_manager = data_manager

    @abstractmethod
    def is_compatible(self, inference: Inference) -> bool:
        """Tell whether it can lead on from this inference."""

    @abstractmethod
    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Return what is behind an inference, none where it sees nothing; a chain gives it one."""


class InferenceChain:
    """Runs operators until nothing new follows; one that raises is named and leads nowhere."""

    def __init__(self, operators: Sequence[InferenceOperator]) -> None:
        self._chain = inferring.InferenceChain([_AsOurs(each) for each in operators], apply=_apply)

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Return what each of these leads to: itself where nothing is behind it."""
        ends = [from_inside(end) for each in inferences for end in self.walk(each).ends]
        return [end for number, end in enumerate(ends) if end not in ends[:number]]

    def walk(self, inference: Inference) -> inferring.Walk:
        """Return all steps from one inference, as a post-mortem has them, and who failed."""
        return self._chain.infer(to_inside(inference), Collected())


class _AsOurs:
    """An operator of others as the chain asks its own."""

    def __init__(self, operator: InferenceOperator) -> None:
        self.name = operator.name
        self._operator = operator

    def is_compatible(self, inside: Inside, _: Collected) -> bool:
        return self._operator.is_compatible(from_inside(inside))

    def infer(self, inside: Inside, _: Collected) -> list[Inside]:
        return [to_inside(each) for each in self._operator.infer([from_inside(inside)])]


def to_inside(theirs: Inference) -> Inside:
    """Return an inference as the chain has it.

    Raises:
        TypeError: it is no inference, or a field holds something of another type.
    """
    if not isinstance(theirs, Inference):
        raise TypeError(f"an inference was expected, not {type(theirs).__name__}")
    fields = {each: getattr(theirs, each) for each in Inside.__struct_fields__}
    if not theirs.attribution:
        fields["attribution"] = Attribution.UNDECIDED
    elif theirs.attribution not in list(Attribution):
        fields["name"] = _known_by(theirs.name, theirs.attribution, theirs.description)
        fields["attribution"] = Attribution.UNDECIDED
        fields["configs"] = {**theirs.configs, _WORDS: theirs.attribution}
    try:
        return msgspec.convert(fields, Inside)
    except msgspec.ValidationError as err:
        raise TypeError(f"inference {theirs.name!r}: {err}") from err


def from_inside(inside: Inside) -> Inference:
    """Return an inference of the chain as others write it."""
    fields = {each: getattr(inside, each) for each in inside.__struct_fields__}
    configs = dict(inside.configs)
    words = configs.pop(_WORDS, "")
    if inside.attribution is Attribution.UNDECIDED:
        fields["attribution"] = words
    known_by = _known_by("", words, inside.description) if words else ""
    return Inference(**{**fields, "name": inside.name.removesuffix(known_by), "configs": configs})


def _known_by(name: str, words: str, description: str) -> str:
    return f"{name} {words} {description}"


def _apply(operator: InsideOperator, inside: Inside, data: Collected) -> Sequence[Inside]:
    try:
        return inferring.apply(operator, inside, data)
    except Exception as err:  # a boundary: what others infer must still be said
        raise inferring.OperatorFailed(f"{type(err).__name__}: {err}") from err
