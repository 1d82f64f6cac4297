# SPDX-License-Identifier: Apache-2.0
"""Play faults of a training over NCCL, record them, and show what is said of each recording.

    python -m benchmarks.played_training --record DIR                 every cause; half an hour
    python -m benchmarks.played_training --record DIR --only stopped
    python -m benchmarks.played_training --read DIR                   what is said of recordings

No GPU is used: docs/explanation/played-training.md says what that means. Exits 1 if something
wrong is said of a recording, 3 if a cause could not be played.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tabulate import tabulate

from benchmarks.command import end_as_on_interrupt
from benchmarks.played_training.causes import BY_NAME, CAUSES
from benchmarks.played_training.perform import ROOT, NotPlayed, play
from benchmarks.played_training.recording import Recording, keep, read
from benchmarks.played_training.say import Said, Verdict, health_check, monitor, post_mortem
from tests.played_gpu import build

_PYTHON = ROOT / ".venv-played" / "bin" / "python"


def main() -> int:
    """Record, then read and judge; return the exit code."""
    options = _parser().parse_args()
    end_as_on_interrupt()
    directory: Path = options.record or options.read
    names = options.only or [cause.name for cause in CAUSES]
    failed = []
    if options.record:
        build.ready(Path(options.python).absolute().parents[1])
        for name in names:
            try:
                keep(
                    play(BY_NAME[name], options.python),
                    BY_NAME[name],
                    options.python,
                    directory / name,
                )
            except NotPlayed as err:
                failed.append(str(err))
                print(err, file=sys.stderr, flush=True)
    recordings = [read(directory / name) for name in names if (directory / name).is_dir()]
    rows = [row(each) for each in recordings]
    headers = ["cause", "what is done", "post-mortem", "monitor", "GPU check"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    if failed:
        return 3
    judges = (post_mortem, monitor, health_check)
    said = [each for rec in recordings for judge in judges if (each := judge(rec))]
    return 1 if any(each.verdict is Verdict.WRONG for each in said) else 0


def row(recording: Recording) -> list[str]:
    """Return a recording's row of the table."""
    cause = recording.cause
    checked = health_check(recording)
    return [
        *(cause.name, cause.title, _cell(post_mortem(recording)), _cell(monitor(recording))),
        checked.verdict.value if checked else "",
    ]


def _cell(said: Said | None) -> str:
    if said is None:
        return ""
    words = said.why or (said.found.cause if said.found else "")
    named = f": {words}" if words else ""
    return f"{said.verdict.value}{named}"


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {cause.name:18} {cause.title}" for cause in CAUSES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.played_training",
        description="Faults of a training over NCCL on played GPUs, recorded.",
        epilog=f"causes:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--record", type=Path, metavar="DIR", help="play, and keep here")
    where.add_argument("--read", type=Path, metavar="DIR", help="what was recorded here before")
    parser.add_argument("--only", action="append", choices=list(BY_NAME), metavar="CAUSE")
    parser.add_argument(
        "--python", default=str(_PYTHON), metavar="PATH", help="that has played GPUs"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
