# SPDX-License-Identifier: Apache-2.0
"""A node in quarantine: tested before it comes back, and never left there."""

from __future__ import annotations

import msgspec
import pytest

from slurm_health.node.draining import QUARANTINE, own_drain
from slurm_health.node.mending import ledger, quarantine
from slurm_health.node.mending.quarantine import Quarantine
from slurm_health.node.mending.whose import NotOurs
from slurm_health.node.notify import EventKind
from slurm_health.node.rules.mending import MendStep
from slurm_health.records.errors import SlurmError
from tests.support.hooked_node import Node
from tests.support.hooked_slurm import HookedSlurm
from tests.support.mended_node import (
    again,
    at_look,
    begun,
    events,
    fails_at_look,
    faulty,
    is_reserved,
    mended,
    note,
    put_into_quarantine,
    steps,
    takes_reservations,
    told_of,
)


def test_a_quarantine_that_its_node_has_forgotten_is_told_by_another(
    rack: list[Node], slurm: HookedSlurm
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
    node: Node, slurm: HookedSlurm
) -> None:
    mended(node, "'deep_test'", "deep_test = ['true']", first="deep_test")
    faulty(node)
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
    node: Node, slurm: HookedSlurm
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
    node: Node, slurm: HookedSlurm
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
    node: Node, slurm: HookedSlurm
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


TICKET = "ticket 42: DIMM being swapped, do not touch"
RESERVED = "+MAINTENANCE+RESERVED"
OURS = "the note as it was"


def test_a_node_that_stays_ours_goes_into_quarantine(node: Node, slurm: HookedSlurm) -> None:
    faulty(node)
    takes_reservations(slurm, at_look(2, f"IDLE+DRAIN{RESERVED}", note(node)))
    put_into_quarantine(node)

    assert is_reserved(slurm)
    assert node.state == "IDLE"
    assert (node.site.state / QUARANTINE).exists()
    assert own_drain.recall(node.site.state) is None


def test_a_deep_test_is_submitted_where_slurm_is_not_where_the_system_has_its_commands(
    node: Node, slurm: HookedSlurm
) -> None:
    mended(node, "'deep_test'", "deep_test = ['true']", first="deep_test")
    faulty(node)
    takes_reservations(slurm, at_look(3, f"IDLE+DRAIN{RESERVED}", note(node)))
    printed = f"printf '%s %s\\n' $PATH $SLURM_CONF >{slurm.directory}/found; echo 7"
    (slurm.bin / "sbatch").write_text(f"#!/bin/sh\n{printed}\n")
    node.now_s += 300
    node.healthcheck(SLURM_CONF="/opt/slurm/etc/slurm.conf")

    found = (slurm.directory / "found").read_text()
    assert found == f"{slurm.path} /opt/slurm/etc/slurm.conf\n"
    assert steps(node) == [("deep_test", "begun")]
    assert (node.site.state / QUARANTINE).exists()


@pytest.mark.parametrize(
    ("state", "reason", "why"),
    [
        (f"IDLE+DRAIN{RESERVED}", TICKET, "no longer drained by us alone"),
        (f"DOWN+DRAIN{RESERVED}", TICKET, "no longer drained by us alone"),
        (f"DOWN{RESERVED}", TICKET, "no longer drained by us alone"),
        (f"IDLE{RESERVED}", "", "no longer drained by us alone"),
        (f"DOWN*+DRAIN{RESERVED}", OURS, "it is DOWN"),
    ],
)
def test_a_node_that_is_down_or_an_administrators_by_now_is_not_put_into_quarantine(
    node: Node, slurm: HookedSlurm, state: str, reason: str, why: str
) -> None:
    faulty(node)
    reason = note(node) if reason == OURS else reason
    takes_reservations(slurm, at_look(2, state, reason))
    with pytest.raises(NotOurs, match=why):
        put_into_quarantine(node)

    assert told_of(slurm, "State=UNDRAIN") == []
    assert (node.state, note(node)) == (state, reason)
    assert told_of(slurm, "scancel") == ["scancel 7"]
    assert not is_reserved(slurm)
    assert not (node.site.state / QUARANTINE).exists()


@pytest.mark.parametrize("look", [1, 2])
def test_a_drain_that_slurm_cannot_show_right_before_is_not_lifted(
    node: Node, slurm: HookedSlurm, look: int
) -> None:
    faulty(node)
    takes_reservations(slurm, fails_at_look(look))
    with pytest.raises(SlurmError):
        put_into_quarantine(node)

    assert told_of(slurm, "State=UNDRAIN") == []
    assert node.state == "IDLE+DRAIN"
    assert not is_reserved(slurm)
    assert not (node.site.state / QUARANTINE).exists()


def test_a_quarantine_that_could_not_be_taken_back_is_ended_by_the_next_health_check(
    node: Node, slurm: HookedSlurm
) -> None:
    mended(node, "'ticket'")
    faulty(node)
    takes_reservations(slurm, 'case "$1" in delete) exit 1;; esac\n' + fails_at_look(2))
    with pytest.raises(SlurmError):
        put_into_quarantine(node)
    assert is_reserved(slurm)
    takes_reservations(slurm)

    assert "putting it into quarantine was interrupted" in again(node)
    assert not is_reserved(slurm)
    assert not (node.site.state / QUARANTINE).exists()
    assert node.state == "IDLE+DRAIN"


def test_a_node_that_somebody_reserved_right_before_its_burn_in_waits_for_it(
    node: Node, slurm: HookedSlurm
) -> None:
    mended(node, "'deep_test'", "deep_test = ['true']", first="ticket")
    faulty(node)
    node.mend()
    for _ in range(2):
        again(node, 61)
    takes_reservations(slurm, at_look(2, "IDLE+DRAIN+RESERVED", note(node)))

    assert "nothing is done to mend it: it is IDLE+DRAIN+RESERVED" in again(node, 61)
    assert told_of(slurm, "State=UNDRAIN") == []


def in_quarantine(node: Node, slurm: HookedSlurm, *, code: int | None, more: str = "") -> None:
    """Have a node in quarantine; its test has ended with a code, or without a result."""
    faulty(node)
    kept, state = own_drain.recall(node.site.state), node.site.state
    assert kept is not None
    step = begun(MendStep.DEEP_TEST)
    found = Quarantine(kept=kept, reservation="shealth-n3", job=7, step=step)
    (state / QUARANTINE).write_bytes(msgspec.json.encode(found))
    own_drain.forget(state)
    if code is not None:
        result = quarantine.TestResult(job=7, code=code, said="memory of module 7")
        (state / "deep-test.json").write_bytes(msgspec.json.encode(result))
    slurm.set({"n3": (f"IDLE{RESERVED}", "")})
    slurm.cluster.set(reservations={"shealth-n3": ["n3", "MAINT"]})
    (slurm.directory / "calls").unlink()
    takes_reservations(slurm, more)


@pytest.mark.parametrize("code", [None, 0, 9])
@pytest.mark.parametrize("state", [f"DOWN{RESERVED}", f"IDLE+FAIL{RESERVED}"])
def test_a_node_that_an_administrator_takes_out_of_quarantine_keeps_their_reason(
    node: Node, slurm: HookedSlurm, state: str, code: int | None
) -> None:
    in_quarantine(node, slurm, code=code, more=at_look(1, state, "ticket 42: PSU burnt"))

    assert f"it was taken out of service while in quarantine: {state}" in again(node)
    assert told_of(slurm, "State=DRAIN") == []
    assert (node.state, note(node)) == (state, "ticket 42: PSU burnt")
    assert not is_reserved(slurm)
    assert not (node.site.state / QUARANTINE).exists()


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize("state", [f"DOWN{RESERVED}", f"IDLE+DRAIN{RESERVED}"])
def test_an_administrator_who_comes_while_its_checks_run_keeps_the_node(
    node: Node, slurm: HookedSlurm, state: str, passes: bool
) -> None:
    in_quarantine(node, slurm, code=0, more=at_look(2, state, TICKET))
    if passes:
        node.mend()
    said = again(node)

    assert "while in quarantine" in said
    assert "released" not in said
    assert told_of(slurm, "State=DRAIN") == []
    assert (node.state, note(node)) == (state, TICKET)
    assert not is_reserved(slurm)


def test_a_node_that_slurm_took_down_stays_in_quarantine_until_it_can_be_drained(
    node: Node, slurm: HookedSlurm
) -> None:
    lost = at_look(1, f"DOWN*{RESERVED}", "Not responding [daemon@2026-01-02T03:04:05]")
    in_quarantine(node, slurm, code=None, more=lost)

    assert "still in quarantine, and not drained: it is DOWN*" in again(node)
    assert told_of(slurm, "State=DRAIN") == []
    assert is_reserved(slurm)

    slurm.set({"n3": (f"IDLE{RESERVED}", "")})
    assert "mending: deep_test failed: job 7 ended without a result" in again(node)
    assert note(node).startswith("shealth:scratch job 7 ended without a result")
    assert node.state == "IDLE+DRAIN"
    assert not is_reserved(slurm)


def test_a_note_on_a_node_in_quarantine_stays_and_so_does_the_node(
    node: Node, slurm: HookedSlurm
) -> None:
    in_quarantine(node, slurm, code=9, more=at_look(1, f"IDLE{RESERVED}", "fan 3 is loud"))

    assert "not drained: it has a note already: fan 3 is loud" in again(node)
    assert told_of(slurm, "State=DRAIN") == []
    assert note(node) == "fan 3 is loud"
    assert is_reserved(slurm)


def test_a_quarantine_ends_though_mending_was_switched_off_meanwhile(
    node: Node, slurm: HookedSlurm
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
