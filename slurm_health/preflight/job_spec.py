# SPDX-License-Identifier: Apache-2.0
"""All that was asked for a job, from its submission to its check and into its journal."""

from __future__ import annotations

from typing import Any

import msgspec

from slurm_health.preflight.decide.policy import (
    FlightRecorder,
    Heartbeat,
    OnHang,
    OnStraggler,
    OnUnchecked,
    Policy,
)
from slurm_health.records import probe_catalog


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that was asked for a job, by its user and by the site.

    Args:
        check: what to measure, as `--check` takes it.
        journal: the directory of all journals; None: the site's choice.
        paths: what a test of storage tests besides the job's own directories, comma-separated.
        python: the interpreter that runs the probes; None: the job's own, if it has torch.
        setup: a file that bash sources before the probes start.
        on_straggler: what a slow node causes.
        max_requeues: how often the job may be requeued because of bad nodes.
        on_unchecked: what becomes of it if its nodes cannot be checked.
        spares: how many nodes it asks for beyond those that it runs on.
        nodes_wanted: on how many of its nodes it runs; None: on all.
        nodes_needed: with how few it runs rather than be requeued; None: as many as it wants.
        max_restarts: how often its script may be started again after a failure.
        monitor: what a script causes that hangs.
        heartbeat: whether its ranks get a heartbeat.
        flight_recorder: whether its PyTorch records collectives.
        script: what its user calls the script.
        submit_time_s: when it was submitted, by the clock there.
        unasked: its user asked for no check: no bad node ends it.
        verbose: whether the check writes into the job's output what it waits for.
    """

    check: str = probe_catalog.DEFAULT
    journal: str | None = None
    paths: str = ""
    python: str | None = None
    setup: str | None = None
    on_straggler: OnStraggler = OnStraggler.EXCLUDE
    max_requeues: int = 3
    on_unchecked: OnUnchecked = OnUnchecked.PROCEED
    spares: int = 0
    nodes_wanted: int | None = None
    nodes_needed: int | None = None
    max_restarts: int = 0
    monitor: OnHang = OnHang.REPORT
    heartbeat: Heartbeat = Heartbeat.AUTO
    flight_recorder: FlightRecorder = FlightRecorder.OFF
    script: str = ""
    submit_time_s: int | None = None
    unasked: bool = False
    verbose: bool = False

    @property
    def keeps_spares(self) -> bool:
        """Whether spare nodes stay in the job, for restarts of its script."""
        return self.spares > 0 and self.max_restarts > 0

    @property
    def policy(self) -> Policy:
        """What it allows to be done about a verdict."""
        return Policy(
            max_requeues=self.max_requeues,
            on_straggler=self.on_straggler,
            nodes_wanted=self.nodes_wanted,
            nodes_needed=self.nodes_needed,
            keep_spares=self.keeps_spares,
            on_unchecked=self.on_unchecked,
            stops=not self.unasked,
        )

    def encoded(self) -> str:
        """Return it as JSON, without what has its default."""
        return msgspec.json.encode(self).decode()

    def recorded(self) -> dict[str, Any]:
        """Return it for the journal, whole, without what only a job's submission knows."""
        fields = msgspec.to_builtins(msgspec.structs.asdict(self))
        hidden = {"journal", "script", "submit_time_s", "verbose"}
        return {k: v for k, v in fields.items() if k not in hidden and v is not None}
