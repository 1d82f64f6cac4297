# SPDX-License-Identifier: Apache-2.0
"""From the Localizer's verdicts, and from what else is known, to the record of a verdict. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any, TypeVar

from msgspec.structs import replace

from slurm_health.records.gpu_load import Burn, words_of_all
from slurm_health.records.records import VerdictReached
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict, Verdict

_HALF_SERVED = 0.5  # of what most nodes had: a job's arithmetic takes twice as long there
_SEVERAL = 2  # devices: of one it is clear which
_PLACE = re.compile(r"\b(?:device|rail) (\d+)\b")  # a rail is that of one device of each node
_WORST_FIRST = (Level.FAULTY, Level.SLOW, Level.INCONCLUSIVE, Level.HEALTHY)
_Judged = TypeVar("_Judged", NodeVerdict, LinkVerdict)


def merged(verdicts: Sequence[Verdict]) -> Verdict:
    """Return what the verdicts of several phases say together, each node's and link's worst.

    A node that is bad in several phases has the reasons of all; its evidence is that of every
    phase, in their order.
    """
    nodes: dict[str, NodeVerdict] = {}
    for verdict in verdicts:
        for name, node_verdict in verdict.nodes.items():
            nodes[name] = _both(nodes[name], node_verdict) if name in nodes else node_verdict
    return Verdict(
        nodes=nodes,
        paths=_worst_of_each(path for verdict in verdicts for path in verdict.paths),
        leaves=_worst_of_each(leaf for verdict in verdicts for leaf in verdict.leaves),
        floors={name: floor for verdict in verdicts for name, floor in verdict.floors.items()},
    )


def _worst_of_each(links: Iterable[LinkVerdict]) -> tuple[LinkVerdict, ...]:
    # The last of several stands.
    worst_last = sorted(links, key=lambda link: -_WORST_FIRST.index(link.level))
    return tuple({link.ends: link for link in worst_last}.values())


def _both(first: NodeVerdict, then: NodeVerdict) -> NodeVerdict:
    ranks = [_WORST_FIRST.index(verdict.level) for verdict in (first, then)]
    leading = first if ranks[0] < ranks[1] else then
    if ranks[0] == ranks[1] and first.slowdown > then.slowdown:
        leading = first  # of a healthy node the one that says what is slower than most
    reason = leading.reason
    if ranks[0] == ranks[1] and leading.level is not Level.HEALTHY:
        leading, reason = first, "; ".join(dict.fromkeys((first.reason, then.reason)))
    return replace(
        leading,
        reason=reason,
        slowdown=max(first.slowdown, then.slowdown),
        evidence=(*first.evidence, *then.evidence),
    )


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of nodes beside what they measured, by their names.

    Args:
        burns: what GPUs reported of themselves under load.
        wrong_results: what devices have computed wrongly.
        exact: the nodes all of whose devices have computed correctly in a round.
        interfaces: the interface of each node whose group failed in some round.
        transports: the way by which data went.
        served: the share of the time of its own work that a node had its processors.
        devices: model, identifier and PCI address of each device.
    """

    burns: Mapping[str, Sequence[Burn]] = field(default_factory=dict)
    wrong_results: Mapping[str, Sequence[str]] = field(default_factory=dict)
    exact: Collection[str] = ()
    interfaces: Mapping[str, str] = field(default_factory=dict)
    transports: Mapping[str, str] = field(default_factory=dict)
    served: Mapping[str, float] = field(default_factory=dict)
    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)


def concluded(
    nodes: Sequence[str], verdict: Verdict, known: Known, others: Iterable[NodeVerdict]
) -> VerdictReached:
    """Return the record of a verdict over all `nodes`, in their order.

    `others` are judged apart from it: nodes that took part in no round, and nodes it judges too.
    """
    tested = {*known.wrong_results, *known.exact}
    wrong = len(known.wrong_results)
    # There is one correct result, whatever the device and the library. Only where most nodes were
    # wrong, or none was ever right, it may be the software.
    software = not known.exact or 1 < len(tested) < 2 * wrong
    usual = median_high(known.served.values()) if known.served else 1.0
    verdicts: dict[str, NodeVerdict] = {}
    for name, node in verdict.nodes.items():
        judged = _with_load(node, known.burns.get(name, ()))
        if texts := known.wrong_results.get(name):
            whose = f"as on {wrong} of {len(tested)} nodes" if software else ""
            judged = _with_wrong_results(judged, texts, whose)
        judged = _with_network(judged, known)
        if (share := known.served.get(name, 1.0)) <= _HALF_SERVED * usual:
            judged = _crowded(judged, share, usual)
        verdicts[name] = _with_devices(judged, known.devices.get(name, ()))
    for other in others:
        before = verdicts.get(other.node)
        verdicts[other.node] = other if before is None else _both(before, other)
    return VerdictReached(
        nodes=[_rounded(verdicts[node]) for node in nodes],
        paths=[_rounded(path) for path in verdict.paths],
        leaves=[_rounded(leaf) for leaf in verdict.leaves],
        floors={name: round(floor, 4) for name, floor in verdict.floors.items()},
    )


def _noting(
    node: NodeVerdict, words: Sequence[str], *, first: bool = False, **changes: Any
) -> NodeVerdict:
    """Return a verdict with these words in its reason and among its evidence."""
    reason = "; ".join([*words, node.reason] if first else [node.reason, *words])
    return replace(node, reason=reason, evidence=(*node.evidence, *words), **changes)


def _with_load(node: NodeVerdict, burns: Sequence[Burn]) -> NodeVerdict:
    """Return the verdict with what GPUs reported of themselves while they were under load.

    Memory errors that could not be corrected, and rows that could not be remapped, are the
    driver's own proof: such a node is faulty. Everything else explains, and changes no level: a
    GPU that was throttled and kept up with its peers is no slower than they are.
    """
    words = words_of_all(burns)
    if not words:
        return node
    proven = any(burn.uncorrected or burn.remap_failed for burn in burns)
    if not proven or node.level is Level.FAULTY:
        return _noting(node, words, first=proven)
    fault = {"level": Level.FAULTY, "component": "memory", "probability": 1.0}
    return _noting(node, words, first=True, **fault)


def _with_wrong_results(node: NodeVerdict, texts: Sequence[str], software: str) -> NodeVerdict:
    """Return the verdict with what devices have computed wrongly, be it once.

    A wrong result is proof, and later ones that are correct take nothing back. Where `software`
    may be why, no node is to blame, and none of those nodes is healthy.
    """
    texts = tuple(dict.fromkeys(texts))
    reason = "; ".join([*(text for text in texts if text not in node.reason), node.reason])
    changes: dict[str, Any] = {}
    if not software:
        changes = {"level": Level.FAULTY, "component": "compute", "probability": 1.0}
    elif node.level is Level.HEALTHY:
        reason += f"; {software}: probably a software problem"
        changes = {"level": Level.INCONCLUSIVE, "probability": 0.0}
    return replace(node, reason=reason, evidence=(*node.evidence, *texts), **changes)


def _with_network(node: NodeVerdict, known: Known) -> NodeVerdict:
    """Return the verdict with the interface and the way by which a bad node reached others.

    A wrong interface, chosen by the user or by NCCL, looks like a broken network; sockets where
    there should be RDMA explain a slow one. Neither changes a level.
    """
    if node.level is not Level.HEALTHY and node.node in known.interfaces:
        over = known.interfaces[node.node]
        node = replace(node, reason=f"{node.reason}; connects over {over}")
    blamed = node.level in {Level.SLOW, Level.FAULTY} and node.component.startswith("network")
    if blamed and node.node in known.transports:
        return _noting(node, [f"data went over {known.transports[node.node]}"])
    return node


def _crowded(node: NodeVerdict, share: float, usual: float) -> NodeVerdict:
    """Return the verdict on a node whose processors others had for more than half of the time.

    That time is left out of what is compared, so that no node is slow for it. But the node may be
    slow for a job, for which it cannot be blamed: it was not measured as its job would find it.
    """
    words = (
        f"other processes used its processors {100 * (1 - share):.0f} % of the time"
        f" ({100 * (1 - usual):.0f} % on most nodes), which is not counted"
    )
    if node.level is not Level.HEALTHY:
        return _noting(node, [words], first=True)
    return _noting(node, [words], first=True, level=Level.INCONCLUSIVE, probability=0.0)


def _with_devices(node: NodeVerdict, devices: Sequence[str]) -> NodeVerdict:
    """Return the verdict with what the devices are that it names by their places on a node."""
    if node.level is Level.HEALTHY or len(devices) < _SEVERAL:
        return node
    numbers = {int(number) for number in _PLACE.findall(f"{node.component} {node.reason}")}
    names = [
        f"device {number} is {devices[number]}"
        for number in sorted(numbers)
        if number < len(devices) and devices[number] not in node.reason
    ]
    return _noting(node, names)


def _rounded(verdict: _Judged) -> _Judged:
    return replace(
        verdict, slowdown=round(verdict.slowdown, 3), probability=round(verdict.probability, 4)
    )
