# SPDX-License-Identifier: Apache-2.0
"""What a worker says, as `preflight.probes.worker` writes it: a type for each kind of event. Pure.

A worker has nothing of ours but the standard library, so it writes plain JSON. Each event becomes a
value of a type here where it arrives.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from slurm_health.records.probe_catalog import ON_CPUS


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """One thing that a worker says."""


# --- before its first round ----------------------------------------------------------------------


class Loaded(Event, frozen=True, kw_only=True, tag="loaded"):
    """It has loaded what it measures with, and opens its device next."""

    torch: str


class NoTorch(Event, frozen=True, kw_only=True, tag="no_torch"):
    """Its interpreter has no torch: it is of no use."""

    detail: str


class Opened(Event, frozen=True, kw_only=True, tag="opened"):
    """Its device is open."""


class Unusable(Event, frozen=True, kw_only=True, tag="unusable"):
    """Its device cannot be used, and is at fault."""

    detail: str


class Refused(Event, frozen=True, kw_only=True, tag="refused"):
    """It does not use its device, for a reason that is no fault of it."""

    detail: str


class Ready(Event, frozen=True, kw_only=True, tag="ready"):
    """It waits for rounds; what it works with is recorded in `WorkersReady`."""

    store_port: int
    torch: str
    backend: str
    device: str
    collective_library: str
    start_ms: float
    model: str
    free_bytes: int
    ports_gbit_per_s: list[float] = []
    gflop_per_s: float = 0.0
    memory_gb_per_s: float = 0.0
    nvlink_domain: str = ""
    gpus: list[str] = []

    @property
    def on_cpus(self) -> bool:
        """Whether it computes with processors, not with an accelerator."""
        return self.backend in ON_CPUS


# --- in a round ----------------------------------------------------------------------------------


class InRound(Event, frozen=True, kw_only=True):
    """Something that belongs to a round."""

    round: int


class ScopeEntered(InRound, frozen=True, kw_only=True, tag="scope"):
    """With whom it works from now on."""

    scope: str


class Measured(InRound, frozen=True, kw_only=True, tag="sample"):
    """What one probe measured; the fields are those of `Sampled`, for one worker.

    `device` is set where a worker has several, and gives each one's by itself.
    """

    probe: str
    quantity: str
    scope: str
    iteration_ms: list[float]
    world_size: int
    total_bytes: int
    flop: float
    figures: dict[str, Any]
    device: int | None = None
    taken_ms: list[float] = []


class Done(InRound, frozen=True, kw_only=True, tag="done"):
    """How its round ended: `measured`, `unmeasured`, `timed_out` or `failed`.

    `own_fault`: no other node can be the cause. `spent`: it is not to be used again. `connecting`:
    whom NCCL was connecting when it was told to stop, of its node by local rank, or all by rank.
    """

    outcome: str
    detail: str
    own_fault: bool = False
    wrong_results: bool = False
    spent: bool = False
    connecting: list[int] = []  # msgspec copies it


_ANY = Loaded | NoTorch | Opened | Unusable | Refused | Ready | ScopeEntered | Measured | Done


def event_of(said: object) -> Event:
    """Return the event that a worker's JSON stands for.

    Raises:
        ValueError: it stands for none.
    """
    event: Event = msgspec.convert(said, _ANY)
    return event


def decode(line: bytes) -> Event:
    """Return the event in a line.

    Raises:
        ValueError: it holds none.
    """
    # Not by msgspec: a probe of a site may give a figure that is not a number, which Python writes.
    return event_of(json.loads(line))
