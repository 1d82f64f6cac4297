# SPDX-License-Identifier: Apache-2.0
"""What a hook has to say: to standard error, which slurmd keeps, and to the machine's log.

slurmd shows the output of a hook that succeeds only at a high debug level, so the machine's log
is where an administrator finds warnings. It is never waited for.
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
    """Says things for one hook on one node."""

    def __init__(
        self, hook: str, node: str, job: str = "", *, to: str = telemetry.LOG_SOCKET
    ) -> None:
        self._to = to
        # The system log takes a first word with a colon for the name of the program.
        self._facts = {"hook": hook, "node": node, "job": job}
        self._head = f"slurm-health: {hook}: node={node}" + (f" job={job}" if job else "")

    def say(self, level: str, text: str) -> None:
        """Write one line to both logs; what cannot be written is lost, and nothing waits."""
        line = f"{self._head} {one_line(text)}"
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
        self._send(level, line)

    def error(self, text: str) -> None:
        """Say what an administrator must see."""
        self.say("error", text)

    def warning(self, text: str) -> None:
        """Say what somebody should look at."""
        self.say("warning", text)

    def info(self, text: str) -> None:
        """Say what was done."""
        self.say("info", text)

    def verdicts(self, results: Sequence[CheckResult]) -> None:
        """Write a line of JSON for each result into the machine's log, a pass too."""
        import json

        for each in results:
            document = {
                **self._facts,
                "check": each.name,
                "status": each.status.value,
                "shadow": each.shadow,
                "text": cut(one_line(each.finding.text), _LENGTH),
                "elapsed_ms": round(each.elapsed_ms, 1),
            }
            self._send(_LEVELS.get(each.status, "info"), f"slurm-health: {json.dumps(document)}")

    def results(self, results: Sequence[CheckResult]) -> None:
        """Log everything that an administrator may have to know."""
        for each in results:
            if each.status not in WELL:
                shadow = " (in shadow: logged only)" if each.shadow else ""
                status = each.status.value
                self.say(
                    _LEVELS[each.status], f"check={each.name} {status}{shadow}: {each.finding.text}"
                )

    def _send(self, level: str, line: str) -> None:
        telemetry.send_line(level, line, to=self._to)
