# SPDX-License-Identifier: Apache-2.0
"""Orders of the master as its agents read them, and the bell that says that there are some."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_health.preflight import orders
from slurm_health.preflight.orders import Bell, News, Ringers, ring_all, rings
from slurm_health.records.records import (
    Disposition,
    GroupAborted,
    JobOutcome,
    MasterWaits,
    Record,
    Rendezvous,
    RoundStarted,
    VerdictReached,
)
from slurm_health.system import journal
from tests import strategies
from tests.support.journals import Clock

HERE = settings(suppress_health_check=list(HealthCheck), max_examples=40)
NODES = ("b", "a", "c10", "c9", "é")


def round_of(*groups: list[str], index: int = 0) -> RoundStarted:
    return RoundStarted(
        round=index,
        name=f"round {index}",
        groups=list(groups),
        rendezvous=[
            Rendezvous(address=f"10.0.0.{number}", port=number + 1)
            for number, _ in enumerate(groups)
        ],
        deadline_s=30.0,
        phase="pair",
        options={"burn_s": 3.0},
    )


def heard(directory: Path, node: str) -> list[Record]:
    """Return all that a node is told, without the signs that the master is there."""
    records = orders.OrderReader(directory, node).read_new()
    return [record for record in records if not isinstance(record, MasterWaits)]


def test_a_node_reads_its_own_group_of_a_round_and_where_it_meets(tmp_path: Path) -> None:
    run = tmp_path / "run"
    orders.OrderWriter(run, "r", NODES).append(round_of(["a", "c9"], ["é", "b"]))

    assert heard(run, "b") == [
        RoundStarted(
            round=0,
            name="round 0",
            groups=[["é", "b"]],
            rendezvous=[Rendezvous(address="10.0.0.1", port=2)],
            deadline_s=30.0,
            phase="pair",
            options={"burn_s": 3.0},
        )
    ]
    assert heard(run, "c10") == []


def test_only_the_members_of_a_group_are_told_to_stop(tmp_path: Path) -> None:
    run = tmp_path / "run"
    writer = orders.OrderWriter(run, "r", NODES)
    writer.append(round_of(["a", "c9"], ["é", "b"], ["c10"]))
    why = "c9 failed: its device is gone"
    writer.append(
        GroupAborted(round=0, group=["a", "c9"], reason=why),
        GroupAborted(round=0, group=["c10"], reason="too late", timed_out=True),
    )

    assert heard(run, "a")[1:] == [
        GroupAborted(round=0, group=["a", "c9"], reason="a member failed")
    ]
    (stopped,) = heard(run, "c10")[1:]
    assert isinstance(stopped, GroupAborted)
    assert stopped.timed_out
    assert len(heard(run, "b")) == 1


@pytest.mark.parametrize(
    "last", [VerdictReached(nodes=[]), JobOutcome(disposition=Disposition.PROCEED, exit_code=0)]
)
def test_every_agent_hears_the_end_of_the_run(tmp_path: Path, last: Record) -> None:
    run = tmp_path / "run"
    orders.OrderWriter(run, "r", NODES).append(last)
    assert [heard(run, node) for node in NODES] == [[VerdictReached(nodes=[])]] * len(NODES)


def test_whatever_the_master_says_is_a_sign_of_life(tmp_path: Path) -> None:
    run = tmp_path / "run"
    writer = orders.OrderWriter(run, "r", NODES)
    reader = orders.OrderReader(run, "a")
    reader.read_new()
    for record in (MasterWaits(reason="for b"), round_of(["b"])):
        assert writer.append(record)
        assert reader.read_new() == [MasterWaits(reason="")]
    assert reader.read_new() == []


def test_there_is_no_run_before_the_orders_of_a_node_s_own_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    reader = orders.OrderReader(run, "a")
    assert (reader.read_new(), reader.run_id) == ([], "")
    orders.OrderWriter(run, "r", ["b"])
    assert (reader.read_new(), reader.run_id) == ([], "")  # it is none of that run's nodes
    reader = orders.OrderReader(run, "b")
    reader.read_new()
    assert reader.run_id == "r"


@HERE
@given(data=st.data())
def test_orders_that_are_shown_in_pieces_are_read_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = tmp_path_factory.mktemp("place") / "run"
    writer = orders.OrderWriter(run, "r", NODES)
    for index in range(3):
        writer.append(round_of(["a", "c9"], ["é", "b"], index=index))
    writer.append(VerdictReached(nodes=[]))
    path = run / orders.NAME
    whole = path.read_bytes()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))

    reader = orders.OrderReader(run, "b")
    found = []
    for cut in [*cuts, len(whole)]:
        path.write_bytes(whole[:cut])
        found += reader.read_new()
    assert found[1:] == heard(run, "b")


def test_what_one_agent_reads_of_a_round_hardly_grows_with_the_number_of_nodes(
    tmp_path: Path,
) -> None:
    def bytes_read(count: int) -> int:
        nodes = [f"n{number:06d}" for number in range(count)]
        groups = [nodes[at : at + 2] for at in range(0, count, 2)]
        run = tmp_path / str(count) / "run"
        writer = orders.OrderWriter(run, "r", nodes)
        reader = orders.OrderReader(run, nodes[-1])
        reader.read_new()
        writer.append(round_of(*groups))
        before = _bytes_read()
        assert len(reader.read_new()) == 1
        return _bytes_read() - before

    assert bytes_read(4096) < bytes_read(64) + 2048


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_meetings_have_a_secret_that_only_the_orders_tell(tmp_path: Path) -> None:
    secrets = []
    for name in ("one", "two"):
        orders.OrderWriter(tmp_path / name, "r", NODES)
        readers = [orders.OrderReader(tmp_path / name, node) for node in ("a", "é")]
        for reader in readers:
            reader.read_new()
        assert readers[0].secret == readers[1].secret
        secrets.append(readers[0].secret)
    assert len(set(secrets)) == 2
    assert min(map(len, secrets)) == 32
    assert (tmp_path / "one" / orders.NAME).stat().st_mode & 0o077 == 0


@pytest.fixture
def ends() -> Iterator[tuple[int, int, int, int]]:
    """The agent's input, the master's end of it, the master's input, the agent's end of that."""
    descriptors = (*os.pipe(), *os.pipe())
    yield descriptors
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


Ends = tuple[int, int, int, int]


def test_an_agent_hears_each_ring_once(ends: Ends) -> None:
    agent_in, master_out, _, agent_out = ends
    bell = Bell("n1", agent_in, agent_out)
    assert not bell.rang()
    ring_all(master_out)
    ring_all(master_out)
    assert bell.rang()
    assert not bell.rang()


@given(cuts=st.lists(st.integers(0, 900), max_size=5))
def test_rings_that_come_in_pieces_are_received_whole(cuts: list[int]) -> None:
    long, short = b"{" + 700 * b"y" + b"}\n", b"{}\n"
    rung_of = [b"x\nslurm-health: news of n1\nnonsense\n", *rings("n22", 7, long + short)]
    ringers, data, rung = Ringers(), b"".join(rung_of), list[News]()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        rung += ringers.rung(data[start:end])
    assert rung[0] == News("n1")
    assert [begins for _, begins, _ in rung[1:]] == [7, 647, 710]
    assert b"".join(piece for _, _, piece in rung[1:]) == long + short
    assert max(map(len, rung_of)) < 1024


@HERE
@given(st.lists(st.lists(strategies.records(), min_size=1, max_size=3), min_size=1), st.data())
def test_of_what_is_received_in_part_nothing_is_missed_or_read_twice(
    tmp_path: Path, writes: list[list[Record]], data: st.DataObject
) -> None:
    journal.path_of(tmp_path, "n1").unlink(missing_ok=True)
    writer, reader = journal.Writer(tmp_path, "n1", Clock()), journal.Reader(tmp_path, "n1")
    read = []
    for number, written in enumerate(writes, 1):
        rung = Ringers().rung(b"".join(rings("n1", *writer.append(*written))))
        for _, begins, piece in rung:
            if number == len(writes) or data.draw(st.booleans()):
                reader.receive(begins, piece)
        received = number == len(writes) or data.draw(st.booleans())
        read += next(journal.read_new_of(tmp_path, [reader], received=received))
    assert [entry.record for entry in read] == list(itertools.chain(*writes))


@given(data=st.binary(max_size=300))
def test_whatever_an_agent_prints_is_no_error(data: bytes) -> None:
    ringers = Ringers()
    ringers.rung(data)
    ringers.rung(b"\n")
    assert ringers.rung(b"slurm-health: news of n1\n") == [News("n1")]


def test_nobody_waits_where_a_pipe_is_full(ends: Ends) -> None:
    agent_in, master_out, _, agent_out = ends
    bell = Bell("n1", agent_in, agent_out)
    os.set_blocking(master_out, False)
    for _ in range(20_000):  # more than a pipe holds
        bell.ring(0, b"{}\n")
        ring_all(master_out)
    assert bell.rang()


def test_a_bell_whose_other_end_is_gone_is_silent(ends: Ends) -> None:
    agent_in, master_out, master_in, agent_out = ends
    bell = Bell("n1", agent_in, agent_out)
    os.close(master_out)
    os.close(master_in)
    bell.ring(0, b"{}\n")
    assert not bell.rang()
    assert bell.descriptor is None


def test_a_file_or_nothing_is_no_bell(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as file:
        bell = Bell("n1", file.fileno(), file.fileno())
        bell.ring(0, b"{}\n")
        assert (bell.descriptor, bell.rang()) == (None, False)
        assert file.tell() == 0
    assert Bell("n1", 9999, 9999).descriptor is None
