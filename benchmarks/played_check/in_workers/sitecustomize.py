# SPDX-License-Identifier: Apache-2.0
"""Every interpreter of a counted check begins with this: its workers note what they wait for.

Each line of a process's file in WAITS_NOTED_IN is a call: the name of a function.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

# By their own names, which more than one release has; a class of them may be called otherwise.
WAITS = ("wait_for_all", "exchange_first")
ROUNDS = ("WorkerRound.run", "Round.run")  # the second of an older slurm_health


def _note_calls(directory: Path) -> None:
    notes = (directory / f"notes.{os.getpid()}").open("a", buffering=1)

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and (code.co_name in WAITS or code.co_qualname in ROUNDS):
            notes.write(f"{code.co_name}\n")

    sys.setprofile(note)


if "WAITS_NOTED_IN" in os.environ and any(word.endswith("worker.py") for word in sys.orig_argv):
    _note_calls(Path(os.environ["WAITS_NOTED_IN"]))
