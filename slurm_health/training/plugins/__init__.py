# SPDX-License-Identifier: Apache-2.0
"""What others write to have their own data collected and their own diagnosis made.

A distribution of theirs registers its classes as entry points; `training.monitor` finds them, runs
each in a child with a time limit, and adapts them to what is built in.

    data            collectors, and what they collected: kept by kind and time
    operators       from one inference to the next, until nothing new follows
    diagnosticians  observe a problem, and ask for an action about it

The modules are pure. This door of theirs only adds the machine's clock, for a `DataManager` that is
given none.

docs/reference/plugins.md says which entry points there are, and what each name of these is inside.
"""

import time
from collections.abc import Callable

from slurm_health.training.plugins import data
from slurm_health.training.plugins.data import KEEP_S, MOST_KEPT, DataCollector, Kept
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


class DataManager(data.DataManager):
    """Keeps what was collected for ten minutes, by the machine's clock unless another is given."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        *,
        keep_s: float = KEEP_S,
        most: int = MOST_KEPT,
    ) -> None:
        super().__init__(clock, keep_s=keep_s, most=most)
