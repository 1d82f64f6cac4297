# SPDX-License-Identifier: Apache-2.0
"""The pure rules of the hooks: breaker, marks, recovery, notes, findings."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.node.rules import accusations, breaker, drain_note, recovery
from slurm_health.node.rules.accusations import NodeMark
from slurm_health.node.rules.breaker import DrainEntry, DrainLedger
from slurm_health.node.rules.drain_note import DrainNote
from slurm_health.node.rules.finding import Finding, Status, capped, is_worse, joined
from slurm_health.node.rules.recovery import BootTime
from slurm_health.node.rules.settings import Accusations, Breaker, is_pattern, matches
from slurm_health.records.nodeset import expand, fold
from slurm_health.records.probe_catalog import BUILT_IN, Metric
from slurm_health.records.text import REASON_LENGTH
from tests.support.accusing import JOB, accusation, journal, judged
from tests.support.rows import rows

NODES = [f"n{number}" for number in range(1, 41)]
drains = st.lists(
    st.tuples(
        st.sampled_from(NODES),
        st.floats(0, 7200),  # how long after the one before
        st.integers(0, 5),  # job
        st.integers(0, 3),  # user
    ),
    max_size=60,
)


@given(drains, st.floats(0.02, 1.0))
def test_no_sequence_of_drains_gets_past_the_breaker(
    wanted: list[tuple[str, float, int, int]], share: float
) -> None:
    limits = Breaker(share=share)
    ledger, now_s = DrainLedger(), 0.0
    done: list[DrainEntry] = []
    for node, later_s, job, uid in wanted:
        now_s += later_s
        entry = DrainEntry(node=node, time_s=now_s, job=job, uid=uid)
        ours = {each.node: each.checks for each in done if now_s - each.time_s < 1000}
        answer = breaker.reserve(ledger, entry, limits=limits, members={"gpu": NODES}, ours=ours)
        ledger = answer.ledger
        if not answer.why_not:
            done.append(entry)
        within = {each.node for each in done if now_s - each.time_s <= 3600}
        assert len(within) <= max(2, int(share * len(NODES)))
        for number in range(1, 6):
            recent = {each.node for each in done if each.job == number}
            window = {e.node for e in done if e.job == number and now_s - e.time_s <= 3600}
            assert len(window) <= breaker.PER_JOB or not recent


@given(drains)
def test_a_tripped_breaker_allows_nothing(wanted: list[tuple[str, float, int, int]]) -> None:
    trip = breaker.Trip(time_s=0, node="n1", why="x", nodes="n[1-40]")
    tripped = DrainLedger(trips={"gpu": trip})
    for node, time_s, job, uid in wanted:
        entry = DrainEntry(node=node, time_s=time_s, job=job, uid=uid)
        answer = breaker.reserve(
            tripped, entry, limits=Breaker(share=1.0), members={"gpu": NODES}, ours={}
        )
        assert answer.why_not
        assert answer.ledger == tripped


def test_returned_nodes_and_clocks_years_ahead_do_not_count() -> None:
    year_s = 365 * 86400.0
    wanted = DrainEntry(node="n3", time_s=year_s, job=7, uid=7)

    def why_not(ledger: DrainLedger, ours: dict[str, tuple[str, ...]] | None = None) -> str:
        limits, members = Breaker(share=0.05), {"gpu": NODES}
        answer = breaker.reserve(ledger, wanted, limits=limits, members=members, ours=ours or {})
        return answer.why_not

    trial = tuple(DrainEntry(node=node, time_s=year_s - 1) for node in ("n1", "n2"))
    ahead = tuple(DrainEntry(node=node, time_s=5 * year_s) for node in ("n1", "n2"))
    assert why_not(DrainLedger(entries=trial))
    assert not why_not(breaker.with_return(DrainLedger(entries=trial), "n1"))
    assert not why_not(DrainLedger(entries=ahead))
    # What is drained now counts, whatever its clock says.
    assert why_not(DrainLedger(entries=ahead), {"n1": (), "n2": ()})


@pytest.mark.parametrize(("other", "refused"), [("xid", True), ("memory", False)])
def test_unrelated_faults_trip_no_breaker(other: str, refused: bool) -> None:
    drain = DrainEntry(node="n3", time_s=0.0, checks=("xid",))
    ours, limits = dict.fromkeys(("n1", "n2"), (other,)), Breaker(share=0.05)
    answer = breaker.reserve(DrainLedger(), drain, limits=limits, members={"gpu": NODES}, ours=ours)
    assert bool(answer.why_not) is refused


def trips_after(users: list[int], nodes: list[str]) -> tuple[str, list[str]]:
    """Let the breaker refuse a drain after those of jobs of these users; why, and what tripped."""
    limits = Breaker(share=0.1)
    ledger = DrainLedger()
    for number, uid in enumerate(users):
        entry = DrainEntry(node=nodes[number], time_s=float(number), job=number + 1, uid=uid)
        answer = breaker.reserve(
            ledger,
            entry,
            limits=limits,
            members={"gpu": nodes},
            ours={},
            name_of={5: "ann"}.__getitem__,
        )
        ledger = answer.ledger
    assert answer.why_not
    return answer.why_not, list(answer.ledger.trips)


@rows
def test_one_users_jobs_trip_nothing(users: list[int], tripped: list[str]) -> None:
    why, found = trips_after(users, NODES[:30])
    assert found == tripped
    assert "n[1-4] would be drained, now or within 60 min: 4 of 30 nodes of gpu, limit 3" in why
    assert ("a fabric or software problem" in why) == bool(tripped)
    assert ("of them after jobs of user ann" in why) == (not tripped)


@rows
def test_two_refusals_of_others_trip_the_breaker(users: list[int], tripped: list[str]) -> None:
    why, found = trips_after(users, NODES[:30])
    assert found == tripped
    assert f"{len(users)} of 30 nodes of gpu, limit 3" in why


def test_a_node_that_is_refused_again_and_again_trips_nothing() -> None:
    again = [NODES[0], NODES[1], NODES[2], *[NODES[3]] * 9, *NODES[4:30]]
    assert trips_after([5, 5, 5, *[-1] * 9], again)[1] == []


def test_a_trip_stops_its_own_partition_and_no_other() -> None:
    trip = breaker.Trip(time_s=0, node="n1", why="x", nodes="n[1-9]")
    ledger = DrainLedger(trips={"gpu": trip})
    stopped = DrainEntry(node="n3", time_s=1.0)
    other = DrainEntry(node="n12", time_s=1.0, partitions=("cpu",))
    assert "the breaker of gpu has tripped" in breaker.refusal(ledger, stopped)
    members = {"cpu": NODES[9:]}
    answer = breaker.reserve(ledger, other, limits=Breaker(), members=members, ours={})
    assert not answer.why_not
    assert answer.ledger.trips == ledger.trips


mark = st.builds(
    NodeMark,
    job=st.integers(1, 30),
    uid=st.integers(1000, 1003),
    component=st.just("node"),
    text=st.just(""),
    time_s=st.floats(0, 600_000),
)


@given(st.lists(mark, max_size=60))
def test_one_users_marks_alone_convict_nobody(found: list[NodeMark]) -> None:
    known: tuple[NodeMark, ...] = ()
    for each in sorted(found, key=lambda m: m.time_s):
        known = accusations.add(known, each, Accusations())
    for uid in range(1000, 1004):
        own = [each for each in known if each.uid == uid]
        assert not accusations.quorum_reached(own, Accusations())
    assert len({(each.job, each.uid) for each in known}) == len(known)
    assert not accusations.quorum_reached(known, Accusations(users=0))


@given(st.lists(mark, max_size=60), st.integers(1, 4), st.integers(1, 4))
def test_marks_that_are_not_kept_would_not_have_counted(
    found: list[NodeMark], users: int, jobs: int
) -> None:
    settings = Accusations(users=users, jobs=jobs)
    known: tuple[NodeMark, ...] = ()
    every: dict[tuple[int, int], NodeMark] = {}
    for each in sorted(found, key=lambda m: m.time_s):
        known = accusations.add(known, each, settings)
        every[each.job, each.uid] = each
    assert accusations.quorum_reached(known, settings) == accusations.quorum_reached(
        [*every.values()], settings
    )


@rows
def test_a_moment_of_another_boot_has_no_place_in_this_one(
    then: BootTime | None, now: BootTime | None, uptime_s: float | None
) -> None:
    assert recovery.uptime_s(then, now) == uptime_s


@given(
    st.lists(st.from_regex(r"[\w.-]{1,20}", fullmatch=True), min_size=1, max_size=3),
    st.integers(0, 10**7),
    st.integers(0, 2**33),
    st.text(max_size=300),
)
def test_a_note_is_known_again_whatever_it_says(
    checks: list[str], job: int, time_s: int, text: str
) -> None:
    note = drain_note.write(DrainNote(checks=tuple(checks), job=job, time_s=time_s, text=text))
    assert note.isascii()
    assert note.isprintable()
    assert '"' not in note
    assert len(note) <= REASON_LENGTH
    assert drain_note.is_ours(note)
    read = drain_note.parse(f"{note} [root@2026-01-02T03:04:05]")
    assert read is not None
    assert (read.job, read.time_s) == (job, time_s)


@rows
def test_the_20_columns_of_sinfo_say_what_is_wrong(check: str, text: str, shown: str) -> None:
    note = drain_note.write(DrainNote(checks=(check,), job=7, time_s=5, text=text))
    assert note[:20] == shown
    assert note.endswith(f" check={check} job=7 t=5")


@pytest.mark.parametrize(
    "reason",
    [
        *("", "ADMIN", "slurm-health", "NHC: slurm-health: x", "shealth: job 3: x"),
        f"shealth: x check=fs job=7 t={'9' * 5000}",
    ],
)
def test_what_is_not_a_hooks_note_is_not_read_as_one(reason: str) -> None:
    assert drain_note.parse(reason) is None


findings = st.builds(Finding, status=st.sampled_from(Status), text=st.text(min_size=1, max_size=5))


@given(st.lists(findings, max_size=6))
def test_several_findings_are_as_bad_as_the_worst(found: list[Finding]) -> None:
    whole = joined(found, well="well")
    assert not any(is_worse(each.status, whole.status) for each in found)
    assert whole.status in {each.status for each in found} | {Status.PASS}


@given(findings, st.sampled_from([Status.WARN, Status.USER_FAULT, Status.NODE_FAULT]))
def test_a_site_can_lower_a_fault_and_nothing_else(found: Finding, severity: Status) -> None:
    after = capped(found, severity)
    assert not is_worse(after.status, found.status)
    if found.status in (Status.PASS, Status.WARN, Status.INCONCLUSIVE):
        assert after == found
    else:
        assert not is_worse(after.status, severity)


def test_a_mark_from_another_day_to_come_counts_no_more_than_an_old_one() -> None:
    mark = NodeMark(job=1, uid=1, component="node", text="", time_s=10 * 86400.0)
    assert accusations.alive([mark], 0.0) == ()
    assert accusations.alive([mark], 10 * 86400.0 - 60) == (mark,)


def test_the_expression_of_the_documentation_reads_our_reasons() -> None:
    page = Path(__file__).parents[3] / "docs/admin/elsewhere.md"
    found = re.search(r"`(\^shealth:.*)`", page.read_text())
    assert found is not None
    note = DrainNote(checks=("nvme", "gpu"), job=7, time_s=1763661234, text="nvme0: it is gone")

    read = re.match(found[1], drain_note.write(note))

    assert read is not None
    assert read.groupdict() == {"what": "nvme0: it is gone", "check": "nvme,gpu"}


# --- accusations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("component", "kind"),
    [
        ("network", "network"),
        ("compute device 3", "compute"),
        ("network rail 5", "network"),
        ("; rm -rf /", "node"),
        ("", "node"),
        *((kind, kind) for kind in sorted({Metric(probe=one.name).component for one in BUILT_IN})),
    ],
)
def test_a_test_of_a_part_is_chosen_by_what_kind_of_part_it_is(component: str, kind: str) -> None:
    found = accusation(journal(judged(component=component)), "n3", JOB)

    assert found is not None
    assert found.component == kind


# --- patterns of node names -----------------------------------------------------------------------


@rows
def test_a_name_is_meant_by_patterns(patterns: list[str], meant: str, others: str) -> None:
    assert all(matches(name, patterns) for name in meant.split())
    assert not any(matches(name, patterns) for name in others.split())


@given(
    st.lists(st.integers(0, 120), min_size=1, max_size=20, unique=True),
    st.integers(1, 4),
    st.integers(0, 130),
)
def test_a_folded_list_means_the_nodes_it_was_folded_from(
    numbers: list[int], width: int, probe: int
) -> None:
    names = [f"gpu{number:0{width}d}" for number in numbers]
    patterns = _patterns(fold(names))
    assert all(matches(name, patterns) for name in names)
    other = f"gpu{probe:0{width}d}"
    assert matches(other, patterns) is (other in expand(fold(names)))


def _patterns(folded: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth = [""], 0
    for character in folded:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


@given(st.text(max_size=20))
def test_no_text_breaks_a_pattern_and_some_are_none(text: str) -> None:
    if is_pattern(text):
        matches("gpu07", [text])
    assert not any(map(is_pattern, ("", "a b", "gpu[", "gpu[x]", "!", "gpu[1-]", "$(x)")))
