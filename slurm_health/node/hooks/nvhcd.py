# SPDX-License-Identifier: Apache-2.0
"""What a launcher that asks is told of the node, as the service that NVIDIA's extension asks.

Its interface is the service HealthCheckService of the package nvhcd, with one call, RunHealthCheck:

    request    args = 1 (repeated string)
    response   success = 1 (bool), exit_code = 2 (int32), output = 3 (string), error = 4 (string)

Four plain fields need no compiler and no library: they are written here as Protocol Buffers encode
them (https://protobuf.dev/programming-guides/encoding/). The arguments are those of a program that
a site may have behind the service, and are not read.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slurm_health.node.rules.finding import CheckResult, Status, node_faults
from slurm_health.records.errors import ExitCode

SERVICE, CALL = "nvhcd.HealthCheckService", "RunHealthCheck"
_VARINT, _BYTES = 0, 2  # wire types


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


def response(*, success: bool, exit_code: int, output: str, error: str = "") -> bytes:
    """Return a response; `exit_code` is not negative, as exit codes are."""
    numbers = ((1, int(success)), (2, exit_code))
    texts = ((3, output), (4, error))
    # A field that has its default value, nought or empty, is left out.
    parts = [_varint(field << 3 | _VARINT) + _varint(value) for field, value in numbers if value]
    for field, text in texts:
        data = text.encode(errors="replace")
        if data:
            parts.append(_varint(field << 3 | _BYTES) + _varint(len(data)) + data)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    """Return a whole number in groups of seven bits, the lowest first."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
