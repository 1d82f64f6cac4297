# SPDX-License-Identifier: Apache-2.0
"""What a site may set beside its checks, with the defaults. Each table of the file is a struct.

The nodes that a setting is for are named by patterns: `gpu[01-16,20]`, `gpu*`, `!login*`. The hooks
match one name against a few of them before every job, and expand none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec

from slurm_health.node.rules.finding import Status

CONTEXTS = ("prolog", "epilog", "healthcheck", "retest")
AbsolutePath = Annotated[str, msgspec.Meta(pattern="^/")]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
Minutes = Annotated[float, msgspec.Meta(ge=0, le=1440)]
Hours = Annotated[float, msgspec.Meta(gt=0, le=8760)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
StepName = Literal["reset", "reboot", "administrator"]
_BRACKET = re.compile(r"\[([\d,-]+)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Hooks(_Table, frozen=True, kw_only=True):
    """`[hooks]`: how the three hooks run."""

    # Root's own directory on every node: what this node was drained for, what checks remember.
    state: AbsolutePath = "/var/lib/slurm-health"
    # False: everything is measured and logged, and nobody is drained.
    drain: bool = True
    # A word in a job's --comment that makes the prolog skip its checks; empty: there is none.
    opt_out: str = ""
    # The prolog does not check a node again that has passed all of its checks in the last so many
    # minutes; 0: it checks before every job. What happens to a node in between is not seen.
    passed_min: Minutes = 0.0
    # Where every user of the node can read that it has passed, and only root can say so.
    passes: AbsolutePath = "/run/slurm-health"
    # A Slurm command that has not answered after this is given up.
    slurm_limit_s: Seconds = 8.0


class Breaker(_Table, frozen=True, kw_only=True):
    """`[breaker]`: how much may be drained at once, by hooks and by root's jobs together.

    Without `directory` nobody is drained: a node alone cannot know how many others are.
    """

    # On a filesystem every node shares, writable by root on the nodes only.
    directory: AbsolutePath = ""
    # Of a partition's nodes, drained by us at one time.
    share: Share = 0.1
    # The same of the nodes below one leaf switch, which fail together where a rack does. Larger: a
    # rack has few nodes, and those that wait for repair count.
    rack_share: Share = 0.25
    # Drains within `window_s` count against the share even when they have been lifted since.
    window_s: Annotated[float, msgspec.Meta(gt=0, le=604800)] = 3600.0
    # One job's drains. A job that breaks nodes must not get through the cluster by retrying.
    per_job: Positive = 2
    # Drains in one hour after jobs of one user.
    per_user_hour: Positive = 4
    # How long the lock of `directory` is waited for.
    lock_limit_s: Seconds = 5.0
    # Hooks that find a fault at the same time ask Slurm spread over this long, by node name.
    spread_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 3.0

    def allowed(self, nodes: int, *, in_rack: bool = False, alike: bool = True) -> int:
        """Return how many nodes of a partition, or below one leaf switch, may be drained.

        With `alike`, for one kind of fault: one always, and two of four or more. In a small
        cluster, a second fault within the hour is a coincidence more often than a common cause.
        Faults of different kinds have none in common, and four of eight may be out for them.
        """
        few = min(2 if alike else 4, max(1, nodes // 2))
        return max(int((self.rack_share if in_rack else self.share) * nodes), few)


class Recovery(_Table, frozen=True, kw_only=True):
    """`[recovery]`: when a node we drained goes back into the pool."""

    release: bool = True
    # Passes in a row of the very checks it was drained for.
    passes: Positive = 3
    # A pass sooner after the last than this is not a fresh one.
    apart_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 60.0
    # A node that is drained more often within a day waits for a person: its test misses the fault.
    per_day: Positive = 3


class Marks(_Table, frozen=True, kw_only=True):
    """`[marks]`: when accusations that no local check confirms drain a node all the same."""

    # Different users. 0: marks are kept and listed, and never drain.
    users: Count = 2
    # Different jobs.
    jobs: Positive = 3
    # A mark older than this is forgotten.
    ttl_h: Hours = 168.0


class AccusationPolicy(Enum):
    """What an accusation can bring about."""

    CONFIRM = "confirm"  # a drain when a local check confirms it, a mark otherwise
    EVIDENCE = "evidence"  # a drain when its own evidence is strong: users are trusted
    NEVER = "never"  # a line in the log


class Accusations(_Table, frozen=True, kw_only=True):
    """`[accusations]`: what the epilog does with what a job's own check found out."""

    policy: AccusationPolicy = AccusationPolicy.CONFIRM
    # Tests of one node in one hour because of what jobs of one user say about it.
    tests_per_user_hour: Positive = 2
    # Of one file of the job's journal; a larger one is not read.
    max_bytes: Annotated[int, msgspec.Meta(ge=1024, le=1 << 28)] = 16 << 20
    read_limit_s: Seconds = 5.0


class Sweep(_Table, frozen=True, kw_only=True):
    """`[sweep]`: whose checks of nodes are the site's own, as root's are.

    The verdict of a job of `user` drains a faulty node, and clears the marks of a healthy one. An
    accused node is checked by one at once, with two partners that Slurm chooses.
    """

    # Without rights, and used by nobody else; empty: no user's word drains.
    user: str = ""
    # The interpreter with torch that jobs train with; empty: as a check finds it.
    python: str = ""
    # What is checked; empty: what a check does by default.
    check: str = ""
    # More options of sbatch for the check of an accused node, as --gres=gpu:8.
    sbatch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.user in {"root", "0"}:
            raise ValueError("user: must have no rights: not root")


class Default(_Table, frozen=True, kw_only=True):
    """`[default]`: which batch jobs are checked though their users type plain `sbatch`.

    A job that all of these name, once `slurm-health init-default` has been run.
    """

    # Of the allocation.
    min_nodes: Positive = 2
    # Only jobs that ask for GPUs.
    gpus: bool = False
    # Empty: all.
    partitions: tuple[Text, ...] = ()
    accounts: tuple[Text, ...] = ()
    # Of the job's time limit: the check of a short job costs too large a part of it.
    min_time_min: Count = 10
    # A check that takes longer is given up, and the job runs unchecked; 0: it takes its time.
    limit_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    # Of the job's time limit: a check that takes more of it is given up; 0: only `limit_s` counts.
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    # A job on one node is not checked where that node has passed all checks of the prolog or the
    # health check in the last so many minutes; 0: every job is.
    passed_min: Minutes = 0.0
    # A word in a job's --comment with which its user leaves it unchecked; empty: there is none.
    opt_out: str = ""
    # What is checked; empty: what a check does by default.
    check: str = ""


class Metrics(_Table, frozen=True, kw_only=True):
    """`[metrics]`: what the hooks tell monitoring."""

    # node_exporter's --collector.textfile.directory; the health check writes a file there.
    directory: AbsolutePath | Literal[""] = ""
    # One line of JSON in the machine's log for what each check of each hook concludes, and each
    # check of a job's nodes.
    syslog_json: bool = False


class Notify(_Table, frozen=True, kw_only=True):
    """`[notify]`: what a site runs, or where it sends, when something happens to a node."""

    # What events call this cluster.
    cluster: str = ""
    # Reads one event, as JSON, on its standard input.
    command: tuple[Text, ...] = ()
    # For apprise; one that begins with / is a file of URLs that only root can read.
    urls: tuple[Text, ...] = ()
    # For one event; then the command is killed.
    limit_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 30.0


class Repair(_Table, frozen=True, kw_only=True):
    """`[repair]`: what is done to a node whose fault root's own checks have confirmed."""

    # What may be done; the order is fixed. Empty: nothing.
    steps: tuple[StepName, ...] = ()
    # What would be done is logged and listed, and nothing is done.
    dry_run: bool = True
    # By the name of a check, the step its faults begin with: before what the check itself knows.
    first: dict[str, StepName] = {}
    # {gpus} becomes the PCI addresses of the GPUs at fault, with commas between.
    reset: tuple[Text, ...] = ("nvidia-smi", "--gpu-reset", "-i", "{gpus}")
    # A command that a drained node must pass before it returns to service: run by root, on the
    # node, once its checks pass. Empty: its checks are enough.
    test: tuple[Text, ...] = ()
    # Then it is killed, and has failed.
    test_limit_min: Annotated[float, msgspec.Meta(gt=0, le=10080)] = 90.0


class CommonKeys(_Table, frozen=True, kw_only=True):
    """Keys every `[checks.NAME]` table may have; the others belong to the check."""

    check: Text | None = None
    contexts: tuple[str, ...] | None = None
    nodes: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    severity: Status | None = None
    # It takes the node for itself, so that a retest runs it on an idle node only.
    exclusive: bool | None = None
    time_limit_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 5.0
    shadow: bool = False
    # A check that does not end within `time_limit_s` has found a fault of the node.
    hang_is_fault: bool = False
    enabled: bool = True


def is_pattern(text: str) -> bool:
    """Tell whether a text can be a node pattern."""
    body = text.removeprefix("!")
    rest = _BRACKET.sub("", body)
    ranges = [part for found in _BRACKET.findall(body) for part in found.split(",")]
    return (
        bool(rest or ranges)
        and re.fullmatch(r"[\w.*?-]*", rest, re.ASCII) is not None
        and all(_RANGE.fullmatch(part) for part in ranges)
    )


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a name is meant by patterns. None at all mean every name.

    A pattern that begins with `!` takes names away, wherever it stands.
    """
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    refused = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    if any(_matches_one(name, pattern) for pattern in refused):
        return False
    return not wanted or any(_matches_one(name, pattern) for pattern in wanted)


def _matches_one(name: str, pattern: str) -> bool:
    if "[" not in pattern:
        return fnmatchcase(name, pattern)
    brackets = _BRACKET.findall(pattern)
    literals = _BRACKET.split(pattern)[::2]
    wanted = r"(\d+)".join(re.escape(text).replace(r"\*", ".*") for text in literals)
    found = re.fullmatch(wanted.replace(r"\?", "."), name)
    return found is not None and all(
        _in_ranges(number, ranges) for number, ranges in zip(found.groups(), brackets, strict=True)
    )


def _in_ranges(number: str, ranges: str) -> bool:
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            continue
        low, high = found.group(1), found.group(2) or found.group(1)
        # Slurm pads every number of a range to the width of its first.
        if int(low) <= int(number) <= int(high) and number == str(int(number)).zfill(len(low)):
            return True
    return False
