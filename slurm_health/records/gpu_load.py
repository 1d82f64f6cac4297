# SPDX-License-Identifier: Apache-2.0
"""Samples of the GPUs under load. Pure.

`preflight.agent.gpu_monitor` writes the lines; a burn has the samples between two moments.
"""

from __future__ import annotations

from collections import Counter
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
# A reason in one sample may be the blink of a regulator.
LEAST_SAMPLES = 2
_DURING = " during the burn"


class DeviceSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU at one moment. None: this GPU, driver or library does not answer."""

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
    """The sampler's only line if it cannot sample."""

    not_sampled: str


class Burn(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU over one burn.

    Clocks, slope and power are of the samples under load, and None if the GPU was idle in all of
    them (`idle_samples`). Counters are the increase during the burn; None without a value at both
    ends. `reason_samples` counts the samples by reason.
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
    """Return the value of a line of the sampler, None for a torn one."""
    with suppress(msgspec.DecodeError):
        return from_json(line, DeviceSample)
    with suppress(msgspec.DecodeError):
        return from_json(line, NotSampled)
    return None


def summarise(samples: Iterable[DeviceSample]) -> list[Burn]:
    """Return one summary per GPU, in the order of their numbers."""
    devices: dict[tuple[int, str], list[DeviceSample]] = {}
    named: dict[int, str] = {}
    for sample in sorted(samples, key=lambda sample: sample.at_s):
        # A GPU that is lost no longer reports its UUID.
        uuid = named.setdefault(sample.index, sample.uuid) if not sample.uuid else sample.uuid
        named[sample.index] = uuid
        devices.setdefault((sample.index, uuid), []).append(sample)
    return [_summary(index, uuid, of_gpu) for (index, uuid), of_gpu in sorted(devices.items())]


def those_of(uuids: Set[str], burns: Sequence[Burn]) -> list[Burn]:
    """Return the burns of these GPUs, all if none is known.

    A GPU without a UUID is taken for one of them that is missing, if there is any.
    """
    missing = uuids - {burn.uuid for burn in burns}
    return [
        burn for burn in burns if not uuids or burn.uuid in uuids or (missing and not burn.uuid)
    ]


def words(burn: Burn) -> list[str]:
    """Return what is wrong with one GPU, nothing for a healthy one."""
    name = f"GPU {burn.index}" + (f" ({burn.uuid})" if burn.uuid else "")
    if burn.lost:
        return [f"{name}: lost during the burn: {burn.lost}"]
    lines = [f"{name}: {text}{_DURING}" for text in _counters(burn)]
    if burn.unanswered:
        lines.append(f"{name}: could not be asked{_DURING}: {burn.unanswered}")
    lasting = sum(bit for bit, count in burn.reason_samples.items() if count >= LEAST_SAMPLES)
    # The general reason is named only without one of its kinds.
    if lasting & (HARDWARE_THERMAL | POWER_BRAKE):
        lasting &= ~HARDWARE_SLOWDOWN
    if lasting & HARDWARE_THERMAL:
        lasting &= ~SOFTWARE_THERMAL
    reasons = [text for bit, text in _WORDS.items() if lasting & bit]
    if reasons:
        facts = [f"{name}: {' and '.join(reasons)}{_DURING}"]
        if burn.first_clock_mhz is not None and burn.last_clock_mhz is not None:
            facts.append(f"clock {burn.first_clock_mhz:,.0f} -> {burn.last_clock_mhz:,.0f} MHz")
        if burn.max_temperature_c is not None:
            facts.append(f"{burn.max_temperature_c} C")
        lines.insert(0, ", ".join(facts))
    return lines


def words_of_all(burns: Iterable[Burn]) -> list[str]:
    """Return what is wrong with a node's GPUs; of burns with the same problem, the first."""
    lines: dict[str, str] = {}
    for burn in burns:
        for text in words(burn):
            lines.setdefault(text.partition(_DURING)[0], text)
    return list(lines.values())


def _summary(index: int, uuid: str, samples: Sequence[DeviceSample]) -> Burn:
    from statistics import median  # agents load this module, and have no use for that one

    busy = [sample for sample in samples if not (sample.reasons or 0) & IDLE]
    clocks = [(sample.at_s, sample.clock_mhz) for sample in busy if sample.clock_mhz is not None]
    speeds = [speed for _, speed in clocks]
    # A fifth of the burn: long enough to be steady, short enough to be its beginning or its end.
    edge = max(1, len(speeds) // 5)
    slope = None
    if len({at for at, _ in clocks}) > 1:  # least squares
        middle = sum(at for at, _ in clocks) / len(clocks)
        spread = sum((at - middle) ** 2 for at, _ in clocks)
        slope = sum((at - middle) * speed for at, speed in clocks) / spread
    temperatures = [s.temperature_c for s in samples if s.temperature_c is not None]
    powers = [sample.power_w for sample in busy if sample.power_w is not None]
    reasons: Counter[int] = Counter()
    for bits in (sample.reasons or 0 for sample in busy):
        reasons.update(1 << place for place in range(bits.bit_length()) if bits >> place & 1)
    return Burn(
        index=index,
        uuid=uuid,
        bus=next((sample.bus for sample in samples if sample.bus), ""),
        samples=len(samples),
        idle_samples=len(samples) - len(busy),
        clock_mhz=median(speeds) if speeds else None,
        first_clock_mhz=median(speeds[:edge]) if speeds else None,
        last_clock_mhz=median(speeds[-edge:]) if speeds else None,
        clock_slope_mhz_per_s=slope,
        reasons=sum(reasons),
        reason_samples=dict(reasons),
        max_temperature_c=max(temperatures, default=None),
        power_w=median(powers) if powers else None,
        uncorrected=_increase([sample.uncorrected for sample in samples]),
        remapped_rows=_increase([sample.remapped_rows for sample in samples]),
        retired_pages=_increase([sample.retired_pages for sample in samples]),
        remap_pending=_became_true([sample.remap_pending for sample in samples]),
        remap_failed=_became_true([sample.remap_failed for sample in samples]),
        lost=next((s.lost for s in reversed(samples) if s.lost), ""),
        unanswered=next((s.unanswered for s in reversed(samples) if s.unanswered), ""),
    )


def _increase(values: Sequence[int | None]) -> int | None:
    """Return how much a counter grew; after a reset in between it starts again from 0."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    return sum(after - before if after >= before else after for before, after in pairwise(known))


def _became_true(values: Sequence[bool | None]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and not known[0] and known[-1]


def _counters(burn: Burn) -> list[str]:
    lines = []
    if burn.uncorrected:
        lines.append(counted(burn.uncorrected, "uncorrected memory error"))
    if burn.remap_failed:
        lines.append("a memory row could not be remapped")
    if burn.remapped_rows:
        lines.append(f"{counted(burn.remapped_rows, 'memory row')} remapped")
    elif burn.remap_pending:
        lines.append("a memory row to be remapped at the next reset")
    if burn.retired_pages:
        lines.append(f"{counted(burn.retired_pages, 'memory page')} retired")
    return lines
