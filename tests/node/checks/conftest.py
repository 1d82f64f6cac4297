# SPDX-License-Identifier: Apache-2.0
"""A recorded machine that is well."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.node.checks.check import Check, CheckContext, Planned
from slurm_health.node.rules.finding import Finding, capped
from slurm_health.node.run import measure
from tests.support.sites import tree
from tests.support.supervised import write_executable

MEMINFO = """\
MemTotal:       527954872 kB
MemFree:        480000000 kB
MemAvailable:   500000000 kB
SwapTotal:        8388604 kB
SwapFree:         8388604 kB
HugePages_Total:       0
"""
STAT = "{pid} ({name}) {state} 1 {pid} {pid} 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 {pid}00 0 0 0\n"
IB = "/sys/class/infiniband/mlx5_{n}/ports/1"


def process(pid: int, name: str, state: str = "S", uid: int = 0) -> dict[str, str]:
    return {
        f"/proc/{pid}/stat": STAT.format(pid=pid, name=name, state=state),
        f"/proc/{pid}/status": f"Name:\t{name}\nUid:\t{uid}\t0\t0\t0\n",
    }


def port(n: int, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> dict[str, str]:
    base = IB.format(n=n)
    return {
        f"{base}/state": f"{state}\n",
        f"{base}/phys_state": "5: LinkUp\n" if "ACTIVE" in state else "3: Disabled\n",
        f"{base}/rate": f"{rate}\n",
        f"{base}/link_layer": "InfiniBand\n",
        f"{base}/counters/link_downed": "0\n",
        f"{base}/counters/symbol_error": "12\n",
    }


WELL = {
    "/proc/meminfo": MEMINFO,
    "/proc/loadavg": "0.42 0.30 0.10 1/900 4711\n",
    "/proc/uptime": "10000.00 9000.00\n",
    "/proc/sys/kernel/random/boot_id": "b-1\n",
    "/proc/self/mounts": "/dev/sda1 / ext4 rw,relatime 0 0\n/dev/sdb1 /scratch ext4 rw 0 0\n",
    "/sys/devices/system/cpu/online": "0-63,128-191\n",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "/sys/devices/system/edac/mc/mc0/ce_count": "3\n",
    "/sys/devices/system/edac/mc/mc0/ue_count": "0\n",
    "/sys/class/net/eth0/operstate": "up\n",
    "/sys/class/net/eth0/speed": "100000\n",
    "/sys/class/net/eth0/duplex": "full\n",
    "/sys/class/net/eth0/carrier_changes": "2\n",
    "/sys/class/net/eth0/statistics/rx_errors": "0\n",
    "/scratch/.keep": "",
    "/dev/kmsg": "6,1,9999000000,-;eth0: link becomes ready\n",
    **process(1, "systemd"),
    **process(700, "munged"),
    **port(0),
    **port(1),
}


@pytest.fixture
def well(tmp_path: Path) -> CheckContext:
    """A node that is well, as files under a directory, and a state of its own."""
    context = tree(tmp_path / "machine", WELL)
    return CheckContext(root=context.root, now_s=context.now_s, state=tmp_path / "state")


def planned(
    check: Check, name: str = "check", limit_s: float = 60, contexts: tuple[str, ...] = ()
) -> Planned:
    """Return a check as a site would have configured it."""
    return Planned(
        name=name,
        check=check,
        time_limit_s=limit_s,
        severity=check.SEVERITY,
        shadow=False,
        contexts=contexts,
    )


def find_out(check: Check, context: CheckContext) -> Finding:
    """Run a check as its child does, and cap what it finds."""
    return capped(measure(planned(check), context), check.SEVERITY)


def printing(directory: Path, name: str, answers: dict[str, str], code: int = 0) -> str:
    """Write a program that prints what belongs to the first word in its arguments; its path."""
    lines = ["#!/bin/sh", 'case " $* " in']
    for number, (words, text) in enumerate(answers.items()):
        (directory / f"{name}.{number}").write_text(text)
        lines.append(f"*' {words} '*) cat {directory}/{name}.{number}; exit {code} ;;")
    lines += [f"*) echo '{name}: cannot do that' >&2; exit 1 ;;", "esac"]
    return str(write_executable(directory / name, "\n".join(lines) + "\n"))
