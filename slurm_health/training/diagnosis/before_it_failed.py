# SPDX-License-Identifier: Apache-2.0
"""What the monitor saw before the script failed: a training that hangs is ended by a timeout later.

Ranks then say only that they waited, or were killed; the monitor saw who kept them waiting. What
was slow before a hang or a failure is told with it where it may belong to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_health.records.script_records import (
    HUNG,
    RANK_FAILED,
    SCRIPT_FAILED,
    TrainingEvent,
    advice_afterwards,
)
from slurm_health.report.sentences import event_text
from slurm_health.training.diagnosis.collected import MonitorSaw, TrainingLog
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness


def hung_until_ended(_: Inference, data: DataManager) -> Inference | None:
    """The training hung until slurm-health ended the script for it.

    How the processes ended then tells nothing.
    """
    saw = data.get(MonitorSaw)
    hang = hang_at_the_end(data)
    if saw is None or not saw.ends_script or hang is None or hang.diagnosed is None:
        return None
    return hung_until("slurm-health ended the script, as --monitor asks", hang, (line_of(hang),))


def hung_before_failure(inference: Inference, data: DataManager) -> Inference | None:
    """The training hung until it failed; as sure as the monitor was of where.

    The hang was not over, and no rank explains the failure by itself.
    """
    hang = hang_at_the_end(data)
    if hang is None or hang.diagnosed is None:
        return None
    log = data.get(TrainingLog)
    if inference.name == RANK_FAILED:
        own = log.of_their_own if log else ()
        if not own or own[0].signal == 0 or own[0].error:
            return None
    elif inference.name == SCRIPT_FAILED and log is not None and log.failures:
        return None
    found = hang.diagnosed
    return Inference(
        name=found.cause,
        description=f"the training hung before it failed: {found.description}",
        attribution=Attribution(found.attribution),
        sureness=Sureness[found.sureness.upper()],
        nodes=tuple(found.nodes),
        ranks=tuple(found.ranks),
        evidence=(line_of(hang), *found.evidence),
        advice=advice_afterwards(found),
    )


def hung_until(ended: str, hang: TrainingEvent, evidence: Sequence[str]) -> Inference:
    """Return that the training hung until something ended it; where, as far as that is likely."""
    found = hang.diagnosed
    assert found is not None
    sure = Sureness[found.sureness.upper()] >= Sureness.LIKELY
    return Inference(
        name=HUNG,
        description=f"the training hung until {ended}: {found.description}",
        attribution=Attribution(found.attribution) if sure else Attribution.UNDECIDED,
        sureness=Sureness.CERTAIN,
        nodes=tuple(found.nodes) if sure else (),
        ranks=tuple(found.ranks),
        evidence=(*evidence, found.description, *found.evidence),
        advice=advice_afterwards(found),
    )


def hang_at_the_end(data: DataManager) -> TrainingEvent | None:
    """Return the hang that was not over when the script ended, None where there was none."""
    saw = data.get(MonitorSaw)
    return saw.hang if saw else None


def line_of(hang: TrainingEvent) -> str:
    """Return when it hung, as a line of evidence."""
    return f"monitor: {event_text(hang)} when it was reported"


def slow_before(cause: Inference, data: DataManager) -> list[str]:
    """Return what was slow before, as lines of evidence: on the nodes of a cause, if it has any."""
    saw = data.get(MonitorSaw)
    found = saw.slow if saw else ()
    here = [each for each in found if not cause.nodes or {*cause.nodes} & {*each.nodes}]
    return list(dict.fromkeys(f"monitor, before that: {each.description}" for each in here))
