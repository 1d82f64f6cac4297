# SPDX-License-Identifier: Apache-2.0
"""How likely nodes are to be bad before they are tested, by what was found of them earlier.

By the earlier checks and failures of the job itself, and by the site's history: one small file,
which its cron writes. A prior decides which nodes are tested with which and how soon, and how much
is needed to trust one. It is bounded where it is used, so that it never convicts or acquits.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
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
# Chosen, not measured: the more was seen, the more; a node of which nothing is known has 0.02.
_OF_LEVEL = {Level.FAULTY: 0.3, Level.SLOW: 0.2, Level.INCONCLUSIVE: 0.05}
_ACCUSED = 0.3
_WHERE_IT_FAILED = 0.1
_NAMED = 3  # of the lemons among a job's nodes


def of_job(root: Path, cluster: str, job_id: int, user_id: int) -> dict[str, float]:
    """Return how likely nodes are to be bad by the earlier runs of a job; empty without any."""
    try:
        name = journal.name_of(root, cluster, str(job_id), user_id, quick=True)
        runs = journal.runs_of(root, cluster, name, owner=user_id)[-_MOST_RUNS:]
    except OSError as err:
        log.warning("earlier findings are not taken into account: %s", err.strerror or err)
        return {}
    return prior_of_findings(found for run in runs for found in _found(run))


def _found(run: Path) -> Iterator[VerdictReached | Diagnosed]:
    """Yield what one run found: by its check, then by the failures of the script after it."""
    for writer in (journal.MASTER, journal.POST_MORTEM):
        with contextlib.suppress(JournalError):  # what cannot be read is no suspicion
            for entry in journal.read_all(run, writer):
                if isinstance(entry.record, VerdictReached | Diagnosed):
                    yield entry.record


def prior_of_findings(earlier: Iterable[VerdictReached | Diagnosed]) -> dict[str, float]:
    """Return how likely nodes are to be bad, from what was found before, oldest first.

    A node that is not named is as likely as any. What was found last counts: a verdict of healthy
    takes back what was before it.
    """
    prior: dict[str, float] = {}
    for found in earlier:
        match found:
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
    """Return how likely nodes are to be bad by the site's history.

    What cannot be used is said and says nothing of any node.
    """
    if path is None:
        return {}
    try:
        known = standings.known_of(standings.read(content_of(path), now_s=now_s), cluster, nodes)
    except (OSError, ValueError) as err:
        why = (err.strerror or err) if isinstance(err, OSError) else err
        log.warning("the history of nodes is not taken into account: %s: %s", path, why)
        return {}
    _tell(known)
    return standings.prior_of(known)


def _tell(known: dict[str, standings.Known]) -> None:
    lemons = [
        (node, each) for node, each in known.items() if each.level is standings.Reliability.LEMON
    ]
    for node, each in sorted(lemons, key=lambda lemon: -lemon[1].score)[:_NAMED]:
        told = "%s has spoiled %d of %d jobs: it is tested more closely"
        log.info(told, node, each.spoiled, each.jobs)
