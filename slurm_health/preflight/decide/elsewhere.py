# SPDX-License-Identifier: Apache-2.0
"""Whether a job that leaves its slow nodes could start again at once: pure.

Leaving a slow node is worth seconds, not a wait in the queue. What is not known for sure counts as
a wait: the job then runs where it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from slurm_health.records.allocation import Estimate

# That much later is still at once: nodes that are cleaned up after a job, and clocks that differ.
SOON_S = 60.0
# What a pending job may wait for although nodes are free. One that waits for anything else, a limit
# of its owner included, might be given the nodes that a requeued job leaves for some seconds.
_NOT_FOR_NODES = ("BeginTime", "Dependency", "JobHeld")
_FOR_ITS_ARRAY = "JobArrayTaskLimit"
# A constraint that is about all nodes of the job together: `[rack1|rack2]`, `fast*2&big*2`.
_OF_ALL_NODES = re.compile(r"[\[*]")
_NAMED = 3  # jobs that are named before the rest is only counted
_YEAR_S = 365 * 86400.0


def wait_behind_jobs(job: str, partition: str, waiting: Mapping[str, str]) -> str:
    """Say which pending jobs might be given the nodes of a job that is requeued, empty for none.

    Their priority does not matter: the job is held while it moves, and they are not. Of an array
    that runs so many tasks at a time, the next one begins as soon as one is requeued.

    Args:
        job: what Slurm calls the job.
        partition: where it runs.
        waiting: the pending jobs that may run on its nodes, with what each waits for.
    """
    array = job.partition("_")[0]

    def may_start(name: str, why: str) -> bool:
        if why.startswith(_FOR_ITS_ARRAY):
            return name.partition("_")[0] == array
        return not why.startswith(_NOT_FOR_NODES)

    rivals = [name for name, why in waiting.items() if may_start(name, why)]
    if not rivals:
        return ""
    named = ", ".join(rivals[:_NAMED])
    more = f" and {len(rivals) - _NAMED} more" if len(rivals) > _NAMED else ""
    who = f"job {named} waits" if len(rivals) == 1 else f"jobs {named}{more} wait"
    return f"{who} for nodes of partition {partition}, and might be given its own meanwhile"


def wait_for_nodes(
    more: int, estimate: Estimate | None, unusable: Mapping[str, str], *, now_s: float
) -> str:
    """Say why a job would have to wait for nodes, empty if it would not.

    Args:
        more: how many nodes it needs beside those that it keeps.
        estimate: when and where those could be had; None where none are needed.
        unusable: of all nodes that it would run on, those that start no job now, with their state.
        now_s: when Slurm was asked.
    """
    nodes = f"{more} other node{'s' if more > 1 else ''}"
    if estimate is not None and estimate.preempts:
        return f"it would get {nodes} only by ending other jobs"
    delay_s = 0.0 if estimate is None else estimate.start_s - now_s
    if delay_s > SOON_S:
        return f"it would have to wait for {nodes}{_span(delay_s)}"
    if unusable:
        states = ", ".join(f"{node} is {state}" for node, state in unusable.items())
        return f"it would have to wait for nodes: {states}"
    return ""


def obstacle_to_asking(fields: Mapping[str, str]) -> str:
    """Say why Slurm cannot be asked for some more nodes for a job, empty if it can.

    Args:
        fields: the job's, as `scontrol show job` names them.
    """
    if _OF_ALL_NODES.search(fields.get("Features", "")):
        return f"--constraint={fields['Features']} is about all of its nodes together"
    if fields.get("Contiguous") == "1":
        return "its nodes are to be next to each other (--contiguous)"
    if "ReqSwitch" in fields:
        return "its nodes are to share switches (--switches)"
    return ""


def request(
    fields: Mapping[str, str], has: Sequence[str], placement: Mapping[str, str], *, more: int
) -> list[str]:
    """Return sbatch's options for `more` nodes as good as one that the job has.

    What the job asked for in all is not repeated: what it has on one of its nodes, each further one
    must have too.

    Args:
        fields: the job's, as `scontrol show job` names them.
        has: sbatch's options for what it has on one node.
        placement: sbatch's options for a job that is to start where this one starts.
        more: how many.
    """
    options = [f"--nodes={more}", f"--ntasks={more}", "--ntasks-per-node=1", *has]
    options += [f"--{option}={value}" for option, value in placement.items()]
    for key, option in _FIELDS.items():
        value = fields.get(key, "")
        if value not in {"", "(null)", "0", "N/A"}:
            options.append(f"--{option}={value}")
    if fields.get("OverSubscribe") == "NO":
        options.append("--exclusive")
    return options


_FIELDS = {"Features": "constraint", "MinTmpDiskNode": "tmp", "TimeLimit": "time"}


def _span(delay_s: float) -> str:
    """Return ` for 50 min`, as far as Slurm can tell: by the time limits of the jobs that run."""
    if delay_s >= _YEAR_S:
        return ", which are in use without an end in sight"
    minutes = max(1, round(delay_s / 60))
    if minutes < 120:
        return f" for up to {minutes} min"
    hours = round(delay_s / 3600)
    return f" for up to {hours} h" if hours < 48 else f" for up to {round(delay_s / 86400)} d"
