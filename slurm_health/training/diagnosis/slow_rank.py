# SPDX-License-Identifier: Apache-2.0
"""Why one rank is slower than the others: no processor, its data, or more to compute.

From `slower-rank`, the symptom, to what takes the most of the time that it has over the others. A
rank whose time nothing explains is called slow, and no more.
"""

from __future__ import annotations

import msgspec

from slurm_health.records.script_records import SLOWER_RANK
from slurm_health.training.diagnosis.collected import Collected
from slurm_health.training.diagnosis.inference import Inference, Sureness
from slurm_health.training.diagnosis.stragglers import Spent

# Of the time that a rank has over the others: what takes so much of it is why.
_MOST = 0.5


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that is slower than the others, and how it and they spend a step.

    `tells_loading`: it says how long it waits for its data.
    """

    rank: int
    node: str
    spent: Spent
    usual: Spent
    tells_loading: bool = False

    @property
    def over_ms(self) -> float:
        """What it has over the others, per step."""
        return self.spent.own_ms - self.usual.own_ms

    @property
    def lacks_processor(self) -> bool:
        """Whether it mostly waits for a processor; then it is late in all that it does."""
        return self._takes_most(self.spent.unserved_ms - self.usual.unserved_ms)

    @property
    def waits_for_data(self) -> bool:
        """Whether it mostly waits for its data."""
        return self._takes_most(self.spent.loading_ms - self.usual.loading_ms)

    @property
    def computes_longer(self) -> bool:
        """Whether its main thread mostly runs for longer."""
        return self._takes_most(self.spent.ran_ms - self.usual.ran_ms)

    def _takes_most(self, ms: float) -> bool:
        return self.over_ms > 0 and ms >= _MOST * self.over_ms


def observe_slow_rank(data: Collected) -> Inference | None:
    """Return the symptom of a rank that is slower than the others, None where none is."""
    slow = data.get(SlowRank)
    if slow is None:
        return None
    unknown = "a device, a filesystem or a library"
    if not slow.tells_loading:
        unknown = "its data, a device, a filesystem or a library"
    return _inference(
        slow,
        SLOWER_RANK,
        f"is slower than the others and waits for something ({unknown}); what for is not known",
        Sureness.POSSIBLE,
        advice=f"check {slow.node} before the next start (slurm-health check"
        " --straggler-detection)"
        + ("" if slow.tells_loading else "; heartbeat.loading(loader) would tell waits for data"),
    )


def no_processor(_: Inference, data: Collected) -> Inference | None:
    """It is ready to run and has no processor: a limit holds it back, or others run on its own."""
    slow = data.get(SlowRank)
    if slow is None or not slow.lacks_processor:
        return None
    limited = slow.spent.throttled_ms >= slow.usual.throttled_ms + _MOST * slow.over_ms
    why = "a CPU limit holds it back" if limited else "others use its processors"
    at = f"its cgroup was held back by its CPU limit, {slow.spent.throttled_ms:.0f} ms per step"
    return _inference(
        slow,
        "no-processor",
        f"is slow because it waits for a processor: {why}",
        Sureness.LIKELY,
        f"its main thread was ready to run and did not for {slow.spent.unserved_ms:.0f} ms"
        f" per step, {slow.usual.unserved_ms:.0f} ms usual",
        *([at] if limited else []),
        advice="look at the limit (cpu.max, or cpu.cfs_quota_us) of the cgroups that it is"
        f" in on {slow.node}, and at what Slurm gave the job (--cpus-per-task)"
        if limited
        else f"look at what runs on {slow.node} (top), and whether its threads and the data"
        " loader's workers are more than its processors (--cpus-per-task, OMP_NUM_THREADS)",
    )


def slow_data(_: Inference, data: Collected) -> Inference | None:
    """By its own word it waits for its data loader: a filesystem, or what is done to each batch."""
    slow = data.get(SlowRank)
    if slow is None or not slow.waits_for_data or slow.lacks_processor:
        return None
    return _inference(
        slow,
        "slow-data-loader",
        "is slow because it waits for its data loader",
        Sureness.LIKELY,
        f"it waited {slow.spent.loading_ms:.0f} ms per step for its data,"
        f" {slow.usual.loading_ms:.0f} ms usual",
        advice=f"look at the filesystem of its data as {slow.node} sees it; more workers"
        " of the loader may hide the wait (num_workers, prefetch_factor)",
    )


def computes_longer(_: Inference, data: Collected) -> Inference | None:
    """It runs for longer than the others: a slower processor or device, or more to do."""
    slow = data.get(SlowRank)
    if slow is None or not slow.computes_longer or slow.lacks_processor or slow.waits_for_data:
        return None
    return _inference(
        slow,
        "computes-longer",
        "is slow because it computes for longer: a slower processor or device, or more to"
        " do than the others",
        Sureness.LIKELY,
        f"its main thread ran for {slow.spent.ran_ms:.0f} ms per step,"
        f" {slow.usual.ran_ms:.0f} ms usual",
        advice=f"check {slow.node} before the next start (slurm-health check"
        " --straggler-detection); check whether this rank has longer batches",
    )


def _inference(
    slow: SlowRank, name: str, description: str, sureness: Sureness, *evidence: str, advice: str
) -> Inference:
    """Return an inference about the rank; that it is slow is no fault of its node's."""
    own_ms, usual_ms = slow.spent.own_ms, slow.usual.own_ms
    return Inference(
        name=name,
        description=f"rank {slow.rank} on {slow.node} {description}",
        sureness=sureness,
        nodes=(slow.node,),
        ranks=(slow.rank,),
        evidence=(
            f"it takes {own_ms:.0f} ms of its own per step, {usual_ms:.0f} ms usual",
            *evidence,
        ),
        advice=advice,
    )
