# SPDX-License-Identifier: Apache-2.0
"""The operators that are built in. Each looks at one kind of data, and is silent without it.

From `script-failed`, the symptom, to what Slurm, kernel and driver say, and to `rank-failed`, the
first failure; from there to what it means. Where every failure is only a consequence, from
`ranks-waited` to what the ranks waited in. From `no-progress`, the symptom of a script that still
runs, to who does not come to what the others wait in; from `slower-steps` to a slow link; from
`slower-rank` to what takes its time.
"""

from __future__ import annotations

from slurm_health.training.diagnosis.before_it_failed import HungBefore, HungUntilEnded
from slurm_health.training.diagnosis.hangs import (
    NobodyLeaves,
    NodeSilent,
    RankElsewhere,
    RankGone,
    RankStopped,
    WaitsDiffer,
)
from slurm_health.training.diagnosis.hangs_without_stacks import ConnectionsUnanswered, FileAwaited
from slurm_health.training.diagnosis.inference import InferenceOperator
from slurm_health.training.diagnosis.mistakes import KnownLastWords, OwnMistake, SameLastWords
from slurm_health.training.diagnosis.out_of_step import DataEndedBefore
from slurm_health.training.diagnosis.ranks import (
    FirstFailure,
    Killed,
    KnownErrors,
    NotThere,
    ProgramError,
    SameErrorEverywhere,
    ScriptCrashed,
)
from slurm_health.training.diagnosis.ras import RasBehind
from slurm_health.training.diagnosis.slow_network import SlowPaths
from slurm_health.training.diagnosis.slow_rank import ComputesLonger, NoProcessor, SlowData
from slurm_health.training.diagnosis.surroundings import (
    BrokenMemory,
    EndedFromOutside,
    GpuErrors,
    KilledForMemory,
    LostNode,
)
from slurm_health.training.diagnosis.waits import (
    CollectivesDiffer,
    ConnectionsBroke,
    FlightDiffers,
    WatchdogTells,
)

OPERATORS: tuple[InferenceOperator, ...] = (
    EndedFromOutside(),
    LostNode(),
    BrokenMemory(),
    KilledForMemory(),
    GpuErrors(),
    HungUntilEnded(),
    HungBefore(),
    DataEndedBefore(),
    FlightDiffers(),
    FirstFailure(),
    KnownErrors(),
    SameErrorEverywhere(),
    ProgramError(),
    NotThere(),
    OwnMistake(),
    SameLastWords(),
    KnownLastWords(),
    Killed(),
    ScriptCrashed(),
    CollectivesDiffer(),
    WatchdogTells(),
    ConnectionsBroke(),
    RankGone(),
    RankStopped(),
    RasBehind(),
    RankElsewhere(),
    WaitsDiffer(),
    NobodyLeaves(),
    NodeSilent(),
    FileAwaited(),
    ConnectionsUnanswered(),
    SlowPaths(),
    NoProcessor(),
    SlowData(),
    ComputesLonger(),
)
