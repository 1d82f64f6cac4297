# SPDX-License-Identifier: Apache-2.0
"""Operators that others write, and the chain that runs them until nothing new follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from slurm_health.training.diagnosis import chain
from slurm_health.training.diagnosis.collected import Collected
from slurm_health.training.diagnosis.inference import Attribution, Inference, Sureness
from slurm_health.training.diagnosis.inference import InferenceOperator as Ours
from slurm_health.training.plugins.data import DataManager

__all__ = ["Attribution", "Inference", "InferenceChain", "InferenceOperator", "Sureness"]


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
        self._chain = chain.InferenceChain([_AsOurs(each) for each in operators], apply=_apply)

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Return what each of these leads to: itself where nothing is behind it."""
        ends = [end for each in inferences for end in self.walk(each).ends]
        return [end for number, end in enumerate(ends) if end not in ends[:number]]

    def walk(self, inference: Inference) -> chain.Walk:
        """Return all steps from one inference, with its conclusion and who failed."""
        return self._chain.infer(inference, Collected())


class _AsOurs:
    """An operator of others as the chain asks its own."""

    def __init__(self, operator: InferenceOperator) -> None:
        self.name = operator.name
        self._operator = operator

    def is_compatible(self, inference: Inference, _: Collected) -> bool:
        return self._operator.is_compatible(inference)

    def infer(self, inference: Inference, _: Collected) -> Sequence[Inference]:
        return self._operator.infer([inference])


def _apply(operator: Ours, inference: Inference, data: Collected) -> Sequence[Inference]:
    try:
        return chain.apply(operator, inference, data)
    except Exception as err:  # a boundary: what others infer must still be said
        raise chain.OperatorFailed(f"{type(err).__name__}: {err}") from err
