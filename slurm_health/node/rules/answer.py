# SPDX-License-Identifier: Apache-2.0
"""What a launcher that asks for the health of its node is told, from what the checks found.

The launcher leaves a node out on any failure that it is told of. So only a proven fault of the node
is one: a check that could not be measured, or that a site has in shadow, keeps no node out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slurm_health.node.rules.finding import CheckResult, Status, node_faults
from slurm_health.records.errors import ExitCode


class HealthAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's checks found, as a launcher asks for it.

    `fail_count` and `failed_checks` are the names that NVIDIA's resiliency extension reads.
    """

    node: str
    fail_count: int
    failed_checks: list[str]
    inconclusive: list[str]
    checks: int

    @property
    def healthy(self) -> bool:
        """Whether the node has no proven fault."""
        return not self.failed_checks

    @property
    def exit_code(self) -> ExitCode:
        """The code with which `slurm-health healthcheck` would end."""
        if self.failed_checks:
            return ExitCode.BAD_NODES
        return ExitCode.INCONCLUSIVE if self.inconclusive else ExitCode.HEALTHY


def answer(results: Sequence[CheckResult], *, node: str) -> HealthAnswer:
    """Return what to say of a node whose checks found this."""
    faults = [_told(each) for each in node_faults(results)]
    return HealthAnswer(
        node=node,
        fail_count=len(faults),
        failed_checks=faults,
        inconclusive=[_told(each) for each in results if each.status is Status.INCONCLUSIVE],
        checks=len(results),
    )


def _told(result: CheckResult) -> str:
    return f"{result.name}: {result.finding.text}"
