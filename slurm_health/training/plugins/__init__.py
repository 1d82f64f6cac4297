# SPDX-License-Identifier: Apache-2.0
"""What others write to have their own data collected and their own diagnosis made. Pure.

A distribution of theirs registers its classes as entry points; `training.monitor` finds them, runs
each in a child with a time limit, and adapts them to what is built in.

    data            collectors, and what they collected: kept by kind and time
    operators       from one inference to the next, until nothing new follows
    diagnosticians  observe a problem, and ask for an action about it

docs/reference/plugins.md says which entry points there are, and what each name of these is inside.
"""

from slurm_health.training.plugins.data import DataCollector, DataManager, Kept
from slurm_health.training.plugins.diagnosticians import (
    ActionKind,
    DiagnosisAction,
    DiagnosisManager,
    DiagnosisObservation,
    Diagnostician,
    EventAction,
    LeaveNode,
    NoAction,
    RestartRanks,
    StopJob,
)
from slurm_health.training.plugins.operators import (
    Attribution,
    Inference,
    InferenceChain,
    InferenceOperator,
    Sureness,
)

__all__ = [
    "ActionKind",
    "Attribution",
    "DataCollector",
    "DataManager",
    "DiagnosisAction",
    "DiagnosisManager",
    "DiagnosisObservation",
    "Diagnostician",
    "EventAction",
    "Inference",
    "InferenceChain",
    "InferenceOperator",
    "Kept",
    "LeaveNode",
    "NoAction",
    "RestartRanks",
    "StopJob",
    "Sureness",
]
