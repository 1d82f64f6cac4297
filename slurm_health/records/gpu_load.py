# SPDX-License-Identifier: Apache-2.0
"""What the GPUs said of themselves while they were under load. Pure.

`preflight.agent.gpu_monitor` writes the lines; a burn is what was sampled between two moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from itertools import pairwise

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.text import counted

# Bits of nvml.h's clocks event reasons.
IDLE = 0x1
HARDWARE_SLOWDOWN = 0x8
SOFTWARE_THERMAL = 0x20
HARDWARE_THERMAL = 0x40
POWER_BRAKE = 0x80
# The software's power cap (0x4) is normal under load and is not among them.
_WORDS = {
    HARDWARE_THERMAL: "hardware thermal slowdown",
    POWER_BRAKE: "power brake of the board or the rack",
    HARDWARE_SLOWDOWN: "hardware slowdown",
    SOFTWARE_THERMAL: "software thermal slowdown",
}
# A reason seen once may be the blink of a regulator.
LEAST_SAMPLES = 2
_DURING = " during the burn"


class DeviceSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU at one moment. None: this GPU, driver or library does not tell."""

    at_s: float
    index: int
    uuid: str = ""
    bus: str = ""
    clock_mhz: int | None = None
    reasons: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    uncorrected: int | None = None
    remapped_rows: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_pages: int | None = None
    lost: str = ""
    unanswered: str = ""


class NotSampled(msgspec.Struct, frozen=True, kw_only=True):
    """The sampler's only line where it cannot sample."""

    not_sampled: str


class Burn(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU over one burn.

    Clocks, slope and power are those of the samples under load, and None where the GPU was idle in
    all of them (`idle_samples`). The counters are what was added
    during the burn; None: not told at both its ends. `reason_samples` counts, for each reason,
    the samples that had it.
    """

    index: int
    uuid: str
    bus: str
    samples: int
    idle_samples: int = 0
    clock_mhz: float | None = None
    first_clock_mhz: float | None = None
    last_clock_mhz: float | None = None
    clock_slope_mhz_per_s: float | None = None
    reasons: int = 0
    reason_samples: dict[int, int] = {}
    max_temperature_c: int | None = None
    power_w: float | None = None
    uncorrected: int | None = None
    remapped_rows: int | None = None
    retired_pages: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    lost: str = ""
    unanswered: str = ""


def decode(line: bytes) -> DeviceSample | NotSampled | None:
    """Return what a line of the sampler says, None for a torn one."""
    with suppress(msgspec.DecodeError):
        return from_json(line, DeviceSample)
    with suppress(msgspec.DecodeError):
        return from_json(line, NotSampled)
    return None


def summarise(samples: Iterable[DeviceSample]) -> list[Burn]:
    """Return one summary per GPU, in the order of their numbers."""
    devices: dict[tuple[int, str], list[DeviceSample]] = {}
    named: dict[int, str] = {}
    for sample in sorted(samples, key=lambda each: each.at_s):
        # A GPU that is lost no longer tells its UUID.
        uuid = named.setdefault(sample.index, sample.uuid) if not sample.uuid else sample.uuid
        named[sample.index] = uuid
        devices.setdefault((sample.index, uuid), []).append(sample)
    return [_summary(index, uuid, each) for (index, uuid), each in sorted(devices.items())]


def those_of(uuids: Set[str], burns: Sequence[Burn]) -> list[Burn]:
    """Return the burns of these GPUs, all where none is known.

    One that does not tell its UUID is taken for one of them that is missing, if there is any.
    """
    missing = uuids - {burn.uuid for burn in burns}
    return [
        burn for burn in burns if not uuids or burn.uuid in uuids or (missing and not burn.uuid)
    ]


def words(burn: Burn) -> list[str]:
    """Return what is worth saying of one GPU, nothing for one that is well."""
    name = f"GPU {burn.index}" + (f" ({burn.uuid})" if burn.uuid else "")
    if burn.lost:
        return [f"{name}: lost during the burn: {burn.lost}"]
    said = [f"{name}: {text}{_DURING}" for text in _counted(burn)]
    if burn.unanswered:
        said.append(f"{name}: could not be asked{_DURING}: {burn.unanswered}")
    slowed = _slowed(_lasting(burn))
    if slowed:
        facts = [f"{name}: {' and '.join(slowed)}{_DURING}", *_clock_and_heat(burn)]
        said.insert(0, ", ".join(facts))
    return said


def words_of_all(burns: Iterable[Burn]) -> list[str]:
    """Return what is worth saying of a node's GPUs; of burns that show the same, the first."""
    found: dict[str, str] = {}
    for burn in burns:
        for text in words(burn):
            found.setdefault(text.partition(_DURING)[0], text)
    return list(found.values())


def _summary(index: int, uuid: str, samples: Sequence[DeviceSample]) -> Burn:
    busy = [each for each in samples if not (each.reasons or 0) & IDLE]
    from statistics import median  # agents load this module, and have no use for that one

    clocks = [(each.at_s, each.clock_mhz) for each in busy if each.clock_mhz is not None]
    speeds = [speed for _, speed in clocks]
    # A fifth of the burn: long enough to be steady, short enough to be its beginning or its end.
    edge = max(1, len(speeds) // 5)
    temperatures = [each.temperature_c for each in samples if each.temperature_c is not None]
    powers = [each.power_w for each in busy if each.power_w is not None]
    seen = _reason_samples(busy)
    return Burn(
        index=index,
        uuid=uuid,
        bus=next((each.bus for each in samples if each.bus), ""),
        samples=len(samples),
        idle_samples=len(samples) - len(busy),
        clock_mhz=median(speeds) if speeds else None,
        first_clock_mhz=median(speeds[:edge]) if speeds else None,
        last_clock_mhz=median(speeds[-edge:]) if speeds else None,
        clock_slope_mhz_per_s=_slope(clocks),
        reasons=sum(seen),
        reason_samples=seen,
        max_temperature_c=max(temperatures, default=None),
        power_w=median(powers) if powers else None,
        uncorrected=_added([each.uncorrected for each in samples]),
        remapped_rows=_added([each.remapped_rows for each in samples]),
        retired_pages=_added([each.retired_pages for each in samples]),
        remap_pending=_became_true([each.remap_pending for each in samples]),
        remap_failed=_became_true([each.remap_failed for each in samples]),
        lost=next((each.lost for each in reversed(samples) if each.lost), ""),
        unanswered=next((each.unanswered for each in reversed(samples) if each.unanswered), ""),
    )


def _reason_samples(samples: Iterable[DeviceSample]) -> dict[int, int]:
    seen: dict[int, int] = {}
    for sample in samples:
        reasons = sample.reasons or 0
        for bit in (1 << place for place in range(reasons.bit_length())):
            if reasons & bit:
                seen[bit] = seen.get(bit, 0) + 1
    return seen


def _slope(points: Sequence[tuple[float, int]]) -> float | None:
    """Return the least-squares slope, None where there are no two moments."""
    if len({at for at, _ in points}) < 2:
        return None
    middle = sum(at for at, _ in points) / len(points)
    spread = sum((at - middle) ** 2 for at, _ in points)
    return sum((at - middle) * value for at, value in points) / spread


def _added(values: Sequence[int | None]) -> int | None:
    """Return how much a counter grew; a reset in between starts it again from nothing."""
    told = [value for value in values if value is not None]
    if len(told) < 2:
        return None
    return sum(after - before if after >= before else after for before, after in pairwise(told))


def _became_true(values: Sequence[bool | None]) -> bool:
    told = [value for value in values if value is not None]
    return bool(told) and not told[0] and told[-1]


def _lasting(burn: Burn) -> int:
    return sum(bit for bit, count in burn.reason_samples.items() if count >= LEAST_SAMPLES)


def _slowed(reasons: int) -> list[str]:
    """Return the reasons in words; the general one only where none of its kinds is told."""
    told = reasons
    if reasons & (HARDWARE_THERMAL | POWER_BRAKE):
        told &= ~HARDWARE_SLOWDOWN
    if reasons & HARDWARE_THERMAL:
        told &= ~SOFTWARE_THERMAL
    return [text for bit, text in _WORDS.items() if told & bit]


def _clock_and_heat(burn: Burn) -> list[str]:
    facts = []
    if burn.first_clock_mhz is not None and burn.last_clock_mhz is not None:
        facts.append(f"clock {burn.first_clock_mhz:,.0f} -> {burn.last_clock_mhz:,.0f} MHz")
    if burn.max_temperature_c is not None:
        facts.append(f"{burn.max_temperature_c} C")
    return facts


def _counted(burn: Burn) -> list[str]:
    said = []
    if burn.uncorrected:
        said.append(counted(burn.uncorrected, "uncorrected memory error"))
    if burn.remap_failed:
        said.append("a memory row could not be remapped")
    if burn.remapped_rows:
        said.append(f"{counted(burn.remapped_rows, 'memory row')} remapped")
    elif burn.remap_pending:
        said.append("a memory row to be remapped at the next reset")
    if burn.retired_pages:
        said.append(f"{counted(burn.retired_pages, 'memory page')} retired")
    return said
