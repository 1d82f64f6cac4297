# SPDX-License-Identifier: Apache-2.0
"""Every option that can be given in more than one place, spelled once.

`slurm-health check`, `sbatch` and `run`, the variables `SLURM_HEALTH_*` and the `#HEALTH` lines of
a batch script all read the table `OPTIONS`. What only one command takes stands with that command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Flag, auto

from slurm_health.preflight import option_kinds
from slurm_health.preflight.decide import policy
from slurm_health.preflight.decide.policy import OnUnchecked
from slurm_health.preflight.localize import settings as localize
from slurm_health.preflight.option_kinds import (
    COUNT,
    DIRECTORY,
    FILE,
    FLAG,
    INTERPRETER,
    NODES,
    PROBES,
    ROUND_DEADLINE,
    SPARES,
    Value,
    ValueKind,
    of_localize,
    one_of,
)
from slurm_health.records import probe_catalog
from slurm_health.records.errors import ConfigError, ExitCode

PREFIX = "SLURM_HEALTH_"


class Door(Flag):
    """Where an option can be given."""

    CHECK = auto()  # slurm-health check
    SBATCH = auto()  # the command line of slurm-health sbatch
    SCRIPT = auto()  # a #HEALTH line, or a variable of the environment that sbatch is called in
    RUN = auto()  # slurm-health run


_SUBMITTED = Door.SBATCH | Door.SCRIPT
_EVERYWHERE = Door.CHECK | _SUBMITTED | Door.RUN


@dataclass(frozen=True)
class SharedOption:
    """One option; not given, it has the value `default`, or what holds is `otherwise`, in words.

    `acting` is set for what only matters where the check acts on what it finds.
    """

    name: str
    kind: ValueKind
    doors: Door
    help: str
    _: KW_ONLY
    default: Value | None = None
    otherwise: str = ""
    acting: bool = False

    @property
    def key(self) -> str:
        """Its name as that of a Python variable."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable that sets it for `slurm-health sbatch`."""
        return PREFIX + self.key.upper()

    @property
    def described(self) -> str:
        """What it does, and its default."""
        default = self.otherwise if self.default is None else self.default
        return f"{self.help.removesuffix('.')} [default: {default}]." if default else self.help

    def parsed(self, text: str, source: str, key: str) -> Value:
        """Return the value of a text that was found at `source` under the name `key`.

        Raises:
            ConfigError: the text is no value of this option.
        """
        try:
            return self.kind.read(text)
        except ConfigError as err:  # about an item of the value
            raise ConfigError(source, key, str(err).removeprefix(f"{err.source}: ")) from None
        except ValueError as err:
            raise ConfigError(source, key, str(err)) from None


_POLICY = policy.Policy()
_JOB = Door.CHECK | _SUBMITTED
OPTIONS = (
    SharedOption(
        "check",
        PROBES,
        _JOB,
        "What to measure: auto, which is standard, with light probes where there is no torch;"
        " quick, standard or thorough; light, without torch; probes by name; a program of your own"
        " by its path; with sbatch also off.",
        otherwise=probe_catalog.DEFAULT,
    ),
    SharedOption(
        "network-check",
        FLAG,
        _JOB,
        "Measure the network in pairs of nodes; alone or in addition to --check.",
    ),
    SharedOption(
        "network-check",
        FLAG,
        Door.RUN,
        "Check the nodes before training: all multiply matrices and exchange data with changing"
        " partners until each is decided. Training starts without the faulty ones if --nnodes"
        " allows it, and not at all otherwise.",
    ),
    SharedOption(
        "straggler-detection",
        FLAG,
        _JOB,
        "Train a GPT that fits the device, in pairs of nodes; alone or in addition to --check.",
    ),
    SharedOption(
        "straggler-detection",
        FLAG,
        Door.RUN,
        "Check the nodes before training with training steps: pairs of them train a GPT that fits"
        " the device, and each node's computation is separated from the communication. Alone, or"
        " after --network-check on the nodes that passed.",
    ),
    SharedOption(
        "exclude-straggler",
        FLAG,
        Door.RUN,
        "Check, and treat a slow node like a faulty one. Without this it is named and trains.",
    ),
    SharedOption(
        "check-again",
        FLAG,
        Door.RUN,
        "Check also where this attempt of the job was checked before, as by slurm-health sbatch.",
    ),
    SharedOption(
        "journal",
        DIRECTORY,
        _EVERYWHERE,
        "Where the journal goes; in Slurm, on a filesystem that all nodes share.",
        otherwise="SLURM_HEALTH_JOURNAL, else the site's choice, else ~/.slurm-health/journal",
    ),
    SharedOption(
        "secret-file",
        FILE,
        Door.RUN,
        "Without Slurm: a file with a secret that all nodes of this run share.",
        otherwise="SLURM_HEALTH_SECRET, else none",
    ),
    SharedOption(
        "python",
        INTERPRETER,
        _EVERYWHERE,
        "The interpreter that runs the probes: the one that the job trains with.",
        otherwise="python3 on PATH if it has torch, else slurm-health's own",
    ),
    SharedOption(
        "setup",
        FILE,
        _EVERYWHERE,
        "A file that bash sources before the check starts its probes, so that they run with what"
        " the job exports, loads or activates.",
        otherwise="the environment as it is",
    ),
    SharedOption(
        "on-straggler",
        one_of(policy.OnStraggler),
        _JOB,
        "Leave a slow node where that costs seconds, only report it, leave it even if the job then"
        " waits for as many others, or do so and drain it too.",
        default=_POLICY.on_straggler.value,
        acting=True,
    ),
    SharedOption(
        "on-inconclusive",
        one_of(policy.OnInconclusive),
        _JOB,
        "Run on nodes that could not be decided, hold the job for a person to look at them, or"
        " leave them out like bad ones.",
        default=_POLICY.on_inconclusive.value,
        acting=True,
    ),
    SharedOption(
        "max-requeues",
        COUNT,
        _JOB,
        "How often the job may be requeued because of bad nodes.",
        default=_POLICY.max_requeues,
        acting=True,
    ),
    SharedOption(
        "at-requeue-limit",
        one_of(policy.AtRequeueLimit),
        _JOB,
        "What a job on bad nodes does once it has been requeued that often.",
        default=_POLICY.at_requeue_limit.value,
        acting=True,
    ),
    SharedOption(
        "on-unchecked",
        one_of(OnUnchecked),
        _SUBMITTED,
        "What a job does whose nodes could not be checked: run all the same, stop with exit code"
        f" {ExitCode.UNAVAILABLE}, or be held for a person to look at it.",
        otherwise=OnUnchecked.PROCEED.value,
    ),
    *(
        SharedOption(
            each.name.replace("_", "-"),
            of_localize(each),
            _EVERYWHERE,
            each.help,
            otherwise="the site's choice, else slurm-health's own",
        )
        for each in localize.OPTIONS
    ),
    SharedOption(
        "round-deadline",
        ROUND_DEADLINE,
        _JOB | Door.RUN,
        "The time limit of a round of short probes until it is known how long one takes; half of it"
        " where torch loads quickly. Burns and training are given more.",
        otherwise="60",
    ),
    SharedOption(
        "spares",
        SPARES,
        _SUBMITTED,
        "Allocate this many nodes more than --nodes, and run the script on the best.",
    ),
    SharedOption(
        "keep-spares",
        FLAG,
        _SUBMITTED,
        "Keep the spare nodes of --spares in the job, for the restarts of --max-restarts.",
    ),
    SharedOption(
        "max-restarts",
        COUNT,
        _SUBMITTED,
        "How often the script may be started again in its job after it has failed, unless that is"
        " its own fault; nodes at fault are left first.",
        otherwise="0; with --keep-spares, as often as there are spares",
    ),
    SharedOption(
        "min-nodes",
        NODES,
        _SUBMITTED,
        "Continue on as few nodes as this instead of being requeued.",
    ),
    SharedOption(
        "monitor",
        one_of(policy.OnHang),
        _SUBMITTED,
        "Watch the script while it trains: say where it hangs and which rank is slow; cancel a job"
        " that hangs, too, or end its script and start it again as after a failure"
        " (--max-restarts); or watch nothing. Sees most with a heartbeat in the training loop.",
        otherwise=policy.OnHang.REPORT.value,
    ),
    SharedOption(
        "monitor",
        one_of(policy.OnHang),
        Door.RUN,
        "Watch the training: say why it failed, where it hangs and which rank is slow; end one that"
        " hangs, too (in Slurm its job is cancelled), or end its workers and start them again as"
        " after a failure (--max-restarts); or watch nothing.",
        otherwise=policy.OnHang.REPORT.value,
    ),
    SharedOption(
        "heartbeat",
        one_of(policy.Heartbeat),
        _SUBMITTED | Door.RUN,
        "Take the steps of PyTorch's optimizers as the heartbeat of a script that sends none of its"
        " own: sets PYTHONPATH in the script's environment.",
        otherwise=policy.Heartbeat.AUTO.value,
    ),
    SharedOption(
        "collect",
        one_of(policy.Collect),
        _SUBMITTED,
        "Which nodes report their state after a failure and in a hang: all, or the batch host.",
        otherwise=policy.Collect.NODES.value,
    ),
    SharedOption(
        "flight-recorder",
        one_of(policy.FlightRecorder),
        _SUBMITTED,
        "Have PyTorch record the script's collectives, and leave them in the journal when they time"
        " out, so that a post-mortem can tell which rank never came: sets variables in the script's"
        " environment that it has not set itself.",
        otherwise=policy.FlightRecorder.OFF.value,
    ),
    SharedOption("dry-run", FLAG, Door.SBATCH, "Print the batch script without submitting it."),
)


def options_of(door: Door) -> dict[str, SharedOption]:
    """Return what can be given at one door, by name."""
    return {option.name: option for option in OPTIONS if door in option.doors}


def what_to_check(settings: Mapping[str, object]) -> str:
    """Return all that is to be checked, from `check` and the flags beside it."""
    named = settings.get("check")
    if named == option_kinds.OFF:
        return option_kinds.OFF
    flags = [name for name in ("network-check", "straggler-detection") if settings.get(name)]
    return ",".join([*([str(named)] if named else []), *flags]) or probe_catalog.DEFAULT


def localize_choices(settings: Mapping[str, object]) -> dict[str, object]:
    """Return what was chosen about localisation, by the names of `localize.OPTIONS`.

    `settings` are by names of options or of Python variables; what was not given is None.
    """
    given = {name.replace("-", "_"): value for name, value in settings.items()}
    names = [each.name for each in localize.OPTIONS]
    return {name: given[name] for name in names if given.get(name) is not None}
