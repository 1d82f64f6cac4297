# SPDX-License-Identifier: Apache-2.0
"""What the hooks cost a job, beside their targets, and beside LBNL NHC where it is at hand.

    python -m benchmarks.hooks                     the table
    python -m benchmarks.hooks --nhc DIRECTORY     with NHC's source tree, the checks both have

Each line is the median, and the slowest, of some runs of a whole process, as slurmd starts it.
NHC runs from its source tree, in the foreground, and marks nothing offline.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SLURMD_NODENAME": "bench"}
_LIMIT_S = 1.0

_BOTH = {
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
    "self": 'check = "daemon"\nname = "python3"\nseverity = "warn"',
}
_MORE = {
    "zombies": "",
    "uninterruptible": "",
    "clocksource": "",
    "clock": "synchronised = false",
    "hugepages": "",
    "kernel-log": "window_s = 1",
}
_NHC = """\
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nhc", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory), options.runs, options.nhc)
    print(tabulate(rows, headers=("", "median ms", "slowest ms", "MB", "target ms")))


def measure(directory: Path, runs: int, nhc: Path | None) -> list[tuple[object, ...]]:
    """Return a row for each case."""
    both, twenty = tables(_BOTH), tables(_BOTH | _MORE)
    hung = '[checks.hung]\ncheck = "command"\nargv = ["sleep", "600"]\n'
    hung += f"time_limit_s = {_LIMIT_S}\n"
    limit_ms = int(_LIMIT_S * 1000)
    cases = [
        ("prolog, 20 checks, well", "prolog", twenty, 120),
        ("health check, 20 checks, well", "healthcheck", twenty, 1000),
        (f"prolog, one of 21 hangs, limit {limit_ms}", "prolog", twenty + hung, limit_ms + 120),
        ("prolog, the 14 checks NHC has too", "prolog", both, ""),
    ]
    rows: list[tuple[object, ...]] = []
    for name, hook, text, target in cases:
        config = site(directory / str(len(rows)), text)
        rows.append((name, *timed(hook_argv(hook, config), runs), target))
    if nhc is not None:
        rows.append(("NHC, the same 14", *timed(nhc_argv(directory, nhc), runs), ""))
    return rows


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
    return [sys.executable, "-I", "-m", "slurm_health.hooks", hook, str(config)]


def nhc_argv(directory: Path, nhc: Path) -> list[str]:
    """Return the command line of NHC with a configuration of the checks both have."""
    conf = directory / "nhc.conf"
    conf.write_text(_NHC)
    settings = ["MARK_OFFLINE=0", "DETACHED_MODE=0", "LOGFILE=-", f"INCDIR={nhc}/scripts"]
    settings.append(f"HELPERDIR={nhc}/helpers")
    return ["bash", str(nhc / "nhc"), "-c", str(conf), *settings]


def timed(argv: Sequence[str], runs: int) -> tuple[str, str, str]:
    """Return median and slowest wall time, and the largest memory of one process."""
    took_ms = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        ran = subprocess.run(
            argv,
            env={**_ENVIRON, "HOME": os.environ.get("HOME", "/")},
            capture_output=True,
            check=False,
        )
        took_ms.append((time.perf_counter() - began) * 1000)
        if ran.returncode != 0:
            raise SystemExit(f"{argv} ended with {ran.returncode}: {ran.stdout!r} {ran.stderr!r}")
    warm_ms = took_ms[1:]
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000
    return f"{statistics.median(warm_ms):.0f}", f"{max(warm_ms):.0f}", f"{peak_mb:.0f}"


if __name__ == "__main__":
    main()
