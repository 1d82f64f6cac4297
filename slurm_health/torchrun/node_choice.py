# SPDX-License-Identifier: Apache-2.0
"""Which nodes training starts with, from a verdict. Pure."""

from __future__ import annotations

from collections.abc import Collection

from slurm_health.records.nodeset import fold
from slurm_health.records.records import VerdictReached
from slurm_health.records.script_records import TrainingPlanned
from slurm_health.records.verdict import Level
from slurm_health.torchrun.arguments import Bounds

# Whom to take first. A slow node that is not excluded trains, but after the undoubted.
_PREFERENCE = (Level.HEALTHY, Level.SLOW, Level.INCONCLUSIVE)


def choose(
    bounds: Bounds,
    verdict: VerdictReached,
    *,
    absent: Collection[str],
    exclude_slow: bool,
) -> TrainingPlanned:
    """Choose the nodes to start with, none if it does not.

    A faulty node never trains. Doubt is no fault: an undecided node does, and so does one whose
    process is silent (`absent`) where training cannot start without it.
    """
    unfit = {Level.FAULTY, Level.SLOW} if exclude_slow else {Level.FAULTY}
    fit = [node for node in verdict.nodes if node.level not in unfit]
    present = [node for node in fit if node.node not in absent]
    present.sort(key=lambda node: _PREFERENCE.index(node.level))
    chosen = {node.node for node in present[: bounds.most]}
    missing = [node.node for node in fit if node.node in absent]
    chosen.update(missing[: max(0, bounds.least - len(chosen))])
    if len(chosen) < bounds.least:
        bad = [node for node in verdict.nodes if node.level in unfit]
        why = "; ".join(f"{node.node} is {node.level.value}: {node.reason}" for node in bad)
        fewer = f", or allow fewer with --nnodes={len(fit)}:{bounds.most}" if fit else ""
        remedy = f"submit the job again with --exclude={fold(node.node for node in bad)}{fewer}"
        unmet = f"--nnodes={bounds.text} cannot be met by the other {len(fit)}"
        return TrainingPlanned(plan="start", reason=f"{why}. {unmet}: {remedy}")
    left_out: dict[str, str] = {}
    for node in verdict.nodes:
        if node.node not in chosen:
            healthy = "its task is silent" if node.node in absent else "not needed"
            doubt = f"{node.level.value}, {node.reason}"
            left_out[node.node] = healthy if node.level is Level.HEALTHY else doubt
    reasons = [f"without {node}: {why}" for node, why in left_out.items()]
    reasons += [
        f"with {node.node} anyway: {node.level.value}, {node.reason}"
        for node in verdict.nodes
        if node.node in chosen and node.level is not Level.HEALTHY
    ]
    return TrainingPlanned(
        plan="start",
        nodes=[node.node for node in verdict.nodes if node.node in chosen],
        reason="; ".join(reasons),
        left_out=left_out,
    )
