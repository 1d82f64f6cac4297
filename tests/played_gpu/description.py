# SPDX-License-Identifier: Apache-2.0
"""The played GPUs of one node and what is broken in them: one flat text file for all who play.

The played CUDA runtime, driver, NCCL and NVML read the file that `PLAYED_GPUS_FILE` names, and read
it again once it has changed: it is replaced by rename, so a fault can strike a running process.
README.md describes the format and what each fault does.
"""

import dataclasses
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

VARIABLE = "PLAYED_GPUS_FILE"
FORMAT = 1
MIB, GIB = 1 << 20, 1 << 30
# The libraries keep tables of this size.
MOST_DEVICES = 64
_NAMESPACE = uuid.UUID("6f1d3c58-6c1e-4b3a-9a2e-0d7c5b7e4a10")  # of the UUIDs that are made here


class NotADescription(ValueError):
    """A device or a fault that no played library would understand."""


# What breaks, not how it looks: each library shows what a real one would. README.md describes each.
FAULT_KINDS = (
    *("open_error", "open_slowly", "slow", "throttle", "wrong_bit", "sticky_error", "peer_error"),
    *("cublas_error", "cudnn_error", "off_bus", "hang", "memory_used", "slow_memory"),
    *("wrong_memory", "slow_host", "link_slow", "link_drop", "link_never", "link_flip"),
    *("nccl_init_hang", "nccl_async_error", "nccl_version", "strike_init", "strike_collective"),
    # What NVML alone shows, or shows otherwise than it would by itself.
    *("nvml_error", "no_handle", "uncorrected_errors", "corrected_errors", "remapped_rows"),
    *("remap_pending", "remap_failed", "retired_pages", "ecc_mode", "recovery_action"),
    *("nvlinks_down", "pcie_width", "max_pcie_width", "pcie_generation", "fabric_state"),
    *("fabric_status", "fabric_cluster", "fabric_clique", "mig_mode", "persistence_mode"),
    *("occupied_by", "clock_reasons", "clock_mhz", "temperature_c", "power_w", "utilization"),
    *("memory_utilization", "power_limit_mw"),
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, as it would be if it were well.

    Speeds of 0 stand for as fast as the CPU that plays it. `jitter` is the standard deviation of
    the time of an operation, as a share of it.
    """

    name: str = "Played GPU"
    uuid: str = ""
    pci_address: str = ""
    memory_bytes: int = 2 * GIB
    processors: int = 16
    capability: str = "9.0"
    tflops: float = 0.0
    memory_gb_per_s: float = 0.0
    link_gb_per_s: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is broken in one device: one of `FAULT_KINDS`, with its numbers."""

    device: int
    kind: str
    value: float = 0.0
    after: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs of one node. NCCL's played connections come from `address`.

    `nvml_start` is the error that NVML does not start with; -1: it hangs.
    """

    devices: tuple[Device, ...]
    faults: tuple[Fault, ...] = ()
    address: str = "127.0.0.1"
    nccl_version: int = 22907
    driver_version: int = 13000  # as cuDriverGetVersion says it
    nvml_start: int = 0


def machine(
    count: int, device: Device | None = None, *, address: str = "127.0.0.1", seed: str | None = None
) -> Machine:
    """Return so many devices of one kind, each with a UUID and a PCI address of its own.

    UUIDs differ between nodes if `seed` does, as by the node's name; without one they are those of
    the calling process. Processes on devices of one UUID share their memory: what runs beside
    others of the same process needs a seed of its own.
    """
    kind = device or Device()
    node = f"process {os.getpid()}" if seed is None else seed
    return Machine(
        devices=tuple(
            dataclasses.replace(
                kind,
                uuid=kind.uuid or f"GPU-{uuid.uuid5(_NAMESPACE, f'{node}/{index}')}",
                pci_address=kind.pci_address or f"0000:{0x19 + 8 * index:02x}:00.0",
            )
            for index in range(count)
        ),
        address=address,
    )


def with_faults(played: Machine, *faults: Fault) -> Machine:
    """Return the machine with these faults as well; one of the same kind and device gives way."""
    new = {(fault.device, fault.kind) for fault in faults}
    kept = (fault for fault in played.faults if (fault.device, fault.kind) not in new)
    return dataclasses.replace(played, faults=(*kept, *faults))


def text(played: Machine) -> str:
    """Return the file's text."""
    _require_known(played)
    return "".join(f"{line}\n" for line in _lines(played))


def _lines(played: Machine) -> Iterator[str]:
    yield f"played_gpus {FORMAT}"
    yield f"count {len(played.devices)}"
    yield f"address {played.address}"
    yield f"nccl_version {played.nccl_version}"
    yield f"driver_version {played.driver_version}"
    yield f"nvml_start {played.nvml_start}"
    for index, device in enumerate(played.devices):
        for field in dataclasses.fields(device):
            yield f"device {index} {field.name} {_number(getattr(device, field.name))}"
    for fault in played.faults:
        yield (
            f"fault {fault.device} {fault.kind} {_number(fault.value)} after {_number(fault.after)}"
        )


def _number(value: object) -> str:
    """Return 719.0 as 719, and 85899345920 without an exponent: C reads both."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def parsed(file_text: str) -> Machine:
    """Return what a text of `text` describes."""
    machine_keys: dict[str, str] = {}
    devices: dict[int, dict[str, str]] = {}
    faults: list[Fault] = []
    for line in file_text.splitlines():
        match line.split(maxsplit=3):
            case ["device", index, key, value]:
                devices.setdefault(int(index), {})[key] = value
            case ["fault", index, kind, numbers]:
                number, _, after = numbers.partition(" after ")
                fault = Fault(device=int(index), kind=kind, value=float(number), after=float(after))
                faults.append(fault)
            case [key, value]:
                machine_keys[key] = value
    return Machine(
        devices=tuple(_device(devices[index]) for index in sorted(devices)),
        faults=tuple(faults),
        address=machine_keys["address"],
        nccl_version=int(machine_keys["nccl_version"]),
        driver_version=int(machine_keys["driver_version"]),
        nvml_start=int(machine_keys["nvml_start"]),
    )


def _device(keys: dict[str, str]) -> Device:
    kinds = get_type_hints(Device)
    return Device(**{name: kinds[name](value) for name, value in keys.items()})


def _require_known(played: Machine) -> None:
    if len(played.devices) > MOST_DEVICES:
        raise NotADescription(f"{len(played.devices)} devices: at most {MOST_DEVICES} are played")
    for fault in played.faults:
        if fault.kind not in FAULT_KINDS:
            raise NotADescription(
                f"no fault {fault.kind!r}; those that are played: {', '.join(FAULT_KINDS)}"
            )
        if not 0 <= fault.device < len(played.devices):
            raise NotADescription(f"fault {fault.kind}: there is no device {fault.device}")


def write(path: Path, played: Machine) -> None:
    """Replace the file by rename, so that whoever reads it sees all of one description."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(text(played))
    new.replace(path)


def read(path: Path) -> Machine:
    """Return what the file describes."""
    return parsed(path.read_text())


def strike(path: Path, *faults: Fault) -> None:
    """Add faults to a file; processes that play its devices have them from their next call on."""
    write(path, with_faults(read(path), *faults))
