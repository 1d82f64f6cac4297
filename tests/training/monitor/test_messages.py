# SPDX-License-Identifier: Apache-2.0

import random

from hypothesis import given
from hypothesis import strategies as st

from slurm_health.training.diagnosis.samples import Frame, Look, NodeReport, RankSample
from slurm_health.training.monitor.messages import REPORTS, MessageReader, lines_of


def report(node: str, frames: int) -> NodeReport:
    dice = random.Random(frames)
    stack = tuple(Frame(dice.randbytes(40).hex(), n, "step") for n in range(frames))
    sample = RankSample(program="0", rank=1, node=node, pid=77, state="S", cpu_s=1.5, stack=stack)
    return NodeReport(node=node, ranks=(sample,), look=Look.INSPECTION, addresses=("10.0.0.1",))


def read(lines: list[bytes], reader: MessageReader[NodeReport] | None = None) -> list[NodeReport]:
    reader = reader or MessageReader(REPORTS)
    taken = (reader.take(line.rstrip(b"\n")) for line in lines)
    return [report for report in taken if report]


def test_lines_are_short_enough_for_srun_to_pass_them_on_whole() -> None:
    lines = list(lines_of(report("n" * 255, 40), 999_999_999))

    assert len(lines) > 1
    assert all(len(line) <= 1024 and line.endswith(b"\n") for line in lines)


def test_lines_of_several_nodes_may_come_in_any_order() -> None:
    sent = [report(f"n{number}", number) for number in (1, 40, 5)]
    lines = [line for message in sent for line in lines_of(message, 1)]
    random.Random(1).shuffle(lines)

    assert sorted(read(lines), key=lambda message: message.node) == sent


def test_a_message_with_a_lost_line_gives_way_to_the_next() -> None:
    first, second = (list(lines_of(report("n1", 40), number)) for number in (1, 2))

    assert read([*first[1:], *second]) == [report("n1", 40)]


@given(st.lists(st.binary(max_size=80), max_size=20))
def test_other_lines_are_passed_over(lines: list[bytes]) -> None:
    reader = MessageReader(REPORTS)
    for line in [*lines, *(b"n1 1 1/1 " + line for line in lines)]:
        assert reader.take(line) is None
    assert read(list(lines_of(NodeReport(node="n1"), 1)), reader) == [NodeReport(node="n1")]
