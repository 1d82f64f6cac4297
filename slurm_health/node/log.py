# SPDX-License-Identifier: Apache-2.0
"""The log of a hook: standard error, which slurmd keeps, and the machine's log.

slurmd shows the output of a hook that succeeds only at a high debug level, so administrators read
warnings in the machine's log. No hook waits for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from slurm_health.node.rules.finding import WELL, CheckResult, Status
from slurm_health.records.text import one_line
from slurm_health.system import telemetry

_LEVELS = {
    Status.NODE_FAULT: "error",
    Status.USER_FAULT: "warning",
    Status.INCONCLUSIVE: "warning",
    Status.WARN: "warning",
}


class Log:
    """Writes the lines of one hook on one node."""

    def __init__(self, hook: str, node: str, job: str = "") -> None:
        # The system log takes a first word with a colon for the name of the program.
        self._head = f"slurm-health: {hook}: node={node}" + (f" job={job}" if job else "")

    def write(self, level: str, text: str) -> None:
        """Write one line to both logs, without waiting; a failure to write loses it."""
        line = f"{self._head} {one_line(text)}"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        telemetry.send_line(level, line)

    def error(self, text: str) -> None:
        """Log what an administrator must see."""
        self.write("error", text)

    def warning(self, text: str) -> None:
        """Log what an administrator should look at."""
        self.write("warning", text)

    def info(self, text: str) -> None:
        """Log what was done."""
        self.write("info", text)

    def results(self, results: Sequence[CheckResult]) -> None:
        """Log every result that is not well."""
        for result in results:
            if result.status not in WELL:
                shadow = " (in shadow: logged only)" if result.shadow else ""
                head = f"check={result.name} {result.status.value}{shadow}"
                self.write(_LEVELS[result.status], f"{head}: {result.finding.text}")
