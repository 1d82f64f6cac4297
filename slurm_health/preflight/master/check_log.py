# SPDX-License-Identifier: Apache-2.0
"""What the log says of a check: its steps and rounds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from slurm_health.records import records
from slurm_health.records.nodeset import fold
from slurm_health.records.text import elapsed_text

log = logging.getLogger(__name__)

# More groups than this are counted, not named, where a round begins.
SHOWN_GROUPS = 64


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
