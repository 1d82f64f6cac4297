# SPDX-License-Identifier: Apache-2.0
"""`healthcheck --explain`: what runs here, why, within which limits, and what it may cause."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_health.node.rules.breaker import PER_JOB
from slurm_health.node.rules.finding import CheckResult
from slurm_health.node.rules.settings import CONTEXTS
from slurm_health.node.run import why_not
from slurm_health.node.site import Site
from slurm_health.records.text import counted


def explain(site: Site, node: str, partition: str | None) -> str:
    """Return the text: for every check, the hooks that run it here, and its settings."""
    lines = [f"{site.path} on {node}"]
    if not site.hooks.drain:
        lines.append("nothing is drained: hooks.drain is false")
    elif not site.breaker.directory:
        unknown = "the number of other drained nodes is unknown"
        lines.append(f"nothing is drained: breaker.directory is not set, so {unknown}")
    else:
        share = f"{100 * site.breaker.share:g} % of a partition"
        lines.append(
            f"drains at most {share}, and {counted(PER_JOB, 'node')} because of one job;"
            f" counted in {site.breaker.directory}"
        )
        lines.append(f"accusations: {site.accusations.policy.value}")
    lines.append("")
    for planned in site.planned:
        reasons = {context: why_not(planned, context, node, partition) for context in CONTEXTS}
        runs = [context for context, reason in reasons.items() if not reason]
        elsewhere = next((reasons[c] for c in CONTEXTS if c in planned.contexts), "in no hook")
        where = ", ".join(runs) or f"not here ({elsewhere})"
        shadow = ", in shadow: logged only" if planned.shadow else ""
        hang = ", a hang is a fault" if planned.hang_is_fault else ""
        alone = ", retested on an idle node only" if planned.exclusive else ""
        text = f"at worst {planned.severity.value}, {planned.time_limit_s:g} s{hang}{alone}{shadow}"
        lines += [f"{planned.name}: {where}", f"    {text}; line {planned.line}"]
    return "\n".join(lines) + "\n"


def results_text(results: Sequence[CheckResult]) -> str:
    """Return a table of results, for a terminal."""
    if not results:
        return "no check runs here\n"
    width = max(len(result.name) for result in results)
    lines = []
    for result in results:
        shadow = " (in shadow)" if result.shadow else ""
        status = result.status.value.replace("_", " ")
        lines.append(
            f"{result.name:<{width}}  {status:<12}  {result.elapsed_ms:6.0f} ms  "
            f"{result.finding.text}{shadow}"
        )
    return "\n".join(lines) + "\n"
