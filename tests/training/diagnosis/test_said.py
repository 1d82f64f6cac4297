# SPDX-License-Identifier: Apache-2.0
"""What is concluded of what was collected, and said of it; tests/frozen has more conclusions.

A line of `tests/data/diagnoses.jsonl` is what was collected of one training that failed, hung or
was slow, the conclusion, and words that are said of it, or `never` are.
"""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_health.training.diagnosis.samples import Frame, RankSample, Standstill
from tests.frozen.trainings import concluded, diagnosed, read

TORCH = "/venv/lib/python3.11/site-packages/torch"


class Case(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    observed: str
    data: list[tuple[str, Any]]
    is_: dict[str, Any] = msgspec.field(name="is")
    says: list[str]
    never: list[str] = []


CASES = msgspec.json.Decoder(Case).decode_lines(
    (Path(__file__).parents[2] / "data" / "diagnoses.jsonl").read_bytes()
)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_was_collected_is_concluded_and_said(case: Case) -> None:
    found = diagnosed(case.observed, [read(kind, told) for kind, told in case.data])

    assert found is not None
    said = [found.description, found.advice, *found.evidence, *found.told, *found.not_collected]
    text = "\n".join([*said, *found.chain])
    assert concluded(found) == case.is_
    assert [words for words in case.says if words not in text] == []
    assert [words for words in case.never if words in text] == []


def test_no_order_of_what_was_seen_names_a_node_twice_or_accuses_one() -> None:
    dice = random.Random(5)
    places = ("distributed/distributed_c10d.py", "autograd/graph.py", "utils/data/dataloader.py")
    train = Frame("/home/a/train.py", 70, "main")
    tops = [*(f"{TORCH}/{place}" for place in (*places, "serialization.py")), "/home/a/augment.py"]
    stacks = [(), *((train, Frame(top, 700, f"call {n}")) for n in range(2) for top in tops)]
    for _ in range(500):
        ranks = tuple(
            RankSample(
                rank=n,
                node=f"n{n + 1}",
                pid=100 + n,
                step=12,
                stack=dice.choice(stacks),
                state=dice.choice("SRDT"),
                gone=dice.random() < 0.1,
            )
            for n in range(dice.randint(1, 6))
        )
        nodes = tuple(rank.node for rank in ranks)
        hangs = Standstill(stalled_s=40.0, allowance_s=25.0, step=12, nodes=nodes, ranks=ranks)
        found = diagnosed("hang", [hangs])
        assert found is not None
        assert found.accused == []
        assert len(set(found.nodes)) == len(found.nodes)
        assert found.advice
