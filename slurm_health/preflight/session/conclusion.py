# SPDX-License-Identifier: Apache-2.0
"""From the Localizer's verdict, and from what could not be measured, to the record of a verdict."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import TypeVar

from msgspec.structs import replace

from slurm_health.records.gpu_load import Burn, words_of_all
from slurm_health.records.records import VerdictReached
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict, Verdict

_HALF_SERVED = 0.5  # of what most nodes had: a job's arithmetic takes twice as long there
_SEVERAL = 2  # devices: of one it is clear which
_PLACE = re.compile(r"\b(?:device|rail) (\d+)\b")  # a rail is that of one device of each node
_Found = TypeVar("_Found", NodeVerdict, LinkVerdict)


@dataclass(frozen=True, kw_only=True)
class Absence:
    """What is known of a node that took part in no round.

    Args:
        could_not_start: Slurm failed to start the agent as often as it was tried.
        others_started: an agent did start on some node of the run.
        lost: why the agent ended, empty if it did not.
        failed: why its workers could not be used, empty if they could.
        device_failed: what its devices did that those of most nodes do not, else empty.
        started: the agent did write to the journal.
        stack: what runs, and on how many devices, on a node that was ready but unlike the others.
        common_stack: what runs on those.
    """

    could_not_start: bool = False
    others_started: bool = True
    lost: str = ""
    failed: str = ""
    device_failed: str = ""
    started: bool = False
    stack: str = ""
    common_stack: str = ""


def unmeasured(node: str, known: Absence) -> NodeVerdict:
    """Judge a node that took part in no round.

    Two findings are the node's own fault: Slurm could repeatedly not start a step there while it
    could elsewhere, and its devices repeatedly failed with a torch that can use those of most
    others. Everything else may be ours, the job's or the interpreter's.
    """
    if known.could_not_start and known.others_started:
        reason = f"Slurm cannot start a step there: {known.lost}"
        return NodeVerdict(
            node=node, level=Level.FAULTY, component="slurmd", reason=reason, evidence=(reason,)
        )
    if known.device_failed:
        reason = f"{known.device_failed}; most nodes can use theirs"
        return NodeVerdict(
            node=node, level=Level.FAULTY, component="device", reason=reason, evidence=(reason,)
        )
    if known.failed:
        reason = f"could not be measured: {known.failed}"
    elif known.stack:
        others = f" ({known.common_stack})" if known.common_stack else ""
        reason = f"not compared: {known.stack} there, unlike the other nodes{others}"
    elif known.lost:
        reason = f"could not be measured: {known.lost}"
    elif known.started:
        reason = "could not be measured: its check processes were not ready in time"
    else:
        reason = "could not be measured: its agent never reported"
    return NodeVerdict(node=node, level=Level.INCONCLUSIVE, probability=0.0, reason=reason)


_WORST_FIRST = (Level.FAULTY, Level.SLOW, Level.INCONCLUSIVE, Level.HEALTHY)


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


def with_burns(verdict: Verdict, burns: Mapping[str, Sequence[Burn]]) -> Verdict:
    """Return the verdict with what GPUs said of themselves while they were under load.

    Memory errors that could not be corrected, and rows that could not be remapped, are the
    driver's own proof: such a node is faulty. Everything else explains, and changes no level: a
    GPU that was throttled and kept up with its peers is no slower than they are.
    """
    nodes = dict(verdict.nodes)
    for name, of_node in burns.items():
        words = words_of_all(of_node)
        if name not in nodes or not words:
            continue
        before = nodes[name]
        proven = any(burn.uncorrected or burn.remap_failed for burn in of_node)
        reason = "; ".join([*words, before.reason] if proven else [before.reason, *words])
        after = replace(before, reason=reason, evidence=(*before.evidence, *words))
        if proven and before.level is not Level.FAULTY:
            after = replace(after, level=Level.FAULTY, component="memory", probability=1.0)
        nodes[name] = after
    return replace(verdict, nodes=nodes)


def with_wrong_results(
    verdict: Verdict, wrong: Mapping[str, Sequence[str]], exact: Collection[str]
) -> Verdict:
    """Return the verdict with what devices have computed wrongly, be it once.

    There is one correct result, whatever the device and the library: so a wrong one is proof, and
    later ones that are correct take nothing back. Only where most nodes were wrong, or none was
    ever right, it may be the software. Then no node is to blame, and none of them is healthy.
    """
    nodes = dict(verdict.nodes)
    tested = {*wrong, *exact}
    software = not exact or 1 < len(tested) < 2 * len(wrong)
    for name, texts in wrong.items():
        if name not in nodes:
            continue
        before = nodes[name]
        new = [text for text in dict.fromkeys(texts) if text not in before.reason]
        reason = "; ".join([*new, before.reason])
        after = replace(before, reason=reason, evidence=(*before.evidence, *dict.fromkeys(texts)))
        if not software:
            after = replace(after, level=Level.FAULTY, component="compute", probability=1.0)
        elif before.level is Level.HEALTHY:
            reason += f"; as on {len(wrong)} of {len(tested)} nodes: probably a software problem"
            after = replace(after, level=Level.INCONCLUSIVE, probability=0.0, reason=reason)
        nodes[name] = after
    return replace(verdict, nodes=nodes)


def with_interfaces(verdict: Verdict, failed_over: Mapping[str, str]) -> Verdict:
    """Return the verdict with the interfaces of nodes that are not healthy and failed over them.

    A wrong interface, chosen by the user or by NCCL, looks like a broken network.
    """
    nodes = {
        name: replace(node, reason=f"{node.reason}; connects over {failed_over[name]}")
        if name in failed_over and node.level is not Level.HEALTHY
        else node
        for name, node in verdict.nodes.items()
    }
    return replace(verdict, nodes=nodes)


def with_transports(verdict: Verdict, transports: Mapping[str, str]) -> Verdict:
    """Return the verdict with the way by which data went, where the network is to blame.

    Sockets where there should be RDMA explain a slow network; it changes no level.
    """
    nodes = dict(verdict.nodes)
    for name, node in verdict.nodes.items():
        blamed = node.level in {Level.SLOW, Level.FAULTY} and node.component.startswith("network")
        if blamed and name in transports:
            way = f"data went over {transports[name]}"
            nodes[name] = replace(
                node, reason=f"{node.reason}; {way}", evidence=(*node.evidence, way)
            )
    return replace(verdict, nodes=nodes)


def with_others(verdict: Verdict, served: Mapping[str, float]) -> Verdict:
    """Return the verdict with the time that others had the processors of nodes.

    That time is left out of what is compared, so that no node is slow for it. But who had them for
    less than half as long as most may be slow for a job, and that is nothing the node can be
    blamed for: it could not be measured as its job would find it. `served` is the share of the
    time that each node had its own.
    """
    nodes = dict(verdict.nodes)
    most = median_high(served.values()) if served else 1.0
    for name, share in served.items():
        before = nodes.get(name)
        if before is None or share > _HALF_SERVED * most:
            continue
        said = (
            f"others had its processors {1 - share:.0%} of the time (on most nodes {1 - most:.0%}),"
            " which is left out"
        )
        after = replace(
            before, reason=f"{said}; {before.reason}", evidence=(*before.evidence, said)
        )
        if before.level is Level.HEALTHY:
            after = replace(after, level=Level.INCONCLUSIVE, probability=0.0)
        nodes[name] = after
    return replace(verdict, nodes=nodes)


def with_limits(verdict: Verdict, limits: Mapping[str, str]) -> Verdict:
    """Return the verdict with the limit that slow devices were held to, where a site has its own.

    It is what they were compared with beside their peers; it changes no level.
    """
    nodes = dict(verdict.nodes)
    for name, node in verdict.nodes.items():
        slow = node.level is Level.SLOW and node.component.startswith(("compute", "memory"))
        if slow and name in limits:
            nodes[name] = replace(node, evidence=(*node.evidence, limits[name]))
    return replace(verdict, nodes=nodes)


def with_devices(verdict: Verdict, devices: Mapping[str, Sequence[str]]) -> Verdict:
    """Return the verdict with what the devices are that it names by their places on a node.

    Args:
        verdict: what was found.
        devices: for each node, model, identifier and PCI address of each device.
    """
    nodes = dict(verdict.nodes)
    for name, node in verdict.nodes.items():
        known = devices.get(name, ())
        if node.level is Level.HEALTHY or len(known) < _SEVERAL:
            continue
        numbers = {int(number) for number in _PLACE.findall(f"{node.component} {node.reason}")}
        names = [
            f"device {number} is {known[number]}"
            for number in sorted(numbers)
            if number < len(known) and known[number] not in node.reason
        ]
        nodes[name] = replace(
            node, reason="; ".join([node.reason, *names]), evidence=(*node.evidence, *names)
        )
    return replace(verdict, nodes=nodes)


def judged(
    nodes: Sequence[str], verdict: Verdict, others: Mapping[str, NodeVerdict]
) -> VerdictReached:
    """Return the record of a verdict over all `nodes`, in their order.

    `others` are what was found apart from it, also of nodes that it judges.
    """
    verdicts = {**verdict.nodes}
    for name, other in others.items():
        verdicts[name] = _both(verdicts[name], other) if name in verdicts else other
    return VerdictReached(
        nodes=[_rounded(verdicts[node]) for node in nodes],
        paths=[_rounded(path) for path in verdict.paths],
        leaves=[_rounded(leaf) for leaf in verdict.leaves],
        floors={name: round(floor, 4) for name, floor in verdict.floors.items()},
    )


def _rounded(found: _Found) -> _Found:
    return replace(
        found, slowdown=round(found.slowdown, 3), probability=round(found.probability, 4)
    )
