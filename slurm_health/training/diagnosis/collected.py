# SPDX-License-Identifier: Apache-2.0
"""What the built-in collectors gather of a failure, by kind."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slurm_health.records.script_records import Diagnosed, TrainingEvent
from slurm_health.records.text import SIGKILL, SIGTERM, listed
from slurm_health.training.diagnosis.collectives import FlightRecord as FlightRecord
from slurm_health.training.diagnosis.collectives import Operation as Operation
from slurm_health.training.diagnosis.training_log import TrainingLog as TrainingLog
from slurm_health.training.framework import DataManager

UNKNOWN_CODE = -1  # of a script that failed, and no exit code of it is known


class ScriptEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How the job's script ended, with `exit_code` or by `signal` (0: none), and where it ran.

    `exit_code` is 128 + n after signal n, as a shell has it. `nodes` are those of the job. With
    `told_to_end` it was sent a signal with which jobs are ended, and may have ended well for it.
    Without `in_slurm` it was no job of Slurm's; `job` is its number there, empty if not known.
    """

    exit_code: int
    signal: int = 0
    nodes: tuple[str, ...] = ()
    script: str = ""
    told_to_end: bool = False
    in_slurm: bool = True
    job: str = ""

    @property
    def well(self) -> bool:
        """Whether it ended as a script does that has done its work."""
        return self.exit_code == 0 and self.signal == 0

    @property
    def by_a_signal(self) -> bool:
        """Whether a signal ended it, or what it ran: a shell passes that on as 128 + n."""
        ended = self.signal != 0 or self.exit_code in {128 + SIGTERM, 128 + SIGKILL}
        return ended or self.told_to_end


class SlurmView(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm said of the job and its nodes when the script had ended.

    `node_states` holds the words of each node's state as Slurm writes them, `DOWN*`; `required` are
    the nodes that the job asked for by name.
    """

    job_states: tuple[str, ...] = ()
    node_states: dict[str, str] = {}
    required: tuple[str, ...] = ()


class FlightRecords(msgspec.Struct, frozen=True, kw_only=True):
    """The Flight Recorder dumps that were found."""

    records: tuple[FlightRecord, ...] = ()


class Listeners(msgspec.Struct, frozen=True, kw_only=True):
    """Who listens on which TCP port of the batch host, in words."""

    holders: dict[int, str] = {}


class NodeTold(msgspec.Struct, frozen=True, kw_only=True):
    """What one node of the job tells after a failure, and while a hang is looked at.

    `kernel` is what its kernel said since the script began, oldest first. `kills` is how often that
    killed for memory in the job's cgroup, which may have `limit_bytes`. `lost_gpus` are those that
    no program can use now, each in words; `state` is what else is not as it should be, `left` what
    ranks do that still run. `flights` are dumps that no other node sees. `not_seen` says what could
    not be looked at, and why.
    """

    node: str
    kernel: tuple[str, ...] = ()
    kills: int = 0
    limit_bytes: int | None = None
    lost_gpus: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    flights: tuple[FlightRecord, ...] = ()
    not_seen: dict[str, str] = {}


class NodesTold(msgspec.Struct, frozen=True, kw_only=True):
    """What all nodes of the job told; `silent` are those that did not, for a reason if it is known.

    That a node is silent is no accusation: it may be the way to it, or its load.
    """

    nodes: tuple[NodeTold, ...] = ()
    silent: tuple[str, ...] = ()
    why_silent: str = ""


class MonitorSaw(msgspec.Struct, frozen=True, kw_only=True):
    """What the monitor found while the script ran: the hang that was not over when it ended.

    `slow` are ranks and connections that were found to be slow before, oldest first. `cancels` is
    set where the monitor cancelled the job for the hang, `ends_script` where it had the script
    ended.
    """

    hang: TrainingEvent | None = None
    cancels: bool = False
    ends_script: bool = False
    slow: tuple[Diagnosed, ...] = ()


def leaving_out(nodes: Sequence[str], data: DataManager) -> str:
    """Return how sbatch is told to do without nodes: it refuses one both asked for and excluded."""
    view = data.get(SlurmView)
    asked = [node for node in nodes if view and node in view.required]
    others = [node for node in nodes if node not in asked]
    how = [f"--nodelist without {listed(asked)}"] if asked else []
    how += [f"--exclude={','.join(others)}"] if others else []
    return f"sbatch {' and '.join(how)}"
