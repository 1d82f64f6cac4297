# SPDX-License-Identifier: Apache-2.0
"""Every setting of a site, with its default: one structure, with a struct for every table.

The nodes that a setting is for are named by patterns: `gpu[01-16,20]`, `gpu*`, `!login*`. The hooks
match one name against a few of them before every job, and expand none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import msgspec

from slurm_health.node.rules.finding import Status

CONTEXTS = ("prolog", "epilog", "healthcheck", "retest")
AbsolutePath = Annotated[str, msgspec.Meta(pattern="^/")]
Count = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
StepName = Literal["reset", "reboot", "administrator"]
# How long a drain counts against the share, even if it has been lifted.
WINDOW_S = 3600.0
_BRACKET = re.compile(r"\[([\d,-]+)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Hooks(_Table, frozen=True, kw_only=True):
    """`[hooks]`: how the three hooks run."""

    # Root's directory on every node, on a local disk: what the node was drained for. Refused if
    # others can write to it.
    state: AbsolutePath = "/var/lib/slurm-health"
    # False: everything is measured and logged, and no node is drained.
    drain: bool = True


class Breaker(_Table, frozen=True, kw_only=True):
    """`[breaker]`: how many nodes may be drained at once, by hooks and by root's jobs together.

    Without `directory` no node is drained: the number of other drained nodes is unknown.
    """

    # On a filesystem that all nodes share, writable by root only. Without it no node is drained.
    directory: AbsolutePath | Literal[""] = ""
    # Of a partition's nodes that may be drained at one time; one always, and two of four or more.
    share: Share = 0.1
    # The same below one leaf switch, or of one block, where Slurm has a topology.
    rack_share: Share = 0.25

    def allowed(self, nodes: int, *, in_rack: bool = False, alike: bool = True) -> int:
        """Return how many nodes of a partition, or below one leaf switch, may be drained.

        With `alike`, for one kind of fault: one always, and two of four or more. In a small
        cluster, a second fault within the hour is a coincidence more often than a common cause.
        Faults of different kinds have no common cause: four of eight nodes may be out for them.
        """
        few = min(2 if alike else 4, max(1, nodes // 2))
        return max(int((self.rack_share if in_rack else self.share) * nodes), few)


class Recovery(_Table, frozen=True, kw_only=True):
    """`[recovery]`: when a node goes back into the pool that we drained, or Slurm by itself."""

    # Passes in a row of the checks that a node was drained for, then it returns; 0: an
    # administrator releases it.
    passes: Count = 3
    # Passes closer together count once.
    apart_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 60.0
    # Drains that Slurm sets by itself: `off`, explained, or also
    # [lifted](../admin/slurm-drains.md) if their cause is gone.
    slurm_drains: Literal["off", "explain", "lift"] = "explain"


class AccusationPolicy(Enum):
    """The effect of an accusation."""

    CONFIRM = "confirm"  # a drain if a local check confirms it, a mark otherwise
    NEVER = "never"  # a line in the log


class Accusations(_Table, frozen=True, kw_only=True):
    """`[accusations]`: the effect of the verdicts of a job's own check."""

    # See [the policy](../explanation/policy.md#accusations).
    policy: AccusationPolicy = AccusationPolicy.CONFIRM
    # Marks of so many different users drain a node; 0: marks never drain.
    users: Count = 2
    # And of so many different jobs.
    jobs: Positive = 3


class Sweep(_Table, frozen=True, kw_only=True):
    """`[sweep]`: whose checks of nodes are the site's own, as root's are.

    The verdict of a job of `user` drains a faulty node, and clears the marks of a healthy one. An
    accused node is checked by one at once, with two partners that Slurm chooses.
    """

    # Without rights, and used by no one else; empty: no user's verdict alone drains.
    user: str = ""
    # The interpreter with torch that jobs train with; empty: as for any check.
    python: str = ""
    # What is checked; empty: the default.
    check: str = ""
    # More options of sbatch for the check of an accused node: `["--qos=scavenger"]`.
    sbatch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.user in {"root", "0"}:
            raise ValueError("user: must have no rights: not root")


class Default(_Table, frozen=True, kw_only=True):
    """`[default]`: the batch jobs that are checked although their users type plain `sbatch`.

    A job must match all of these, after `slurm-health init default` has been run.
    """

    # Of the allocation.
    min_nodes: Positive = 2
    # Only jobs that ask for GPUs.
    gpus: bool = False
    # Empty: all.
    partitions: tuple[Text, ...] = ()
    # Empty: all.
    accounts: tuple[Text, ...] = ()
    # Jobs with a shorter time limit are not checked; without one, the partition's counts.
    min_time_min: Count = 10
    # A check that takes longer is given up, and the job runs unchecked; 0: no limit.
    limit_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    # Of the job's time limit: a check that takes more is given up; 0: only `limit_s` counts.
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    # A word in a job's --comment with which its user leaves it unchecked; empty: none.
    opt_out: str = ""
    # What is checked; empty: the default.
    check: str = ""
    # Also watch these jobs, and say in their reports where they hang and why they failed. A job is
    # left alone for its first minute, and if it has one rank only.
    watch: bool = True
    # Give their ranks a heartbeat by PYTHONPATH: a report then names the collective and the line.
    heartbeat: bool = False


class Metrics(_Table, frozen=True, kw_only=True):
    """`[metrics]`: the output of the hooks for monitoring."""

    # node_exporter's --collector.textfile.directory, where the health check writes a file.
    directory: AbsolutePath | Literal[""] = ""


class Notify(_Table, frozen=True, kw_only=True):
    """`[notify]`: the command and the URLs that get the events of nodes."""

    # The name of this cluster in events.
    cluster: str = ""
    # Reads one event, as JSON, on its standard input.
    command: tuple[Text, ...] = ()
    # For apprise; an entry that begins with / is a file of URLs that only root can read.
    urls: tuple[Text, ...] = ()
    # Also mail the owner of a job that hangs, fails, moves or stops, without its --mail-type.
    owners: bool = False
    # For one event; then the command is killed.
    limit_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 30.0


class Repair(_Table, frozen=True, kw_only=True):
    """`[repair]`: the steps to repair a node whose fault root's own checks have confirmed."""

    # The steps that may be taken; the order is fixed. Empty: none.
    steps: tuple[StepName, ...] = ()
    # Steps are logged and listed, and not taken.
    dry_run: bool = True
    # By the name of a check, the step that its faults begin with.
    first: dict[str, StepName] = {}
    # {gpus} becomes the PCI addresses of the GPUs at fault, with commas between.
    reset: tuple[Text, ...] = ("nvidia-smi", "--gpu-reset", "-i", "{gpus}")
    # A command that a drained node must pass before it returns. Empty: its checks are enough.
    test: tuple[Text, ...] = ()
    # Then the test is killed, and has failed.
    test_limit_min: Annotated[float, msgspec.Meta(gt=0, le=10080)] = 90.0


class CommonKeys(_Table, frozen=True, kw_only=True):
    """Keys every `[checks.NAME]` table may have; the others belong to the check."""

    # Which check to run; unset: the table's name.
    check: Text | None = None
    # Any of `prolog`, `epilog`, `healthcheck`, `retest`; unset: the check's own.
    contexts: tuple[str, ...] | None = None
    # Patterns, such as `gpu[01-16,20]`, `gpu*`, `!gpu07`; empty: all.
    nodes: tuple[str, ...] = ()
    # Patterns; with these, a check runs only if there is a job. Empty: all.
    partitions: tuple[str, ...] = ()
    # Its most severe result: `warn`, `user_fault` or `node_fault`; unset: the check's own.
    severity: Status | None = None
    # A retest runs it only while no other job is on the node; unset: the check's own.
    exclusive: bool | None = None
    # After this it is killed, and inconclusive.
    time_limit_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 5.0
    # Its result is logged and has no other effect.
    shadow: bool = False
    # Not to end within `time_limit_s` is a node fault. Only for what can hang because of the node
    # alone.
    hang_is_fault: bool = False
    # False: the table is ignored.
    enabled: bool = True


class Settings(_Table, frozen=True, kw_only=True):
    """The whole file. The first five keys are for every user; preflight checks the last two."""

    # Where journals go; may begin with `~`; empty: `~/.slurm-health/journal`.
    journal: str = ""
    # The file in which root [publishes](../admin/fleet.md#let-the-checks-know) what the history
    # says of nodes.
    standings: AbsolutePath | Literal[""] = ""
    # Directories whose [storage](../explanation/storage.md) every check tests; may begin with `~`.
    paths: tuple[str, ...] = ()
    expectations: dict[str, dict[str, Any]] = {}
    localize: dict[str, Any] = {}
    hooks: Hooks = Hooks()
    breaker: Breaker = Breaker()
    recovery: Recovery = Recovery()
    accusations: Accusations = Accusations()
    sweep: Sweep = Sweep()
    default: Default = Default()
    metrics: Metrics = Metrics()
    notify: Notify = Notify()
    repair: Repair = Repair()
    checks: dict[str, dict[str, Any]] = {}


def is_pattern(text: str) -> bool:
    """Return whether a text can be a node pattern."""
    body = text.removeprefix("!")
    rest = _BRACKET.sub("", body)
    ranges = [part for bracket in _BRACKET.findall(body) for part in bracket.split(",")]
    return (
        bool(rest or ranges)
        and re.fullmatch(r"[\w.*?-]*", rest, re.ASCII) is not None
        and all(_RANGE.fullmatch(part) for part in ranges)
    )


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether patterns match a name. No pattern at all matches every name.

    A pattern that begins with `!` excludes names, wherever it stands.
    """
    if any(_matches_one(name, pattern[1:]) for pattern in patterns if pattern.startswith("!")):
        return False
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    return not wanted or any(_matches_one(name, pattern) for pattern in wanted)


def _matches_one(name: str, pattern: str) -> bool:
    if "[" not in pattern:
        return fnmatchcase(name, pattern)
    literals = _BRACKET.split(pattern)[::2]
    wanted = r"(\d+)".join(re.escape(text).replace(r"\*", ".*") for text in literals)
    match = re.fullmatch(wanted.replace(r"\?", "."), name)
    if match is None:
        return False
    for number, ranges in zip(match.groups(), _BRACKET.findall(pattern), strict=True):
        spans = [part.group(1, 2) for part in map(_RANGE.fullmatch, ranges.split(",")) if part]
        # Slurm pads every number of a range to the width of its first.
        if not any(
            int(low) <= int(number) <= int(high or low)
            and number == str(int(number)).zfill(len(low))
            for low, high in spans
        ):
            return False
    return True
