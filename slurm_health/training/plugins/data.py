# SPDX-License-Identifier: Apache-2.0
"""Collectors that others write, and what collectors have collected, by kind and time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

KEEP_S = 600.0
MOST_KEPT = 10_000  # of one kind


class DataCollector(ABC):
    """Collects one kind of data; it may raise.

    Attributes:
        kind: under which its data is kept and what reports call it; its class's name unless set.
        environ: of the job; set before it is asked anything there.
    """

    kind: str = ""
    environ: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.kind = cls.__dict__.get("kind") or cls.__name__

    @abstractmethod
    def is_enabled(self) -> bool:
        """Tell whether it can collect here: yes, for those that only ask what is inherited."""
        return True

    @abstractmethod
    def collect_data(self) -> object:
        """Return what there is, None where there is nothing.

        In a job it comes from a child process: JSON must be able to carry it.
        """


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One thing that was collected, and when, in seconds by the clock of who keeps it."""

    kind: str
    time_s: float
    data: Any


class DataManager:
    """Keeps what was collected, and forgets it.

    Args:
        clock: seconds, as of `time.time`.
        keep_s: what is older than this is forgotten.
        most: so many of one kind are kept, the latest.
    """

    def __init__(
        self, clock: Callable[[], float], *, keep_s: float = KEEP_S, most: int = MOST_KEPT
    ) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._most = most
        self._kept: dict[str, deque[Kept]] = {}

    def store(self, kind: str, data: object, *, time_s: float | None = None) -> None:
        """Keep something of a kind, as collected now unless told otherwise."""
        at_s = self._clock() if time_s is None else time_s
        of_kind = self._kept.setdefault(kind, deque())
        before = next((n for n, each in enumerate(of_kind) if each.time_s > at_s), len(of_kind))
        of_kind.insert(before, Kept(kind=kind, time_s=at_s, data=data))
        if len(of_kind) > self._most:
            of_kind.popleft()

    def get(self, kind: str) -> list[Kept]:
        """Return what is kept of a kind, oldest first."""
        of_kind = self._kept.get(kind, deque())
        oldest_s = self._clock() - self._keep_s
        while of_kind and of_kind[0].time_s < oldest_s:
            of_kind.popleft()
        return list(of_kind)

    def latest(self, kind: str) -> Any:
        """Return the latest data of a kind, None where none is kept."""
        kept = self.get(kind)
        return kept[-1].data if kept else None
