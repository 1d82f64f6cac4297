# SPDX-License-Identifier: Apache-2.0
"""What the hooks cost a job, compared with their targets and, if available, with LBNL NHC.

    python -m benchmarks.hooks                     the table
    python -m benchmarks.hooks --nhc DIRECTORY     with NHC's source tree: the checks that both have

Each line is the fastest, the median and the slowest of several runs of a whole process, as slurmd
starts it. The cases take turns, so that other load on the machine affects all of them. NHC runs
from its source tree, in the foreground, and marks nothing offline.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SLURMD_NODENAME": "bench"}
_LIMIT_S = 1.0
_NAME = Path("/proc/self/comm").read_text().strip()  # a process that is there: this one

BOTH = {
    "memory": "min_total_gib = 0.1",
    "swap": "",
    "cpus": "min_online = 1",
    "load": "",
    "root": 'check = "filesystem"\npath = "/"\nwritable = true',
    "shm": 'check = "filesystem"\npath = "/dev/shm"',
    "room": 'check = "filesystem"\npath = "/"\nmin_available_percent = 1',
    "inodes": 'check = "filesystem"\npath = "/"\nmin_free_inodes_percent = 1',
    "lo": 'check = "ethernet"\ninterface = "lo"',
    "passwd": 'check = "file"\npath = "/etc/passwd"',
    "hosts": 'check = "file"\npath = "/etc/hosts"\ncontains = "localhost"',
    "tmp": 'check = "file"\npath = "/tmp"\nkind = "directory"',
    "null": 'check = "file"\npath = "/dev/null"',
    "self": f'check = "daemon"\nname = "{_NAME}"\nseverity = "warn"',
}
_MORE = {
    "shells": 'check = "file"\npath = "/etc/shells"',
    "uninterruptible": "",
    "clocksource": "",
    "clock": "synchronised = false",
    "profile": 'check = "file"\npath = "/etc/profile"',
    "kernel-log": 'fault = ["^no such line"]\nwarn = []',
}
NHC_CHECKS = """\
* || check_hw_physmem 1kb 9999gb
* || check_hw_swap 0 9999gb
* || check_hw_cpuinfo
* || check_ps_loadavg 999
* || check_fs_mount_rw -f /
* || check_fs_mount -f /dev/shm
* || check_fs_free / 1%
* || check_fs_ifree / 1%
* || check_hw_eth lo
* || check_file_test -r /etc/passwd
* || check_file_contents /etc/hosts '/localhost/'
* || check_file_test -d /tmp
* || check_file_test -r /dev/null
* || check_ps_loadavg 998
"""


class Run(NamedTuple):
    """What one run took."""

    elapsed_ms: float
    cpu_ms: float
    peak_mb: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nhc", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory), options.runs, options.nhc)
    headers = ("", "quickest ms", "median ms", "slowest ms", "CPU ms", "MB", "target ms")
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors, {options.runs} runs")
    print(tabulate(rows, headers=headers))


def measure(directory: Path, runs: int, nhc: Path | None) -> list[tuple[object, ...]]:
    """Return a row for each case."""
    both, twenty = tables(BOTH), tables(BOTH | _MORE)
    hung = '[checks.hung]\ncheck = "command"\nargv = ["sleep", "600"]\n'
    hung += f"time_limit_s = {_LIMIT_S}\n"
    limit_ms = int(_LIMIT_S * 1000)
    ours = [
        ("prolog, 20 checks, well", "prolog", twenty, 120),
        ("health check, 20 checks, well", "healthcheck", twenty, 1000),
        (f"prolog, one of 21 hangs, limit {limit_ms}", "prolog", twenty + hung, limit_ms + 120),
        ("prolog, the 14 checks NHC has too", "prolog", both, ""),
    ]
    cases: list[tuple[str, list[str], object]] = [
        (name, hook_argv(hook, site(directory / str(number), text)), target)
        for number, (name, hook, text, target) in enumerate(ours)
    ]
    if nhc is not None:
        cases.append(("NHC, the same 14", nhc_argv(directory, nhc), ""))
    took: dict[str, list[Run]] = {name: [] for name, _, _ in cases}
    for _ in range(runs + 1):
        for name, argv, _ in cases:
            took[name].append(timed(argv))
    return [(name, *summary(took[name][1:]), target) for name, _, target in cases]


def tables(checks: dict[str, str]) -> str:
    """Return the tables of some checks."""
    contexts = 'contexts = ["prolog", "healthcheck"]'
    return "".join(f"[checks.{name}]\n{contexts}\n{text}\n" for name, text in checks.items())


def site(directory: Path, text: str) -> Path:
    """Write a site's file."""
    directory.mkdir(mode=0o755)
    path = directory / "config.toml"
    path.write_text(f'[hooks]\nstate = "{directory}/state"\n{text}')
    path.chmod(0o644)
    return path


def hook_argv(hook: str, config: Path) -> list[str]:
    """Return the command line that the shims use."""
    return [sys.executable, "-I", "-m", "slurm_health.node.hooks", hook, str(config)]


def nhc_argv(directory: Path, nhc: Path) -> list[str]:
    """Return the command line of NHC with a configuration of the checks both have."""
    conf = directory / "nhc.conf"
    conf.write_text(NHC_CHECKS)
    settings = ["MARK_OFFLINE=0", "DETACHED_MODE=0", "LOGFILE=-", f"INCDIR={nhc}/scripts"]
    settings.append(f"HELPERDIR={nhc}/helpers")
    return ["bash", str(nhc / "nhc"), "-c", str(conf), *settings]


def timed(argv: Sequence[str]) -> Run:
    """Run a whole process once."""
    environ = {**_ENVIRON, "HOME": os.environ.get("HOME", "/")}
    began = time.perf_counter()
    process = subprocess.Popen(
        argv, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    elapsed_ms = (time.perf_counter() - began) * 1000
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{argv} ended with {process.returncode}")
    return Run(elapsed_ms, (used.ru_utime + used.ru_stime) * 1000, used.ru_maxrss / 1000)


def summary(runs: Sequence[Run]) -> list[str]:
    """Return quickest, median and slowest time, the median processor time, the largest memory."""
    times = [each.elapsed_ms for each in runs]
    cpu_ms = statistics.median(each.cpu_ms for each in runs)
    peak_mb = max(each.peak_mb for each in runs)
    found = (min(times), statistics.median(times), max(times), cpu_ms, peak_mb)
    return [f"{each:.0f}" for each in found]


if __name__ == "__main__":
    main()
