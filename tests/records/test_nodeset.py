# SPDX-License-Identifier: Apache-2.0

import os
import re
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.records.nodeset import (
    expand,
    fold,
    fold_in_order,
    is_down,
    is_lost,
)
from slurm_health.system.slurm.parsing import node_of
from tests.strategies import node_lists
from tests.support.rows import rows

RECORDED = Path(__file__).parents[1] / "data" / "slurm-22.05" / "nodes-down-and-idle.txt"
# Close to one another, so that some are neighbours: with one number and two, padded and not.
numbered_lists = st.lists(
    st.from_regex(r"(n|r[12]n|r0?[1-3]-n)0{0,2}([7-9]|1[0-2]|9[89]|10[01])", fullmatch=True),
    unique=True,
    max_size=12,
)


@rows
def test_a_node_list_stands_for_its_names(nodelist: str, names: tuple[str, ...]) -> None:
    assert expand(nodelist) == names


def test_zeros_that_a_cluster_has_outgrown_are_read_as_slurm_writes_them() -> None:
    assert expand("n[98-100],m[08-100]")[-3:] == ("m98", "m99", "m100")
    assert expand("m[08-100]")[:2] == ("m08", "m09")


@rows
def test_what_is_no_node_list_is_quoted_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"cannot read {text!r}")):
        expand(text)


@pytest.mark.parametrize(
    "text",
    [
        *("n[1-999999999]", "n[1-99999999999]", "r[1-999]n[1-999]", "a,n[1,5-70000]"),
        *(f"n[1-{'9' * 30}]", f"n[1-{'9' * 5000}]", "n[1-99999999", "n[1-9]" * 2000),
        *("n[1-65536],a", ",".join(["n[1-65536]"] * 2000)),
    ],
)
def test_a_list_longer_than_slurm_allows_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        expand(text)


def test_the_nodes_of_the_largest_cluster_are_a_node_list() -> None:
    assert len(expand("rack[001-064]n[0001-1024]")) == 64 * 1024


@given(st.text(alphabet="an019-.,[]_", max_size=12) | st.text(max_size=12))
def test_any_text_is_a_node_list_or_a_value_error(text: str) -> None:
    try:
        names = expand(text)
    except ValueError:
        return
    assert names


@given(node_lists, st.randoms())
def test_folding_depends_on_the_set_of_names_alone(names: list[str], random: Random) -> None:
    folded = fold(names)
    shuffled = [*names, *names]
    random.shuffle(shuffled)

    assert fold(shuffled) == folded
    assert sorted(expand(folded or "none")) == sorted(names or ["none"])


@given(node_lists | numbered_lists)
def test_names_come_back_in_order_from_brackets_at_their_end(names: list[str]) -> None:
    in_order = fold_in_order(names)
    assert expand(in_order or "none") == tuple(names or ["none"])
    assert re.search(r"\][^,]", f"{fold(names)},{in_order}") is None


@rows
def test_only_neighbours_are_folded_where_the_order_counts(names: list[str], folded: str) -> None:
    assert fold_in_order(names) == folded


def test_slurm_reads_a_list_as_we_do_and_in_the_same_order(tmp_path: Path) -> None:
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed")
    (tmp_path / "slurm.conf").write_text("ClusterName=t\nSlurmctldHost=h\n")
    orders = [["n10", "n9"], ["n09", "n10", "n9"], ["r2n1", "r1n1", "r1n2", "r10n1"], ["b1", "a1"]]
    written = [*map(fold_in_order, orders), "r[1-2]n[2,1]", "gpu[01-03,7]", "n[08-100]"]

    done = subprocess.run(
        ["scontrol", "show", "hostnames", ",".join(written)],
        env={**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    if done.returncode != 0:
        pytest.skip(f"scontrol show hostnames fails: {done.stderr.strip()}")
    assert tuple(dict.fromkeys(done.stdout.split())) == expand(",".join(written))
    assert done.stdout.split()[:9] == [name for order in orders[:3] for name in order]


@rows
def test_only_a_number_at_the_end_of_a_name_is_folded(names: list[str], folded: str) -> None:
    assert fold(names) == folded


def test_nodes_that_slurm_really_lost_are_lost_and_only_one_of_them_is_down() -> None:
    nodes = [node for line in RECORDED.read_text().splitlines() if (node := node_of(line))]

    assert [(node.state, is_lost(node.state), is_down(node.state)) for node in nodes] == [
        ("DOWN", True, True),
        ("IDLE+NOT_RESPONDING", True, False),
    ]


@rows
def test_a_node_that_is_down_or_does_not_answer_is_lost(state: str, lost: bool) -> None:
    assert is_lost(state) is lost
    assert lost or not is_down(state)
