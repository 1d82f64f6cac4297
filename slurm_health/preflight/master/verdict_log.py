# SPDX-License-Identifier: Apache-2.0
"""What a check concluded, as lines of JSON in the machine's log, where the site wants them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from slurm_health.records.nodeset import fold
from slurm_health.records.records import RunFinished, RunStarted, VerdictReached
from slurm_health.records.text import cut, one_line
from slurm_health.records.verdict import Level
from slurm_health.system import telemetry

# JSON writes one character as up to six, and a line is cut at 2,000 bytes.
_LENGTH = 250


def tell(
    verdict: VerdictReached,
    started: RunStarted,
    finished: RunFinished,
    *,
    to: str = telemetry.LOG_SOCKET,
) -> None:
    """Write a line for each bad node, and one for the check. Who reads `level` sees both."""
    job = {
        "cluster": one_line(started.cluster),
        "job": one_line(started.run_id),
        "user": one_line(started.user),
        "partition": one_line(started.partition),
    }
    for found in verdict.nodes:
        if found.level in {Level.FAULTY, Level.SLOW}:
            what = {
                "node": one_line(found.node),
                "level": found.level.value,
                "component": one_line(found.component),
                "reason": cut(one_line(found.reason), _LENGTH),
            }
            _send("warning", {"verdict": "node", **job, **what}, to)
    levels = Counter(found.level.value for found in verdict.nodes)
    what = {
        "disposition": finished.disposition.value,
        "reason": cut(one_line(finished.reason), _LENGTH),
        "nodes": cut(fold(found.node for found in verdict.nodes), _LENGTH),
    }
    counts = {level.value: levels[level.value] for level in Level}
    _send("info", {"verdict": "check", **job, **what, **counts}, to)


def _send(level: str, document: Mapping[str, object], to: str) -> None:
    telemetry.send_line(level, f"slurm-health: {json.dumps(document)}", to=to)
