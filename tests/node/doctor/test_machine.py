# SPDX-License-Identifier: Apache-2.0
"""What doctor says of the site's file and of this machine."""

import os
import socket
import sys
from pathlib import Path

import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.doctor import machine, slurm_conf
from slurm_health.node.doctor.advice import Advice, Urgency
from slurm_health.system.slurm.parsing import Node
from tests.support.rows import rows
from tests.support.sites import load_site, tree
from tests.support.supervised import write_executable


def by_level(advice: list[Advice]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {level.value: [] for level in Urgency}
    for each in advice:
        assert bool(each.do) == (each.level is not Urgency.FINE), each
        found[each.level.value].append(f"{each.text} | {each.do}")
    return found


@pytest.mark.parametrize(("kind", "told"), [("nfs4", True), ("xfs", False)])
def test_a_state_that_nodes_may_share_is_named(tmp_path: Path, kind: str, told: bool) -> None:
    state = tmp_path / "state"
    site = load_site(tmp_path / "etc", f"[hooks]\nstate='{state}'\n[checks.memory]\n")
    place = tree(tmp_path / "machine", {"/proc/self/mounts": f"x {tmp_path} {kind} rw 0 0\n"})
    said = by_level(machine.advise_machine(site, "lab", place))["look"]
    assert any(f"hooks.state = {state} is on {kind}" in each for each in said) == told, said


@rows
def test_what_a_site_lacks_is_advised(
    tmp_path: Path, text: str, ledger: str, config: dict[str, str], level: str, said: list[str]
) -> None:
    if os.getuid() != 0 and ("TMP" in text or "directory" in text or "~" in text):
        pytest.skip("only root tries the shared directory, and shares its journal")
    (tmp_path / "lab").mkdir()
    for place in (tmp_path, tmp_path / "lab"):
        place.chmod(0o755 if ledger else 0o1777)
    if ledger:
        (tmp_path / "ledger.1").write_text(ledger)
    for name, mode in (("loose", 0o777), ("open", 0o644)):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(mode)
    site = load_site(tmp_path / "etc", text.replace("TMP", str(tmp_path)))
    found = by_level(
        [
            *machine.advise_machine(site, "lab"),
            *machine.advise_on_repair(site, config),
            *machine.advise_on_notify(site),
        ]
    )
    assert any(all(words in line for words in said) for line in found[level]), found
    off = load_site(tmp_path / "off", "")
    assert [*machine.advise_on_repair(off, config), *machine.advise_on_notify(off)] == []


@pytest.mark.parametrize("key", ["Prolog", "Epilog"])
def test_the_shims_as_shipped_have_the_limits_that_doctor_takes_them_to_have(key: str) -> None:
    shim = slurm_conf.read_shim(Path(__file__).parents[3] / key.lower() / "slurm-health")
    assert shim is not None
    assert shim.limit_s == slurm_conf.SHIM_LIMITS_S[key]


def test_a_node_without_a_system_log_is_told(tmp_path: Path) -> None:
    """There, nobody would ever learn what the hooks found."""
    place = CheckContext(root=tmp_path)
    assert machine.log_advice(place).level is Urgency.LOOK
    (tmp_path / "dev").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(tmp_path / "dev/log"))
        assert machine.log_advice(place).level is Urgency.FINE


@rows
def test_a_missing_program_of_a_check_is_named(tmp_path: Path, text: str, program: str) -> None:
    site = load_site(tmp_path / "etc", text)
    machine_without = CheckContext(root=tmp_path / "machine")

    found = by_level(machine.advise_machine(site, "lab", machine_without))["change"]
    assert any(f"runs {program}, which is not on this node" in each for each in found)

    name = "usr/bin/dcgmi" if program == "dcgmi" else program.lstrip("/")
    there = tmp_path / "machine" / name
    there.parent.mkdir(parents=True)
    write_executable(there, "#!/bin/sh\n")
    found = by_level(machine.advise_machine(site, "lab", machine_without))["change"]
    assert not any("is not on this node" in each for each in found)


def test_an_installation_that_users_cannot_enter_is_found(tmp_path: Path) -> None:
    """The hooks are root's and run; every command of a user ends with Permission denied."""
    closed = tmp_path / "machine" / Path(sys.executable).parent.relative_to("/")
    closed.mkdir(parents=True)
    place, site = CheckContext(root=tmp_path / "machine"), load_site(tmp_path / "etc", "")
    for mode, is_told in ((0o755, False), (0o700, True)):
        closed.chmod(mode)
        found = by_level(machine.advise_machine(site, "lab", place))["change"]
        said = f"users cannot enter {Path(sys.executable).parent}"
        assert any(said in each for each in found) is is_told


@pytest.mark.root
@pytest.mark.parametrize(("mode", "uid"), [(0o777, 0), (0o1777, 12345)])
@pytest.mark.parametrize("level", [".", "lab"])
def test_a_journal_that_users_could_replace_is_named_at_each_level(
    tmp_path: Path, mode: int, uid: int, level: str
) -> None:
    journal = tmp_path / "journal"
    (journal / "lab").mkdir(parents=True)
    for place in (journal, journal / "lab"):
        place.chmod(0o1777)
    (journal / level).chmod(mode)
    os.chown(journal / level, uid, -1)
    site = load_site(tmp_path / "etc", f"journal='{journal}'\n[checks.memory]\n")

    found = by_level(machine.advise_machine(site, "lab"))["change"]

    assert any("must be root's and sticky" in text for text in found)


def test_patterns_that_match_nothing_are_named(tmp_path: Path) -> None:
    text = "[checks.memory]\nnodes = ['n[1-9]', '!gpu*']\npartitions = ['gpu', 'large']\n"
    site = load_site(tmp_path / "etc", text)
    nodes = {"n1": Node(name="n1", state="IDLE", partitions=("gpu",))}

    found = by_level([*machine.unmatched(site, nodes)])["look"]

    assert [line.partition(", which")[0] for line in found] == [
        "checks.memory: nodes has !gpu*",
        "checks.memory: partitions has large",
    ]
