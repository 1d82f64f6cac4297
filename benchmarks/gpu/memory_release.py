# SPDX-License-Identifier: Apache-2.0
"""4: how soon the memory of killed workers is free, idle and busy, killed in turn and together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import product

from benchmarks.gpu.child import Child, running
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.step import Amount, Figure, NotMeasured, Section, Step

HOLDERS = 4
_START_LIMIT_S = 180.0
_FREE_LIMIT_S = 60.0
# The job's script waits no longer than this for the devices: the rest of what a check takes back.
_TOO_LATE_S = 20.0
# Of what the workers held, and a context's worth: what the driver keeps or gives back later.
_LEFT_OVER, _LEFT_OVER_BYTES = 0.02, 64_000_000
_MORE_THAN_FREE = 0.9


def steps(amount: Amount) -> list[Step]:
    """Return a step for each size, with workers idle or busy, killed in turn or together."""
    return [
        Step(
            name=f"{held_bytes / 1e9:g} GB, {what}, {how}",
            does=f"kill {HOLDERS} processes that hold it, and wait until it is free",
            takes_s=45.0,
            measure=partial(_measured, held_bytes, what, together=how == "together"),
        )
        for held_bytes, what, how in product(
            amount.held_bytes, ("idle", "busy"), ("in turn", "together")
        )
    ]


SECTION = Section(number=4, title="memory of killed workers", steps=steps)


def _measured(held_bytes: int, what: str, machine: Machine, *, together: bool) -> list[Figure]:
    devices = 0 if machine.on_cpus else 1
    watch = Child(machine, "watch", devices, environ=machine.environ)
    with running([watch]):
        before_bytes = int(watch.event(_START_LIMIT_S)["used_bytes"])
        if devices and held_bytes > _MORE_THAN_FREE * (_total_bytes(machine) - before_bytes):
            return [Figure(name="left out", value=f"{held_bytes / 1e9:g} GB are not free")]
        words = (held_bytes // HOLDERS, what, devices)
        holders = [Child(machine, "hold", *words, environ=machine.environ) for _ in range(HOLDERS)]
        with running(holders):
            for holder in holders:
                holder.event(_START_LIMIT_S)
            watch.tell(" ".join(str(holder.pid) for holder in holders))
            _await(watch, at_least=before_bytes + held_bytes)
            begun_s = time.time()
            _kill(holders, together=together)
            gone_s = time.time() - begun_s
            left_bytes = _LEFT_OVER_BYTES + _LEFT_OVER * held_bytes
            free_s = _await(watch, at_most=before_bytes + left_bytes) - begun_s
    return [
        Figure(name="processes gone", value=round(gone_s, 3), unit="s"),
        Figure(
            name="memory free",
            value=round(free_s, 3),
            unit="s",
            wrong=f"later than {_TOO_LATE_S:.0f} s" if free_s > _TOO_LATE_S else "",
        ),
    ]


def _total_bytes(machine: Machine) -> int:
    return machine.facts.devices[0].total_bytes


def _kill(holders: Sequence[Child], *, together: bool) -> None:
    if together:
        for holder in holders:
            holder.signal()
    for holder in holders:
        holder.signal()
        if not holder.wait():
            raise NotMeasured(f"process {holder.pid} hangs in the kernel")


def _await(watch: Child, *, at_least: float = 0.0, at_most: float = float("inf")) -> float:
    """Return the moment when the memory in use is within these bounds.

    Raises:
        NotMeasured: it is not for long.
    """
    give_up = time.monotonic() + _FREE_LIMIT_S
    while time.monotonic() < give_up:
        seen = watch.event(_FREE_LIMIT_S)
        if at_least <= seen["used_bytes"] <= at_most:
            return float(seen["at_s"])
    raise NotMeasured(
        f"{seen['used_bytes'] / 1e9:.2f} GB are in use after {_FREE_LIMIT_S:.0f} s, not between"
        f" {at_least / 1e9:.2f} and {at_most / 1e9:.2f}"
    )
