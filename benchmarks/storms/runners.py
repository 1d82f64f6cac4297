# SPDX-License-Identifier: Apache-2.0
"""What stands in a storm: our hooks, and others' to compare them with."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.hooks import BOTH, NHC_CHECKS, tables
from tests.support.sites import write_site

ROOT = Path(__file__).parents[2]
# Each node of the lab has a /tmp of its own.
FLAG = "/tmp/broken"
CLOCK_AHEAD = "/tmp/clock-ahead"
LOG = "/tmp/hooks.log"
TIMES = "/tmp/hook-times"
_AHEAD = Path(__file__).with_name("ahead.c")

_OURS = """\
[hooks]
state = "/tmp/slurm-health-state"
[breaker]
directory = "{shared}"
# Two users have submitted all of these jobs.
per_user_hour = 100000
[recovery]
apart_s = 5
[checks.flag]
check = "file"
path = "{flag}"
exists = false
contexts = ["prolog", "healthcheck"]
{checks}
"""
# A runner as clusters write it: a check fails, the node is drained, and returned once it passes.
_PLAIN = """\
import os, subprocess, sys
node = os.environ["SLURMD_NODENAME"]
broken = os.path.exists("{flag}")
update = ["scontrol", "update", "NodeName=" + node]
if broken:
    subprocess.run([*update, "State=DRAIN", "Reason=[node_problem] flag"], check=False)
    sys.exit(1 if sys.argv[1] == "prolog" else 0)
if sys.argv[1] == "healthcheck":
    shown = subprocess.run(["scontrol", "show", "node", node], capture_output=True, text=True)
    if "Reason=[node_problem]" in shown.stdout:
        subprocess.run([*update, "State=RESUME"], check=False)
"""
# Times what it calls, and ends as that did: when, seconds of the clock and of the processor, code.
# With as many digits as bash has: bash 5.3 rounds 3.9996 to `3.:00`.
_TIMED = """\
#!/bin/bash
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
TIMEFORMAT="$EPOCHREALTIME %6R %6U %6S"
ahead=
test -e {ahead} && ahead="env LD_PRELOAD={library}"
took=$( {{ time $ahead {command} >>{log} 2>&1; }} 2>&1 )
code=$?
echo "{hook} $took $code" >>{times}
exit $code
"""


def _ours(place: Path, shared: Path) -> dict[str, str]:
    text = _OURS.format(shared=shared, flag=FLAG, checks=tables(BOTH))
    config = write_site(place / "etc", text)
    found = {}
    for hook, shim in (
        ("prolog", "prolog/slurm-health"),
        ("epilog", "epilog/slurm-health"),
        ("healthcheck", "prolog/slurm-health-healthcheck"),
    ):
        said = (ROOT / shim).read_text()
        for key, value in (("python", sys.executable), ("config", str(config))):
            said = re.sub(rf"^{key}=.*$", f"{key}={value}", said, flags=re.MULTILINE)
        found[hook] = _script(place / f"slurm-health-{hook}", said)
    return found


def _nhc(place: Path, _shared: Path) -> dict[str, str]:
    nhc = place / "nhc"  # a copy of its tree
    for helper in (nhc / "helpers").iterdir():
        helper.chmod(0o755)  # as its own `make install` does: in its tree none may be run
    conf = place / "nhc.conf"
    conf.write_text(f"{NHC_CHECKS}* || check_cmd_status -r 1 test -e {FLAG}\n")
    settings = f"NHC_RM=slurm DETACHED_MODE=0 LOGFILE=- INCDIR={nhc}/scripts"
    command = f"bash {nhc}/nhc -c {conf} {settings} HELPERDIR={nhc}/helpers"
    return {"prolog": command, "healthcheck": command}


def _plain(place: Path, _shared: Path) -> dict[str, str]:
    script = place / "plain.py"
    script.write_text(_PLAIN.format(flag=FLAG))
    command = f"{sys.executable} -I -S {script}"
    return {"prolog": f"{command} prolog", "healthcheck": f"{command} healthcheck"}


def _empty(_place: Path, _shared: Path) -> dict[str, str]:
    return {"prolog": f"{sys.executable} -I -S -c pass"}


RUNNERS: dict[str, Callable[[Path, Path], dict[str, str]]] = {
    "slurm-health": _ours,
    "nhc": _nhc,
    "plain": _plain,
    "empty": _empty,
}


def can_compile() -> bool:
    """Tell whether a node's clock can be set ahead here."""
    return shutil.which("cc") is not None


def install(runner: str, place: Path, shared: Path) -> dict[str, str]:
    """Lay a runner's hooks into a directory; return their paths by hook.

    Args:
        runner: its name in `RUNNERS`.
        place: the directory, empty, that all nodes see.
        shared: where hooks of all nodes keep what they share.
    """
    library = place / "ahead.so"
    if can_compile():
        argv = ["cc", "-shared", "-fPIC", "-o", str(library), str(_AHEAD)]
        subprocess.run(argv, check=True)
    return {
        hook: _script(
            place / hook,
            _TIMED.format(
                hook=hook,
                command=command,
                log=LOG,
                times=TIMES,
                ahead=CLOCK_AHEAD,
                library=library,
            ),
        )
        for hook, command in RUNNERS[runner](place, shared).items()
    }


def _script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)
