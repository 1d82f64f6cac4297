# SPDX-License-Identifier: Apache-2.0
"""Steps that take longer than before, for all ranks, and not by what ranks compute themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

USUAL_WINDOWS = 3  # at least so many, before it is known what is usual
SLOW_WINDOWS = 3  # in a row; a checkpoint or an evaluation is over by then
LONGER = 0.3  # of a usual step, in each of these
FEWEST_STEPS = 3  # in a window
_KEPT = 60


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """A rank so far: steps, when the latest ended, seconds of its own in so many steps."""

    steps: int
    last_s: float
    own_s: float = 0.0
    own_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """A step in a window of time, in ms: all of it, and the most that a rank took by itself."""

    step_ms: float
    own_ms: float = 0.0  # 0 where ranks do not tell it

    @property
    def waits_ms(self) -> float:
        """What is no rank's own: communication."""
        return self.step_ms - self.own_ms


@dataclass(frozen=True, kw_only=True)
class Longer:
    """What a step took in the latest windows, and before."""

    now: StepWindow
    usual: StepWindow


class SlowSteps:
    """Compares the steps of one program with its own earlier ones, window by window."""

    def __init__(self) -> None:
        self._before: Mapping[int, RankSteps] = {}
        self._windows: deque[StepWindow] = deque(maxlen=_KEPT)
        self._named = False

    def window(self, now: Mapping[int, RankSteps]) -> Longer | None:
        """Close a window; return by how much steps take longer, once until that is over."""
        before = {rank: self._before[rank] for rank in now if rank in self._before}
        made = [now[rank].steps - each.steps for rank, each in before.items()]
        if not made or len(made) < len(now) or min(made) < 0:  # ranks that are new, or start again
            self._before = dict(now)
            return None
        if min(made) < FEWEST_STEPS:
            return None  # too short a window for these steps: it goes on
        self._windows.append(_window(before, now))
        self._before = dict(now)
        longer = self._longer()
        new = longer is not None and not self._named
        self._named = longer is not None
        return longer if new else None

    def _longer(self) -> Longer | None:
        windows = list(self._windows)
        earlier, latest = windows[:-SLOW_WINDOWS], windows[-SLOW_WINDOWS:]
        if len(earlier) < USUAL_WINDOWS:
            return None
        usual = _middle(earlier)
        least_ms = usual.waits_ms + LONGER * usual.step_ms
        if any(each.waits_ms < least_ms for each in latest):
            return None
        return Longer(now=_middle(latest), usual=usual)


def _window(before: Mapping[int, RankSteps], now: Mapping[int, RankSteps]) -> StepWindow:
    step_ms, own_ms = [], [0.0]
    for rank, began in before.items():
        ended = now[rank]
        step_ms.append(1e3 * (ended.last_s - began.last_s) / (ended.steps - began.steps))
        if ended.own_steps > began.own_steps:
            own_s = ended.own_s - began.own_s
            own_ms.append(1e3 * own_s / (ended.own_steps - began.own_steps))
    return StepWindow(step_ms=median(step_ms), own_ms=max(own_ms))


def _middle(windows: list[StepWindow]) -> StepWindow:
    return StepWindow(
        step_ms=median(each.step_ms for each in windows),
        own_ms=median(each.own_ms for each in windows),
    )
