# SPDX-License-Identifier: Apache-2.0
"""What is said of a check: its steps and rounds in the log, what it concluded in the machine's log.

The machine's log gets lines of JSON, and only where the site wants them.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from slurm_health.records import records
from slurm_health.records.nodeset import fold
from slurm_health.records.text import cut, one_line
from slurm_health.records.verdict import Level
from slurm_health.system import telemetry

log = logging.getLogger(__name__)

# More groups than this are counted, not named, where a round begins.
SHOWN_GROUPS = 64
_MOST_NODES = 8  # each by name; of more, the slowest few and what was usual
_SLOWEST = 3
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
            log.info("round %d: %s", started.round, _round_text(started))
        case records.GroupAborted(round=index, group=group, reason=reason):
            log.info("round %d: %s stopped: %s", index, fold(group), reason)
        case _:
            pass


def _log_nodes(level: int, what: str, nodes: Sequence[str]) -> None:
    if log.isEnabledFor(level):  # to fold thousands of names takes as long as to judge them
        log.log(level, "%s %s", what, fold(nodes))


def _round_text(started: records.RoundStarted) -> str:
    """Say who does what in a round: `pairs n1-n2 n3-n4: matmul, allgather`."""
    if all(len(group) == 1 for group in started.groups):
        who = f"{fold(node for group in started.groups for node in group)} alone"
    elif len(started.groups) > SHOWN_GROUPS:
        who = f"{len(started.groups)} groups"
    else:
        who = " ".join(fold(group) for group in started.groups)
    return f"{who}: {', '.join(probe.name for probe in started.probes)}"


def took_text(reports: Mapping[str, records.NodeReported], silent: list[str]) -> str:
    """Return `n1 2.1 s, n2 2.2 s; no answer from n3`; `silent` are those that did not report."""
    took_s = {
        node: report.elapsed_ms / 1000 for node, report in reports.items() if node not in silent
    }
    slowest = sorted(took_s, key=lambda node: -took_s[node])[:_SLOWEST]
    many = len(took_s) > _MOST_NODES
    named = slowest if many else sorted(took_s)
    parts = [", ".join(f"{node} {took_s[node]:.1f} s" for node in named)] if named else []
    if many:
        parts.append(f"median of {len(took_s)} nodes {median(took_s.values()):.1f} s")
    if silent:
        parts.append(f"no answer from {fold(silent)}")
    return "; ".join(parts) or "nobody reported"


def tell(
    verdict: records.VerdictReached,
    started: records.RunStarted,
    finished: records.RunFinished,
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
