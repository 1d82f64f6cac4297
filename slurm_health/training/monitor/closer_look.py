# SPDX-License-Identifier: Apache-2.0
"""What is looked at only while a training stands still, beside what its ranks answer.

What their GPUs do is asked of NVML: a rank that waits for its own GPU may use no processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from slurm_health.training.diagnosis.rank_now import RankLook, all_of
from slurm_health.training.monitor import py_spy
from slurm_health.training.monitor.gpu_activity import activity
from slurm_health.training.monitor.ranks import Ranks

_ANSWER_S = 3.0
_STACKS_S = 3.0  # of ranks that do not answer

Processes = Mapping[tuple[str, int], Sequence[int]]


def look_closer(ranks: Ranks) -> tuple[tuple[RankLook, ...], dict[str, str]]:
    """Return all that can be seen of the ranks on this node, and why what cannot."""
    looks = ranks.look(_ANSWER_S)
    processes = ranks.processes()
    looks, why_no_stacks = with_stacks(looks, processes, _STACKS_S)
    looks, why_no_gpus = _with_gpus(looks, processes)
    reasons = {"stacks": why_no_stacks, "gpu-activity": why_no_gpus}
    return tuple(looks), {what: why for what, why in reasons.items() if why}


def with_stacks(
    looks: Sequence[RankLook], processes: Processes, wait_s: float
) -> tuple[list[RankLook], str]:
    """Return the same with the stacks of those that did not answer; why some have none."""
    pids = {
        (look.program, look.rank): processes[look.program, look.rank][0]
        for look in looks
        if not look.answered and (look.program, look.rank) in processes
    }
    if not pids:
        return list(looks), ""
    read = py_spy.stacks(list(pids.values()), wait_s=wait_s)
    stacks = {rank: read.by_pid[pid] for rank, pid in pids.items() if pid in read.by_pid}
    return [
        msgspec.structs.replace(look, stack=stacks.get((look.program, look.rank), look.stack))
        for look in looks
    ], read.why_not


def _with_gpus(looks: Sequence[RankLook], processes: Processes) -> tuple[list[RankLook], str]:
    """Return the same with what their GPUs do; why that is not known of some."""
    seen = activity()
    found = []
    for look in looks:
        pids = processes.get((look.program, look.rank), ())
        use = all_of(seen.by_pid[pid] for pid in pids if pid in seen.by_pid)
        found.append(msgspec.structs.replace(look, gpu_share=use.share, gpu_waits=use.waits))
    return found, seen.why_not
