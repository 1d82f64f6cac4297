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
    RANKS_WAITED,
    SCRIPT_FAILED,
    HangFound,
    advice_afterwards,
)
from slurm_health.training.diagnosis.collected import Collected, MonitorSaw, TrainingLog
from slurm_health.training.diagnosis.inference import Attribution, Inference, Sureness


class HungUntilEnded:
    """The training hung until slurm-health ended the script for it."""

    name = "monitor-ended-it"

    def is_compatible(self, inference: Inference, data: Collected) -> bool:
        """The monitor's word is needed that it had the script ended."""
        saw = data.get(MonitorSaw)
        return inference.name == SCRIPT_FAILED and saw is not None and saw.ends_script

    def infer(self, _: Inference, data: Collected) -> Sequence[Inference]:
        """Say so: how the processes ended then tells nothing."""
        hang = hang_at_the_end(data)
        ended = "slurm-health ended the script, as --monitor asks"
        return [hung_until(ended, hang, (line_of(hang),))] if hang else []


class HungBefore:
    """The training hung until it failed."""

    name = "monitor"

    def is_compatible(self, inference: Inference, data: Collected) -> bool:
        """A hang that was not over is needed, and a failure that no rank explains by itself."""
        if hang_at_the_end(data) is None:
            return False
        log = data.get(TrainingLog)
        own = log.of_their_own if log else ()
        if inference.name == RANK_FAILED:
            return bool(own) and own[0].signal != 0 and not own[0].error
        nothing_said = log is None or not log.failures
        return inference.name == RANKS_WAITED or (inference.name == SCRIPT_FAILED and nothing_said)

    def infer(self, _: Inference, data: Collected) -> Sequence[Inference]:
        """Return what the monitor found, as sure as it was of it."""
        hang = hang_at_the_end(data)
        assert hang is not None
        found = hang.found
        return [
            Inference(
                name=found.cause,
                description=f"the training hung before it failed: {found.description}",
                attribution=Attribution(found.attribution),
                sureness=Sureness[found.sureness.upper()],
                nodes=tuple(found.nodes),
                ranks=tuple(found.ranks),
                evidence=(line_of(hang), *found.evidence),
                advice=advice_afterwards(found),
            )
        ]


def hung_until(ended: str, hang: HangFound, evidence: Sequence[str]) -> Inference:
    """Return that the training hung until something ended it; where, as far as that is likely."""
    found = hang.found
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


def hang_at_the_end(data: Collected) -> HangFound | None:
    """Return the hang that was not over when the script ended, None where there was none."""
    saw = data.get(MonitorSaw)
    return saw.hang if saw else None


def line_of(hang: HangFound) -> str:
    """Return when it hung, as a line of evidence."""
    if hang.at_rest:
        return f"monitor: {hang.stood_still} when it was reported"
    return (
        f"monitor: no step after step {hang.step}, for {hang.stalled_s:.0f} s when it was reported"
    )


def slow_before(cause: Inference, data: Collected) -> list[str]:
    """Return what was slow before, as lines of evidence: on the nodes of a cause, if it has any."""
    saw = data.get(MonitorSaw)
    found = saw.slow if saw else ()
    here = [each for each in found if not cause.nodes or {*cause.nodes} & {*each.nodes}]
    return list(dict.fromkeys(f"monitor, before that: {each.description}" for each in here))
