# SPDX-License-Identifier: Apache-2.0
"""`slurm-health plan` shows a run step by step, and says what it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_health.cli.plan import plan
from slurm_health.records.errors import UsageError

TOPOLOGY = "".join(
    f"SwitchName=leaf{k} Level=0 Nodes=n[{8 * k + 1}-{8 * k + 8}]\n" for k in range(4)
)


def call(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(plan, arguments, input=stdin)


def output(*arguments: str, stdin: str | None = None) -> str:
    result = call(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_healthy_cluster_takes_one_round() -> None:
    text = output("n[1-8]")
    assert "verdict after 1 round:" in text
    assert "healthy: n[1-8] (8 nodes)" in text


def test_faults_are_found_and_explained() -> None:
    text = output("n[1-8]", "--bad", "n3,n7:slow=1.3")
    assert "n3 faulty: no allgather with n" in text
    assert "n7 slow: allgather slow with n" in text
    assert "healthy: n[1-2,4-6,8] (6 nodes)" in text


def test_a_slow_leaf_of_a_topology_is_named() -> None:
    text = output("n[1-32]", "--topology", "-", "--bad", "leaf2:leaf=1.5", stdin=TOPOLOGY)
    assert "leaf leaf2 slow:" in text
    assert "healthy: n[1-32] (32 nodes)" in text


def test_a_topology_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(TOPOLOGY)
    assert "round 0: 16 groups" in output("n[1-32]", "--topology", str(path))


def test_json_carries_rounds_and_verdicts() -> None:
    found = json.loads(output("n[1-4]", "--bad", "n2:silent", "--json"))
    assert found["nodes"]["n2"]["level"] == "inconclusive"
    assert found["rounds"][0]["groups"][0]["nodes"]


def test_a_set_of_nodes_can_share_a_fault() -> None:
    found = json.loads(output("n[1-16]", "--bad", "n[2-3]:compute=2,n5:flaky=1", "--json"))
    levels = {name: node["level"] for name, node in found["nodes"].items()}
    assert [name for name, level in levels.items() if level == "slow"] == ["n2", "n3"]
    assert [name for name, level in levels.items() if level == "faulty"] == ["n5"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["n[1-"], "cannot read 'n[1-'"),
        (["n[1-20000]"], "20000 nodes are more than"),
        (["n1", "--bad", "n2"], "n2: not among the nodes"),
        (["n1", "--bad", "n1:slow"], "slow needs a factor"),
        (["n1", "--bad", "n1:slow=0.5"], "slow needs a factor"),
        (["n1", "--bad", "n1:slow=1.2.3"], "1.2.3 is not a number"),
        (["n1", "--bad", "n1:tired=2"], "unknown fault 'tired'"),
        (["n1", "--bad", "n1:dead=2"], "dead takes no number"),
        (["n1", "--bad", "n1:flaky=2"], "must be a probability"),
        (["n1", "--bad", ":::"], "cannot read ':::'"),
        (["n1", "--bad", "leaf1:leaf=2"], "not among the leaf switches"),
    ],
)
def test_what_cannot_be_served_is_said(arguments: list[str], problem: str) -> None:
    result = call(*arguments)
    assert isinstance(result.exception, UsageError)
    assert problem in str(result.exception)


def test_a_topology_that_cannot_be_read_is_said_with_its_line() -> None:
    result = call("n1", "--topology", "-", stdin="SwitchName=a Nodes=n[1-\n")
    assert isinstance(result.exception, UsageError)
    assert "line 1" in str(result.exception)
