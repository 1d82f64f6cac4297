# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from slurm_health.training.diagnosis.rank_now import RankLook, RankNow
from slurm_health.training.diagnosis.seen import Frame
from slurm_health.training.monitor.messages import (
    MESSAGES,
    MessageReader,
    NodeLook,
    NodeMessage,
    NodeNow,
    lines_of,
)


def look(node: str, frames: int) -> NodeLook:
    dice = random.Random(frames)
    stack = tuple(Frame(dice.randbytes(40).hex(), n, "step") for n in range(frames))
    now = RankNow("0", 1, 77, "S", 1.5, 10, 3, 4, 0.5, 1.0, 1.0, 0.1, 3)
    return NodeLook(node, (RankLook("0", 1, True, "futex", stack),), (now,), ("10.0.0.1",))


def read(lines: list[bytes], reader: MessageReader[NodeMessage] | None = None) -> list[NodeMessage]:
    reader = reader or MessageReader(MESSAGES)
    return [each for line in lines if (each := reader.take(line.rstrip(b"\n")))]


def test_lines_are_short_enough_for_srun_to_pass_them_on_whole() -> None:
    lines = list(lines_of(look("n" * 255, 40), 999_999_999))

    assert len(lines) > 1
    assert all(len(line) <= 1024 and line.endswith(b"\n") for line in lines)


def test_lines_of_several_nodes_may_come_in_any_order() -> None:
    said = [look(f"n{number}", number) for number in (1, 40, 5)]
    lines = [line for each in said for line in lines_of(each, 1)]
    random.Random(1).shuffle(lines)

    assert sorted(read(lines), key=lambda each: each.node) == said


def test_a_message_with_a_lost_line_gives_way_to_the_next() -> None:
    first, second = (list(lines_of(look("n1", 40), number)) for number in (1, 2))

    assert read([*first[1:], *second]) == [look("n1", 40)]


@given(st.lists(st.binary(max_size=80), max_size=20))
def test_other_lines_are_passed_over(lines: list[bytes]) -> None:
    reader = MessageReader(MESSAGES)
    for line in [*lines, *(b"n1 1 1/1 " + line for line in lines)]:
        assert reader.take(line) is None
    assert read(list(lines_of(NodeNow("n1"), 1)), reader) == [NodeNow("n1")]
