# SPDX-License-Identifier: Apache-2.0
"""What a node's own rules decide: accusations, the breaker, recovery, repair, the kernel's words.

`inputs/kernel_lines.txt` holds lines of kernels and drivers, and lines that users can write.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from slurm_health.node.rules import accusations, breaker, drain_note, recovery, repair
from slurm_health.node.rules.finding import CheckResult, Finding, Remedy, Status
from slurm_health.node.rules.kernel_lines import (
    all_errors,
    explained,
    is_evidence,
    of_sxid,
    of_xid,
)
from slurm_health.node.rules.settings import (
    Accusations,
    Breaker,
    Recovery,
    Repair,
    StepName,
    matches,
)
from slurm_health.records.verdict import Level

LINES = Path(__file__).parent / "inputs" / "kernel_lines.txt"
NOW_S = 1_700_000_000.0
_HOUR_S = 3600.0


def entries() -> Iterator[tuple[str, object]]:
    """Yield all of it."""
    yield from _accusations()
    yield from _marks()
    yield from _shares()
    yield from _breaker()
    yield from _breaker_for_owners()
    yield from _repair()
    yield from _gate()
    yield from _recovery()
    yield from _kernel()
    yield from _patterns()
    yield from _notes()


def _accusations() -> Iterator[tuple[str, object]]:
    for levels in product((Level.FAULTY, Level.SLOW, Level.HEALTHY), repeat=3):
        said = [
            accusations.Accusation(node="n1", job=12, component="network", reason="x", level=level)
            for level in levels
        ]
        counts = accusations.effective(said)
        key = f"accused: of {', '.join(each.value for each in levels)} counts"
        yield key, None if counts is None else counts.level.value


def _marks() -> Iterator[tuple[str, object]]:
    settings = Accusations()
    for users, jobs, wanted in product((1, 2, 3), (1, 2, 3, 4), (0, 1, 2)):
        marks = tuple(_mark(number, uid=number % users) for number in range(jobs))
        found = accusations.quorum_reached(marks, Accusations(users=wanted))
        yield f"marks: {jobs} jobs of {users} users, {wanted} users wanted", found
    for age_h in (-25.0, -23.0, 0.0, 167.9, 168.1):
        marks = (_mark(1, uid=1, time_s=NOW_S - age_h * _HOUR_S),)
        yield f"marks: {age_h:g} h old", len(accusations.alive(marks, NOW_S))
    kept: tuple[accusations.NodeMark, ...] = ()
    for number in range(6):
        kept = accusations.add(kept, _mark(number % 4, uid=1), settings)
        yield f"marks: after {number + 1} of one user", [mark.job for mark in kept]


def _mark(job: int, *, uid: int, time_s: float = NOW_S) -> accusations.NodeMark:
    return accusations.NodeMark(job=job, uid=uid, component="network", text="x", time_s=time_s)


def _shares() -> Iterator[tuple[str, object]]:
    limits = Breaker()
    for nodes in (1, 2, 3, 4, 8, 9, 16, 19, 20, 29, 30, 64, 100, 1000):
        key = f"breaker: of {nodes} nodes, of those below one switch"
        yield key, [limits.allowed(nodes), limits.allowed(nodes, in_rack=True)]


def _breaker() -> Iterator[tuple[str, object]]:
    """Yield what becomes of one drain after another, by how far apart and after whose jobs."""
    gaps_s = {"at once": 1.0, "within the hour": 900.0, "slowly": 3700.0, "backwards": -60.0}
    for (pace, gap_s), nodes, owners, racks in product(
        gaps_s.items(), (4, 16, 40), (1, 2, 9), (False, True)
    ):
        names = [f"n{number}" for number in range(nodes)]
        below = {f"leaf{each}": names[4 * each : 4 * each + 4] for each in range(nodes // 4)}
        ledger, said = breaker.DrainLedger(), ""
        for number, node in enumerate(names[:8]):
            time_s, uid = NOW_S + gap_s * number, 1000 + number % owners
            result = breaker.reserve(
                ledger,
                _drain(number, time_s, 100 + number, uid),
                limits=Breaker(directory="/x"),
                members={"all": names},
                ours={},
                racks={leaf: each for leaf, each in below.items() if node in each} if racks else {},
            )
            allowed = not result.why_not
            trips = len(result.ledger.trips) > len(ledger.trips)
            said += "d" if allowed else "T" if trips else "r"
            ledger = result.ledger
        where = "with racks" if racks else "without racks"
        key = f"breaker: {pace}, {nodes} nodes, {owners} users, {where}"
        yield key, [said, sorted(ledger.trips)]


def _breaker_for_owners() -> Iterator[tuple[str, object]]:
    ages_s = (10.0, 599.0, 601.0, 1800.0, 3599.0, 3601.0, 7199.0, 7201.0, -10.0, -90000.0)
    for age_s, of_job in product(ages_s, (True, False)):
        most = 0
        for before in range(6):
            entries_before = tuple(
                _drain(each, NOW_S - age_s, job=7 if of_job else 100 + each)
                for each in range(before)
            )
            ledger = breaker.DrainLedger(entries=entries_before)
            if not breaker.refusal(ledger, _drain(99, NOW_S, job=7)):
                most = before + 1
        who = "one job" if of_job else "one user"
        yield f"breaker: most for {who} with others {age_s:g} s ago, window 3600 s", most


def _drain(node: int, time_s: float, job: int, uid: int = 1000) -> breaker.DrainEntry:
    where = ("all",)
    return breaker.DrainEntry(node=f"n{node}", time_s=time_s, job=job, uid=uid, partitions=where)


_STEPS: tuple[StepName, ...] = ("reset", "reboot", "administrator")


def _repair() -> Iterator[tuple[str, object]]:
    settings = Repair(dry_run=False, steps=_STEPS)
    fewer = Repair(dry_run=False, steps=("reboot", "administrator"))
    named = Repair(steps=("reset", "reboot"), first={"gpu": "reboot"})
    for remedies in product((None, *Remedy), repeat=2):
        failed = [
            CheckResult(
                name=name, finding=Finding(status=Status.NODE_FAULT, text="x", remedy=remedy)
            )
            for name, remedy in zip(("gpu", "xid"), remedies, strict=True)
        ]
        words = " and ".join(known.value if known else "nothing known" for known in remedies)
        yield f"repair: {words} begins with", repair.first_step(failed, settings).value
        key = f"repair: {words}, gpu is named, begins with"
        yield key, repair.first_step(failed, named).value
    yield "repair: no check failed begins with", repair.first_step([], settings).value
    for first, done, outcome, age_h, drain, allowed in product(
        repair.LADDER,
        (None, *repair.RepairStep),
        (repair.Outcome.BEGUN, repair.Outcome.DONE, repair.Outcome.DRY_RUN),
        (0.1, 23.0, 25.0),
        ("this drain", "another drain"),
        (settings, fewer),
    ):
        if done is None and (outcome is not repair.Outcome.DONE or age_h > 1 or drain[0] == "a"):
            continue
        attempts = [] if done is None else [_attempt(done, outcome, age_h, drain)]
        chosen = repair.next_step(
            first, attempts, node="n1", drain="this drain", settings=allowed, now_s=NOW_S
        )
        before = f"{done.value} {outcome.value} {age_h:g} h ago for {drain}" if done else "nothing"
        key = f"repair: {first.value} first, after {before}, {len(allowed.steps)} steps"
        yield key, chosen.step.value if chosen.step else None
    for count, age_h in product((3, 4, 5), (0.9, 1.1)):
        attempts = [
            _attempt(repair.RepairStep.RESET, repair.Outcome.DONE, age_h, "x", node=f"m{number}")
            for number in range(count)
        ]
        chosen = repair.next_step(
            repair.RepairStep.RESET, attempts, node="n1", drain="x", settings=settings, now_s=NOW_S
        )
        key = f"repair: after {count} steps of others {age_h:g} h ago"
        yield key, chosen.step.value if chosen.step else None


def _gate() -> Iterator[tuple[str, object]]:
    """Yield whether a node returns to service after one test or two, by how they ended and when."""
    test = repair.RepairStep.TEST
    for first, second, age_h in product(repair.Outcome, (None, *repair.Outcome), (0.1, 1.0)):
        attempts = [_attempt(test, first, age_h + 2, "x")]
        if second is not None:
            attempts.append(_attempt(test, second, age_h, "x"))
        settings = Repair(test=("x",))
        chosen = repair.next_step(
            test, attempts, node="n1", drain="x", settings=settings, now_s=NOW_S
        )
        state = {
            test: "test needed",
            repair.RepairStep.ADMINISTRATOR: "test failed",
            None: "open" if chosen.is_open else "testing",
        }[chosen.step]
        after = f"{first.value}, then {second.value}" if second else first.value
        yield f"repair: test {after} {age_h:g} h ago", state


def _attempt(
    step: repair.RepairStep,
    outcome: repair.Outcome,
    age_h: float,
    drain: str,
    *,
    node: str = "n1",
) -> repair.RepairAttempt:
    time_s = NOW_S - age_h * _HOUR_S
    until_s = time_s + 1800.0
    return repair.RepairAttempt(
        node=node, step=step, time_s=time_s, drain=drain, outcome=outcome, until_s=until_s
    )


def _recovery() -> Iterator[tuple[str, object]]:
    settings = Recovery()
    for passed, gap_s in product(("pppp", "ppfp", "fppp", "pfpp"), (30.0, 59.0, 61.0, -10.0)):
        record = recovery.DrainRecord(node="n1", reason="x", retest=("gpu",), time_s=NOW_S)
        said = []
        for number, letter in enumerate(passed, 1):
            record = recovery.after_test(
                record, all_passed=letter == "p", now_s=NOW_S + gap_s * number, settings=settings
            )
            said.append(f"{record.passes}{' due' if recovery.is_due(record, settings) else ''}")
        yield f"recovery: {passed}, {gap_s:g} s apart", said


_WORDS = {True: "Fatal", False: "Non-fatal", None: ""}


def _kernel() -> Iterator[tuple[str, object]]:
    for meaning in all_errors():
        yield f"kernel: {meaning.name}", [meaning.status.value, meaning.check, meaning.whose]
    for number in (*range(1, 180), 200, 999):
        error = of_xid(number)
        remedy = error.remedy.value if error.remedy else None
        yield f"xid {number}", [error.status.value, remedy]
    for number, fatal in product(
        (12020, 20034, 22003, 22011, 23001, 23017, 23018), (True, False, None)
    ):
        yield f"sxid {number}, fatal {fatal}", of_sxid(number, _WORDS[fatal]).status.value
    for line in LINES.read_text().splitlines():
        meaning_found = explained(line)
        told = [meaning_found.name, meaning_found.status.value] if meaning_found else None
        yield f"line: {line}", [is_evidence(line), told]


def _patterns() -> Iterator[tuple[str, object]]:
    patterns = ("gpu[01-16,20]", "gpu*", "!login*", "n?", "gpu[1-3]x[1-2]", "!gpu1,x")
    for name, pattern in product(
        ("gpu01", "gpu1", "gpu20", "gpu17", "login1", "n1", "gpu2x1"), patterns
    ):
        yield f"pattern: {name} is of {pattern}", matches(name, (pattern,))


def _notes() -> Iterator[tuple[str, object]]:
    note = drain_note.write(
        drain_note.DrainNote(
            checks=("filesystem-scratch",), job=4711, time_s=1_763_661_234, text="x"
        )
    )
    for name, reason in {
        "as written": note,
        "signed": f"{note} [root@2026-11-28T05:00:00]",
        "rebooted": f"{note} : reboot issued [root@2026-11-28T05:00:00]",
        "edited": f"{note} ticket 12",
        "cut": note[:20],
        "of another": "bad fan",
    }.items():
        parsed = drain_note.parse(reason)
        told = [list(parsed.checks), parsed.job, parsed.time_s] if parsed else None
        key = f"note {name}: ours, edited, what it says"
        yield key, [drain_note.is_ours(reason), drain_note.is_edited(reason, note), told]
