# SPDX-License-Identifier: Apache-2.0
"""What a report says of a run, and whether that is right. Pure: it reads what a user would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.diagnosis.causes import NOTHING, Ends, Where
from benchmarks.diagnosis.plan import RANKS, Plan

_BAD_LEVELS = {"faulty", "slow"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a report names: a cause, on which nodes, and when, in seconds since the epoch."""

    cause: str
    nodes: tuple[str, ...]
    at_s: float


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One run: what was named, whether rightly, and how soon.

    `accused` are the healthy nodes that were held at fault, by whatever. `wrong` are sentences.
    """

    plan: Plan
    named: str
    cause_right: bool
    node_right: bool
    accused: tuple[str, ...]
    found_s: float | None
    again_s: float | None
    wrong: tuple[str, ...]
    load: float = 0.0
    evidence: str = ""

    @property
    def right(self) -> bool:
        """Whether cause and node are right, nobody else is accused, and the rest is as it must."""
        return not self.wrong


def judge(
    plan: Plan,
    report: Mapping[str, Any],
    *,
    drained: Mapping[str, str],
    fault_s: float,
    again_s: float | None,
) -> Judged:
    """Judge a run.

    Args:
        plan: what was done.
        report: of its job, as JSON has it.
        drained: the nodes out of service, with the reason.
        fault_s: when it happened, seconds since the epoch.
        again_s: when the first step after a restart ended, None if none did.
    """
    findings = sorted(findings_of(report), key=lambda each: each.at_s)
    # A fault that makes ranks wait for each other is followed by others.
    first = findings[0] if findings else None
    named = first.cause if first else NOTHING
    cause_right = named in plan.cause.named
    node_right = _nodes_right(plan, first)
    accused = tuple(sorted(_accused(plan, report, drained)))
    wrong = []
    if not cause_right:
        wrong.append(f"named {named}")
    elif not node_right:
        wrong.append(f"shown on {','.join(first.nodes) if first else ''}, it was {plan.node}")
    wrong += [f"{node} is healthy and was accused" for node in accused]
    wrong += _what_followed(plan, report, again_s)
    return Judged(
        plan=plan,
        named=named,
        cause_right=cause_right,
        node_right=node_right,
        accused=accused,
        found_s=round(first.at_s - fault_s, 1) if first else None,
        again_s=round(again_s - fault_s, 1) if again_s is not None else None,
        wrong=tuple(wrong),
    )


def with_ended_start(
    report: Mapping[str, Any], diagnosed: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a report that tells why the script failed, also once it has been started again.

    Args:
        report: of a job, as JSON has it: of the script's last start only.
        diagnosed: what the post-mortems of the first attempt wrote into the journal, in order.
    """
    first, *others = report["runs"]
    if diagnosed and not first["post_mortem"]:
        first = {**first, "post_mortem": diagnosed[-1]}
    return {**report, "runs": [first, *others]}


def findings_of(report: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what a report names of the job's script."""
    for run in report["runs"]:
        at_s = {what: list(_times(run, what)) for what in _KINDS}
        for event, time_s in zip(run["events"], at_s["training_event"], strict=False):
            if event["event"] in {"hang", "slowdown", "straggler"}:
                cause = event["diagnosed"]["cause"]
                yield Finding(cause=cause, nodes=tuple(event["nodes"]), at_s=time_s)
        if run["post_mortem"]:
            found = run["post_mortem"]
            nodes = tuple(found["nodes"])
            yield Finding(cause=found["cause"], nodes=nodes, at_s=at_s["diagnosed"][-1])


_KINDS = ("training_event", "diagnosed")


def _times(run: Mapping[str, Any], what: str) -> Iterator[float]:
    for event in run["timeline"]:
        if event["event"] == what:
            yield run["started_s"] + event["after_s"]


def _nodes_right(plan: Plan, first: Finding | None) -> bool:
    nodes = set(first.nodes) if first else set()
    match plan.cause.where:
        case Where.NODE:
            return nodes == {plan.node}
        case Where.ALL:
            return nodes == {f"n{rank + 1}" for rank in range(RANKS)}
        case Where.NONE:
            return not nodes


def _accused(plan: Plan, report: Mapping[str, Any], drained: Mapping[str, str]) -> Iterator[str]:
    """Yield the healthy nodes that anything holds at fault, each once."""
    guilty = {plan.node} if plan.cause.of_the_node else set()
    held = set(drained)
    for run in report["runs"]:
        found = [event["diagnosed"] for event in run["events"] if event["event"] == "hang"]
        found += [run["post_mortem"]] if run["post_mortem"] else []
        held |= {node for each in found for node in each.get("accused", ())}
        held |= {each["node"] for each in run["nodes"] if each["level"] in _BAD_LEVELS}
        held |= {
            node
            for event in run["timeline"]
            if event["event"] == "failure_planned"
            for node in event["nodes"]
        }
        # A rank that is called slow puts its node in doubt, rightly where it is slow.
        straggler = (event for event in run["events"] if event["event"] == "straggler")
        slow = {node for event in straggler for node in event["nodes"]}
        held |= slow - ({plan.node} if plan.cause.ends is Ends.SLOWS else set())
    yield from held - guilty


def _what_followed(plan: Plan, report: Mapping[str, Any], again_s: float | None) -> Iterator[str]:
    planned = [
        event["action"]
        for run in report["runs"]
        for event in run["timeline"]
        if event["event"] == "failure_planned"
    ]
    if plan.cause.ends is Ends.GOES_ON and again_s is None:
        yield "the training did not go on"
    if plan.cause.ends is Ends.STOPS and again_s is not None:
        yield "it was started again, and is the user's to mend"
    if plan.cause.ends is Ends.STOPS and not any(text.startswith("stop") for text in planned):
        yield f"it was not planned to stop: {'; '.join(planned) or 'nothing was planned'}"
