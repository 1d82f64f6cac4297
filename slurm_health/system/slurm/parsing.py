# SPDX-License-Identifier: Apache-2.0
"""Parse Slurm's output: lines of jobs, nodes and partitions, and the topology of switches."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from slurm_health.records.errors import LocalizeError, SlurmError
from slurm_health.records.nodeset import expand, is_lost, words_of
from slurm_health.records.text import whole_number

# `Key=value` pairs of one-line scontrol output. A value may hold spaces, and a reason or comment
# words like `limit=280`; Slurm's own keys begin with a capital letter.
_PAIR = re.compile(r"(?:^|\s)([A-Z][\w:/]*)=")
# One job of several, and the name its owner gave it: both a name and a comment may hold line ends,
# and a name, which stands in front, words that look like the fields behind it.
_JOB = re.compile(r"^(?=JobId=\d+ (?:ArrayJobId|HetJobId|JobName)=)", re.MULTILINE)
_JOB_NAME = re.compile(r"(?<= )JobName=.*?(?= UserId=\S+\(\d+\) GroupId=)", re.DOTALL)
# As sinfo writes them; a mark behind the word means a coming reboot or power-down.
_LISTED_OUT = ("drain", "down", "fail", "maint", "reboot", "power", "inval", "future")
_OUT = ("DRAIN", "DOWN", "FAIL", "MAINT", "REBOOT", "POWER", "INVAL", "FUTURE")
# With one of these next to DRAIN a passed check is not enough.
_UNRELEASABLE = ("DOWN", "FAIL", "MAINT", "REBOOT", "POWER", "INVAL", "FUTURE", "NOT_RESP")
_NAME = re.compile(r"^NodeName=(\S+)")
_STATE = re.compile(r"\sState=(\S+)")
_PARTITIONS = re.compile(r"\sPartitions=(\S+)")
# Features that it has, or could have after a reboot.
_FEATURES = re.compile(r"\sAvailableFeatures=(\S+)")
# Up to who set it and when; fields may follow.
_SIGNED = re.compile(r".*?\[[^][@\s]+@[\dT:.+-]+\]")


# Slurm's words for no value.
_NOTHING = frozenset({"", "(null)", "N/A"})

# Slurm's words for a job that has ended. It prints marks such as CONFIGURING, STOPPED, RESIZING or
# REQUEUE_HOLD in place of the state of one that has not.
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)

# `12_3` names one task of an array.
JobId = int | str
_FIELD = re.compile(r"(\w+)=(\S*)")
_NAMES = ("switchname", "blockname", "ringname")
_NO_SWITCHES = {"", "(null)"}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `fields` are those of scontrol, without its name."""

    job_id: JobId
    states: frozenset[str]
    reason: str
    fields: Mapping[str, str]

    def value(self, key: str) -> str:
        """Return one field, empty if Slurm has no value."""
        text = self.fields.get(key, "")
        return "" if text in _NOTHING else text

    @property
    def excluded(self) -> tuple[str, ...]:
        """Nodes the job must not run on."""
        return nodes_of(self.value("ExcNodeList"))

    @property
    def required(self) -> tuple[str, ...]:
        """Nodes the job requests by name."""
        return nodes_of(self.value("ReqNodeList"))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes the job holds."""
        return nodes_of(self.value("NodeList"))

    @property
    def restarts(self) -> int:
        """How often the job was requeued, by any user, or 0 if it is unknown."""
        return whole_number(self.value("Restarts")) or 0

    @property
    def pending(self) -> bool:
        """Pending for good: nothing of an earlier attempt is still being cleaned up."""
        return "PENDING" in self.states and "COMPLETING" not in self.states

    @property
    def ended(self) -> bool:
        """Ended for good: a job with another state as well may be in the queue again."""
        return bool(self.states) and self.states <= ENDED

    @property
    def held(self) -> bool:
        """Held by any user: Slurm marks that with a priority of 0, whatever the reason."""
        return self.fields.get("Priority") == "0"


class ListedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a user's jobs.

    `job` is `12_3` for a task of an array, `12_[4-9]` for several, `12+1` for a component of a
    heterogeneous job.
    """

    job: str
    name: str
    state: str
    reason: str
    nodes: int
    restarts: int
    submitted_s: int

    @property
    def whole(self) -> str:
        """The id of the whole job: of the array, or of the first component."""
        return re.split("[_+]", self.job)[0]

    @property
    def ended(self) -> bool:
        """Ended for good."""
        return self.state in ENDED

    @property
    def word(self) -> str:
        """The state in small letters, with why a job waits."""
        waits = self.state == "PENDING" and self.reason not in {"", "None"}
        return self.state.lower() + (f" ({self.reason})" if waits else "")


def listed_job_of(line: str) -> ListedJob | None:
    """Parse one line of squeue in the format `LISTED_JOB`; None if it does not match."""
    fields, _, name = line.partition("|")
    words = fields.split(maxsplit=5)
    if len(words) < 6 or not all(map(str.isdecimal, words[2:5])):
        return None  # the rest of a name with a line end
    job, state, nodes, restarts, submitted_s, reason = words
    return ListedJob(
        job=job,
        name=name.strip(),
        state=state,
        reason=reason.strip(),
        nodes=int(nodes),
        restarts=int(restarts),
        submitted_s=int(submitted_s),
    )


# Every field but the last two is one word; times are seconds with SLURM_TIME_FORMAT=%s.
LISTED_JOB = (
    "JobArrayID:.64 ,State:.20 ,NumNodes:.12 ,RestartCnt:.12 ,SubmitTime:.24 ,Reason:.64|,Name:64"
)


class CompletingJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has ended and keeps `nodes`; `array` is its own number without an array."""

    job: int
    array: int
    uid: int
    ended_s: int
    nodes: tuple[str, ...]


# Times are seconds with SLURM_TIME_FORMAT=%s; of such a job, squeue lists the nodes that it keeps.
COMPLETING_JOB = "%A %F %U %e %N"


def completing_job_of(line: str) -> CompletingJob | None:
    """Parse one line of squeue in the format `COMPLETING_JOB`; None if it does not match."""
    words = line.split()
    if len(words) != 5 or not all(map(str.isdecimal, words[:4])):
        return None
    job, array, uid, ended_s = map(int, words[:4])
    return CompletingJob(job=job, array=array, uid=uid, ended_s=ended_s, nodes=nodes_of(words[4]))


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a job, over all its nodes."""

    nodes: int
    cpus: int
    tasks: int


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One node. `reason` carries who set it, and when; `features` is None where unknown."""

    name: str
    state: str
    reason: str = ""
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] | None = None

    @property
    def states(self) -> frozenset[str]:
        """The words of the state, without marks such as `*`."""
        return words_of(self.state)

    @property
    def out_of_pool(self) -> bool:
        """Whether it is out of use, or will be: drained, down, rebooting, powered down."""
        # Slurm writes a coming reboot, maintenance or power-down as a mark behind the word too.
        return any(mark in self.state for mark in "@^$~!%") or any(
            word.startswith(_OUT) for word in self.states
        )

    @property
    def drained(self) -> bool:
        """Whether it takes no jobs because of a drain."""
        return "DRAIN" in self.states

    @property
    def idle(self) -> bool:
        """Whether no job runs on it; one may be in its epilog."""
        return "IDLE" in self.states

    @property
    def lost(self) -> bool:
        """Whether Slurm has lost it: it is down or does not answer."""
        return is_lost(self.state)

    @property
    def releasable(self) -> bool:
        """Whether lifting the drain is all it needs."""
        silent = any(mark in self.state for mark in "*$@^")
        return (
            self.drained
            and not silent
            and not any(word.startswith(_UNRELEASABLE) for word in self.states)
        )


class ListedNode(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a partition's nodes.

    `hardware`: processors, memory and generic resources. In the partition no job starts on fewer
    nodes than `least`, or with a longer limit than `limit_min`, None for no limit.
    """

    name: str
    state: str
    hardware: tuple[str, ...]
    features: tuple[str, ...]
    least: int
    limit_min: int | None = None

    @property
    def out_of_pool(self) -> bool:
        """Whether it starts no job now: drained, down, rebooting, powered down."""
        return not self.state.isalpha() or self.state.startswith(_LISTED_OUT)


# Name, state, processors, memory, generic resources, job sizes and time limit of the partition,
# features.
LISTED_NODE = "%N %T %c %m %G %s %l %f"


def listed_node_of(line: str) -> ListedNode | None:
    """Parse one line of sinfo in the format `LISTED_NODE`; None if it does not match."""
    words = line.split()
    if len(words) < 8:
        return None
    name, state, cpus, memory_mb, gres, size, limit, *features = words
    days, _, clock = limit.rpartition("-")  # 1-02:00:00, 2:00:00, 10:00
    parts = [whole_number(part) for part in (days or "0", *clock.split(":"))]
    limit_s: int | None = None
    if None not in parts:
        limit_s = 0
        for part in parts[1:]:
            limit_s = 60 * limit_s + (part or 0)
        limit_s += 24 * 3600 * (parts[0] or 0)
    return ListedNode(
        name=name,
        state=state,
        hardware=(cpus, memory_mb, gres),
        features=_words("".join(features)),
        least=whole_number(size.partition("-")[0]) or 1,
        limit_min=None if limit_s is None else limit_s // 60,
    )


def job_of(job_id: JobId, fields: Mapping[str, str]) -> Job:
    """Return a job from its fields."""
    return Job(
        job_id=job_id,
        states=words_of(fields.get("JobState", "")),
        reason=fields.get("Reason", ""),
        fields=fields,
    )


def job_fields(job_id: JobId, text: str) -> dict[str, str]:
    """Return the fields of one job from the output of `scontrol show job -o`.

    The id of an array, or of a job of several parts, shows every task or part. The name of a job
    is left out: it may hold words that look like the next field.
    """
    shown = [parse_pairs(_JOB_NAME.sub("", job)) for job in _JOB.split(text)]
    return next((fields for fields in shown if fields.get("JobId") == str(job_id)), shown[-1])


def node_of(line: str) -> Node | None:
    """Parse one line of `scontrol show nodes -o`; None if it does not match.

    The note is free text and may hold words like fields, so only fields before it are read.
    """
    head, _, tail = line.partition(" Reason=")
    name, state, partitions = (field.search(head) for field in (_NAME, _STATE, _PARTITIONS))
    features = _FEATURES.search(head)
    if name is None or state is None:
        return None
    signed = _SIGNED.match(tail)
    return Node(
        name=name.group(1),
        state=state.group(1),
        reason=signed.group() if signed else tail.strip(),
        partitions=tuple(partitions.group(1).split(",")) if partitions else (),
        features=_words(features.group(1)) if features else None,
    )


def _words(text: str) -> tuple[str, ...]:
    return () if text in _NOTHING else tuple(text.split(","))


def parse_pairs(line: str) -> dict[str, str]:
    """Return the fields of one line of `scontrol show -o`.

    The first of two fields with one name counts: free text that looks like a field, such as a
    node's reason, comes after the fields that matter.
    """
    marks = list(_PAIR.finditer(line))
    ends = [mark.start() for mark in marks[1:]] + [len(line)]
    fields: dict[str, str] = {}
    for mark, end in zip(marks, ends, strict=False):
        fields.setdefault(mark.group(1), line[mark.end() : end].strip())
    return fields


def parse_config(text: str) -> dict[str, str]:
    """Return the fields of `scontrol show config`."""
    fields = {}
    for line in text.splitlines():
        name, sign, value = line.partition("=")
        if sign:
            fields[name.strip()] = "" if value.strip() in _NOTHING else value.strip()
    return fields


def nodes_of(text: str) -> tuple[str, ...]:
    """Return the nodes of a list.

    Raises:
        SlurmError: it cannot be read; an empty answer would mean no nodes.
    """
    try:
        return () if text in _NOTHING else expand(text)
    except ValueError as err:
        raise SlurmError(f"Slurm gives a node list that cannot be read: {err}") from err


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """One partition; `max_nodes` is None if a job may have all nodes.

    A job on fewer nodes than `min_nodes` waits there for ever.
    """

    name: str
    nodes: int
    nodelist: str
    max_nodes: int | None
    min_nodes: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """Its nodes."""
        return nodes_of(self.nodelist)


def partition_of(fields: Mapping[str, str]) -> Partition:
    """Return the partition that `scontrol show partition` describes with these fields."""
    return Partition(
        name=fields.get("PartitionName", ""),
        nodes=whole_number(fields.get("TotalNodes", "")) or 0,
        nodelist=fields.get("Nodes", ""),
        max_nodes=whole_number(fields.get("MaxNodes", "")),
        min_nodes=whole_number(fields.get("MinNodes", "")) or 1,
    )


def parse_topology(text: str) -> dict[str, tuple[str, ...]]:
    """Return the nodes of every leaf switch, block or ring, in the order of the text.

    A tree plugin prints a line per switch, `SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-8]`;
    only level 0 is a leaf. A block plugin prints `BlockName=b1 ... Nodes=n[1-8]`, one for rings
    (26.05) `RingName=r1 Nodes=n[1-8]`. The lines of topology.conf are read as well: there, a switch
    that names nodes is a leaf. Other lines are skipped.

    Raises:
        LocalizeError: a node list cannot be read, or a node hangs on two leaves.
    """
    leaves: dict[str, tuple[str, ...]] = {}
    home: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        leaf = _leaf(line)
        if leaf is None:
            continue
        name, nodelist = leaf
        try:
            nodes = expand(nodelist)
        except ValueError as err:
            raise LocalizeError(f"topology, line {number}: {err}") from err
        for node in nodes:
            if (other := home.setdefault(node, name)) != name:
                why = f"node {node} hangs on {name} and on {other}"
                raise LocalizeError(f"topology, line {number}: {why}")
        leaves[name] = (*leaves.get(name, ()), *nodes)
    return leaves


def _leaf(line: str) -> tuple[str, str] | None:
    """Return name and node list of the leaf on a line, None without one."""
    fields = {key.lower(): value for key, value in _FIELD.findall(line.partition("#")[0])}
    name = next((fields[key] for key in _NAMES if key in fields), None)
    nodelist = fields.get("nodes", "")
    if not name or nodelist in _NO_SWITCHES or fields.get("level", "0") != "0":
        return None
    return name, nodelist
