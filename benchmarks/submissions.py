# SPDX-License-Identifier: Apache-2.0
"""What checking jobs by default costs slurmctld per submission, on the lab.

    python -m benchmarks.submissions [--times 1000]

The same job is submitted so many times without the plugin, with it and left as it is by its rules,
and with it and changed by it. The three take turns, a tenth of the times each, so that other load
affects all of them. Slurm's own statistics tell how long slurmctld worked on a submission.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from tabulate import tabulate

from tests.lab import Lab
from tests.lab.installed_site import COMMAND

_TURNS = 10
_CONF, _LINE = "/etc/slurm/slurm.conf", "JobSubmitPlugins=lua"
_RULES = "[default]\nmin_nodes = 2\nopt_out = 'nocheck'\n"
_SCRIPT = "#!/bin/bash\n#SBATCH --time=1:00:00\n" + "# a line of a script\n" * 200
_SUBMIT = (
    "i=0; while [ $i -lt {times} ]; do sbatch -H -Q -N2 {words} job.sh >/dev/null; i=$((i+1)); done"
)
_TOOK = re.compile(r"REQUEST_SUBMIT_BATCH_JOB .*count:(\d+) +ave_time:(\d+)")


class Turn(NamedTuple):
    """One turn: what slurmctld took for a submission, and what a user waited for it."""

    controller_us: float
    wall_ms: float


def measure(lab: Lab, times: int, words: str) -> Turn:
    """Submit so many held jobs one after another; cancel them."""
    lab.run(["sdiag", "--reset"])
    began_s = time.monotonic()
    argv = ["sh", "-c", _SUBMIT.format(times=times, words=words)]
    lab.run(argv, user="alice", deadline_s=600)
    wall_ms = (time.monotonic() - began_s) * 1000 / times
    found = _TOOK.search(lab.run(["sdiag"]).stdout)
    if found is None or int(found[1]) != times:
        sys.exit(f"sdiag does not tell of {times} submissions")
    lab.run(["scancel", "--user=alice"])
    lab.wait_until(lambda: lab.ask("squeue", "-h").stdout, lambda left: not left, "no jobs", 300)
    return Turn(float(found[2]), wall_ms)


def _plugin(lab: Lab, *, on: bool) -> None:
    edit = f"1i {_LINE}" if on else f"/^{_LINE}/d"
    lab.run(["sed", "-i", edit, _CONF])
    lab.run(["scontrol", "reconfigure"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--times", type=int, default=1000)
    times = max(parser.parse_args().times // _TURNS, 1)
    turns: dict[str, list[Turn]] = {"without the plugin": [], "left as it is": [], "changed": []}
    with Lab.start(nodes=2) as lab:
        rules = lab.paths.etc / "rules.toml"
        rules.write_text(_RULES)
        (lab.home("alice") / "job.sh").write_text(_SCRIPT)
        lab.run([COMMAND, "init-default", f"--config={rules}"])
        for _ in range(_TURNS):
            turns["without the plugin"].append(measure(lab, times, ""))
            _plugin(lab, on=True)
            turns["left as it is"].append(measure(lab, times, "--comment=nocheck"))
            turns["changed"].append(measure(lab, times, ""))
            _plugin(lab, on=False)
    plain = _median(turns["without the plugin"], lambda turn: turn.controller_us)
    rows = [
        [
            name,
            round(_median(each, lambda turn: turn.controller_us)),
            round(_median(each, lambda turn: turn.controller_us) / plain, 2),
            round(_median(each, lambda turn: turn.wall_ms), 1),
        ]
        for name, each in turns.items()
    ]
    print(
        f"{times * _TURNS} submissions of a script of {len(_SCRIPT)} bytes each; medians of turns\n"
    )
    print(tabulate(rows, ["job", "slurmctld us", "ratio", "sbatch ms"]))


def _median(turns: list[Turn], of: Callable[[Turn], float]) -> float:
    return statistics.median(map(of, turns))


if __name__ == "__main__":
    main()
