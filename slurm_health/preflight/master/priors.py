# SPDX-License-Identifier: Apache-2.0
"""The probability of nodes to be bad before they are tested, from earlier evidence.

The evidence is the job's own earlier checks and failures, and the site's history: one small file,
which its cron writes. A prior decides which nodes are tested with which and how soon, and how much
it takes to trust one. Its user bounds it, so that it never convicts or acquits.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from slurm_health.records import standings
from slurm_health.records.errors import JournalError
from slurm_health.records.records import VerdictReached
from slurm_health.records.script_records import Diagnosed
from slurm_health.records.verdict import Level
from slurm_health.system import journal
from slurm_health.system.site_file import content_of

log = logging.getLogger(__name__)

_MOST_RUNS = 20  # the last ones of a job; few have as many
# Chosen, not measured: more evidence counts more; a node without any has 0.02.
_OF_LEVEL = {Level.FAULTY: 0.3, Level.SLOW: 0.2, Level.INCONCLUSIVE: 0.05}
_ACCUSED = 0.3
_WHERE_IT_FAILED = 0.1
_NAMED = 3  # of the lemons among a job's nodes


def of_job(root: Path, cluster: str, job_id: int, user_id: int) -> dict[str, float]:
    """Return the priors from the earlier runs of a job; empty without any."""
    try:
        name = journal.name_of(root, cluster, str(job_id), user_id, quick=True)
        runs = journal.runs_of(root, cluster, name, owner=user_id)[-_MOST_RUNS:]
    except OSError as err:
        log.warning("earlier findings are not taken into account: %s", err.strerror or err)
        return {}
    records: list[VerdictReached | Diagnosed] = []
    for run in runs:  # the verdict of its check, then the failures of the script after it
        for writer in (journal.MASTER, journal.POST_MORTEM):
            with contextlib.suppress(JournalError):  # an unreadable file is no suspicion
                records.extend(
                    entry.record
                    for entry in journal.read_all(run, writer)
                    if isinstance(entry.record, VerdictReached | Diagnosed)
                )
    return prior_of_findings(records)


def prior_of_findings(earlier: Iterable[VerdictReached | Diagnosed]) -> dict[str, float]:
    """Return the priors from earlier records, oldest first.

    The last record about a node counts: a verdict of healthy takes back what was before it. Other
    nodes have no prior.
    """
    prior: dict[str, float] = {}
    for record in earlier:
        match record:
            case VerdictReached(nodes=judged):
                for node in judged:
                    prior.pop(node.node, None)
                    if node.level in _OF_LEVEL:
                        prior[node.node] = _OF_LEVEL[node.level]
            case Diagnosed(nodes=nodes, accused=accused):
                for name in (*nodes, *accused):
                    likely = _ACCUSED if name in accused else _WHERE_IT_FAILED
                    prior[name] = max(likely, prior.get(name, 0.0))
    return prior


def of_site(
    path: Path | None, cluster: str, nodes: Sequence[str], *, now_s: float
) -> dict[str, float]:
    """Return the priors from the site's history; an unusable file is logged, and gives none."""
    if path is None:
        return {}
    try:
        known = standings.known_of(standings.read(content_of(path), now_s=now_s), cluster, nodes)
    except (OSError, ValueError) as err:
        why = (err.strerror or err) if isinstance(err, OSError) else err
        log.warning("the history of nodes is not taken into account: %s: %s", path, why)
        return {}
    lemons = {n: node for n, node in known.items() if node.level is standings.Reliability.LEMON}
    for name, lemon in sorted(lemons.items(), key=lambda item: -item[1].score)[:_NAMED]:
        text = "%s has spoiled %d of %d jobs: it is tested more closely"
        log.info(text, name, lemon.spoiled, lemon.jobs)
    return standings.prior_of(known)
