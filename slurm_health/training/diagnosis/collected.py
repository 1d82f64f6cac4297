# SPDX-License-Identifier: Apache-2.0
"""What is known of a failure, by kind: what its output says, and what collectors gather."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from slurm_health.records.script_records import Diagnosed, TrainingEvent
from slurm_health.records.text import SIGKILL, SIGTERM, listed
from slurm_health.training.diagnosis.collectives import FlightRecord as FlightRecord
from slurm_health.training.framework import DataManager

UNKNOWN_CODE = -1  # of a script that failed, and no exit code of it is known


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a line says beside the ends of ranks: its kind, and what it is about.

    `order` is its place in the output, `text` the line.
    """

    kind: str
    value: str = ""
    node: str = ""
    rank: int | None = None
    order: int = 0
    text: str = ""


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank, or one task whose rank is not known, failed.

    Args:
        rank: its number in the training, None where nothing says it.
        node: where it ran, as the source calls it; empty where it is not known.
        error: the exception with its text, `KeyError: 'lr'`; of a chain, the first.
        place: the deepest line of the user's own code in its traceback.
        raises: that line is a `raise`: the script itself ended, and knew why.
        waits_in: the collective that it was in, `all_gather`, or `backward`.
        loading: it was in `torch.load`.
        exit_code: 0 where none is known.
        signal: by which it was killed, 0 for none.
        at: the place of the first line about it in the output, to tell which was first.
        line: what the output says of it, in a line.
        consequence: it is what ranks do when another one has failed.
        cut: it began to write an exception, whose words are lost.
        bare: nothing but a line with an exception shows it: it may have been dealt with.
    """

    rank: int | None = None
    node: str = ""
    error: str = ""
    place: str = ""
    raises: bool = False
    waits_in: str = ""
    loading: bool = False
    exit_code: int = 0
    signal: int = 0
    at: int = 0
    line: str = ""
    consequence: bool = False
    cut: bool = False
    bare: bool = False

    @property
    def who(self) -> str:
        """Its rank and node, as far as they are known."""
        who = f"rank {self.rank}" if self.rank is not None else "a process"
        return f"{who} on {self.node}" if self.node else who


def failed_ranks(failures: Iterable[RankFailure]) -> tuple[int, ...]:
    """Return the ranks that are known, in order."""
    return tuple(sorted({failure.rank for failure in failures if failure.rank is not None}))


def failed_nodes(failures: Iterable[RankFailure]) -> tuple[str, ...]:
    """Return the nodes that are known, in order."""
    return tuple(sorted({failure.node for failure in failures if failure.node}))


class LastWords(msgspec.Struct, frozen=True, kw_only=True):
    """A line that processes wrote before their end, outside any traceback.

    Args:
        text: the line.
        at: its place in the output, where it stands first.
        times: how often it was written.
        last: for how many processes it was the last complaint, as far as they can be told apart.
        ranks: those that wrote it, as far as their lines name them.
        first: it was the first complaint of a process.
        complains: it reads like an error; else it is only the last line of a process.
    """

    text: str
    at: int
    times: int = 1
    last: int = 0
    ranks: tuple[int, ...] = ()
    first: bool = False
    complains: bool = True


class TrainingLog(msgspec.Struct, frozen=True, kw_only=True):
    """What the output says: failures in the order in which they came, and facts of the system.

    Of very many failures the first are kept; `failed` counts all. `words` are what processes wrote
    at their end beside tracebacks, `progress` how far each rank came by NCCL's own watchdog, where
    all work is in the group of all ranks, `watchdogs` whether one wrote at all, and `subgroups`
    whether one named a group of some ranks only.
    """

    failures: tuple[RankFailure, ...] = ()
    failed: int = 0
    facts: tuple[Fact, ...] = ()
    words: tuple[LastWords, ...] = ()
    progress: tuple[FlightRecord, ...] = ()
    watchdogs: bool = False
    subgroups: bool = False

    @property
    def of_their_own(self) -> tuple[RankFailure, ...]:
        """The failures that are no consequence of another one."""
        return tuple(failure for failure in self.failures if not failure.consequence)

    def of(self, kind: str) -> tuple[Fact, ...]:
        """Return the facts of a kind, in their order."""
        return tuple(fact for fact in self.facts if fact.kind == kind)


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
    """What was seen before the script ended: the hang that was not over, and what was slow.

    `slow` are ranks and connections that were found to be slow before, oldest first. `cancels` is
    set where the monitor cancelled the job for the hang, `ends_script` where it had the script
    ended. `check` is what kept the check before the script from finding nodes healthy, in words.
    """

    hang: TrainingEvent | None = None
    cancels: bool = False
    ends_script: bool = False
    slow: tuple[Diagnosed, ...] = ()
    check: tuple[str, ...] = ()


def leaving_out(nodes: Sequence[str], data: DataManager) -> str:
    """Return how sbatch is told to do without nodes: it refuses one both asked for and excluded."""
    view = data.get(SlurmView)
    asked = [node for node in nodes if view and node in view.required]
    others = [node for node in nodes if node not in asked]
    how = [f"--nodelist without {listed(asked)}"] if asked else []
    how += [f"--exclude={','.join(others)}"] if others else []
    return f"sbatch {' and '.join(how)}"
