# SPDX-License-Identifier: Apache-2.0
"""What `sbatch --test-only` answers: when and where a job would start."""

from __future__ import annotations

import re

from slurm_health.records.allocation import Estimate
from slurm_health.records.errors import SlurmError
from slurm_health.records.nodeset import expand

# The environment in which Slurm's commands print a time as seconds since the epoch.
PRINT_EPOCH = {"SLURM_TIME_FORMAT": "%s"}
# 26.05.5 says `at 1795383392 a using 1 processors`.
_START = re.compile(r"to start at (\d{1,18})(?: a)? using \d+ processors on nodes (\S+)")
_PREEMPTS = re.compile(r"Preempts: ")


def estimate_of(text: str) -> Estimate:
    """Read the answer that was printed with `PRINT_EPOCH`.

    Raises:
        SlurmError: it is none.
    """
    found = _START.search(text)
    try:
        nodes = expand(found[2]) if found else ()
    except ValueError:
        nodes = ()
    if found is None or not nodes:
        said = " / ".join(text.split("\n")).strip(" /")[:200]
        raise SlurmError(f"sbatch --test-only answered {said!r}, expected a start time")
    return Estimate(
        start_s=float(found[1]), nodes=nodes, preempts=_PREEMPTS.search(text) is not None
    )
