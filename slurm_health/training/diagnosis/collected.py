# SPDX-License-Identifier: Apache-2.0
"""Data about a failure, by kind: from its output, and from collectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from slurm_health.records.script_records import Diagnosed, TrainingEvent
from slurm_health.records.text import SIGKILL, SIGTERM, listed
from slurm_health.training.diagnosis.collectives import FlightRecord as FlightRecord
from slurm_health.training.framework import DataManager

UNKNOWN_CODE = -1  # of a script that failed with an unknown exit code


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """An observation in one line of the output, other than the end of a rank.

    `value` and `node` are its subject, `order` is its place in the output, `text` the line.
    """

    kind: str
    value: str = ""
    node: str = ""
    rank: int | None = None
    order: int = 0
    text: str = ""


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of one rank, or of one task of unknown rank.

    Args:
        rank: its number in the training, None if unknown.
        node: its node, by the name that the source has for it; empty if unknown.
        error: the exception with its text, `KeyError: 'lr'`; of a chain, the first.
        place: the deepest line of the user's own code in its traceback.
        raises: that line is a `raise`: the script itself ended, and knew why.
        waits_in: the collective that it was in, `all_gather`, or `backward`.
        loading: it was in `torch.load`.
        exit_code: 0 if unknown.
        signal: the signal that killed it, 0 for none.
        at: the place of the first line about it in the output; failures are ordered by it.
        line: its evidence, in one line.
        consequence: it followed from another rank's failure.
        cut: it began to write an exception, whose words are lost.
        bare: only a line with an exception shows it, and the program may have handled that.
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
        """Its rank and node, if they are known."""
        who = f"rank {self.rank}" if self.rank is not None else "a process"
        return f"{who} on {self.node}" if self.node else who


def failed_ranks(failures: Iterable[RankFailure]) -> tuple[int, ...]:
    """Return the known ranks, in order."""
    return tuple(sorted({failure.rank for failure in failures if failure.rank is not None}))


def failed_nodes(failures: Iterable[RankFailure]) -> tuple[str, ...]:
    """Return the known nodes, in order."""
    return tuple(sorted({failure.node for failure in failures if failure.node}))


class LastWords(msgspec.Struct, frozen=True, kw_only=True):
    """A line that processes wrote before their end, outside any traceback.

    Args:
        text: the line.
        at: its place in the output, where it stands first.
        times: how often it was written.
        last: for how many distinguishable processes it was the last complaint.
        ranks: those that wrote it, by the prefixes of their lines.
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
    """The decoded output: failures in the order of their lines, and facts of the system.

    Of very many failures the first are kept; `failed` counts all. `words` are the last lines of
    processes outside tracebacks. `ordered`: the failures stand in one file, so that the first is
    known. `progress` is how far every rank came by NCCL's own watchdogs, if
    all work is in the group of all ranks. `watchdogs`: at least one wrote; `subgroups`: one named a
    group of some ranks only.
    """

    failures: tuple[RankFailure, ...] = ()
    failed: int = 0
    ordered: bool = True
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

    `exit_code` is 128 + n after signal n, as in a shell. `nodes` are those of the job. With
    `told_to_end` it received a signal that ends jobs, and may have ended well because of it.
    Without `in_slurm` it was no job of Slurm's; `job` is its number there, empty if unknown.
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
        """Whether it ended without an error."""
        return self.exit_code == 0 and self.signal == 0

    @property
    def by_a_signal(self) -> bool:
        """Whether a signal ended it, or what it ran: a shell passes that on as 128 + n."""
        ended = self.signal != 0 or self.exit_code in {128 + SIGTERM, 128 + SIGKILL}
        return ended or self.told_to_end


class SlurmView(msgspec.Struct, frozen=True, kw_only=True):
    """Slurm's view of the job and its nodes after the end of the script.

    `node_states` has the state of every node as Slurm writes it, `DOWN*`; `required` are the nodes
    that the job asked for by name.
    """

    job_states: tuple[str, ...] = ()
    node_states: dict[str, str] = {}
    required: tuple[str, ...] = ()


class FlightRecords(msgspec.Struct, frozen=True, kw_only=True):
    """The Flight Recorder dumps of the job."""

    records: tuple[FlightRecord, ...] = ()


class Listeners(msgspec.Struct, frozen=True, kw_only=True):
    """The owners of listening TCP ports of the batch host, in words."""

    holders: dict[int, str] = {}


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one node of the job, after a failure or during a hang.

    `kernel` has its kernel's lines since the script began, oldest first. `kills` counts the kills
    for memory in the job's cgroup, which may have `limit_bytes`. `lost_gpus` are the GPUs that no
    program can use now, in words; `state` has all other trouble, `left` the ranks that still run.
    `flights` are dumps on this node's own filesystems. `unavailable` has by name what could not be
    read, and why. `mounts` are its filesystems with a server, by their points.
    """

    node: str
    kernel: tuple[str, ...] = ()
    kills: int = 0
    limit_bytes: int | None = None
    lost_gpus: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    flights: tuple[FlightRecord, ...] = ()
    unavailable: dict[str, str] = {}
    mounts: dict[str, str] = {}


class NodeStates(msgspec.Struct, frozen=True, kw_only=True):
    """The states of all nodes of the job; `silent` are those without an answer.

    Silence alone does not blame a node: it may be the network, or the node's load.
    """

    nodes: tuple[NodeState, ...] = ()
    silent: tuple[str, ...] = ()
    why_silent: str = ""


class MonitorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The monitor's events before the script ended.

    `hang` was not over. `cancels`: the monitor cancelled the job for it; `ends_script`: it had the
    script ended. `slow` are causes of slow ranks and connections, oldest first. `check` has the
    reasons for which the check before the script did not judge nodes healthy.
    """

    hang: TrainingEvent | None = None
    cancels: bool = False
    ends_script: bool = False
    slow: tuple[Diagnosed, ...] = ()
    check: tuple[str, ...] = ()


def exclude_options(nodes: Sequence[str], data: DataManager) -> str:
    """Return the command that submits without nodes: sbatch refuses to exclude a required one."""
    view = data.get(SlurmView)
    asked = [node for node in nodes if view and node in view.required]
    others = [node for node in nodes if node not in asked]
    how = [f"--nodelist without {listed(asked)}"] if asked else []
    how += [f"--exclude={','.join(others)}"] if others else []
    return f"sbatch {' and '.join(how)}"
