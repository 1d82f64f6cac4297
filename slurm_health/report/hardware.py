# SPDX-License-Identifier: Apache-2.0
"""The parts of a node that its journal names: devices, their UUIDs and PCI addresses, interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_health.records.gpu_load import Burn, words
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import DevicesWatched, WorkersReady


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """One GPU as the driver names it. `said` is what it reported of itself under load."""

    index: int
    uuid: str
    pci_address: str
    said: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a node computes with, and over which network interface it reached the others."""

    model: str
    interface: str
    devices: tuple[DeviceReport, ...] = ()


def hardware_of(entries: Sequence[Entry]) -> Hardware | None:
    """Return what a node said of its parts, None where its workers were never ready."""
    ready: WorkersReady | None = None
    burns: dict[int, Burn] = {}
    said: dict[int, dict[str, None]] = {}
    for entry in entries:
        if isinstance(entry.record, WorkersReady):
            ready = entry.record
        elif isinstance(entry.record, DevicesWatched):
            for burn in entry.record.devices:
                burns[burn.index] = burn
                said.setdefault(burn.index, {}).update(dict.fromkeys(words(burn)))
    if ready is None:
        return None
    devices = tuple(
        DeviceReport(index=index, uuid=burn.uuid, pci_address=burn.bus, said=tuple(said[index]))
        for index, burn in sorted(burns.items())
    )
    return Hardware(model=ready.model, interface=ready.interface, devices=devices)
