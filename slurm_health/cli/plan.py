# SPDX-License-Identifier: Apache-2.0
"""`slurm-health plan`: which rounds would be run, and what would be concluded, with no cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import click

from slurm_health.cli.output import print_lines
from slurm_health.preflight.localize.localizer import (
    GroupResult,
    Level,
    Localizer,
    LocalizeSettings,
)
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster, Weather
from slurm_health.records.errors import UsageError
from slurm_health.records.nodeset import expand, fold
from slurm_health.records.text import counted
from slurm_health.records.verdict import Verdict

_MOST_NODES = 16_384
_MOST_GROUPS = 16  # pairs of a round that are printed before the rest is only counted
_NOISE = 0.01  # relative standard deviation of one measurement
_FAULT = re.compile(r"([^:\[\]]+(?:\[[^\]]*\][^:\[\]]*)*)(?::(\w+)(?:=([\d.]+))?)?")
_KINDS = "dead, flaky=0.9, slow=1.3, compute=1.3, silent"


@click.command()
@click.argument("hostlist", metavar="NODELIST")
@click.option(
    "--bad",
    metavar="WHO[:HOW],...",
    default="",
    help=f"Simulated faults. HOW is one of {_KINDS}; dead if left out.",
)
@click.option(
    "--seed", metavar="N", type=int, default=0, show_default=True, help="Same seed, same run."
)
def plan(hostlist: str, bad: str, seed: int) -> None:
    """Simulate a check of the nodes NODELIST and show every step of it.

    \b
    slurm-health plan 'n[1-8]'                    a healthy cluster: one round
    slurm-health plan 'n[1-8]' --bad n3           n3 answers no partner
    slurm-health plan 'n[1-8]' --bad n7:slow=1.3  n7's network is 1.3x slower

    No node is contacted, and nothing is written. Pairing, inference and wording are those of a
    real run; only the measurements are made up.
    """  # noqa: D301 - \b is click's mark for a block that keeps its lines
    try:
        nodes = expand(hostlist)
    except ValueError as err:
        raise UsageError(str(err)) from err
    if len(nodes) > _MOST_NODES:
        raise UsageError(f"{len(nodes)} nodes are more than the {_MOST_NODES} that can be played")
    faults = _faults(bad, nodes)
    weather = Weather(noise=_NOISE, spread=_NOISE / 2, device_spread=_NOISE / 2, spikes=0.0)
    cluster = SimulatedCluster(nodes, faults=faults, weather=weather, seed=seed)
    localizer = Localizer(nodes, settings=LocalizeSettings(seed=seed))
    rounds = 0
    while (round_ := localizer.next_round()) is not None:
        results = cluster.answer(round_)
        localizer.observe(round_.index, results)
        print_lines(_round_lines(round_.index, results))
        rounds += 1
    print_lines(
        [f"verdict after {counted(rounds, 'round')}:", *_verdict_lines(localizer.verdict())]
    )


def _faults(text: str, nodes: Sequence[str]) -> Faults:
    """Return the faults that `--bad` describes.

    Raises:
        UsageError: the text cannot be read, or names something that is not in the run.
    """
    failing: dict[str, float] = {}
    network: dict[str, float] = {}
    compute: dict[str, float] = {}
    silent: set[str] = set()
    for item in filter(None, re.split(r",(?![^\[]*\])", text.strip())):  # commas outside brackets
        match = _FAULT.fullmatch(item)
        if match is None:
            raise UsageError(
                f"--bad: cannot read {item!r}; write node or node:how, how is {_KINDS}"
            )
        how, amount = match[2] or "dead", match[3]
        try:
            names = expand(match[1])
            value = float(amount or 0.9)
        except ValueError as err:
            raise UsageError(f"--bad: {err}") from err
        if strangers := [name for name in names if name not in nodes]:
            raise UsageError(f"--bad: {fold(strangers)}: not among the nodes of the run")
        match how:
            case "silent" if amount is None:
                silent.update(names)
            case "dead" if amount is None:
                failing |= dict.fromkeys(names, 1.0)
            case "flaky" if 0 < value <= 1:
                failing |= dict.fromkeys(names, value)
            case "slow" if value >= 1:
                network |= dict.fromkeys(names, value)
            case "compute" if value >= 1:
                compute |= dict.fromkeys(names, value)
            case _:
                raise UsageError(
                    f"--bad: cannot play {item!r}; known are {_KINDS}: a probability, or a factor"
                    " of at least 1"
                )
    return Faults(failing=failing, network=network, compute=compute, silent=frozenset(silent))


def _round_lines(number: int, results: Sequence[GroupResult]) -> Iterator[str]:
    yield f"round {number}: {counted(len(results), 'group')}"
    for result in results[:_MOST_GROUPS]:
        times = ", ".join(f"{metric} {ms:.1f} ms" for metric, ms in result.shared_ms.items())
        silent = f"{', '.join(result.silent)} did not answer" if result.silent else ""
        outcome = result.outcome.value.replace("_", " ")
        yield f"  {' + '.join(result.nodes)}: {silent or times or outcome}"
    if len(results) > _MOST_GROUPS:
        yield f"  ... and {len(results) - _MOST_GROUPS} more"


def _verdict_lines(verdict: Verdict) -> Iterator[str]:
    for level in (Level.FAULTY, Level.SLOW, Level.INCONCLUSIVE):
        for name in verdict.named(level):
            node = verdict.nodes[name]
            sure = f"probability {node.probability:.3f}"
            yield f"  {name} {node.level.value}: {node.reason} ({sure})"
            yield from (f"    {line}" for line in node.evidence)
    for path in verdict.paths:
        yield f"  path {' - '.join(path.ends)} {path.level.value}: {path.reason}"
    if healthy := verdict.named(Level.HEALTHY):
        yield f"  healthy: {fold(healthy)} ({counted(len(healthy), 'node')})"
