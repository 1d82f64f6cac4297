# SPDX-License-Identifier: Apache-2.0
"""How each GPU of this node does during a burn: a process that asks them, and who listens to it.

    BurnWatch   the agent's end: starts the sampler for the time of a burn and sums up what it said
    main        the sampler: `python -m slurm_health.preflight.agent.gpu_monitor`, in our own
                interpreter; one JSON line per GPU and moment, four times a second

The sampler ends with 0 on SIGTERM and when its standard input or output is closed. Where GPUs
cannot be sampled it says why, as its only line, and ends with 0 too: that says nothing about the
node.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from slurm_health.records import gpu_load
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import LineBuffer
from slurm_health.system import nvml as doors
from slurm_health.system import processes

INTERVAL_S = 0.25
_UNKILLABLE_S = 5.0
_STANDARD_INPUT = 0
_STANDARD_OUTPUT = 1
# Of nvml.h: the clock of the multiprocessors, the sensor on the die, causes of retired pages.
_CLOCK_SM = 1
_SENSOR_GPU = 0
_RETIREMENT_CAUSES = (0, 1)


def command() -> tuple[str, ...]:
    """Return the command line that starts the sampler."""
    return processes.own_module("slurm_health.preflight.agent.gpu_monitor")


class BurnWatch:
    """The sampler of one burn. It is a process, because a sick driver can block its caller.

    `devices` are those of the burn, with their UUIDs where torch knows them. The driver tells of
    all GPUs of a machine, and others may be another job's, or another node's that is played here.
    """

    def __init__(self, environ: Mapping[str, str], devices: Sequence[str]) -> None:
        self._uuids = {word for name in devices for word in name.split() if word[:4] == "GPU-"}
        self._lines = LineBuffer()
        self._samples: list[gpu_load.DeviceSample] = []
        self._not_sampled = ""
        self._process: processes.Process | None = None
        try:
            self._process = processes.start_tied(
                command(),
                environ=environ,
                stdin=processes.PIPE,
                stdout=processes.PIPE,
            )
        except OSError as err:
            self._not_sampled = f"the sampler cannot be started: {err.strerror}"

    def read(self) -> None:
        """Take in what the sampler has written, so that it never waits for a reader."""
        if self._process is None:
            return
        processes.read_available(self._process.stderr)
        for line in self._lines.feed(processes.read_available(self._process.stdout)):
            decoded = gpu_load.decode(line)
            if isinstance(decoded, gpu_load.DeviceSample):
                self._samples.append(decoded)
            elif isinstance(decoded, gpu_load.NotSampled):
                self._not_sampled = decoded.not_sampled

    def end(self) -> tuple[list[gpu_load.Burn], str]:
        """End the sampler; return what it saw of each device, and why nothing if it could not.

        It has nothing to put in order, so it is killed; one that hangs in a driver is given up.
        """
        self.read()
        process, self._process = self._process, None
        if process is not None and not processes.abandon_session(process, wait_s=_UNKILLABLE_S):
            self._not_sampled = "the sampler hangs in the kernel and cannot be killed"
        return gpu_load.those_of(self._uuids, gpu_load.summarise(self._samples)), self._not_sampled


def main() -> int:
    """Sample until told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        nvml = doors.start()
        count = _count(nvml)
    except (Unmeasured, doors.DriverBroken) as err:
        _write([gpu_load.NotSampled(not_sampled=str(err))])
        return 0
    for _ in _moments():
        samples = (_sample(nvml, index) for index in range(count))
        if not _write(sample for sample in samples if sample is not None):
            break
    return 0


def _moments() -> Iterator[None]:
    """Yield at regular moments, until standard input is closed."""
    due_s = time.monotonic()
    while True:
        yield
        # After a call that took long, go on from now: no burst of late samples.
        due_s = max(due_s + INTERVAL_S, time.monotonic())
        while (left_s := due_s - time.monotonic()) > 0:
            readable, _, _ = select.select([_STANDARD_INPUT], [], [], left_s)
            if readable and not os.read(_STANDARD_INPUT, 4096):
                return


def _write(lines: Iterable[msgspec.Struct]) -> bool:
    """Write the lines at once; return False when nobody reads them."""
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(_STANDARD_OUTPUT, data) :]
    return not data


def _count(nvml: Any) -> int:
    try:
        count = int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as err:
        raise Unmeasured(f"NVML: {err}") from err
    if not count:
        raise Unmeasured("NVML sees no GPU here")
    return count


def _sample(nvml: Any, index: int) -> gpu_load.DeviceSample | None:
    """Return one GPU as it is now, None for one that is not this job's to ask."""
    now = gpu_load.DeviceSample(at_s=round(time.time(), 3), index=index)
    questions = doors.Questions(nvml)
    try:
        handle = questions.handle(index)
        if handle is None:
            return None
        now = _memory(nvml, questions.told, handle, _speed(nvml, questions.told, handle, now))
    except doors.Lost as err:
        return msgspec.structs.replace(now, lost=str(err))
    return msgspec.structs.replace(now, unanswered=questions.unanswered)


def _speed(
    nvml: Any, ask: Callable[..., Any], handle: Any, now: gpu_load.DeviceSample
) -> gpu_load.DeviceSample:
    pci = ask(nvml.nvmlDeviceGetPciInfo, handle)
    milliwatts = ask(nvml.nvmlDeviceGetPowerUsage, handle)
    return msgspec.structs.replace(
        now,
        uuid=doors.as_text(ask(nvml.nvmlDeviceGetUUID, handle) or ""),
        bus=doors.as_text(pci.busId) if pci is not None else "",
        clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, _CLOCK_SM),
        reasons=ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
        temperature_c=ask(nvml.nvmlDeviceGetTemperature, handle, _SENSOR_GPU),
        power_w=None if milliwatts is None else milliwatts / 1e3,
    )


def _memory(
    nvml: Any, ask: Callable[..., Any], handle: Any, now: gpu_load.DeviceSample
) -> gpu_load.DeviceSample:
    remapped = ask(nvml.nvmlDeviceGetRemappedRows, handle)
    retired = [ask(nvml.nvmlDeviceGetRetiredPages, handle, cause) for cause in _RETIREMENT_CAUSES]
    errors = (handle, doors.UNCORRECTED, doors.VOLATILE)
    return msgspec.structs.replace(
        now,
        uncorrected=ask(nvml.nvmlDeviceGetTotalEccErrors, *errors),
        remapped_rows=remapped[0] + remapped[1] if remapped is not None else None,
        remap_pending=bool(remapped[2]) if remapped is not None else None,
        remap_failed=bool(remapped[3]) if remapped is not None else None,
        retired_pages=None if None in retired else sum(len(one or ()) for one in retired),
    )


if __name__ == "__main__":
    sys.exit(main())
