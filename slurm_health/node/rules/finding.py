# SPDX-License-Identifier: Apache-2.0
"""The findings of checks, and several findings joined to one.

The values are msgspec structs, not dataclasses: the hooks load them before every job, and a child
process makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec


class Status(Enum):
    """The conclusion of a check, from the best to the worst."""

    PASS = "pass"  # noqa: S105 - not a password
    NOT_APPLICABLE = "not_applicable"  # nothing here is of its kind: silent
    WARN = "warn"
    INCONCLUSIVE = "inconclusive"  # could not be measured: says nothing about the node
    USER_FAULT = "user_fault"  # a job or its user left something behind
    NODE_FAULT = "node_fault"  # measured, and the node's own: the only one that drains


_RANK = {status: rank for rank, status in enumerate(Status)}
# A check with such a finding has nothing to report.
WELL = (Status.PASS, Status.NOT_APPLICABLE)

UNWATCHED = "unwatched"  # a figure: how many jobs run on though their watch has ended
Figure = float | int | str


class Remedy(Enum):
    """The repair of a fault, if the maker of the hardware or the author of a check names one."""

    RESET = "reset"  # of GPUs
    REBOOT = "reboot"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusion of one check, with its numbers.

    `remedy` repairs the fault, None if it is unknown; `devices` are the PCI addresses of the GPUs
    at fault, if they are known.
    """

    status: Status
    text: str
    figures: dict[str, Figure] = {}
    remedy: Remedy | None = None
    devices: tuple[str, ...] = ()


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The finding of a configured check.

    `hung`: the check did not end within its time limit; `shadow`: the finding is only logged.
    """

    name: str
    finding: Finding
    elapsed_ms: float = 0.0
    shadow: bool = False
    hung: bool = False

    @property
    def status(self) -> Status:
        """The conclusion alone."""
        return self.finding.status


def passed(text: str, **figures: Figure) -> Finding:
    """Return a finding that all is well."""
    return Finding(status=Status.PASS, text=text, figures=figures)


def warned(text: str, **figures: Figure) -> Finding:
    """Return a finding that an administrator should look at, and that changes nothing."""
    return Finding(status=Status.WARN, text=text, figures=figures)


def inconclusive(text: str, **figures: Figure) -> Finding:
    """Return a finding that nothing could be measured."""
    return Finding(status=Status.INCONCLUSIVE, text=text, figures=figures)


def user_fault(text: str, **figures: Figure) -> Finding:
    """Return a finding that a job or its user left the node in this state."""
    return Finding(status=Status.USER_FAULT, text=text, figures=figures)


def node_fault(text: str, **figures: Figure) -> Finding:
    """Return a finding that the node itself is at fault."""
    return Finding(status=Status.NODE_FAULT, text=text, figures=figures)


def with_remedy(finding: Finding, remedy: Remedy | None, *devices: str) -> Finding:
    """Return a finding with its remedy and its GPUs."""
    return msgspec.structs.replace(finding, remedy=remedy, devices=tuple(filter(None, devices)))


def common_remedy(findings: Iterable[Finding]) -> Remedy | None:
    """Return the strongest remedy of these faults, which repairs all; None if one has none."""
    remedies = [finding.remedy for finding in findings]
    known = [remedy for remedy in remedies if remedy is not None]
    return max(known, key=list(Remedy).index) if known and len(known) == len(remedies) else None


def is_worse(status: Status, than: Status) -> bool:
    """Return whether one conclusion is worse than another."""
    return _RANK[status] > _RANK[than]


def joined(findings: Sequence[Finding], *, well: str) -> Finding:
    """Return one finding for several parts of a check: the worst status, and its parts.

    Args:
        findings: one per part.
        well: the text if every part passed.
    """
    status = max((part.status for part in findings), key=_RANK.__getitem__, default=Status.PASS)
    figures: dict[str, Figure] = {}
    for part in findings:
        figures |= part.figures
    if status is Status.PASS:
        return Finding(status=status, text=well, figures=figures)
    worst = [part for part in findings if part.status is status]
    return Finding(
        status=status,
        text="; ".join(part.text for part in worst),
        figures=figures,
        remedy=common_remedy(worst),
        devices=tuple(dict.fromkeys(device for part in worst for device in part.devices)),
    )


def capped(finding: Finding, severity: Status) -> Finding:
    """Return the finding, no worse than a site lets this check be. Only faults are lowered."""
    is_fault = finding.status in (Status.USER_FAULT, Status.NODE_FAULT)
    if is_fault and is_worse(finding.status, severity):
        return msgspec.structs.replace(finding, status=severity)
    return finding


def node_faults(results: Iterable[CheckResult]) -> list[CheckResult]:
    """Return the results that may drain the node."""
    return [
        result for result in results if result.status is Status.NODE_FAULT and not result.shadow
    ]
