# SPDX-License-Identifier: Apache-2.0
"""How many spares `--spares=auto` comes to, by what the site's history says of its nodes.

The history's rates come from the file that the site publishes for all checks; with too little of
them there are no spares, and it is said why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from slurm_health.preflight import config
from slurm_health.preflight.decide.spares import (
    LEAST_HOURS,
    LEAST_STARTS,
    rate_of,
    spares_for,
)
from slurm_health.preflight.option_kinds import Value
from slurm_health.preflight.sbatch.node_counts import node_counts, rooms_of
from slurm_health.records import standings
from slurm_health.records.errors import SlurmError, UsageError
from slurm_health.records.standings import Rates
from slurm_health.system.site_file import content_of
from slurm_health.system.slurm.client import Client

_HOURS = 24.0  # of a script whose time limit is not known
# sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, and these after days.
_TIME = re.compile(r"(?:(\d{1,5})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?")
_NODES = re.compile(r"(?:\d{1,9}-)?(\d{1,9})")


def with_advised_spares(
    settings: Mapping[str, Value],
    asked: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    now_s: float,
) -> tuple[dict[str, Value], str]:
    """Return the settings with as many spares as the history advises, and what that rests on.

    `asked` are the options of sbatch that the job is submitted with.
    """
    keep = bool(settings.get("keep-spares"))
    count, said = _asked_of_slurm(settings, asked, environ, keep=keep, now_s=now_s)
    advised_settings: dict[str, Value] = {**settings, "spares": count}
    if keep and not count:
        del advised_settings["keep-spares"]  # there are none to keep
    return advised_settings, f"--spares=auto: {said}"


def _asked_of_slurm(
    settings: Mapping[str, Value],
    asked: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    keep: bool,
    now_s: float,
) -> tuple[int, str]:
    """Return how many spares a job of this cluster gets, and what that rests on."""
    nodes = nodes_of(asked)
    if nodes is None:
        return 0, "no spares: the job does not say on how many nodes it runs (--nodes)"
    try:
        node_counts(asked, {**settings, "spares": 1})
        client = Client(environ, patience_s=0)
        cluster = asked.get("clusters") or client.cluster_name()
        rooms = {} if "clusters" in asked else rooms_of(asked, client.partitions())
    except (UsageError, SlurmError) as err:
        return 0, f"no spares: {err}"
    return advised(
        rates_of(config.standings(environ), cluster, now_s=now_s),
        nodes,
        keep=keep,
        time_limit=asked.get("time", ""),
        room=max(rooms.values(), default=None),
    )


def rates_of(path: Path | None, cluster: str, *, now_s: float) -> Rates | str:
    """Return how often the nodes of a cluster were bad, or why that is not known."""
    if path is None:
        return "the site publishes no history (`standings` in its config.toml)"
    try:
        found = standings.read(content_of(path), now_s=now_s).rates.get(cluster)
    except (OSError, ValueError) as err:
        why = (err.strerror or err) if isinstance(err, OSError) else err
        return f"{path}: {why}"
    return found or f"{path} has nothing of cluster {cluster}"


def advised(
    rates: Rates | str, nodes: int, *, keep: bool, time_limit: str, room: int | None
) -> tuple[int, str]:
    """Return how many spares a job of so many nodes gets, and what that rests on.

    Args:
        rates: how often nodes were bad, or why that is not known.
        nodes: that the script is to run on.
        keep: they also replace nodes that fail while it runs.
        time_limit: the job's, as sbatch is told; empty where it is not.
        room: how many nodes a job may have at most, None where that is not known.
    """
    if isinstance(rates, str):
        return 0, f"no spares: {rates}"
    starts, run = rates.starts, rates.hours
    if starts.exposure < LEAST_STARTS:
        known = f"{starts.exposure:.0f} starts of a job on a node are known"
        return 0, f"no spares: only {known}, and {LEAST_STARTS} are needed"
    hours = (hours_of(time_limit) or _HOURS) if keep and run.exposure >= LEAST_HOURS else None
    found = spares_for(rates, nodes, hours=hours)
    count, capped = found.count, ""
    if room is not None and nodes + count > room:
        count = max(0, room - nodes)
        capped = f", fewer than the {found.count} advised: a job may have {room} nodes"
    said = [f"{rate_of(starts) * 100:.2g} of 100 starts of a job on a node found it bad"]
    if hours is not None:
        per_day = rate_of(run) * 24_000
        said.append(f"{per_day:.2g} failed in 1,000 node-days, for {hours:g} h")
    elif keep:
        said.append(f"too few hours of scripts are known ({run.exposure:.0f} of {LEAST_HOURS:.0f})")
    return count, f"{_spares(count)} for {nodes} nodes{capped}: {'; '.join(said)}"


def hours_of(time_limit: str) -> float | None:
    """Return the hours of a time limit as sbatch takes it; None for none, or another text."""
    found = _TIME.fullmatch(time_limit)
    if found is None:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    # Hours, minutes, seconds; without days, two numbers or one begin with the minutes.
    per_hour = (1, 60, 3600) if days is not None or len(numbers) == len(parts) else (60, 3600)
    hours = sum(number / each for number, each in zip(numbers, per_hour, strict=False))
    return (24.0 * int(days or 0) + hours) or None  # 0 is no limit


def _spares(count: int) -> str:
    return f"{count or 'no'} spare{'' if count == 1 else 's'}"


def nodes_of(asked: Mapping[str, str]) -> int | None:
    """Return on how many nodes a job is to run at most; None where its options do not say."""
    found = _NODES.fullmatch(asked.get("nodes", ""))
    return int(found[1]) if found else None
