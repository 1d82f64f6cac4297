# SPDX-License-Identifier: Apache-2.0
"""What earlier checks and failures of a job say of its nodes, as the prior of the next check.

A prior decides which nodes are tested with which and how soon, and how much is needed to trust
one. It is bounded where it is used, so that it never convicts or acquits.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_health.records.records import VerdictReached
from slurm_health.records.script_records import Diagnosed
from slurm_health.records.verdict import Level

# Chosen, not measured: the more was seen, the more; a node of which nothing is known has 0.02.
_OF_LEVEL = {Level.FAULTY: 0.3, Level.SLOW: 0.2, Level.INCONCLUSIVE: 0.05}
_ACCUSED = 0.3
_WHERE_IT_FAILED = 0.1


def prior_of(earlier: Iterable[VerdictReached | Diagnosed]) -> dict[str, float]:
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
