# SPDX-License-Identifier: Apache-2.0
"""A reset of GPUs, or a reload of the driver: minutes in a process of its own.

It looks again before it does anything, because a person may have been quicker; and the health check
looks at nothing while it is at it, because whoever asks a GPU keeps it from being reset.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.draining import RETURNED
from slurm_health.node.rules.mending import MendStep, StepOutcome, Tried
from slurm_health.node.site_settings import Site
from slurm_health.records.decoding import from_msgpack
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import cut, one_line
from slurm_health.system import SYSTEM_PATH, processes
from slurm_health.system.killable import Answered, Broke, Hung, run_one
from slurm_health.system.nvml import GpuDevice, Gpus, read_gpus
from slurm_health.system.private_files import publish

_LOCK = "mend.lock"
_NVML_LIMIT_S = 60.0
_SAID = 300
# What is kept of what a step's command says: a test of hours may print all the while.
_LAST_BYTES = 4096


class StepRefused(Exception):
    """The step must not be taken; the text says why."""


def start(site: Site, begun: Tried, devices: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Start the process that takes the step.

    Raises:
        OSError: it cannot be started.
    """
    order = msgspec.json.encode(begun).decode()
    words = [site.path, order, *devices]
    processes.start_detached(processes.own_module("slurm_health.node.mending", *words), environ)


@contextlib.contextmanager
def at_work(state: Path) -> Iterator[bool]:
    """Hold this node for mending; yield whether it was free."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Others can reach the directory: who may open a file can hold its lock.
    with os.fdopen(
        os.open(state / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b"
    ) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def is_at_work(state: Path) -> bool:
    """Tell whether a step is being taken on this node."""
    if not (state / _LOCK).exists():
        return False
    with at_work(state) as free:
        return not free


def take(
    site: Site,
    begun: Tried,
    devices: Collection[str],
    *,
    why_not: Callable[[], str],
    look: Callable[[], Gpus] | None = None,
) -> Tried:
    """Take a step; return how it ended.

    Args:
        site: the site's file.
        begun: the step.
        devices: the PCI addresses of the GPUs at fault; none for all.
        why_not: asks Slurm why nothing may be done to the node now.
        look: asks NVML, where it is not this machine's.
    """
    refusal = why_not()
    if refusal:
        return msgspec.structs.replace(begun, outcome=StepOutcome.FAILED, text=refusal)
    try:
        argv = _argv(site, begun.step, devices, look or _look)
        text = _run(argv, site.mend.limit_min)
    except StepRefused as err:
        return msgspec.structs.replace(begun, outcome=StepOutcome.FAILED, text=str(err))
    if begun.step is MendStep.RESET:
        _forget_messages(site.state)
    return msgspec.structs.replace(begun, outcome=StepOutcome.DONE, text=text)


def _argv(
    site: Site, step: MendStep, devices: Collection[str], look: Callable[[], Gpus]
) -> list[str]:
    if step is MendStep.RELOAD:
        return list(site.mend.reload)
    buses = _free(look(), devices)
    return [each.replace("{gpus}", ",".join(buses)) for each in site.mend.reset]


def _free(gpus: Gpus, wanted: Collection[str]) -> list[str]:
    """Return the addresses of GPUs that nobody uses.

    Raises:
        StepRefused: one is in use, or it cannot be told; or its NVLinks are just being joined.
    """
    if gpus.broken:
        raise StepRefused(f"the GPUs cannot be asked: {gpus.broken}")
    named = {_plain(each) for each in wanted}
    found = [each for each in gpus.devices if not named or _plain(each.bus) in named]
    if not found or (named and len(found) < len(named)):
        missing = named - {_plain(each.bus) for each in found}
        raise StepRefused(f"NVML shows no GPU at {', '.join(sorted(missing)) or 'all'}")
    for each in found:
        _require_free(each)
    return [each.bus or str(each.index) for each in found]


def _require_free(device: GpuDevice) -> None:
    name = f"GPU {device.index}"
    if device.processes is None:
        why = device.lost or device.unanswered or "not supported"
        raise StepRefused(f"{name} does not tell which processes use it: {why}")
    if device.processes:
        raise StepRefused(f"{name} is in use by PID {', '.join(map(str, device.processes))}")
    if device.fabric_state == "in progress":
        raise StepRefused(f"{name} is still joining the NVLink fabric")


def _plain(bus: str) -> str:
    """Return an address as the kernel and NVML both have it: `0000:3b:00`."""
    parts = bus.lower().partition(".")[0].split(":")
    domain = parts[-3][-4:] if len(parts) > 2 else "0000"
    return ":".join([domain.zfill(4), *parts[-2:]])


def _look() -> Gpus:
    match run_one(lambda: msgspec.msgpack.encode(read_gpus()), _NVML_LIMIT_S):
        case Answered(data=data):
            return from_msgpack(data, Gpus)
        case Broke(reason=reason):
            raise StepRefused(f"the GPUs cannot be asked: {reason}")
        case Hung(limit_s=limit_s):
            raise StepRefused(f"NVML did not answer within {limit_s:g} s")


def _run(argv: Sequence[str], limit_min: float) -> str:
    code, output = run_command(argv, limit_min)
    said = cut(one_line(output), _SAID)
    if code:
        raise StepRefused(f"{argv[0]} ended with code {code}: {said}")
    return said


def run_command(argv: Sequence[str], limit_min: float) -> tuple[int, str]:
    """Run a command of the site's, as root; return its code, and the last of what it said.

    Raises:
        StepRefused: it cannot be run, or did not end in time.
    """
    try:
        ended = processes.run(
            argv,
            environ={"PATH": SYSTEM_PATH, "LC_ALL": "C", "HOME": "/root"},
            deadline_s=60 * limit_min,
            directory=Path("/"),
            last_bytes=_LAST_BYTES,
        )
    except TimeoutError:
        raise StepRefused(f"{argv[0]} did not end within {limit_min:g} min") from None
    except OSError as err:
        raise StepRefused(f"{argv[0]} cannot be run: {err.strerror}") from err
    return ended.returncode, (ended.stdout + ended.stderr).decode(errors="replace")


def _forget_messages(state: Path) -> None:
    """Let messages of the kernel from before the reset count no more, as after a person's word."""
    place = CheckContext(now_s=time.time(), state=state)
    with contextlib.suppress(OSError, Unmeasured):
        now = place.boot_time()
        if now is not None:
            publish(state / RETURNED, msgspec.json.encode(now), mode=0o600)
