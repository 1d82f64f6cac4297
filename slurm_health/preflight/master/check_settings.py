# SPDX-License-Identifier: Apache-2.0
"""What a check is told, and what of it the journal keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurm_health.preflight.decide.policy import OnUnchecked, Policy
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.phases import Phase
from slurm_health.records.records import RunFinished
from slurm_health.records.verdict import NodeVerdict


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """What a check is told by its command line, its environment and the batch script.

    `localize` holds what was chosen of `localize.settings.OPTIONS`. `tell` is told how the
    run ends: when it has, and before a requeue is asked for that ends this process with the job.
    `alive` is called as the check gets on. `run_id` is set by whoever starts a check that was
    killed again, to hear of one run only.
    `at_fault` are nodes that are not checked: what is known already is acted on with the verdict.
    `probe_environ` is what the agents and their workers get, the check's own environment where it
    is None; `setup` is the file that made it. `light` says why light probes are to measure, which
    `python` does not run.
    """

    journal_root: Path
    python: str
    policy: Policy
    limits: TimeLimits
    phases: tuple[Phase, ...]
    localize: Mapping[str, object] = field(default_factory=dict)
    cpu_workers: int = 1
    progress: Callable[[str], None] | None = None
    act: bool = False
    on_unchecked: OnUnchecked = OnUnchecked.PROCEED
    script: str = ""
    submit_time_s: int | None = None
    tell: Callable[[RunFinished, Path], None] = lambda *_: None
    alive: Callable[[], None] = lambda: None
    run_id: str = ""
    setup: str = ""
    probe_environ: Mapping[str, str] | None = None
    at_fault: tuple[NodeVerdict, ...] = ()
    light: str = ""

    def recorded(self) -> dict[str, str | int | float | bool]:
        """Return the settings in force, so that a report explains itself."""
        return {
            "python": self.python,
            "check": ",".join(probe.name for phase in self.phases for probe in phase.probes),
            **({"light": self.light} if self.light else {}),
            **({"setup": self.setup} if self.setup else {}),
            "act": self.act,
            "max_requeues": self.policy.max_requeues,
            "on_straggler": self.policy.on_straggler.value,
            "on_inconclusive": self.policy.on_inconclusive.value,
            "at_requeue_limit": self.policy.at_requeue_limit.value,
            "on_unchecked": self.on_unchecked.value,
            "round_deadline_s": self.limits.round_deadline_s,
            **{name: str(value) for name, value in self.localize.items()},
        }
