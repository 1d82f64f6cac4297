# SPDX-License-Identifier: Apache-2.0
"""`slurm-health plan`: which rounds would be run, and what would be concluded, with no cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

import click
import msgspec

from slurm_health.cli.output import print_result
from slurm_health.preflight.localize.localizer import (
    GroupResult,
    Level,
    Localizer,
    LocalizeSettings,
    Round,
)
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster, Weather
from slurm_health.records.errors import LocalizeError, UsageError
from slurm_health.records.nodeset import expand, fold
from slurm_health.records.text import counted
from slurm_health.records.verdict import NodeVerdict, Verdict
from slurm_health.system.slurm.parsing import parse_topology

_MANY_NODES = 16_384
_SHOWN_GROUPS = 16  # pairs of a round that are printed before the rest is only counted
_ITEM = re.compile(r"([^:\[\]]+(?:\[[^\]]*\][^:\[\]]*)*)(?::(\w+)(?:=([\d.]+))?)?")
_KINDS = "dead, flaky[=0.9], slow=1.3, compute=1.3, silent, leaf=1.3"


@dataclass(frozen=True, kw_only=True)
class _Play:
    """One simulated run."""

    rounds: list[tuple[Round, list[GroupResult]]]
    verdict: Verdict
    faults: Faults


@click.command(short_help="Show the rounds, the evidence and the verdict, without a cluster.")
@click.argument("hostlist")
@click.option(
    "--bad",
    metavar="WHO[:HOW],...",
    default="",
    help=f"Simulated faults. HOW is one of {_KINDS}; dead if left out.",
)
@click.option(
    "--topology",
    metavar="FILE",
    type=click.File("r"),
    help="What `scontrol show topology` prints, or topology.conf; - for stdin.",
)
@click.option(
    "--noise",
    metavar="SHARE",
    type=click.FloatRange(0, 1),
    default=0.01,
    show_default=True,
    help="Relative standard deviation of one measurement.",
)
@click.option(
    "--seed", metavar="N", type=int, default=0, show_default=True, help="Same seed, same run."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    hostlist: str, bad: str, topology: TextIO | None, noise: float, seed: int, as_json: bool
) -> None:
    """Simulate a health check of HOSTLIST and show every step of it.

    \b
    slurm-health plan 'n[1-8]'                    a healthy cluster: one round
    slurm-health plan 'n[1-8]' --bad n3           n3 does not answer its partners
    slurm-health plan 'n[1-8]' --bad n7:slow=1.3  the network of n7 is 1.3x slower
    slurm-health plan 'n[1-16]' --topology topo.txt --bad leaf2:leaf=1.5

    No node is contacted, and nothing is written. Pairing, inference and wording are those of a
    real run; only the measurements are made up.
    """  # noqa: D301 - \b is click's mark for a block that keeps its lines
    nodes = _nodes(hostlist)
    leaves = _leaves(topology)
    faults = parse_faults(bad, nodes, leaves)
    play = _play(nodes, leaves, faults, noise, seed)
    lines = [_as_json(play)] if as_json else _as_text(play)
    print_result("".join(f"{line}\n" for line in lines))


def _nodes(hostlist: str) -> tuple[str, ...]:
    try:
        nodes = expand(hostlist)
    except ValueError as err:
        raise UsageError(str(err)) from err
    if len(nodes) > _MANY_NODES:
        raise UsageError(
            f"{len(nodes)} nodes are more than the {_MANY_NODES} that can be simulated"
        )
    return tuple(dict.fromkeys(nodes))


def _leaves(topology: TextIO | None) -> dict[str, tuple[str, ...]]:
    if topology is None:
        return {}
    try:
        return parse_topology(topology.read())
    except (LocalizeError, UnicodeDecodeError) as err:
        raise UsageError(str(err)) from err


def parse_faults(text: str, nodes: Sequence[str], leaves: dict[str, tuple[str, ...]]) -> Faults:
    """Return the faults that `--bad` describes.

    Raises:
        UsageError: the text cannot be read, or names something that is not in the run.
    """
    faults = Faults()
    for item in _split(text):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise UsageError(
                f"--bad: cannot read {item!r}; write node or node:how, how is {_KINDS}"
            )
        who, how, amount = match[1], match[2] or "dead", match[3]
        known = leaves if how == "leaf" else nodes
        try:
            names = expand(who)
        except ValueError as err:
            raise UsageError(f"--bad: {err}") from err
        strangers = [name for name in names if name not in known]
        if strangers:
            what = "leaf switches of --topology" if how == "leaf" else "nodes of the run"
            raise UsageError(f"--bad: {fold(strangers)}: not among the {what}")
        faults = _with(faults, names, how, amount)
    return faults


def _split(text: str) -> Iterator[str]:
    """Split at commas outside brackets."""
    yield from (item for item in re.split(r",(?![^\[]*\])", text.strip()) if item)


def _with(faults: Faults, names: Sequence[str], how: str, amount: str | None) -> Faults:
    """Return the faults with one more kind of them."""
    if how in {"dead", "silent"} and amount is not None:
        raise UsageError(f"--bad: {how} takes no number")
    try:
        number = float(amount) if amount is not None else 0.9
    except ValueError as err:
        raise UsageError(f"--bad: {amount} is not a number") from err
    if how == "silent":
        return replace(faults, silent=faults.silent | set(names))
    if how in {"dead", "flaky"}:
        probability = 1.0 if how == "dead" else number
        if not 0 < probability <= 1:
            raise UsageError(f"--bad: flaky={amount} must be a probability above 0")
        return replace(faults, failing={**faults.failing, **dict.fromkeys(names, probability)})
    if how not in {"slow", "compute", "leaf"}:
        raise UsageError(f"--bad: unknown fault {how!r}; known are {_KINDS}")
    if amount is None or number < 1:
        raise UsageError(f"--bad: {how} needs a factor of at least 1, as in {how}=1.3")
    factors = dict.fromkeys(names, number)
    if how == "slow":
        return replace(faults, network={**faults.network, **factors})
    if how == "compute":
        return replace(faults, compute={**faults.compute, **factors})
    return replace(faults, leaves={**faults.leaves, **factors})


def _play(
    nodes: tuple[str, ...],
    leaves: dict[str, tuple[str, ...]],
    faults: Faults,
    noise: float,
    seed: int,
) -> _Play:
    weather = Weather(noise=noise, spread=noise / 2, device_spread=noise / 2, spikes=0.0)
    cluster = SimulatedCluster(nodes, faults=faults, weather=weather, topology=leaves, seed=seed)
    localizer = Localizer(nodes, topology=leaves or None, settings=LocalizeSettings(seed=seed))
    rounds = []
    while (round_ := localizer.next_round()) is not None:
        results = cluster.answer(round_)
        localizer.observe(round_.index, results)
        rounds.append((round_, results))
    return _Play(rounds=rounds, verdict=localizer.verdict(), faults=faults)


def _as_text(play: _Play) -> Iterator[str]:
    for round_, results in play.rounds:
        yield f"round {round_.index}: {counted(len(results), 'group')}"
        for result in results[:_SHOWN_GROUPS]:
            yield f"  {' + '.join(result.nodes)}: {_facts(result)}"
        if len(results) > _SHOWN_GROUPS:
            yield f"  ... and {len(results) - _SHOWN_GROUPS} more"
    verdict = play.verdict
    yield f"verdict after {counted(len(play.rounds), 'round')}:"
    for level in (Level.FAULTY, Level.SLOW, Level.INCONCLUSIVE):
        for name in verdict.named(level):
            yield from _accusation(name, verdict.nodes[name])
    for leaf in verdict.leaves:
        yield f"  leaf {leaf.ends[0]} {leaf.level.value}: {leaf.reason}"
    for path in verdict.paths:
        yield f"  path {' - '.join(path.ends)} {path.level.value}: {path.reason}"
    healthy = verdict.named(Level.HEALTHY)
    if healthy:
        yield f"  healthy: {fold(healthy)} ({counted(len(healthy), 'node')})"


def _accusation(name: str, verdict: NodeVerdict) -> Iterator[str]:
    sure = f"probability {verdict.probability:.3f}"
    yield f"  {name} {verdict.level.value}: {verdict.reason} ({sure})"
    for line in verdict.evidence:
        yield f"    {line}"


def _facts(result: GroupResult) -> str:
    facts = [f"{metric} {ms:.1f} ms" for metric, ms in result.shared_ms.items()]
    if result.silent:
        return f"{', '.join(result.silent)} did not answer"
    return ", ".join(facts) or result.outcome.value.replace("_", " ")


def _as_json(play: _Play) -> str:
    measured = ("nodes", "outcome", "shared_ms", "node_ms", "silent")
    verdict = play.verdict
    found = {
        "rounds": [
            {"index": round_.index, "groups": [_fields(result, *measured) for result in results]}
            for round_, results in play.rounds
        ],
        "nodes": {
            name: {
                "level": node.level,
                "slowdown": round(node.slowdown, 4),
                "probability": round(node.probability, 6),
                **_fields(node, "component", "reason", "evidence"),
            }
            for name, node in verdict.nodes.items()
        },
        "leaves": [
            {"leaf": leaf.ends[0], **_fields(leaf, "level", "reason")} for leaf in verdict.leaves
        ],
        "paths": [_fields(path, "ends", "level", "reason") for path in verdict.paths],
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def _fields(value: object, *names: str) -> dict[str, object]:
    return {name: getattr(value, name) for name in names}
