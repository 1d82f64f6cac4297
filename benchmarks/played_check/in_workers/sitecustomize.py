# SPDX-License-Identifier: Apache-2.0
"""Every interpreter of a counted check begins with this: its workers note what they wait for.

Each line of a process's file in WAITS_NOTED_IN is a call: the name of a function, and of the file
that it is in.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

NOTED = (
    "WorkerRound.run",
    "Round.run",  # of an older slurm_health
    "Meeting.wait_for_all",
    "exchange_first",
    "Membership.exchange_first",
)


def _note_calls(directory: Path) -> None:
    notes = (directory / f"notes.{os.getpid()}").open("a", buffering=1)

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_qualname in NOTED:
            notes.write(f"{frame.f_code.co_qualname}\n")

    sys.setprofile(note)


if "WAITS_NOTED_IN" in os.environ and any(word.endswith("worker.py") for word in sys.orig_argv):
    _note_calls(Path(os.environ["WAITS_NOTED_IN"]))
