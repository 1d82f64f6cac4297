# SPDX-License-Identifier: Apache-2.0
"""Everything that one GPU can show, over NCCL where several processes have to share it.

    python -m benchmarks.gpu                        all nine sections
    python -m benchmarks.gpu --only 2 --only 4
    python -m benchmarks.gpu --device cpu --small   that it runs, on a machine without a GPU

Each step is kept in a file as soon as it is done. A call begins no step that would not end within
its budget; the next call continues, and tries again what could not be measured. On a machine
without a GPU it only says what it would do. Exits 1 if a result is wrong, 3 if steps are left or
could not be measured, else 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.command import count, end_as_on_interrupt
from benchmarks.gpu import figures_file
from benchmarks.gpu.machine import Unusable, describe, find_python
from benchmarks.gpu.plan import Plan, exit_code, measure_left, table, title, would_do
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.step import SMALL, Amount
from slurm_health.preflight.agent.node_facts import device_count

BUDGET_S = 540.0
DEFAULT_FILE = Path("gpu.json")


def main() -> int:
    """Measure what is left, print the table, return the exit code."""
    begun_s = time.monotonic()
    options = _parser().parse_args()
    end_as_on_interrupt()
    environ: Mapping[str, str] = os.environ
    wanted = [each for each in SECTIONS if not options.only or each.number in options.only]
    plan = Plan(sections=wanted, amount=SMALL if options.small else Amount())
    if options.device == "cpu":
        environ = {**environ, "CUDA_VISIBLE_DEVICES": ""}
    elif not device_count(environ):
        print(would_do(plan))
        return 0
    try:
        machine = describe(options.python or find_python(environ), environ)
        figures = figures_file.read(options.output, machine.facts, small=options.small)
        print(title(figures), file=sys.stderr)
        figures = measure_left(plan, machine, figures, options.output, begun_s + options.budget)
    except Unusable as err:
        print(f"benchmarks.gpu: {err}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"interrupted; the steps that are done are in {options.output}", file=sys.stderr)
        return 130
    print(table(plan, figures))
    return exit_code(plan, figures)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Everything that one GPU can show.",
        epilog="; ".join(f"{each.number}: {each.title}" for each in SECTIONS),
    )
    numbers = [each.number for each in SECTIONS]
    parser.add_argument(
        "--only", action="append", type=int, choices=numbers, metavar="N", help="this section"
    )
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu", help="[gpu]")
    parser.add_argument(
        "--small", action="store_true", help="a little of everything, to see that it runs"
    )
    parser.add_argument(
        "--budget", type=count, default=BUDGET_S, metavar="SECONDS", help="of this call [540]"
    )
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_FILE, metavar="FILE", help="[gpu.json]"
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="that has torch [python3 on the PATH or this one, first one built for GPUs]",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
