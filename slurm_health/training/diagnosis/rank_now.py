# SPDX-License-Identifier: Apache-2.0
"""What a node's monitor tells of one rank, and whether the rank rested between two such times."""

from __future__ import annotations

import msgspec

from slurm_health.training.diagnosis.collected import FlightRecord
from slurm_health.training.diagnosis.pace import Pace
from slurm_health.training.diagnosis.seen import Frame

# A main thread that only waits comes back so often, as from waits with a time limit, and runs for
# next to nothing; on a starved node it may be ready to run for longer. One that spins runs all the
# time, or is ready to, and does not wait in the kernel.
_WAKES_PER_S = 0.5
_RESTS_SHARE, _READY_SHARE, _SPINS_SHARE = 0.002, 0.05, 0.9
IDLE_BYTES_PER_S = 16 << 10  # that a rank and its children read and write


class RankNow(msgspec.Struct, frozen=True, array_like=True):
    """One rank at this moment; the program it belongs to is a step of the job, or its script.

    Of its heartbeat: the step, how many so far, seconds since the last, what one takes, the longest
    pause, seconds of its own in so many steps, of which it waited `loading_s` for its data, which
    has given so many batches, and may have ended: all 0 of a rank without one. `cpu_s` and
    `io_bytes` are of it and its children. `world` is how many ranks there are, 0 where that is not
    told. Its main thread ran for `ran_s`, was ready to for `unserved_s` without a processor, and
    went to wait in the kernel `wakes` times; `throttled_s` is how long its cgroup was held back by
    a CPU limit. 0 where that is not known.
    Its work, as far as the heartbeat tells that: `tokens` so far, its `role`, by which ranks do the
    same, and the `replica` of the model that it belongs to, -1 where that is not known.
    """

    program: str
    rank: int
    pid: int
    state: str
    cpu_s: float
    io_bytes: int
    step: int = 0
    steps: int = 0
    age_s: float = 0.0
    typical_s: float = 0.0
    longest_s: float = 0.0
    own_s: float = 0.0
    own_steps: int = 0
    world: int = 0
    loading_s: float = 0.0
    batches: int = 0
    data_ended: bool = False
    ran_s: float = 0.0
    unserved_s: float = 0.0
    throttled_s: float = 0.0
    wakes: int = 0
    tokens: float = 0.0
    role: str = ""
    replica: int = -1

    @property
    def pace(self) -> Pace:
        """How it gets on."""
        return Pace(steps=self.steps, typical_s=self.typical_s, longest_s=self.longest_s)


class RankLook(msgspec.Struct, frozen=True, array_like=True):
    """What one rank answered, and what it and its children wait for in the kernel.

    `gpu_share` is the share of time in which their GPU was used, 0 where that is not known, and
    `gpu_waits` tells that it did next to nothing in it.
    """

    program: str
    rank: int
    answered: bool
    kernel: str
    stack: tuple[Frame, ...] = ()
    flight: FlightRecord | None = None
    gpu_share: float = 0.0
    gpu_waits: bool = False


def rests(before: RankNow, now: RankNow, window_s: float) -> bool:
    """Tell whether a rank's main thread waited in one place, or spun in it, between two looks."""
    if window_s <= 0 or before.pid != now.pid:
        return False
    moved_bytes = abs(now.io_bytes - before.io_bytes)
    woke = now.wakes - before.wakes
    ran = (now.ran_s - before.ran_s) / window_s
    ready = (now.unserved_s - before.unserved_s) / window_s
    waits = (ran <= _RESTS_SHARE and ready <= _READY_SHARE) or ran + ready >= _SPINS_SHARE
    return waits and woke <= _WAKES_PER_S * window_s and moved_bytes <= IDLE_BYTES_PER_S * window_s
