# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence

from slurm_health.training.diagnosis.collected import Collected
from slurm_health.training.diagnosis.inference import (
    ASKS_FOR,
    Attribution,
    Inference,
    InferenceChain,
    Sureness,
)

NOTHING = Collected()


class Leads:
    """Leads from one inference to others."""

    def __init__(self, before: str, *after: Inference) -> None:
        self.name = f"from-{before}"
        self._before = before
        self._after = after

    def is_compatible(self, inference: Inference, _: Collected) -> bool:
        return inference.name == self._before

    def infer(self, _: Inference, __: Collected) -> Sequence[Inference]:
        return self._after


class Endless:
    """Leads from anything to something new."""

    name = "endless"

    def is_compatible(self, _: Inference, __: Collected) -> bool:
        return True

    def infer(self, inference: Inference, _: Collected) -> Sequence[Inference]:
        return [named(inference.name + "a"), named(inference.name + "b")]


def named(
    name: str,
    sureness: Sureness = Sureness.POSSIBLE,
    attribution: Attribution = Attribution.UNDECIDED,
) -> Inference:
    return Inference(name=name, description=name, sureness=sureness, attribution=attribution)


def test_the_surest_cause_is_the_conclusion() -> None:
    sure = named("sure", Sureness.CERTAIN, Attribution.NODE)
    ends = [named("guess", Sureness.POSSIBLE, Attribution.USER), sure]

    assert InferenceChain([Leads("a", *ends)]).infer(named("a"), NOTHING).conclusion == sure


def test_causes_that_are_as_sure_and_blame_others_leave_it_undecided() -> None:
    ends = [
        named("theirs", Sureness.CERTAIN, Attribution.USER),
        named("its", Sureness.CERTAIN, Attribution.NODE),
    ]
    found = InferenceChain([Leads("a", *ends)]).infer(named("a"), NOTHING).conclusion

    assert found.attribution is Attribution.UNDECIDED
    assert found.accused == ()
    assert "theirs" in found.description
    assert "its" in found.description


def test_operators_that_lead_on_for_ever_or_in_a_circle_come_to_an_end() -> None:
    walk = InferenceChain([Endless()], most_steps=10).infer(named("a"), NOTHING)
    circle = InferenceChain([Leads("a", named("b")), Leads("b", named("a"))])

    assert len(walk.steps) == 10
    assert circle.infer(named("a"), NOTHING).conclusion is not None


def test_only_a_likely_fault_of_a_node_accuses_it() -> None:
    def accused(sureness: Sureness, attribution: Attribution) -> tuple[str, ...]:
        return Inference(
            name="x", description="x", sureness=sureness, attribution=attribution, nodes=("n1",)
        ).accused

    assert accused(Sureness.LIKELY, Attribution.NODE) == ("n1",)
    assert accused(Sureness.POSSIBLE, Attribution.NODE) == ()
    assert accused(Sureness.CERTAIN, Attribution.USER) == ()


def test_what_others_ask_for_hides_nothing_that_is_as_sure() -> None:
    asked = Inference(name="event", description="it is odd", configs={ASKS_FOR: "event"})
    operators = [Leads("a", asked, named("b")), Leads("b", named("c"))]

    assert InferenceChain(operators).infer(named("a"), NOTHING).conclusion == named("c")
    assert InferenceChain([Leads("a", asked)]).infer(named("a"), NOTHING).conclusion == asked
