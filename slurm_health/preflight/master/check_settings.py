# SPDX-License-Identifier: Apache-2.0
"""What a check is to do, and what of it the journal keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurm_health.preflight.decide.policy import Policy
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.phases import Phase
from slurm_health.records.records import JobOutcome
from slurm_health.records.verdict import NodeVerdict


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """What a check is to do, as far as it is known where the check runs.

    Args:
        spec: what was asked for.
        policy: what it allows to be done about a verdict.
        journal_root: the directory of all journals.
        python: the interpreter that runs the probes.
        phases: what is measured.
        localize: what the site has chosen about localisation.
        limits: how long the session waits.
        light: why light probes are to measure, which `python` does not run; empty for others.
        probe_environ: what agents and their workers get.
        act: whether the verdict is acted on.
        run_id: set when a check that was killed begins again, so that it reads one run only.
        at_fault: nodes that are not checked: what is known already is acted on with the verdict.
        progress: receives what the check waits for.
        tell: receives the outcome: at the end, and before a requeue ends this process.
        alive: called as the check makes progress.
    """

    spec: JobSpec
    policy: Policy
    journal_root: Path
    python: str
    phases: tuple[Phase, ...]
    probe_environ: Mapping[str, str]
    localize: Mapping[str, object] = field(default_factory=dict)
    limits: TimeLimits = field(default_factory=TimeLimits)
    light: str = ""
    act: bool = False
    run_id: str = ""
    at_fault: tuple[NodeVerdict, ...] = ()
    progress: Callable[[str], None] | None = None
    tell: Callable[[JobOutcome, Path], None] = lambda *_: None
    alive: Callable[[], None] = lambda: None

    def recorded(self) -> dict[str, str | int | float | bool]:
        """Return the settings in force, so that a report explains itself."""
        return {
            **self.spec.recorded(),
            "python": self.python,
            "check": ",".join(probe.name for phase in self.phases for probe in phase.probes),
            **({"light": self.light} if self.light else {}),
            "act": self.act,
            **{name: str(value) for name, value in self.localize.items()},
        }
