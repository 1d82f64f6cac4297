# SPDX-License-Identifier: Apache-2.0
"""What a node-local check says, and how several say one thing.

The values are msgspec structs, not dataclasses: the hooks load them before every job, and a
process boundary lies between where a value is made and where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec


class Status(Enum):
    """What a check concludes, from the best to the worst."""

    PASS = "pass"  # noqa: S105 - not a password
    WARN = "warn"
    INCONCLUSIVE = "inconclusive"  # could not be measured: says nothing about the node
    USER_FAULT = "user_fault"  # a job or its user left something behind
    NODE_FAULT = "node_fault"  # measured, and the node's own: the only one that drains


_RANK = {status: rank for rank, status in enumerate(Status)}
_FAULTS = (Status.USER_FAULT, Status.NODE_FAULT)

Figure = float | int | str


class Remedy(Enum):
    """What mends a fault, where the hardware's maker, or a check's author, says so."""

    RESET = "reset"  # of GPUs
    REBOOT = "reboot"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check concludes, with its numbers.

    `remedy` is what mends a fault, None where nobody knows; `devices` are the PCI addresses of
    the GPUs at fault, as far as they are known.
    """

    status: Status
    text: str
    figures: dict[str, Figure] = {}
    remedy: Remedy | None = None
    devices: tuple[str, ...] = ()


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """A finding, and which configured check it is from.

    `hung` is set when the check did not end within its time limit; `shadow` when the site wants
    it logged and nothing else.
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
    """Return a finding that somebody should look at, and that changes nothing."""
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


def mended_by(finding: Finding, remedy: Remedy | None, *devices: str) -> Finding:
    """Return a finding with what mends it, and of which GPUs it is."""
    return msgspec.structs.replace(finding, remedy=remedy, devices=tuple(filter(None, devices)))


def common_remedy(findings: Iterable[Finding]) -> Remedy | None:
    """Return what mends all of these faults: the strongest; None where one has none."""
    remedies = [each.remedy for each in findings]
    known = [each for each in remedies if each is not None]
    return max(known, key=list(Remedy).index) if known and len(known) == len(remedies) else None


def is_worse(status: Status, than: Status) -> bool:
    """Tell whether one conclusion is worse than another."""
    return _RANK[status] > _RANK[than]


def joined(findings: Sequence[Finding], *, well: str) -> Finding:
    """Return one finding for several parts of a check: the worst status, and what it was said of.

    Args:
        findings: one per part.
        well: the text when every part passed.
    """
    status = max((each.status for each in findings), key=_RANK.__getitem__, default=Status.PASS)
    figures: dict[str, Figure] = {}
    for each in findings:
        figures |= each.figures
    if status is Status.PASS:
        return Finding(status=status, text=well, figures=figures)
    worst = [each for each in findings if each.status is status]
    return Finding(
        status=status,
        text="; ".join(each.text for each in worst),
        figures=figures,
        remedy=common_remedy(worst),
        devices=tuple(dict.fromkeys(device for each in worst for device in each.devices)),
    )


def capped(finding: Finding, severity: Status) -> Finding:
    """Return the finding, no worse than a site lets this check be. Only faults are lowered."""
    if finding.status in _FAULTS and is_worse(finding.status, severity):
        return msgspec.structs.replace(finding, status=severity)
    return finding


def node_faults(results: Iterable[CheckResult]) -> list[CheckResult]:
    """Return the results that may drain the node."""
    return [each for each in results if each.status is Status.NODE_FAULT and not each.shadow]
