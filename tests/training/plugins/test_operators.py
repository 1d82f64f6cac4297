# SPDX-License-Identifier: Apache-2.0
"""Operators of others run until nothing new follows."""

from __future__ import annotations

import pytest

from slurm_health.training.plugins import (
    DataManager,
    Inference,
    InferenceChain,
    InferenceOperator,
    Sureness,
)

HANG = Inference(name="hang", description="it hangs")


class Leads(InferenceOperator):
    """Leads from `before` to `after`."""

    before, after = "", ""

    def is_compatible(self, inference: Inference) -> bool:
        return inference.name == self.before

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        told = {**inferences[0].configs, self.after: str(self._data_manager.latest("heat"))}
        return [Inference(name=self.after, description=self.after, configs=told)]


class ToNetwork(Leads):
    before, after = "hang", "network"


class ToLink(Leads):
    before, after = "network", "link"


class BackToHang(Leads):
    before, after = "link", "hang"


class Breaks(Leads):
    before = "hang"

    def infer(self, _: list[Inference]) -> list[Inference]:
        raise KeyError("no crystal ball")


def chain(*operators: type[InferenceOperator]) -> InferenceChain:
    manager = DataManager(lambda: 1.0)
    manager.store("heat", 60)
    return InferenceChain([each(manager) for each in operators])


def test_a_chain_goes_on_until_nothing_new_follows() -> None:
    (end,) = chain(BackToHang, ToLink, ToNetwork).infer([HANG])

    assert (end.name, end.configs) == ("link", {"network": "60", "link": "60"})


def test_what_nothing_is_compatible_with_stays_as_it_is() -> None:
    other = Inference(name="slow", description="it is slow")

    assert chain(ToNetwork).infer([HANG, other, other])[1:] == [other]


def test_an_operator_that_raises_is_named_and_the_others_go_on() -> None:
    walk = chain(Breaks, ToNetwork).walk(HANG)

    assert walk.conclusion.name == "network"
    assert walk.failed == ("Breaks: KeyError: 'no crystal ball'",)


# --- as the pages of the design write it ------------------------------------------------------


class Narrows(InferenceOperator):
    """Leads from one description of the same name to the next."""

    before, after = "hang", "hang of the host"

    def __init__(self, data_manager: DataManager) -> None:
        super().__init__(data_manager)

    def is_compatible(self, inference: Inference) -> bool:
        return inference == Inference("training", "is", self.before)

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        inferences[0].description = self.after
        return inferences


class NarrowsAgain(Narrows):
    before, after = "hang of the host", "a rank at its data"


class NarrowsBack(Narrows):
    before, after = "a rank at its data", "hang"


def test_an_inference_has_four_fields_in_their_order_and_needs_none() -> None:
    one = Inference("training", "is", "hang", {"rank": "3"})

    assert (one.name, one.attribution, one.description, one.configs) == (
        "training",
        "is",
        "hang",
        {"rank": "3"},
    )
    assert Inference() == Inference("", "", "", {})
    assert chain(ToNetwork).infer([Inference(), one]) == [Inference(), one]


def test_inferences_of_one_name_lead_on_where_they_are_attributed_in_words_of_others() -> None:
    ends = chain(Narrows, NarrowsAgain, NarrowsBack).infer([Inference("training", "is", "hang")])

    assert ends == [Inference("training", "is", "a rank at its data")]


def test_words_of_others_blame_nobody() -> None:
    blamed = Inference("n1", "its fault", "it smokes", sureness=Sureness.LIKELY, nodes=("n1",))
    known = Inference("n1", "node fault", "it smokes", sureness=Sureness.LIKELY, nodes=("n1",))

    assert chain().walk(blamed).conclusion.accused == ()
    assert chain().walk(known).conclusion.accused == ("n1",)


class Answers(Leads):
    before = "hang"
    answer: object = None

    def infer(self, _: list[Inference]) -> list[Inference]:
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([Inference("it", nodes="n1")], "inference 'it': Expected `array`, got `str`"),  # type: ignore[arg-type]
        (["it"], "an inference was expected, not str"),
        (None, "'NoneType' object is not iterable"),
    ],
)
def test_an_operator_that_answers_with_something_else_is_named(answer: object, said: str) -> None:
    class Wrong(Answers):
        pass

    Wrong.answer = answer
    walk = chain(Wrong).walk(HANG)

    assert walk.conclusion.name == "hang"
    assert f"Wrong: TypeError: {said}" in walk.failed[0]
