# SPDX-License-Identifier: Apache-2.0
"""Count what a check waits for on well played GPUs: rounds, initialisations of NCCL, waits.

    python -m benchmarks.played_check                        standard, two nodes of eight devices
    python -m benchmarks.played_check --devices=2 --check=quick
    python -m benchmarks.played_check --of=VENV/bin/python   of the slurm_health in there

Initialisations are those that NCCL's own log names, the most on any device. Waits are those of the
worker that waits most often: for all devices of its group to come to the same, and for the first
exchange of a group. How long any of this takes is not told: no GPU takes part. Exits 1 if a node
was not found healthy, 3 if nothing could be counted.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.command import count
from tests.played_gpu import build
from tests.played_gpu.description import Device, machine, write
from tests.played_gpu.running import environment

ROOT = Path(__file__).parents[2]
IN_WORKERS = Path(__file__).parent / "in_workers"
LONGEST_S = 500
# Small, so that little work is chosen, and the machine that plays it all is not what is counted.
DEVICE = Device(memory_bytes=4 << 30, tflops=0.002, memory_gb_per_s=8, link_gb_per_s=0.02)
_BEGUN = re.compile(r"ncclComm\w+ comm \S+ rank \d+ nranks (\d+) .* Init START")
_ROUND, _WAIT = "run", "wait_for_all"


class NotCounted(Exception):
    """The check told nothing that could be counted; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What was counted; in `initialised` by how many devices took part."""

    levels: Mapping[str, str]
    phases: Sequence[str]
    initialised: Mapping[int, int]
    waits: Sequence[int]
    exchanges: Sequence[int]


def main() -> int:
    """Run the check, print the counts; return the exit code."""
    options = _parser().parse_args()
    build.ready(options.python.absolute().parents[1])
    with tempfile.TemporaryDirectory(prefix="played-check-") as name:
        try:
            counted = count_waits(options, Path(name))
        except NotCounted as err:
            print(err, file=sys.stderr)
            return 3
    print(table(counted))
    sick = {node: level for node, level in counted.levels.items() if level != "healthy"}
    if sick:
        print(f"not healthy: {sick}", file=sys.stderr)
    return 1 if sick else 0


def count_waits(options: argparse.Namespace, directory: Path) -> Counted:
    """Check played nodes that are well, and count.

    Raises:
        NotCounted: the check did not end in time, or with a verdict.
    """
    devices = options.nodes * options.devices
    write(directory / "gpus", machine(devices, DEVICE, seed=str(directory)))
    said = _checked(options, directory, devices)
    (master,) = (directory / "journal").rglob("master.jsonl")
    records = [json.loads(line) for line in master.read_text().splitlines()]
    workers = [_by_round(file.read_text().split()) for file in directory.glob("notes.*")]
    logs = [_BEGUN.findall(log.read_text()) for log in directory.glob("nccl.*")]
    longest = max(workers, key=lambda rounds: sum(each[_WAIT] for each in rounds), default=[])
    phases = [record["phase"] for record in records if record["kind"] == "round_started"]
    levels = {node["node"]: node["level"] for node in said["nodes"]}
    if len(longest) != len(phases):
        raise NotCounted(f"no worker was in all {len(phases)} rounds: {levels}")
    return Counted(
        levels=levels,
        phases=phases,
        initialised=Counter(int(size) for size in max(logs, key=len, default=[])),
        waits=[each[_WAIT] for each in longest],
        exchanges=[each.total() - each[_WAIT] for each in longest],
    )


def _checked(
    options: argparse.Namespace, directory: Path, devices: int
) -> dict[str, list[dict[str, str]]]:
    """Run the check to its end; return what it says in JSON."""
    argv = [options.of, "-m", "slurm_health", "check", f"--local={options.nodes}", "--json"]
    variables = {
        "CUDA_VISIBLE_DEVICES": ",".join(str(number) for number in range(devices)),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": f"{directory}/nccl.%p",
        "PYTHONPATH": str(IN_WORKERS),
        "WAITS_NOTED_IN": str(directory),
    }
    words = [f"--check={options.check}", f"--journal={directory / 'journal'}"]
    try:
        done = subprocess.run(
            [*argv, *words, f"--python={options.python.absolute()}"],
            env=environment(directory / "gpus", variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_S,
        )
        said: dict[str, list[dict[str, str]]] = json.loads(done.stdout)
    except subprocess.TimeoutExpired as err:
        raise NotCounted(f"the check did not end within {LONGEST_S} s") from err
    except json.JSONDecodeError as err:
        raise NotCounted(f"the check came to no verdict: {done.stderr.strip()}") from err
    return said


def _by_round(notes: Sequence[str]) -> list[Counter[str]]:
    """Return how often a worker called what, round by round."""
    rounds: list[Counter[str]] = []
    for name in notes:
        if name == _ROUND:
            rounds.append(Counter())
        elif rounds:
            rounds[-1][name] += 1
    return rounds


def table(counted: Counted) -> str:
    """Return the counts as a table for people."""
    rounds = enumerate(zip(counted.phases, counted.waits, counted.exchanges, strict=True))
    rows = [(index, *each) for index, each in rounds]
    headers = ["round", "phase", "waits for all devices of a group", "first exchanges of a group"]
    sizes = ", ".join(f"{often} of {size}" for size, often in sorted(counted.initialised.items()))
    return (
        f"{tabulate(rows, headers=headers, tablefmt='github')}\n\n"
        f"{len(rows)} rounds, {sum(counted.waits)} waits, {sum(counted.exchanges)} first exchanges;"
        f" initialisations of NCCL on a device: {sum(counted.initialised.values())}"
        f" ({sizes} devices)"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.played_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=count, default=2, help="how many (default 2)")
    parser.add_argument("--devices", type=count, default=8, help="of each node (default 8)")
    parser.add_argument("--check", default="standard", help="which check (default standard)")
    parser.add_argument("--of", default=sys.executable, help="whose slurm_health checks")
    parser.add_argument(
        "--python",
        type=Path,
        default=ROOT / ".venv-played" / "bin" / "python",
        help="whose torch runs on played GPUs",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
