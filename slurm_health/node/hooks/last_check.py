# SPDX-License-Identifier: Apache-2.0
"""When each node's last health check ran and how it ended, kept where all nodes can see it.

One file per node, so that no lock is needed. A node that is well leaves nothing else behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from slurm_health.node.rules.finding import CheckResult, Status, node_faults
from slurm_health.node.site_settings import Site
from slurm_health.records.decoding import from_json
from slurm_health.records.text import cut
from slurm_health.system.killable import run_guarded

_DIRECTORY = "checked"
_LIMIT_S = 2.0
_LENGTH = 500
# From here on, hours tell more than minutes.
_HOURS_S = 5400.0


class LastCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One health check. `faulty`: it found a proven fault of the node; `faults` says which."""

    node: str
    time_s: float
    faulty: bool
    text: str
    faults: str = ""

    def said(self, now_s: float) -> str:
        """Return when it was and how it ended, for a person."""
        return f"{self.age(now_s)}: {self.text}"

    def age(self, now_s: float) -> str:
        """Return when it was."""
        age_s = now_s - self.time_s
        return f"{age_s / 60:.0f} min ago" if age_s < _HOURS_S else f"{age_s / 3600:.0f} h ago"


def of_results(results: Sequence[CheckResult], *, node: str, now_s: float) -> LastCheck:
    """Return how a health check ended."""
    faults = node_faults(results)
    others = [each for each in results if each.status is not Status.PASS and each not in faults]
    bad = [*faults, *others]  # or what is cut off may be the fault
    told = "; ".join(f"{each.name} {each.status.value}: {each.finding.text}" for each in bad)
    return LastCheck(
        node=node,
        time_s=now_s,
        faulty=bool(faults),
        text=cut(told, _LENGTH) or f"{len(results)} checks passed",
        faults=cut("; ".join(f"{each.name}: {each.finding.text}" for each in faults), _LENGTH),
    )


def keep(site: Site, found: LastCheck) -> None:
    """Leave it in the shared directory, in a child; what cannot be kept is lost."""
    if not site.breaker.directory:
        return
    from slurm_health.node.draining.shared_state import STUCK, shared_directory
    from slurm_health.system.private_files import publish

    def work() -> bytes:
        directory = shared_directory(site.breaker) / _DIRECTORY
        directory.mkdir(mode=0o755, exist_ok=True)
        publish(directory / f"{found.node}.json", msgspec.json.encode(found))
        return b""

    run_guarded(site.state, STUCK, work, _LIMIT_S)


def read_all(site: Site) -> dict[str, LastCheck]:
    """Return the last health check of every node that has left one."""
    found = {}
    for path in (Path(site.breaker.directory or "/nowhere") / _DIRECTORY).glob("*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found[path.stem] = from_json(path.read_bytes(), LastCheck)
    return found


def forget_others(site: Site, nodes: Collection[str]) -> None:
    """Remove what nodes left that Slurm has no more, where whoever asks may."""
    if site.breaker.directory:
        with contextlib.suppress(OSError):
            for path in (Path(site.breaker.directory) / _DIRECTORY).glob("*.json"):
                if path.stem not in nodes:
                    path.unlink()
