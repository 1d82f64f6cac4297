# SPDX-License-Identifier: Apache-2.0
"""What a check must know of its last run, to tell an error counter that grows from an old one."""

from __future__ import annotations

import contextlib
from typing import TypeVar

import msgspec

from slurm_health.node.checks.check import CheckContext
from slurm_health.records.decoding import from_json
from slurm_health.system.private_files import publish

_T = TypeVar("_T")


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    time_s: float
    boot: str
    data: msgspec.Raw


def exchange(machine: CheckContext, key: str, now: _T, kind: type[_T]) -> tuple[_T | None, float]:
    """Keep `now` for the next run; return what the last one kept, and how many seconds ago.

    None when there is nothing to compare with: the first run, or the first after a reboot, which
    sets counters back. A state that cannot be kept is no error: the next run then has nothing
    to compare with either.
    """
    if machine.state is None:
        return None, 0.0
    boot = machine.read_or_none("/proc/sys/kernel/random/boot_id") or ""
    path = machine.state / "seen" / f"{key.replace('/', '_')}.json"
    before, age_s = None, 0.0
    with contextlib.suppress(OSError, msgspec.DecodeError):
        kept = from_json(path.read_bytes(), _Kept)
        if kept.boot == boot:
            before = from_json(kept.data, kind)
            age_s = max(0.0, machine.now_s - kept.time_s)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = msgspec.Raw(msgspec.json.encode(now))
        publish(path, msgspec.json.encode(_Kept(time_s=machine.now_s, boot=boot, data=data)))
    return before, age_s
