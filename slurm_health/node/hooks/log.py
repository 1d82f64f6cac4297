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
from slurm_health.records.text import cut, one_line
from slurm_health.system import telemetry

# JSON writes one character as up to six, and a line is cut at 2,000 bytes.
_LENGTH = 250
_LEVELS = {
    Status.NODE_FAULT: "error",
    Status.USER_FAULT: "warning",
    Status.INCONCLUSIVE: "warning",
    Status.WARN: "warning",
}


class Log:
    """Writes the lines of one hook on one node."""

    def __init__(
        self, hook: str, node: str, job: str = "", *, to: str = telemetry.LOG_SOCKET
    ) -> None:
        self._to = to
        # The system log takes a first word with a colon for the name of the program.
        self._facts = {"hook": hook, "node": node, "job": job}
        self._head = f"slurm-health: {hook}: node={node}" + (f" job={job}" if job else "")

    def write(self, level: str, text: str) -> None:
        """Write one line to both logs, without waiting; a failure to write loses it."""
        line = f"{self._head} {one_line(text)}"
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
        telemetry.send_line(level, line, to=self._to)

    def error(self, text: str) -> None:
        """Log what an administrator must see."""
        self.write("error", text)

    def warning(self, text: str) -> None:
        """Log what an administrator should look at."""
        self.write("warning", text)

    def info(self, text: str) -> None:
        """Log what was done."""
        self.write("info", text)

    def verdicts(self, results: Sequence[CheckResult]) -> None:
        """Write every result, passes too, as a line of JSON into the machine's log."""
        import json

        for result in results:
            document = {
                **self._facts,
                "check": result.name,
                "status": result.status.value,
                "shadow": result.shadow,
                "text": cut(one_line(result.finding.text), _LENGTH),
                "elapsed_ms": round(result.elapsed_ms, 1),
            }
            level = _LEVELS.get(result.status, "info")
            telemetry.send_line(level, f"slurm-health: {json.dumps(document)}", to=self._to)

    def results(self, results: Sequence[CheckResult]) -> None:
        """Log every result that is not well."""
        for result in results:
            if result.status not in WELL:
                shadow = " (in shadow: logged only)" if result.shadow else ""
                head = f"check={result.name} {result.status.value}{shadow}"
                self.write(_LEVELS[result.status], f"{head}: {result.finding.text}")
