# SPDX-License-Identifier: Apache-2.0
"""A node in a reservation of root's, in which a job tests it deeply.

A drained node takes no job, not even root's. So the reservation comes first, which keeps all others
away and does not run out; then the drain is lifted; then the test begins. Whatever dies in between,
the node stays out of reach of users until the test has passed or somebody has looked. The node's
health check waits for the test, and ends the quarantine.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path

import msgspec

from slurm_health.node.draining import QUARANTINE, own_drain
from slurm_health.node.draining.shared_state import SharedStateUnusable
from slurm_health.node.mending import ledger, perform, whose
from slurm_health.node.mending.ledger import HealthCheck
from slurm_health.node.notify import EventKind
from slurm_health.node.rules import drain_note
from slurm_health.node.rules.drain_note import DrainNote
from slurm_health.node.rules.mending import StepOutcome, Tried
from slurm_health.node.rules.recovery import DrainRecord
from slurm_health.node.site_settings import Site
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import SlurmError
from slurm_health.records.text import cut, one_line
from slurm_health.system import SYSTEM_PATH, processes
from slurm_health.system.private_files import publish
from slurm_health.system.slurm.maintenance import Maintenance
from slurm_health.system.slurm.parsing import Node

_RESULT = "deep-test.json"
_SAID = 300
# A job that has not begun within this, on a node that is reserved for it, never will.
_WAITS_MIN = 30


class NotBegun(Exception):
    """The node could not be put into quarantine, and is drained as before."""


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """What a node in quarantine was drained for, its reservation, its job, and its step."""

    kept: DrainRecord
    reservation: str
    job: int
    step: Tried


class TestResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a deep test ended: of which job, with which code (-1: not in time), and what it said."""

    job: int
    code: int
    said: str


def recall(state: Path) -> Quarantine | None:
    """Return what is kept of this node's quarantine, None where it is in none."""
    try:
        return from_json((state / QUARANTINE).read_bytes(), Quarantine)
    except (OSError, msgspec.DecodeError):
        return None


def forget(state: Path) -> None:
    """Remove what is kept: the quarantine is over."""
    for name in (QUARANTINE, _RESULT):
        with contextlib.suppress(OSError):
            (state / name).unlink()


def reservation_of(node: str) -> str:
    """Return what the reservation of a node in quarantine is called."""
    return f"shealth-{node}"


def begin(
    site: Site,
    kept: DrainRecord,
    step: Tried,
    controller: Maintenance,
    *,
    environ: Mapping[str, str],
    hours: float = 0.0,
) -> None:
    """Put a node into quarantine and have it tested there, again and again for so many hours.

    `environ` is the health check's own, which knows where Slurm's commands are.

    Raises:
        NotBegun: it could not be done, and why; the node is drained as it was.
        NotOurs: it is in somebody else's hands by now; nothing of ours stays on it.
        SlurmError: likewise, by Slurm.
    """
    name = reservation_of(kept.node)
    whose.require_ours(controller.node(kept.node), kept.reason)
    if controller.is_reserved(name, kept.node):
        raise NotBegun(f"there is a reservation {name} already: scontrol show reservation {name}")
    job, lifting = 0, False
    try:
        controller.reserve(name, kept.node)  # which a late slurmctld may do without an answer
        _require(controller.is_reserved(name, kept.node), "Slurm does not have the reservation")
        job = _submit(site, kept.node, name, controller, environ, hours)
        found = Quarantine(kept=kept, reservation=name, job=job, step=step)
        publish(site.state / QUARANTINE, msgspec.json.encode(found), mode=0o600)
        now = controller.node(kept.node)  # again: a reservation and a job take their time
        whose.require_ours(now, kept.reason, reserved=True)
        lifting = True
        why_not = own_drain.undrain(controller, now)
        _require(not why_not, why_not)
    except (SlurmError, OSError, NotBegun, whose.NotOurs):
        if not lifting or _is_drained(kept.node, controller):
            _give_back(site.state, name, kept.node, job, controller)
            raise
        # The drain may be lifted: it stays in its reservation, and the next health check looks.
    own_drain.forget(site.state)


def _give_back(state: Path, name: str, node: str, job: int, controller: Maintenance) -> None:
    """Take back what has been begun; where Slurm does not, the next health check does."""
    ended = True
    try:
        if job:
            controller.cancel(job)
    except SlurmError:
        ended = False
    try:
        if controller.is_reserved(name, node):
            controller.delete_reservation(name)
    except SlurmError:
        ended = False
    if ended:
        forget(state)


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise NotBegun(why)


def _is_drained(node: str, controller: Maintenance) -> bool:
    try:
        return controller.node(node).drained
    except SlurmError:
        return False


def _submit(
    site: Site,
    node: str,
    reservation: str,
    controller: Maintenance,
    environ: Mapping[str, str],
    hours: float,
) -> int:
    limit = site.mend.deep_test_min + ceil(60 * hours)
    words = [
        "--job-name=slurm-health-deep-test",
        f"--reservation={reservation}",
        f"--nodelist={node}",
        "--nodes=1",
        "--exclusive",
        f"--time={limit}",
        f"--deadline=now+{limit + _WAITS_MIN}minutes",
        "--no-requeue",
        "--output=/dev/null",
        "--chdir=/",
        *site.mend.sbatch,
    ]
    order = f"{hours:g}"
    argv = processes.own_module("slurm_health.node.mending", site.path, "deep-test", order)
    script = f"#!/bin/sh\nexec {shlex.join(argv)}\n"
    # Nothing else of an administrator's shell, from which a health check may be run.
    found = {name: environ[name] for name in ("PATH", "SLURM_CONF") if environ.get(name)}
    return controller.submit(words, script, {"PATH": SYSTEM_PATH, **found})


def run_test(site: Site, job: int, *, hours: float, clock_s: Callable[[], float]) -> int:
    """Run the site's test, in the job, and leave its result on the node; return its code.

    It is run once, and again until so many hours have passed or it fails.
    """
    until_s = clock_s() + 3600 * hours
    code, said = _run_once(site)
    runs = 1
    while code == 0 and clock_s() < until_s:
        code, said = _run_once(site)
        runs += 1
    if code and runs > 1:
        said = f"in run {runs}: {said}"
    result = TestResult(job=job, code=code, said=cut(one_line(said), _SAID))
    publish(site.state / _RESULT, msgspec.json.encode(result), mode=0o600)
    return 1 if code else 0


def _run_once(site: Site) -> tuple[int, str]:
    """Run the site's test; return its code (-1: none), and the end of what it said."""
    try:
        code, output = perform.run_command(site.mend.deep_test, site.mend.deep_test_min)
    except perform.StepRefused as err:
        return -1, str(err)
    return code, output[-_SAID:]  # that is where tests say what is wrong


def result_of(site: Site, found: Quarantine) -> TestResult | None:
    """Return how the test of a quarantine ended, None where it has not."""
    try:
        result = from_json((site.state / _RESULT).read_bytes(), TestResult)
    except (OSError, msgspec.DecodeError):
        return None
    return result if result.job == found.job else None


# --- what the health check of such a node does --------------------------------------------------


def attend(check: HealthCheck, faults_of: Callable[[DrainRecord], str]) -> bool:
    """Look after a node in quarantine; tell whether it is in one still.

    Args:
        check: the health check.
        faults_of: runs the node's checks, with those that it was drained for; says what is not a
            pass, nothing where all are.
    """
    found = recall(check.site.state)
    if found is None or found.kept.node != check.node:
        return False
    try:
        return _attend(check, found, check.maintenance(), faults_of)
    except (SlurmError, SharedStateUnusable, OSError) as err:
        check.log.warning(f"in quarantine, and its state there is not known: {err}")
        return True


def _attend(
    check: HealthCheck,
    found: Quarantine,
    controller: Maintenance,
    faults_of: Callable[[DrainRecord], str],
) -> bool:
    now = controller.node(check.node)
    why = whose.taken(now)
    if why:
        return _taken(check, found, controller, now, why)
    if not controller.is_reserved(found.reservation, check.node):
        _leave(check, found, controller)
        ledger.fail(check, found.step, "its reservation was deleted")
        return False
    runs = found.job in controller.unended(0)
    result = result_of(check.site, found)
    if result is None and runs:
        check.log.info(f"in quarantine: job {found.job} tests it")
        return True
    if result is None:
        return _fails(check, found, controller, f"job {found.job} ended without a result")
    if result.code:
        why = f"the deep test ended with code {result.code}: {result.said}"
        return _fails(check, found, controller, why)
    if runs:
        return True  # its epilog
    faults = faults_of(found.kept)
    if faults:
        return _fails(check, found, controller, f"the deep test passed, these did not: {faults}")
    return _passes(check, found, controller)


def _taken(
    check: HealthCheck, found: Quarantine, controller: Maintenance, now: Node, why: str
) -> bool:
    """End the quarantine of a node that is drained, or in somebody else's hands by now."""
    if now.drained and drain_note.unsigned(now.reason) == found.kept.reason:
        own_drain.remember(check.site.state, found.kept)  # it died before it lifted the drain
        why = "putting it into quarantine was interrupted"
    _leave(check, found, controller)
    ledger.fail(check, found.step, why)
    return False


def _passes(check: HealthCheck, found: Quarantine, controller: Maintenance) -> bool:
    now = controller.node(check.node)  # again: the checks after the test took their time
    taken = whose.taken(now)
    if taken:
        return _taken(check, found, controller, now, f"it passed its test, but {taken}")
    controller.delete_reservation(found.reservation)
    forget(check.site.state)
    text = "released after its deep test"
    ended = msgspec.structs.replace(found.step, outcome=StepOutcome.DONE, text=text)
    ledger.keep(check.site, ended)
    check.log.info(text)
    ledger.tell(check, EventKind.RELEASED, text)
    return True


def _fails(check: HealthCheck, found: Quarantine, controller: Maintenance, why: str) -> bool:
    """Drain the node again, as it was; only then may its reservation go.

    It has never been back, so the breaker has nothing to say. Where it must not be drained, as
    while it is down, it stays in its reservation, and the next health check looks again.
    """
    now = controller.node(check.node)  # again: an administrator may have been quicker
    taken = whose.taken(now)
    if taken:
        return _taken(check, found, controller, now, f"{why}; {taken}")
    why_not = whose.why_not_drained(now)
    if why_not:
        check.log.warning(f"still in quarantine, and not drained: {why_not}; {why}")
        return True
    before = drain_note.parse(found.kept.reason)
    now_s = check.context.now_s
    note = drain_note.write(
        DrainNote(
            checks=before.checks if before else ("deep-test",),
            job=before.job if before else 0,
            time_s=int(now_s),
            text=f"{why}; {before.text if before else ''}",
        )
    )
    record = msgspec.structs.replace(
        found.kept, reason=note, time_s=now_s, retest=(), passes=0, passed_s=0.0, confirmed=True
    )
    own_drain.remember(check.site.state, record)
    controller.drain([check.node], note)
    if not controller.node(check.node).drained:
        raise SlurmError("Slurm accepted the drain, but the node is not drained")
    _leave(check, found, controller)
    ledger.fail(check, found.step, why)
    return False


def _leave(check: HealthCheck, found: Quarantine, controller: Maintenance) -> None:
    """End what is left of a quarantine, on a node that something else holds by now."""
    with contextlib.suppress(SlurmError):
        if found.job in controller.unended(0):
            controller.cancel(found.job)
    with contextlib.suppress(SlurmError):
        if controller.is_reserved(found.reservation, check.node):
            controller.delete_reservation(found.reservation)
    forget(check.site.state)
