# SPDX-License-Identifier: Apache-2.0
"""From a symptom, such as a failed script or a hang, to the record of its cause."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from slurm_health.node.rules.kernel_lines import device_error
from slurm_health.records.script_records import Diagnosed
from slurm_health.records.text import cut, listed, one_line
from slurm_health.training.diagnosis.collected import (
    MonitorSaw,
    NodesTold,
    NodeTold,
    ScriptEnd,
    TrainingLog,
)
from slurm_health.training.diagnosis.failed import quotes
from slurm_health.training.diagnosis.pace import PaceFinding
from slurm_health.training.diagnosis.rows import On
from slurm_health.training.diagnosis.samples import Standstill
from slurm_health.training.diagnosis.surroundings import slow_before
from slurm_health.training.diagnosis.words import known
from slurm_health.training.framework import (
    ASKS_FOR,
    Attribution,
    ChainStep,
    DataManager,
    DiagnosisAction,
    DiagnosisObservation,
    Diagnostician,
    EventAction,
    Inference,
    OperatorMaker,
    Walk,
)

_MOST_EVIDENCE = 6
_QUOTED = 120  # characters of what the check met
_MOST_BEFORE = 2  # of these: what had been slow before
_MOST_LINES = 24  # of what nodes report
_MOST_OF_NODE = 5
_REASONS = 3  # of what one kind of thing was not seen for


class CauseDiagnostician(Diagnostician):
    """Leads from a symptom to its cause, and asks for that to be recorded."""

    def __init__(
        self,
        symptom: Callable[[DataManager], Inference | None],
        operators: Sequence[OperatorMaker],
    ) -> None:
        super().__init__(operators)
        self._symptom = symptom

    def observe(self, **kwargs: Any) -> DiagnosisObservation | None:
        """Return the symptom in what was collected, None where there is none."""
        symptom = self._symptom(kwargs["data_manager"])
        return None if symptom is None else DiagnosisObservation(symptom.name, symptom=symptom)

    def resolve(self, problem: DiagnosisObservation, **kwargs: Any) -> DiagnosisAction:
        """Walk from the symptom to a cause, and put it into words."""
        assert problem.symptom is not None
        data: DataManager = kwargs["data_manager"]
        return EventAction(diagnosed=diagnosed(self.walk(problem.symptom, data), data))


def diagnosed(walk: Walk, data: DataManager) -> Diagnosed:
    """Return the record of where a chain led."""
    cause = walk.conclusion
    way = walk.way_to(cause)
    evidence = dict.fromkeys(
        line for inference in (cause, *(step.after for step in way)) for line in inference.evidence
    )
    before = slow_before(cause, data)[-_MOST_BEFORE:]
    if cause.blame is Attribution.UNDECIDED and data.get(ScriptEnd) is not None:
        evidence |= dict.fromkeys(quotes(data))
    log = data.get(TrainingLog)
    own = log.of_their_own if log and cause.ranks else ()
    first = next((failure for failure in own if failure.rank in cause.ranks), None)
    return Diagnosed(
        cause=cause.name,
        description=(cause.description or cause.name) + _known_before(cause, data),
        attribution=cause.blame.value,
        sureness=cause.sureness.name.lower(),
        error=first.error if first else "",
        place=first.place if first else "",
        first=_first_of(cause, way),
        nodes=_of_the_job(cause.nodes, data),
        ranks=list(cause.ranks),
        accused=_of_the_job(cause.accused, data),
        evidence=[*list(evidence)[: _MOST_EVIDENCE - len(before)], *before],
        told=[
            *_not_followed(walk),
            *_lines_told(data, cause.nodes, ended=cause.blame is Attribution.OUTSIDE),
        ],
        advice=cause.advice,
        advises_process=cause.advises_process,
        chain=[f"{step.operator}: {step.after.name}" for step in way],
        not_collected=[f"{name}: {why}" for name, why in _not_seen(data).items()],
        failed=[
            *(f"collector {name}: {what}" for name, what in data.failed.items()),
            *(f"operator {name}: {what}" for name, what in walk.failed.items()),
        ],
    )


def _known_before(cause: Inference, data: DataManager) -> str:
    """Return that the check before the script met the same, by the same words."""
    saw = data.get(MonitorSaw)
    for text in saw.check if saw else ():
        row = known(text)
        if row is not None and row.name == cause.name and On.LAST_WORDS in row.on:
            return f"; the check before the script met it too: {cut(one_line(text), _QUOTED)}"
    return ""


def _first_of(cause: Inference, way: Sequence[ChainStep]) -> str:
    """Return what happened first: no step of its own where it is the cause, or all ranks met it."""
    if len(way) < 2 or (cause.blame is Attribution.USER and len(cause.ranks) > 1):
        return ""
    return way[-2].after.description


def _not_followed(walk: Walk) -> Iterator[str]:
    """Yield what diagnosticians of others asked for where something else is the conclusion."""
    for end in walk.ends:
        if ASKS_FOR in end.configs and end != walk.conclusion:
            yield f"{end.name} asks for {end.configs[ASKS_FOR]}: {end.description}"


def _of_the_job(nodes: Iterable[str], data: DataManager) -> list[str]:
    """Return those that are nodes of the job: what a job prints may name any."""
    sources: list[ScriptEnd | Standstill | PaceFinding | None]
    sources = [data.get(ScriptEnd), data.get(Standstill), data.get(PaceFinding)]
    of_the_job = {node for source in sources if source is not None for node in source.nodes}
    return [node for node in nodes if node in of_the_job]


def _lines_told(data: DataManager, concerned: Collection[str], *, ended: bool) -> Iterator[str]:
    """Yield what nodes report that may matter, at most so many lines; `concerned` nodes first.

    What every node reports of its state is how these nodes are, and says nothing of one of them.
    Nor is it news that nodes of a job that was `ended` do not answer it.
    """
    reports = data.get(NodesTold)
    if reports is None:
        return
    if reports.silent and not ended:
        why = reports.why_silent or "no answer in time"
        yield f"{listed(reports.silent)} did not answer: {why}"
    alike = _alike(reports.nodes)
    by_line: dict[str, list[str]] = {}
    for node in sorted(
        reports.nodes, key=lambda node: (node.node not in concerned, not node.kernel)
    ):
        for line in list(_lines(node, alike))[:_MOST_OF_NODE]:
            by_line.setdefault(line, []).append(node.node)
    lines = [f"{listed(nodes)}: {line}" for line, nodes in by_line.items()]
    yield from lines[:_MOST_LINES]


def _not_seen(data: DataManager) -> dict[str, str]:
    """Return what was not collected, and why, with what nodes could not look at."""
    reports = data.get(NodesTold)
    reasons: dict[str, dict[str, list[str]]] = {}
    for node in reports.nodes if reports else ():
        for what, why in node.not_seen.items():
            reasons.setdefault(what, {}).setdefault(why, []).append(node.node)
    of_nodes = {
        what: "; ".join(
            f"{why} ({listed(nodes)})" for why, nodes in list(by_why.items())[:_REASONS]
        )
        for what, by_why in reasons.items()
    }
    return {**data.missing, **of_nodes}


def _alike(nodes: Sequence[NodeTold]) -> frozenset[str]:
    if len(nodes) < 2:  # there is nothing to compare with
        return frozenset()
    return frozenset.intersection(*(frozenset(node.state) for node in nodes))


def _lines(node: NodeTold, alike: Collection[str]) -> Iterator[str]:
    yield from node.lost_gpus
    for line in reversed(node.kernel):
        error = device_error(line)
        yield f"kernel: {line}" + (f" (that is: {error.words})" if error else "")
    if node.kills:
        yield f"{node.kills} killed for memory"
    yield from (line for line in node.state if line not in {*alike, *node.lost_gpus})
    yield from node.left
