# SPDX-License-Identifier: Apache-2.0
"""A node in quarantine: tested before it comes back, and never left there."""

from __future__ import annotations

import msgspec
import pytest

from slurm_health.node.draining import QUARANTINE, own_drain
from slurm_health.node.mending import ledger, quarantine
from slurm_health.node.mending.quarantine import Quarantine
from slurm_health.node.rules.mending import MendStep
from slurm_health.node.rules.notices import EventKind
from tests.support.fake_scontrol import FakeScontrol
from tests.support.hooked_node import Node
from tests.support.mended_node import again, begun, events, faulty, mended, note


def test_a_quarantine_that_its_node_has_forgotten_is_told_by_another(
    rack: list[Node], slurm: FakeScontrol
) -> None:
    mended(rack[1], "'ticket'")
    lost = msgspec.structs.replace(begun(MendStep.DEEP_TEST), node="n1", until_s=rack[1].now_s)
    ledger.keep(rack[1].site, lost)
    slurm.set({"n1": ("IDLE+MAINTENANCE+RESERVED", "")})
    rack[1].now_s += 3601
    rack[1].healthcheck()

    text = "n1 is not back from quarantine: scontrol show reservation shealth-n1"
    assert events(rack[1]) == [(EventKind.STEP_FAILED, text), (EventKind.TICKET, text)]


def test_a_reservation_that_fails_leaves_the_node_drained_as_it_was(
    node: Node, slurm: FakeScontrol
) -> None:
    mended(node, "'deep_test'", "deep_test = ['true']", first="deep_test")
    faulty(node)
    slurm.trouble('case "$1" in create) echo Invalid user >&2; exit 1;; esac')
    slurm.trouble(
        'case "$1 $2" in "create reservation") echo Invalid user >&2; exit 1;;'
        ' "show reservation") echo Reservation not found >&2; exit 1;; esac'
    )
    before = node.reason

    assert "mending: deep_test failed: it could not be begun" in again(node)
    assert (node.state, node.reason) == ("IDLE+DRAIN", before)


def due_back(node: Node, more: str = "", steps: str = "'deep_test'") -> str:
    """Drain a node for what then passes, until it may come back; return what is said then."""
    mended(node, steps, f"deep_test = ['true']\n{more}", first="ticket")
    faulty(node)
    node.mend()
    return "".join(again(node, 61) for _ in range(3))


@pytest.mark.parametrize(
    ("more", "steps_allowed"), [("burn_in_h = 0", "'deep_test'"), ("", "'ticket'")]
)
def test_without_a_burn_in_a_node_comes_back_once_it_has_passed(
    node: Node, more: str, steps_allowed: str
) -> None:
    assert "released after 3 passes" in due_back(node, more, steps_allowed)
    assert node.state == "IDLE"


def test_a_dry_run_says_what_burn_in_there_would_be_and_the_node_comes_back(node: Node) -> None:
    mended(node, "'deep_test'", "deep_test = ['true']", first="ticket")
    node.more = node.more.replace("dry_run = false", "")
    faulty(node)
    node.mend()
    said = "".join(again(node, 61) for _ in range(3))

    assert "dry run: would be tested first: for 24 h before it comes back" in said
    assert node.state == "IDLE"


def test_a_node_whose_burn_in_cannot_be_begun_comes_back_and_a_person_is_told(
    node: Node, slurm: FakeScontrol
) -> None:
    slurm.trouble(
        'case "$1 $2" in "create reservation") echo Invalid user >&2; exit 1;;'
        ' "show reservation") exit 0;; esac'
    )
    said = due_back(node)

    assert "mending: deep_test failed: it could not be begun" in said
    assert "Invalid user" in said
    assert node.state == "IDLE"
    assert EventKind.STEP_FAILED in [kind for kind, _ in events(node)]


def test_a_burn_in_waits_until_the_hour_allows_one_more_step(node: Node) -> None:
    mended(node, "'deep_test'", "deep_test = ['true']\nper_hour = 1", first="ticket")
    other = msgspec.structs.replace(begun(MendStep.REBOOT), node="n9", time_s=node.now_s)
    faulty(node)
    ledger.keep(node.site, other)
    node.mend()
    said = "".join(again(node, 61) for _ in range(3))

    assert "not released: it waits for its burn-in: 1 step within the hour" in said
    assert node.state == "IDLE+DRAIN"


def test_a_node_on_which_a_job_still_runs_waits_for_its_burn_in(
    node: Node, slurm: FakeScontrol
) -> None:
    mended(node, "'deep_test'", "deep_test = ['true']", first="ticket")
    faulty(node)
    node.mend()
    slurm.set({"n3": ("MIXED+DRAIN", note(node))})
    said = "".join(again(node, 61) for _ in range(3))

    assert "not released: it waits for its burn-in: it is MIXED+DRAIN" in said
    assert node.state == "MIXED+DRAIN"


@pytest.mark.parametrize(("fails_in", "code", "text"), [(0, 0, "run 4"), (3, 7, "in run 3: run 3")])
def test_a_burn_in_repeats_the_test_until_its_time_has_passed_or_it_fails(
    node: Node, fails_in: int, code: int, text: str
) -> None:
    counted = node.directory / "runs"
    script = (
        f"echo >>{counted}; n=$(wc -l <{counted}); echo run $n;"
        f" test $n -ne {fails_in} || exit {code or 1}"
    )
    node.more = f'[mend]\ndeep_test = ["sh", "-c", "{script}"]\n'
    node.site.state.mkdir(parents=True)
    # A look at the clock is half an hour later than the one before: at 0, 0.5, 1, 1.5 and 2 h.
    times = iter(range(0, 20_000, 1800))
    quarantine.run_test(node.site, 4711, hours=2.0, clock_s=lambda: float(next(times)))

    data = (node.site.state / "deep-test.json").read_bytes()
    result = msgspec.json.decode(data, type=quarantine.TestResult)
    assert (result.job, result.code, result.said) == (4711, code, text)


def test_a_reservation_that_a_late_slurmctld_makes_without_an_answer_does_not_stay(
    node: Node, slurm: FakeScontrol
) -> None:
    mended(node, "'deep_test'", "deep_test = ['true']", first="deep_test")
    faulty(node)
    slurm.trouble(
        'case "$1 $2" in'
        ' "create reservation") touch $dir/made; echo Zero Bytes were transmitted >&2; exit 1;;'
        ' "show reservation") [ ! -f $dir/made ] || echo "ReservationName=shealth-n3 Nodes=n3";'
        " exit;;"
        ' "delete ReservationName=shealth-n3") rm $dir/made; exit;; esac'
    )

    assert "mending: deep_test failed: it could not be begun" in again(node)
    assert any(call.startswith("create reservation") for call in slurm.calls())
    assert not (slurm.directory / "made").exists()
    assert node.state == "IDLE+DRAIN"


def test_a_quarantine_ends_though_mending_was_switched_off_meanwhile(
    node: Node, slurm: FakeScontrol
) -> None:
    faulty(node)
    kept, state = own_drain.recall(node.site.state), node.site.state
    assert kept is not None
    lost = Quarantine(kept=kept, reservation="shealth-n3", job=7, step=begun(MendStep.DEEP_TEST))
    (state / QUARANTINE).write_bytes(msgspec.json.encode(lost))
    own_drain.forget(state)
    slurm.set({"n3": ("IDLE", "")})
    slurm.trouble('case "$1 $2" in "show reservation") exit;; esac')

    assert "its reservation was deleted" in again(node)
    assert not (state / QUARANTINE).exists()
    assert node.state == "IDLE+DRAIN"  # it is faulty still, and can be drained again
