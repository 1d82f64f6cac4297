# SPDX-License-Identifier: Apache-2.0
"""What is said of a check: its steps and rounds in the log, what it concluded in the machine's log.

The machine's log gets lines of JSON, and only where the site wants them.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import structs

from slurm_health.records import records
from slurm_health.records.nodeset import fold
from slurm_health.records.text import cut, elapsed_text, one_line
from slurm_health.records.verdict import Level
from slurm_health.system import telemetry

log = logging.getLogger(__name__)

# More groups than this are counted, not named, where a round begins.
SHOWN_GROUPS = 64
# JSON writes one character as up to six, and a line is cut at 2,000 bytes.
_LENGTH = 250


def log_record(record: records.Record) -> None:
    """Say in the log what the master does with a record of its own."""
    match record:
        case records.AgentsLaunched(nodes=nodes, launch=launch):
            _log_nodes(logging.INFO if launch else logging.DEBUG, "starting agents on", nodes)
        case records.AgentsLost(nodes=nodes, reason=reason):
            log.warning("node=%s agent lost: %s", fold(nodes), reason)
        case records.NodesAdmitted(nodes=nodes):
            _log_nodes(logging.DEBUG, "measuring", nodes)
        case records.RoundStarted() as started if log.isEnabledFor(logging.INFO):
            log.info("%s: %s", started.name, _round_text(started))
        case records.GroupAborted(group=group, reason=reason):
            log.info("%s stopped: %s", fold(group), reason)
        case _:
            pass


def _log_nodes(level: int, what: str, nodes: Sequence[str]) -> None:
    if log.isEnabledFor(level):  # to fold thousands of names takes as long as to judge them
        log.log(level, "%s %s", what, fold(nodes))


def _round_text(started: records.RoundStarted) -> str:
    """Say who does what in a round: `pairs n[1-2] n[3-4]: matmul, allgather`."""
    largest = max((len(group) for group in started.groups), default=0)
    kind = {2: "pairs"}.get(largest, "groups")
    if largest < 2:
        who = fold(node for group in started.groups for node in group)
    elif len(started.groups) > SHOWN_GROUPS:
        who = f"{len(started.groups)} {kind}"
    else:
        who = f"{kind} {' '.join(fold(group) for group in started.groups)}"
    return f"{who}: {', '.join(probe.name for probe in started.probes)}"


def end_text(reports: Mapping[str, records.NodeReported], silent: list[str]) -> str:
    """Return `elapsed n3 20.1 s, n[1-2] 1.6 s; no answer from n4`: how a round ended.

    `silent` are the nodes that did not report in time; what they reported later does not count.
    """
    elapsed_s = {
        node: report.elapsed_ms / 1000 for node, report in reports.items() if node not in silent
    }
    parts = [elapsed_text(elapsed_s), f"no answer from {fold(silent)}" if silent else ""]
    return "; ".join(part for part in parts if part) or "no node reported"


def tell(
    verdict: records.VerdictReached,
    started: records.RunStarted,
    finished: records.JobOutcome,
    *,
    to: str = telemetry.LOG_SOCKET,
) -> None:
    """Write a line for each bad node, each path that is not well, and the check."""
    job = {
        "cluster": one_line(started.cluster),
        "job": one_line(started.run_id),
        "user": one_line(started.user),
        "partition": one_line(started.partition),
    }
    for node in verdict.nodes:
        if node.level in {Level.FAULTY, Level.SLOW}:
            what = {
                "node": one_line(node.node),
                "level": node.level.value,
                "component": one_line(node.component),
                "reason": cut(one_line(node.reason), _LENGTH),
            }
            _send("warning", {"verdict": "node", **job, **what}, to)
    for path in verdict.storage:
        fields = {**structs.asdict(path), "nodes": fold(path.nodes)}
        what = {name: cut(one_line(value), _LENGTH) for name, value in fields.items()}
        _send("warning", {"verdict": "storage", **job, **what}, to)
    levels = Counter(node.level.value for node in verdict.nodes)
    what = {
        "disposition": finished.disposition.value,
        "reason": cut(one_line(finished.reason), _LENGTH),
        "nodes": cut(fold(node.node for node in verdict.nodes), _LENGTH),
    }
    counts = {level.value: levels[level.value] for level in Level}
    _send("info", {"verdict": "check", **job, **what, **counts}, to)


def _send(level: str, document: Mapping[str, object], to: str) -> None:
    telemetry.send_line(level, f"slurm-health: {json.dumps(document)}", to=to)
