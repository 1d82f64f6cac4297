# SPDX-License-Identifier: Apache-2.0
"""What the hooks cost a job, compared with their targets and, if available, with LBNL NHC.

    python -m benchmarks.hooks                     the table
    python -m benchmarks.hooks --nhc DIRECTORY     with NHC's source tree: the checks that both have
    python -m benchmarks.hooks --slurm-drains      what [recovery] slurm_drains adds if all is well

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
from collections.abc import Mapping, Sequence
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
    "load": "max_per_cpu = 999",
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
    "services": 'check = "file"\npath = "/etc/services"',
    "clocksource": "",
    "protocols": 'check = "file"\npath = "/etc/protocols"',
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
    parser.add_argument("--slurm-drains", action="store_true")
    options = parser.parse_args()
    headers = ("", "quickest ms", "median ms", "slowest ms", "CPU ms", "MB", "target ms")
    with tempfile.TemporaryDirectory() as directory:
        if options.slurm_drains:
            headers = ("", "off ms", "more ms", "CPU off ms", "CPU more ms", "target ms", "")
            rows = slurm_drains(Path(directory), options.runs)
        else:
            rows = measure(Path(directory), options.runs, options.nhc)
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


def slurm_drains(directory: Path, runs: int) -> list[tuple[object, ...]]:
    """Return a row for each hook and setting: how much more a run takes than the one with `off`.

    The medians of pairs: in each turn every hook runs with every setting, in changing order. No
    node looks at all nodes here, as all but one a minute do not.
    """
    settings, hooks = ("off", "explain", "lift"), ("prolog", "epilog", "healthcheck")
    look = directory / "shared" / "slurm.look"
    look.mkdir(mode=0o755, parents=True)
    sites = {
        setting: site(
            directory / setting,
            f'[breaker]\ndirectory = "{look.parent}"\n[recovery]\nslurm_drains = "{setting}"\n'
            + tables(BOTH | _MORE, '["prolog", "epilog", "healthcheck"]'),
        )
        for setting in settings
    }
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1", "SLURM_CLUSTER_NAME": "bench"}
    took: dict[tuple[str, str], list[Run]] = {}
    for turn in range(runs + 1):
        look.touch()
        for hook in hooks:
            for setting in settings[turn % 3 :] + settings[: turn % 3]:
                environ = {} if hook == "healthcheck" else job
                run = timed(hook_argv(hook, sites[setting]), environ)
                took.setdefault((hook, setting), []).append(run)
    rows: list[tuple[object, ...]] = []
    for hook in hooks:
        off = took[hook, "off"][1:]
        for setting in settings[1:]:
            pairs = list(zip(took[hook, setting][1:], off, strict=True))
            more = statistics.quantiles((a.elapsed_ms - b.elapsed_ms for a, b in pairs), n=4)
            cpu_ms = statistics.median(a.cpu_ms - b.cpu_ms for a, b in pairs)
            rows.append(
                (
                    f"{hook}, {setting}",
                    f"{statistics.median(run.elapsed_ms for run in off):.1f}",
                    f"{more[1]:+.1f}",
                    f"{statistics.median(run.cpu_ms for run in off):.1f}",
                    f"{cpu_ms:+.1f}",
                    5,
                    f"half of the pairs from {more[0]:+.1f} to {more[2]:+.1f}",
                )
            )
    return rows


def tables(checks: dict[str, str], contexts: str = '["prolog", "healthcheck"]') -> str:
    """Return the tables of some checks."""
    keys = f"contexts = {contexts}"
    return "".join(f"[checks.{name}]\n{keys}\n{text}\n" for name, text in checks.items())


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


def timed(argv: Sequence[str], more: Mapping[str, str] | None = None) -> Run:
    """Run a whole process once."""
    environ = {**_ENVIRON, "HOME": os.environ.get("HOME", "/"), **(more or {})}
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
