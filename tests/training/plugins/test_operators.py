# SPDX-License-Identifier: Apache-2.0
"""Operators of others run until nothing new follows."""

from __future__ import annotations

from slurm_health.training.plugins import DataManager, Inference, InferenceChain, InferenceOperator

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
