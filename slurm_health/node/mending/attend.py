# SPDX-License-Identifier: Apache-2.0
"""What the health check of a node in quarantine does: waits for its test, then ends it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from slurm_health.node import event_queue
from slurm_health.node.draining import own_drain
from slurm_health.node.draining.shared_state import Unusable
from slurm_health.node.mending import ledger, quarantine
from slurm_health.node.mending.mend import Worker, fail
from slurm_health.node.mending.quarantine import Quarantine
from slurm_health.node.rules import drain_note
from slurm_health.node.rules.drain_note import DrainNote
from slurm_health.node.rules.mending import StepOutcome
from slurm_health.node.rules.notices import Event, EventKind
from slurm_health.node.rules.recovery import DrainRecord
from slurm_health.records.errors import SlurmError
from slurm_health.system.slurm.maintenance import Maintenance


def attend(worker: Worker, faults_of: Callable[[DrainRecord], str]) -> bool:
    """Look after a node in quarantine; tell whether it is in one still.

    Args:
        worker: the health check.
        faults_of: runs the node's checks, with those that it was drained for; says what is not a
            pass, nothing where all are.
    """
    found = quarantine.recall(worker.site.state)
    if found is None or found.kept.node != worker.node:
        return False
    try:
        return _attend(worker, found, worker.maintenance(), faults_of)
    except (SlurmError, Unusable, OSError) as err:
        worker.log.warning(f"in quarantine, and how it goes on is not known: {err}")
        return True


def _attend(
    worker: Worker,
    found: Quarantine,
    controller: Maintenance,
    faults_of: Callable[[DrainRecord], str],
) -> bool:
    now = controller.node(worker.node)
    if now.drained:
        if drain_note.unsigned(now.reason) == found.kept.reason:
            own_drain.remember(worker.site.state, found.kept)  # it died before it lifted the drain
            why = "it was cut short"
        else:
            why = f"it was drained again while in quarantine: {now.reason or '(no reason)'}"
        _leave(worker, found, controller)
        fail(worker, found.step, why)
        return False
    if not controller.is_reserved(found.reservation, worker.node):
        _leave(worker, found, controller)
        fail(worker, found.step, "its reservation was deleted")
        return False
    runs = found.job in controller.unended(0)
    result = quarantine.result_of(worker.site, found)
    if result is None and runs:
        worker.log.info(f"in quarantine: job {found.job} tests it")
        return True
    if result is None:
        return _fails(worker, found, controller, f"job {found.job} ended without a result")
    if result.code:
        why = f"the deep test ended with code {result.code}: {result.said}"
        return _fails(worker, found, controller, why)
    if runs:
        return True  # its epilog
    faults = faults_of(found.kept)
    if faults:
        return _fails(worker, found, controller, f"the deep test passed, but not: {faults}")
    return _passes(worker, found, controller)


def _passes(worker: Worker, found: Quarantine, controller: Maintenance) -> bool:
    controller.delete_reservation(found.reservation)
    quarantine.forget(worker.site.state)
    text = "released after its deep test"
    ended = msgspec.structs.replace(found.step, outcome=StepOutcome.DONE, text=text)
    ledger.keep(worker.site, ended)
    worker.log.info(text)
    now_s = worker.context.now_s
    released = Event(kind=EventKind.RELEASED, node=worker.node, time_s=now_s, text=text)
    event_queue.tell(worker.site, released)
    return True


def _fails(worker: Worker, found: Quarantine, controller: Maintenance, why: str) -> bool:
    """Drain the node again, as it was; only then may its reservation go.

    It has never been back, so the breaker has nothing to say.
    """
    before = drain_note.parse(found.kept.reason)
    now_s = worker.context.now_s
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
    own_drain.remember(worker.site.state, record)
    controller.drain([worker.node], note)
    if not controller.node(worker.node).drained:
        raise SlurmError("Slurm accepted the drain, but the node is not drained")
    _leave(worker, found, controller)
    fail(worker, found.step, why)
    return False


def _leave(worker: Worker, found: Quarantine, controller: Maintenance) -> None:
    """End what is left of a quarantine, on a node that something else holds by now."""
    with contextlib.suppress(SlurmError):
        if found.job in controller.unended(0):
            controller.cancel(found.job)
    with contextlib.suppress(SlurmError):
        if controller.is_reserved(found.reservation, worker.node):
            controller.delete_reservation(found.reservation)
    quarantine.forget(worker.site.state)
