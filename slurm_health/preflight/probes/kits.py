# SPDX-License-Identifier: Apache-2.0
"""What a worker works with: torch, or nothing but Python and numpy. One face for both.

A worker and its rounds go through a kit and never ask which one it is. `torch_kit` is for the
interpreter that the job trains with, `light_kit` for any. A probe is of one kit, and may have a
sibling of the same name in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

from slurm_health.preflight.probes.context import ProbeContext, Sample

Check = Callable[[], None]
Measure = Callable[[ProbeContext], list[Sample]]


class Store(Protocol):
    """Through which the members of a group find each other; keys are seen by all of them."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return a value that is there."""

    def check(self, keys: list[str]) -> bool:
        """Tell whether there is a value of each key."""


OpenStore = Callable[[str, int], Callable[[str], Store]]
"""Connects to the store at an address and a port; returns what gives its part of a prefix."""


class Membership(Protocol):
    """The group that a worker is in, at most one at a time. Whatever waits calls `check`."""

    def form(
        self, store: Any, *, rank: int, world_size: int, timeout: timedelta, check: Check
    ) -> None:
        """Form it with all its members."""

    def part(self, ranks: list[int], *, timeout: timedelta, check: Check) -> Any:
        """Return a part of it with these ranks, which every member is in one of."""

    def exchange_first(self, group: Any, check: Check) -> None:
        """Make sure that a part (None: the whole group) can exchange data at all."""

    def leave(self) -> None:
        """Leave it, if there is one."""

    def leave_broken(self) -> bool:
        """Leave one of which a member may be missing; tell whether this worker is still good."""

    def interrupt(self) -> None:
        """End whatever the main thread waits for in it without calling `check`."""


class Kit(Protocol):
    """What the probes of a worker are made with.

    `version` is of torch, empty where there is none.
    """

    @property
    def version(self) -> str:
        """The version of torch."""

    def claim(self, local_rank: int, *, devices: int, environ: Mapping[str, str]) -> Any:
        """Return the device of a worker.

        Raises:
            Unusable: the device or its driver failed.
            SystemExit: it cannot be used for another reason.
        """

    def serve_store(self) -> tuple[object, int]:
        """Serve a store for as long as this object lives; return its port too."""

    def facts(self, device: Any, *, devices: int, environ: Mapping[str, str]) -> dict[str, Any]:
        """Return what the event `ready` says of a worker.

        Raises:
            Unusable: the device failed.
            SystemExit: it cannot be used for another reason.
        """

    def open_store(self, timeout: timedelta) -> OpenStore:
        """Return what connects to the store of another worker."""

    def membership(self, device: Any) -> Membership:
        """Return the group of a worker with this device: none as yet."""

    def context(self, membership: Any, **fields: Any) -> ProbeContext:
        """Return what a probe is given."""

    def measure_of(self, name: str, path: str) -> Measure | None:
        """Return what runs a probe, None where it is one of the other kit.

        Raises:
            NotMeasured: its file cannot be loaded, or is no probe.
        """

    def is_out_of_memory(self, err: BaseException) -> bool:
        """Tell an error that says there is no memory from all others."""

    def users(self, device: Any) -> str:
        """Return which other processes use a device, empty where none is known of."""

    def ways(self, device: Any, environ: Mapping[str, str]) -> str:
        """Return by which ways data has gone so far, empty where that is not known."""

    def is_replaced(self, device: Any) -> bool:
        """Tell whether a worker with such a device is replaced after what may have spoilt it."""
