# SPDX-License-Identifier: Apache-2.0
"""How fast GPUs exchange data with their host and with each other, and whether it arrives as sent.

By the driver alone, without torch. One worker has all devices of its node, and works with all of
them at the same time, each in a thread of its own. Times are those of the devices' own clocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from slurm_health.preflight.probes.context import (
    Figure,
    NodeFault,
    NotMeasured,
    ProbeContext,
    Sample,
    WrongResults,
)
from slurm_health.preflight.probes.light_cuda import (
    OUT_OF_MEMORY,
    DriverError,
    OpenedGpu,
    in_threads,
    users,
)
from slurm_health.preflight.probes.meeting import circles

# A third of a millisecond at the 50 GB/s that PCIe of generation 5 reaches; a window has several.
COPY_BYTES = 16 << 20
WINDOW_MS, LEAST, MOST, BUDGET_MS = 3.0, 3, 8, 40.0
_BLOCK_BYTES = (1 << 20) - 3  # random ones, again and again, so that no two pages are alike
_NOTHING = 0  # what memory is filled with that data is to arrive in
_memcmp = ctypes.CDLL(None).memcmp


def host(context: ProbeContext) -> list[Sample]:
    """Time copies of every device in each direction, and compare what came back.

    Returns:
        Two samples of each device, of quantity `to_device` and `to_host`, whose bytes are counted
        once. Nothing where there is no device.

    Raises:
        WrongResults: data arrived changed.
        NodeFault: a device failed.
        NotMeasured: its memory is in use.
    """
    gpus = _gpus(context)
    found: list[list[Sample]] = [[] for _ in gpus]

    def exchange(place: int) -> None:
        found[place] = _with_host(gpus[place])

    _on_all(context, gpus, [functools.partial(exchange, place) for place in range(len(gpus))])
    return [each for samples in found for each in samples]


def peers(context: ProbeContext) -> list[Sample]:
    """Time exchanges of each two devices, and compare what the last one brought.

    As with torch: a device is judged by the partner it is fastest with, and the slowest is told.

    Raises:
        WrongResults: data arrived changed.
        NodeFault: a device failed.
        NotMeasured: its memory is in use.
    """
    gpus = _gpus(context)
    if len(gpus) < 2:
        return []
    times_ms: list[dict[int, list[float]]] = [{} for _ in gpus]
    turns = [circles(place, len(gpus)) for place in range(len(gpus))]
    for circle_of in zip(*(each[1:] for each in turns), strict=True):
        pairs = sorted({tuple(circle) for circle in circle_of if circle})

        def exchange(one: int, other: int) -> None:
            elapsed_ms = _between(gpus[one], gpus[other])
            times_ms[one][other] = times_ms[other][one] = elapsed_ms

        _on_all(
            context,
            [gpus[one] for one, _ in pairs],
            [functools.partial(exchange, *p) for p in pairs],
        )
    return [_judged_by_the_fastest(gpu, times) for gpu, times in zip(gpus, times_ms, strict=True)]


def _judged_by_the_fastest(gpu: OpenedGpu, times_ms: dict[int, list[float]]) -> Sample:
    by_speed = sorted(times_ms, key=lambda other: median(times_ms[other]))
    slowest = by_speed[-1]
    figures: dict[str, Figure] = {
        "slowest_with": slowest,
        "slowest_gb_per_s": round(COPY_BYTES / median(times_ms[slowest]) / 1e6, 3),
    }
    return Sample(
        iteration_ms=times_ms[by_speed[0]],
        total_bytes=COPY_BYTES,
        device=gpu.number,
        figures=figures,
    )


def _gpus(context: ProbeContext) -> Sequence[OpenedGpu]:
    device: Any = context.device
    gpus: Sequence[OpenedGpu] = device.gpus
    return gpus


def _on_all(
    context: ProbeContext, gpus: Sequence[OpenedGpu], work: Sequence[Callable[[], None]]
) -> None:
    """Do something with devices, all at the same time.

    Raises:
        WrongResults, NodeFault, NotMeasured: as the probes do.
    """
    ends = in_threads(work, is_stopped=functools.partial(_is_stopped, context))
    errors = [(gpu, end) for gpu, end in zip(gpus, ends, strict=True) if end is not None]
    for _, end in errors:
        if isinstance(end, NodeFault):
            raise end
    for gpu, end in errors:
        if isinstance(end, DriverError) and end.code == OUT_OF_MEMORY:
            raise NotMeasured(f"{gpu}{users(gpu)}: {end}")
        if isinstance(end, DriverError):
            raise NodeFault(f"{gpu} failed while data was copied: {end}")
        if isinstance(end, Exception):
            raise end
    if len(errors) == len(gpus):
        context.meet()  # the round was stopped before any was done, for all that is known
    for gpu, _ in errors:
        raise NodeFault(f"{gpu} hangs in a copy, while others of the node have finished theirs")


def _is_stopped(context: ProbeContext) -> bool:
    try:
        context.meet()
    except Exception:  # whatever stops the round: it is raised again where nothing is found
        return True
    return False


def _with_host(gpu: OpenedGpu) -> list[Sample]:
    with _memory(gpu) as there, _pinned(gpu) as sent, _pinned(gpu) as back:
        _fill(sent, gpu)
        fetch = functools.partial(gpu.to_device, there, sent, COPY_BYTES)
        bring = functools.partial(gpu.to_host, back, there, COPY_BYTES)
        iteration_ms = {"to_device": _timed_ms(fetch, [gpu])}
        ctypes.memset(back, _NOTHING, COPY_BYTES)
        iteration_ms["to_host"] = _timed_ms(bring, [gpu])
        _require_same(back, sent, f"from the host to {gpu} and back")
    return [
        Sample(iteration_ms=ms, quantity=name, total_bytes=COPY_BYTES, device=gpu.number)
        for name, ms in iteration_ms.items()
    ]


def _between(one: OpenedGpu, other: OpenedGpu) -> list[float]:
    """Exchange data between two devices, both ways at the same time; return milliseconds."""
    for gpu, peer in ((one, other), (other, one)):
        try:
            gpu.reach(peer)
        except DriverError as err:
            raise NodeFault(f"{gpu} does not reach {peer}, though it says it does: {err}") from err
    with (
        _memory(one) as mine,
        _memory(other) as others,
        _memory(one) as from_other,
        _memory(other) as from_one,
        _pinned(one) as sent,
        _pinned(one) as back,
    ):
        for gpu, memory in ((one, mine), (other, others)):
            _fill(sent, gpu)
            gpu.to_device(memory, sent, COPY_BYTES)
            gpu.wait()

        def exchange() -> None:
            one.to_peer(other, from_one, mine, COPY_BYTES)
            other.to_peer(one, from_other, others, COPY_BYTES)

        elapsed_ms = _timed_ms(exchange, [one, other])
        for source, target, memory in ((other, one, from_other), (one, other, from_one)):
            _fill(sent, source)
            ctypes.memset(back, _NOTHING, COPY_BYTES)
            target.to_host(back, memory, COPY_BYTES)
            target.wait()
            _require_same(back, sent, f"from {source} to {target}")
    return elapsed_ms


@contextlib.contextmanager
def _memory(gpu: OpenedGpu) -> Iterator[ctypes.c_void_p]:
    """Hold memory of a device."""
    memory = gpu.allocated(COPY_BYTES)
    try:
        yield memory
    finally:
        with contextlib.suppress(DriverError):  # it has failed, which is known by now
            gpu.free(memory)


@contextlib.contextmanager
def _pinned(gpu: OpenedGpu) -> Iterator[ctypes.c_void_p]:
    """Hold memory of the host that devices read and write by themselves."""
    memory = gpu.pinned(COPY_BYTES)
    try:
        yield memory
    finally:
        with contextlib.suppress(DriverError):
            gpu.unpin(memory)


def _timed_ms(copy: Callable[[], None], gpus: Sequence[OpenedGpu]) -> list[float]:
    """Return milliseconds of a copy in each window, those of the device that took longest."""
    quickest_ms = max(min(_window_ms(copy, gpus, 1) for _ in range(2)), 1e-3)
    count = math.ceil(WINDOW_MS / quickest_ms)
    windows = max(LEAST, min(MOST, int(BUDGET_MS / (quickest_ms * count))))
    return [_window_ms(copy, gpus, count) / count for _ in range(windows)]


def _window_ms(copy: Callable[[], None], gpus: Sequence[OpenedGpu], count: int) -> float:
    begins = [gpu.mark() for gpu in gpus]
    for _ in range(count):
        copy()
    ends = [gpu.mark() for gpu in gpus]
    moments = zip(gpus, begins, ends, strict=True)
    return max(gpu.between_ms(begin, end) for gpu, begin, end in moments)


@functools.cache
def _block(number: int) -> bytes:
    return random.Random(number).randbytes(_BLOCK_BYTES)  # noqa: S311 - not for secrets


def _fill(memory: ctypes.c_void_p, gpu: OpenedGpu) -> None:
    """Write what this device sends, which no other one does."""
    assert memory.value is not None
    for offset in range(0, COPY_BYTES, _BLOCK_BYTES):
        length = min(_BLOCK_BYTES, COPY_BYTES - offset)
        ctypes.memmove(memory.value + offset, _block(gpu.number), length)


def _require_same(arrived: ctypes.c_void_p, sent: ctypes.c_void_p, way: str) -> None:
    """Make sure that every byte is what was sent.

    Raises:
        WrongResults: one is not.
    """
    if not _memcmp(arrived, sent, ctypes.c_size_t(COPY_BYTES)):
        return
    both = (ctypes.string_at(memory, COPY_BYTES) for memory in (arrived, sent))
    wrong = sum(one != other for one, other in zip(*both, strict=True))
    raise WrongResults(
        f"data changed on its way {way}: {wrong} of {COPY_BYTES} bytes differ from those sent"
    )
