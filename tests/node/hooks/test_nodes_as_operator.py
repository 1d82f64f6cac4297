# SPDX-License-Identifier: Apache-2.0
"""`nodes` as an operator who is not root calls it: Slurm obeys, the shared directory does not."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from slurm_health.node import marks, shared
from slurm_health.node.hooks import nodes
from slurm_health.node.marks import MARKS
from slurm_health.node.rules.accusations import NodeMark
from slurm_health.node.store import StoreForRoot, StoreUnusable
from slurm_health.system.killable import Answered, run_one
from slurm_health.system.slurm.client import Client
from tests.support.hooked_node import Node
from tests.support.hooked_slurm import HookedSlurm

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
_OPERATOR = 65534
_OF_CHECK = "shealth: /broken exists check=scratch job=0 t=1"
_OF_MARKS = "shealth: accused by 3 jobs check=marks job=7 t=1"


@pytest.fixture
def tmp_path(public_path: Path) -> Path:
    """Have everything where the operator can reach it."""
    return public_path


@pytest.fixture
def marked(node: Node, slurm: HookedSlurm) -> Node:
    """Two drained nodes with marks, one of them drained for these."""
    slurm.set({"n5": ("IDLE+DRAIN", _OF_CHECK), "n6": ("IDLE+DRAIN", _OF_MARKS)})
    mark = NodeMark(job=7, uid=1000, component="network", text="slow", time_s=node.now_s)
    for name in ("n5", "n6"):
        marks.add(node.site, name, mark)
    for path in (slurm.directory, *slurm.directory.rglob("*")):
        path.chmod(0o777)
    return node


def as_operator(work: Callable[[], object]) -> bytes:
    """Do something as a user who is not root; what it returns, as JSON."""

    def become() -> bytes:
        os.setgroups([])
        os.setresgid(_OPERATOR, _OPERATOR, _OPERATOR)
        os.setresuid(_OPERATOR, _OPERATOR, _OPERATOR)
        return msgspec.json.encode(work())

    ended = run_one(become, 30.0)
    assert isinstance(ended, Answered), ended
    return ended.data


def test_one_node_that_fails_keeps_no_other_back(marked: Node, slurm: HookedSlurm) -> None:
    site, controller = marked.site, Client.for_hook(marked.environ(), limit_s=20)
    told = as_operator(lambda: nodes.release(site, ["n6", "n99", "n5"], controller, {}))
    came = msgspec.json.decode(told, type=dict[str, str])
    assert list(came) == ["n6", "n99", "n5"]
    assert came["n6"].startswith("not released: the next mark would drain it again")
    assert came["n5"].startswith("released; its marks are kept: only root can")
    assert slurm.nodes()["n6"] == ("IDLE+DRAIN", _OF_MARKS)
    assert slurm.nodes()["n5"] == ("IDLE", "")


def test_who_accuses_which_node_is_for_root(marked: Node) -> None:
    marked.break_it()
    marked.prolog(job=9, uid=1000)
    assert [each.uid for each in shared.read_ledger(marked.site.breaker).entries] == [1000]
    site = marked.site
    settings = site.breaker

    def look() -> list[str]:
        refused = []
        for ask in (
            lambda: shared.read_ledger(settings),
            lambda: MARKS.delete(settings, "n5"),
        ):
            try:
                ask()
            except StoreForRoot as err:
                refused.append(str(err))
        found = nodes.listing(site, {}, 0.0)
        assert found.tripped is None
        return [*refused, nodes.text(found, 0.0).splitlines()[0]]

    told = msgspec.json.decode(as_operator(look), type=list[str])
    assert len(told) == 3
    assert told[-1] == "only root can see whether the breaker has tripped"


def test_a_reset_by_an_operator_says_who_may_and_no_number_of_an_error(marked: Node) -> None:
    site = marked.site

    def reset() -> str:
        try:
            return nodes.reset(site)
        except StoreUnusable as err:
            return str(err)

    told = msgspec.json.decode(as_operator(reset), type=str)
    assert told.startswith("only root may reset the breaker: sudo slurm-health nodes reset")
    assert "rrno" not in told
