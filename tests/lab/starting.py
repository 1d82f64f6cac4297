# SPDX-License-Identifier: Apache-2.0
"""Starts the keeper of a lab and hears from it; ends it when the start fails."""

import os
import secrets
import select
import signal
import subprocess
import sys
from contextlib import suppress

from . import cgroups, directory, gpus
from .errors import LabStartFailed
from .layout import CHECKOUT, LabSpec, write_spec

_STOP_DEADLINE_S = 60
_TAIL_LINES = 15


def new_name() -> str:
    return f"{own_prefix()}{secrets.token_hex(3)}"


def own_prefix() -> str:
    """How the names begin that `new_name` gives in this process."""
    return f"t{os.getpid()}-"


def start_keeper(spec: LabSpec, *, detached: bool, deadline_s: float) -> "subprocess.Popen[bytes]":
    """Start the processes that hold the lab, and wait until its daemons run."""
    directory.sweep_dead()
    # An interrupt between the keeper's start and our knowing of it would leave it alone.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        keeper, report = _take_and_launch(spec, detached=detached)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _hear(report, spec, deadline_s)
    except BaseException:
        abandon(spec, keeper)
        raise
    finally:
        os.close(report)
    return keeper


def _take_and_launch(spec: LabSpec, *, detached: bool) -> tuple["subprocess.Popen[bytes]", int]:
    lock = directory.take(spec.paths.root)
    try:
        _prepare(spec)
        launched = _launch(spec, lock, detached=detached)
    except BaseException:
        os.close(lock)
        directory.sweep_if_dead(spec.paths.root)
        raise
    os.close(lock)
    return launched


def _hear(report: int, spec: LabSpec, deadline_s: float) -> None:
    """Wait for the keeper's report, which is empty when all is well."""
    ready, _, _ = select.select([report], [], [], deadline_s)
    why = os.read(report, 65536).decode() if ready else f"not ready within {deadline_s:g} s"
    if not why and not spec.paths.state.exists():
        why = "its keeper ended at once"
    if why:
        raise LabStartFailed(why, log_tails(spec))


def _prepare(spec: LabSpec) -> None:
    spec.paths.log.mkdir()
    write_spec(spec)
    if spec.gpus:
        gpus.prepare(spec)
    controller = cgroups.find_cpu_controller()
    if controller is not None:
        # Without cgroups all works but the fault that starves a node's CPU; that one will say so.
        with suppress(OSError):
            cgroups.create(controller, spec.name, spec.nodes)


def _launch(spec: LabSpec, lock: int, *, detached: bool) -> tuple["subprocess.Popen[bytes]", int]:
    report, ready = os.pipe()
    argv = [sys.executable, "-m", "tests.lab.boot", str(spec.paths.root), f"--ready-fd={ready}"]
    passed = [lock, ready]
    if not detached:
        # A descriptor of this very process: readable when, and only when, it has ended.
        watch = os.pidfd_open(os.getpid())
        passed.append(watch)
        argv.append(f"--watch-fd={watch}")
    with (spec.paths.log / "boot.log").open("wb") as log:
        keeper = subprocess.Popen(
            argv,
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=passed,
            start_new_session=True,
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
        )
    os.close(ready)
    if not detached:
        os.close(watch)
    return keeper, report


def abandon(spec: LabSpec, keeper: "subprocess.Popen[bytes]") -> None:
    """End the lab of this keeper, wait for it, and remove what is left."""
    keeper.terminate()
    try:
        keeper.wait(_STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        keeper.kill()  # its init dies with it
        keeper.wait()
    directory.await_end(spec.paths.root, _STOP_DEADLINE_S)
    directory.sweep_if_dead(spec.paths.root)


def log_tails(spec: LabSpec) -> str:
    """The ends of the lab's logs, those that say anything."""
    parts = []
    for path in sorted(spec.paths.log.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        if lines:
            parts.append(f"--- {path.name}\n" + "\n".join(lines))
    return "\n".join(parts)
