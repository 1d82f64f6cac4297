# SPDX-License-Identifier: Apache-2.0
"""The steps that were tried on all nodes, among what nodes keep in `breaker.directory`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from slurm_health.node import notify
from slurm_health.node.checks.check import CheckContext
from slurm_health.node.draining.shared_state import (
    SharedStateUnusable,
    in_child,
    read_ledger,
    shared_directory,
    under_lock,
)
from slurm_health.node.notify import EventKind, NodeEvent
from slurm_health.node.rules import mending
from slurm_health.node.rules.breaker import tripped_for
from slurm_health.node.rules.mending import NextStep, StepOutcome, Tried
from slurm_health.node.site_settings import Site
from slurm_health.records.decoding import from_json
from slurm_health.system.private_files import publish
from slurm_health.system.slurm.maintenance import Maintenance

_FILE = "mending.json"


class ActionLog(Protocol):
    """Where it is said what was done."""

    def info(self, text: str) -> None:
        """Say what was done."""

    def warning(self, text: str) -> None:
        """Say what somebody should look at."""


class HealthCheck(Protocol):
    """What is needed of a health check. `log` says what was done."""

    @property
    def site(self) -> Site: ...  # noqa: D102
    @property
    def node(self) -> str: ...  # noqa: D102
    @property
    def context(self) -> CheckContext: ...  # noqa: D102
    @property
    def log(self) -> ActionLog: ...  # noqa: D102

    def maintenance(self) -> Maintenance:
        """Return slurmctld, with what is done to nodes under repair."""


def read(site: Site) -> tuple[Tried, ...]:
    """Return the steps of all nodes, asked in a child.

    Raises:
        SharedStateUnusable: they cannot be read, and so nothing may be done.
    """
    data = in_child(site, lambda: msgspec.json.encode(_read(shared_directory(site.breaker))))
    return from_json(data, tuple[Tried, ...])


def look(site: Site) -> tuple[Tried, ...]:
    """Return the same for a person who waits.

    Raises:
        SharedStateUnusable: they cannot be read.
    """
    return _read(shared_directory(site.breaker))


def reserve(
    site: Site,
    node: str,
    partitions: tuple[str, ...],
    choose: Callable[[tuple[Tried, ...]], tuple[NextStep, Tried | None]],
) -> tuple[NextStep, Tried | None]:
    """Choose a step and count it before it is taken, so that no two nodes take the last one.

    Args:
        site: the site's file.
        node: whose step it is.
        partitions: of the node; where the breaker of one has tripped, nothing is done.
        choose: what is to be done, and what to keep of it.

    Raises:
        SharedStateUnusable: it cannot be counted.
    """

    def work(shared: Path) -> bytes:
        tripped = tripped_for(read_ledger(site.breaker), node, partitions)
        if tripped is not None:
            why = f"the breaker of {tripped} has tripped"
            return msgspec.json.encode((NextStep(step=None, why=why), None))
        before = _read(shared)
        chosen, new = choose(before)
        if new is not None:
            _keep(shared, mending.with_tried(before, new))
        return msgspec.json.encode((chosen, new))

    return from_json(under_lock(site, work), tuple[NextStep, Tried | None])


def keep(site: Site, ended: Tried) -> None:
    """Keep how a step has ended.

    Raises:
        SharedStateUnusable: it cannot be kept.
    """

    def work(shared: Path) -> bytes:
        _keep(shared, mending.with_tried(_read(shared), ended))
        return b""

    under_lock(site, work)


def fail(check: HealthCheck, step: Tried, why: str) -> None:
    """Keep that a step failed, and have it told.

    Raises:
        SharedStateUnusable: it cannot be kept.
    """
    keep(check.site, msgspec.structs.replace(step, outcome=StepOutcome.FAILED, text=why))
    check.log.warning(f"mending: {step.step.value} failed: {why}")
    tell(check, EventKind.STEP_FAILED, f"{step.step.value}: {why}", (step.step.value,))


def tell(
    check: HealthCheck,
    kind: EventKind,
    text: str,
    checks: tuple[str, ...] = (),
    evidence: tuple[str, ...] = (),
) -> None:
    """Have it told what has happened to this node."""
    event = NodeEvent(
        kind=kind,
        node=check.node,
        time_s=check.context.now_s,
        text=text,
        checks=checks,
        evidence=evidence,
    )
    notify.send(check.site, event)


def _read(shared: Path) -> tuple[Tried, ...]:
    path = shared / _FILE
    try:
        return from_json(path.read_bytes(), tuple[Tried, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as err:
        raise SharedStateUnusable(f"{path} cannot be read: {err}; remove it to start over") from err


def _keep(shared: Path, tried: tuple[Tried, ...]) -> None:
    publish(shared / _FILE, msgspec.json.encode(tried))
