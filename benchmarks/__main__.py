# SPDX-License-Identifier: Apache-2.0
"""Run a benchmark by its name.

    python -m benchmarks                 what there is
    python -m benchmarks NAME [ARGS]     `--help` lists its options

docs/explanation/performance.md has the results.
"""

from __future__ import annotations

import difflib
import runpy
import sys

# Name: module below `benchmarks`, what it measures.
BENCHMARKS = {
    "acting": ("acting", "how soon a job continues after its verdict"),
    "admin": ("admin", "an administrator's hour: do the hooks do what they should?"),
    "check": ("check", "how long a check takes, and DLRover's: --dlrover VENV"),
    "diagnosis": ("diagnosis", "fifteen faults of a running training: are they named (hours)"),
    "gpu": ("gpu", "everything that one GPU can show; --device=cpu without one"),
    "history": ("history", "how fast journals are indexed, and the history answers"),
    "hooks": ("hooks", "what the prolog and the health check cost on this node"),
    "localize": ("localize", "how often the localisation is right, beside DLRover's rule"),
    "monitor": ("monitor_cost", "what the monitor costs on each node, and per step of a training"),
    "replay": ("replay", "what is said of recordings of real clusters: ARGS=DIR"),
    "owners": ("owners", "is every event of a job sent once to its owner, whatever breaks"),
    "watch": ("watch", "a watch that nobody asked for: are hangs reported, and healthy jobs not"),
    "slurm-drains": ("slurm_drains", "Slurm's own drains: explained, and no node returned wrongly"),
    "storage": ("storage_clients", "what the test of storage asks of a server: 256 clients"),
    "scale": ("scale", "what a check of up to 16,384 simulated nodes costs"),
}


def main(argv: list[str]) -> int:
    """Run what `argv` names, or print what there is; return the exit code."""
    if argv and argv[0] in BENCHMARKS:
        module = f"benchmarks.{BENCHMARKS[argv[0]][0]}"
        sys.argv[1:] = argv[1:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    if argv and argv[0] not in {"-h", "--help"}:
        print(f"unknown benchmark {argv[0]!r}{_did_you_mean(argv[0])}", file=sys.stderr)
    print("make bench NAME=... [ARGS='...'], or python -m benchmarks NAME [ARGS]; names:")
    for name, (_, what) in BENCHMARKS.items():
        print(f"  {name:12} {what}")
    return 2 if argv and argv[0] not in {"-h", "--help"} else 0


def _did_you_mean(name: str) -> str:
    close = difflib.get_close_matches(name, BENCHMARKS, n=1)
    return f"; did you mean {close[0]}?" if close else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
