# SPDX-License-Identifier: Apache-2.0
"""What the master is to do next."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_health.records.records import AgentsLaunched, GroupAborted, Record


@dataclass(frozen=True, kw_only=True)
class Append:
    """Write this record; nothing else."""

    record: Record


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Write these records: all that is to be stopped now, however many groups that are."""

    records: tuple[GroupAborted, ...]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Write this record, then start an agent on each of its nodes."""

    record: AgentsLaunched


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing to do before `until_s`, unless the journal says more. `reason` says for what."""

    until_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Conclude:
    """The verdict stands; act on it."""


Step = Append | Abort | Launch | Wait | Conclude
