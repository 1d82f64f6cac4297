# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.records.nodeset import expand, fold
from tests.strategies import node_lists


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("n1", ("n1",)),
        ("gpu[01-03,7]", ("gpu7", "gpu01", "gpu02", "gpu03")),
        ("n[9-11]", ("n9", "n10", "n11")),
        ("a1,b[1-2]", ("a1", "b1", "b2")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("login.cluster-a", ("login.cluster-a",)),
        ("n1,n1", ("n1",)),
    ],
)
def test_a_node_list_stands_for_its_names(nodelist: str, names: tuple[str, ...]) -> None:
    assert expand(nodelist) == names


@pytest.mark.parametrize("text", ["", ",", "n[1-", "n]", "n[3-1]", "n[a]", "a&b", "a!b", "@all"])
def test_what_is_no_node_list_is_quoted_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"cannot read {text!r}")):
        expand(text)


@pytest.mark.parametrize(
    "text",
    ["n[1-999999999]", "r[1-999]n[1-999]", "a,n[1,5-70000]", f"n[1-{'9' * 30}]", "n[1-99999999"],
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


@given(node_lists)
def test_folding_loses_no_name_and_adds_none(names: list[str]) -> None:
    folded = fold(names)

    assert bool(folded) == bool(names)
    if names:
        assert sorted(expand(folded)) == sorted(names)


@given(node_lists, st.randoms())
def test_folding_depends_on_the_set_of_names_alone(names: list[str], random: Random) -> None:
    shuffled = [*names, *names]
    random.shuffle(shuffled)

    assert fold(shuffled) == fold(names)


@given(node_lists)
def test_brackets_stand_at_the_end_of_a_name_where_every_slurm_can_read_them(
    names: list[str],
) -> None:
    assert re.search(r"\][^,]", fold(names)) is None


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], ""),
        (["n3", "n1", "n2"], "n[1-3]"),
        (["n1-ib", "n2-ib"], "n1-ib,n2-ib"),
        (["r1n3", "r2n3"], "r1n3,r2n3"),
        (["r1n3", "r1n4", "r2n3"], "r1n[3-4],r2n3"),
        (["n1", "n01"], "n[1,01]"),
    ],
)
def test_only_a_number_at_the_end_of_a_name_is_folded(names: list[str], folded: str) -> None:
    assert fold(names) == folded


def test_a_sites_own_way_of_folding_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "defaults.conf").write_text("[nodeset]\nautostep: 3\nfold_axis: 1\n")
    code = "from slurm_health.records.nodeset import fold; print(fold(['n1', 'n3', 'n5', 'n7']))"

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CLUSTERSHELL_CFGDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert done.stdout == "n[1,3,5,7]\n"
