# SPDX-License-Identifier: Apache-2.0
"""The records of a check in a journal.

Samples are stored raw, never only reduced, so that a better rule can judge an old run again.
`record_codec` turns a record into a line.

The master writes its decisions and acts, which come first here; an agent writes the events of its
node; the requeue helper writes its own acts. Records of the user's script are in `script_records`.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec

from slurm_health.records.gpu_load import Burn
from slurm_health.records.probe_catalog import LIGHT_ON_CPUS, ON_CPUS, Metric
from slurm_health.records.verdict import Action as Action
from slurm_health.records.verdict import Disposition as Disposition
from slurm_health.records.verdict import LinkVerdict, NodeVerdict, Outcome, StorageVerdict

Count = Annotated[int, msgspec.Meta(ge=0)]
Figure = int | float | str


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """One thing that happened."""


class RunStarted(Record, frozen=True, kw_only=True, tag="run_started"):
    """A check began on these nodes. Always the first record of `master.jsonl`.

    `prior` is how likely some of them were to be bad, by earlier checks. `submit_time_s` is when
    `slurm-health sbatch` submitted the job, by the clock there.
    """

    run_id: str
    job_id: int
    attempt: Count
    cluster: str
    partition: str
    nodes: list[str]
    master_node: str
    user: str
    script: str = ""
    job_name: str = ""
    array: str = ""
    start_time_s: int | None = None
    submit_time_s: int | None = None
    slurm_health: str = ""
    settings: dict[str, str | int | float | bool] = {}
    prior: dict[str, float] = {}

    @property
    def slurm_name(self) -> str:
        """What Slurm's commands call the job; a task of an array never by its number alone."""
        return self.array or str(self.job_id)


class AgentsLaunched(Record, frozen=True, kw_only=True, tag="agents_launched"):
    """One agent per node of `nodes` was started; `launch` counts from 0.

    `light` is why it measures with light probes; empty if it uses torch.
    """

    launch: Count
    nodes: list[str]
    light: str = ""


class LossCause(Enum):
    """Why there is no agent."""

    ENDED = "ended"  # it ran and ended; another one may do better
    NOT_STARTED = "not_started"  # Slurm could not start a step there
    NO_JOURNAL = "no_journal"  # it ran and does not see the master's file, or cannot write its own
    JOB_ENDED = "job_ended"  # Slurm starts no step of a job that has ended


class AgentsLost(Record, frozen=True, kw_only=True, tag="agents_lost"):
    """The launcher reported that agents could not start or have ended, and why."""

    launch: Count
    nodes: list[str]
    reason: str
    cause: LossCause = LossCause.ENDED


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where the members of a group meet: the store that the first member's worker serves."""

    address: str
    port: int


class NodesAdmitted(Record, frozen=True, kw_only=True, tag="nodes_admitted"):
    """The rounds are run with these nodes; the others could not be measured.

    `leaves` maps leaf switches to them, where Slurm knows the topology.
    """

    nodes: list[str]
    leaves: dict[str, list[str]] = {}


class MasterStopped(Record, frozen=True, kw_only=True, tag="master_stopped"):
    """The master was ended by `reason`, the name of a signal. Its check may yet begin again.

    `job` is why Slurm ended the job, if it is known: "the job was cancelled".
    """

    reason: str
    job: str = ""


class MasterWaits(Record, frozen=True, kw_only=True, tag="master_waits"):
    """The master is alive, and waits for a reason. Agents leave a silent master."""

    reason: str


class ProbeUsed(msgspec.Struct, frozen=True, kw_only=True):
    """A probe of a round, with its scope. `path` is the file of a user's own probe."""

    name: str
    scope: str
    path: str = ""


class RoundStarted(Record, frozen=True, kw_only=True, tag="round_started"):
    """Groups began a round of a phase. `rendezvous[i]` belongs to `groups[i]`.

    `round` counts the rounds of all phases; `name` is for people: `solo test`, `round 0` of pairs.
    `absent` names members without a usable agent; their groups do not start. `options` are the
    probes', the same for all nodes.
    """

    round: Count
    name: str
    groups: list[list[str]]
    rendezvous: list[Rendezvous]
    deadline_s: float
    absent: list[str] = []
    phase: str = ""
    probes: list[ProbeUsed] = []
    options: dict[str, Figure] = {}


class GroupAborted(Record, frozen=True, kw_only=True, tag="group_aborted"):
    """The members of one group were ordered to stop, and why.

    `timed_out` is set if a deadline caused it, not the failure of a member.
    """

    round: Count
    group: list[str]
    reason: str
    timed_out: bool = False


class RoundEnded(Record, frozen=True, kw_only=True, tag="round_ended"):
    """Nothing more is expected of a round. `silent` names nodes that did not report in it."""

    round: Count
    silent: list[str] = []


class VerdictReached(Record, frozen=True, kw_only=True, tag="verdict_reached"):
    """The conclusion of the run.

    `floors` are the smallest relative slowdowns that made a node slow in it, by metric. `unseen`
    says which probes were chosen and why, and what such probes cannot see; empty for those with
    torch.
    """

    nodes: list[NodeVerdict]
    paths: list[LinkVerdict] = []
    leaves: list[LinkVerdict] = []
    floors: dict[str, float] = {}
    unseen: str = ""
    storage: list[StorageVerdict] = []


class ActionIntended(Record, frozen=True, kw_only=True, tag="action_intended"):
    """The master is about to act. Written before the act, so that no act is ever done twice."""

    action: Action
    nodes: list[str] = []
    reason: str = ""


class ActionDone(Record, frozen=True, kw_only=True, tag="action_done"):
    """How an act ended.

    `nodes` are those it took effect on, or, where it took effect on none, those it was meant for.
    """

    action: Action
    succeeded: bool
    nodes: list[str] = []
    detail: str = ""


class JobOutcome(Record, frozen=True, kw_only=True, tag="job_outcome"):
    """What becomes of a job after its check.

    `nodes` are those the job goes on with, if they are not all that it was to have; `spares` those
    that it keeps beside them. `directory` is where the journal lies, for the supervisor of the job;
    the journal itself leaves it empty.
    """

    disposition: Disposition
    exit_code: int = 0
    reason: str = ""
    nodes: list[str] = []
    spares: list[str] = []
    directory: str = ""

    @property
    def leaves(self) -> bool:
        """Whether the job leaves its nodes: Slurm ends this attempt of it."""
        return self.disposition is Disposition.REQUEUE


class Unchecked(Record, frozen=True, kw_only=True, tag="unchecked"):
    """The nodes could not be checked: why, and what to do about it."""

    reason: str
    remedy: str


class AgentStarted(Record, frozen=True, kw_only=True, tag="agent_started"):
    """An agent runs on this node and sees the master's journal.

    `leaf` is the switch the node hangs on, where Slurm knows the topology. `driver_keeps_state` is
    set where the driver of its GPUs is known to stay initialised between processes.
    """

    node: str
    launch: Count
    hostname: str
    address: str
    leaf: str = ""
    driver_keeps_state: bool = False


class WorkersStarting(Record, frozen=True, kw_only=True, tag="workers_starting"):
    """The node's workers are being (re)placed; an earlier `workers_ready` is void."""

    node: str
    launch: Count


class WorkersReady(Record, frozen=True, kw_only=True, tag="workers_ready"):
    """Every worker of the node has loaded torch, or is a light one, and waits for a round.

    `store_port` is where the first worker serves the rendezvous of groups this node leads.
    `model` says what the node computes with: only nodes of one model are compared in what they
    do alone. `free_bytes` is the least memory that is free on any of its devices. `interface` says
    over which network interface its workers reach other nodes, or how that is chosen.
    `ports_gbit_per_s` are the rates of its active InfiniBand and RoCE ports that NCCL may use.
    `gflop_per_s` and `memory_gb_per_s` are what its slowest accelerator reached in a moment's test,
    for sizing the work; 0: not known. `nvlink_domain` is set where nodes share NVLink.
    `accelerators` is how many the node has, also where light workers leave them alone.
    """

    node: str
    launch: Count
    store_port: int
    torch: str
    backend: str
    devices: list[str]
    collective_library: str = ""
    start_ms: float = 0.0
    model: str = ""
    free_bytes: Count = 0
    interface: str = ""
    ports_gbit_per_s: list[float] = []
    gflop_per_s: float = 0.0
    memory_gb_per_s: float = 0.0
    nvlink_domain: str = ""
    accelerators: Count = 0

    @property
    def on_cpus(self) -> bool:
        """Whether they compute with processors, not with accelerators."""
        return self.backend in ON_CPUS

    @property
    def light(self) -> bool:
        """Whether they measure without torch."""
        return self.backend == LIGHT_ON_CPUS


class WorkersFailed(Record, frozen=True, kw_only=True, tag="workers_failed"):
    """The node's workers cannot be used: torch is missing, or they ended before they were ready.

    `device_failed` is set when its devices were the cause, and were again when they were tried
    again, with this `torch`; `no_torch` when there is none for them, on a node with so many
    `accelerators`.
    """

    node: str
    launch: Count
    reason: str
    device_failed: bool = False
    torch: str = ""
    no_torch: bool = False
    accelerators: Count = 0


class DevicesUnopened(Record, frozen=True, kw_only=True, tag="devices_unopened"):
    """These devices have not been opened, `waited_s` after every worker had loaded `torch`."""

    node: str
    launch: Count
    devices: list[int]
    waited_s: float
    torch: str


class Sampled(Record, frozen=True, kw_only=True, tag="sampled"):
    """The raw times of one probe on this node in one round.

    `iteration_ms[r]` are the times of local rank r, one per timed iteration. `total_bytes` is the
    data that one iteration moves (the size of a collective over all its ranks), `flop` its work.
    `quantity` is one of several quantities of a probe. `scope`: the times are of a device ("solo"),
    of the node's devices together ("node"), of the devices of one rank on all nodes of the group
    ("rail"), or of the whole group ("pair"). `taken_ms` is the part of a time in which others had
    the processors; empty if it is little or unknown.
    """

    node: str
    round: Count
    group: list[str]
    probe: str
    iteration_ms: list[list[float]]
    world_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    total_bytes: Count = 0
    flop: float = 0.0
    quantity: str = ""
    scope: str = "solo"
    figures: dict[str, Figure] = {}
    taken_ms: list[list[float]] = []

    @property
    def metric(self) -> Metric:
        """What the times are of."""
        return Metric(probe=self.probe, quantity=self.quantity)


class NodeReported(Record, frozen=True, kw_only=True, tag="node_reported"):
    """This node's last report on a round.

    `crashed`: a process of the node's own died, was stopped, raised or measured a fault of the
    node, and did not wait for a partner in vain. `wrong_results`: a device gave another result than
    the only correct one. `unmeasured`: nothing could be measured, for no fault of the node.
    `connecting`: NCCL was connecting when the round was stopped. `elapsed_ms` counts from when the
    node read that the round began.
    """

    node: str
    round: Count
    outcome: Outcome
    elapsed_ms: float = 0.0
    detail: str = ""
    crashed: bool = False
    wrong_results: bool = False
    unmeasured: bool = False
    connecting: bool = False


class DevicesWatched(Record, frozen=True, kw_only=True, tag="devices_watched"):
    """Reports of the node's GPUs during a round; `not_watched` is why there are none."""

    node: str
    round: Count
    devices: list[Burn] = []
    not_watched: str = ""


class StorageRead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a node read the files of a peer; `ms` for the large one, 0 if it did not read that."""

    status: str
    ms: float = 0.0


class StorageTested(Record, frozen=True, kw_only=True, tag="storage_tested"):
    """What this node did at one path, in its test of storage.

    `status` is how its own files went: `ok`, `hung` or the name of an error, and `at` at which
    step. `small_ms` is for small files: made, written, synced, locked and removed; `large_ms` for a
    large one of `large_bytes`, written and synced; 0: there was none. `reads` are of the files of
    its peers, by their names. `server` is empty for a filesystem of the node's own.
    """

    node: str
    path: str
    status: str
    at: str = ""
    small_ms: float = 0.0
    large_ms: float = 0.0
    large_bytes: Count = 0
    reads: dict[str, StorageRead] = {}
    filesystem: str = ""
    server: str = ""
    free_bytes: Count = 0
    total_bytes: Count = 0


class AgentEnded(Record, frozen=True, kw_only=True, tag="agent_ended"):
    """The agent left, on request or because of `reason`."""

    node: str
    launch: Count
    reason: str = ""


class NodeHeld(Record, frozen=True, kw_only=True, tag="node_held"):
    """The job has ended and its node is not free: what keeps it, and what returns it."""

    node: str
    text: str


# All of this page, in the order in which they stand here.
KINDS: tuple[type[Record], ...] = tuple(Record.__subclasses__())
