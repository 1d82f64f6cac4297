# SPDX-License-Identifier: Apache-2.0
"""From a symptom, such as a failed script or a hang, to the record of its cause."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from slurm_health.node.rules.kernel_lines import device_error
from slurm_health.records.script_records import Diagnosed
from slurm_health.records.text import cut, listed, one_line
from slurm_health.training.diagnosis.collected import (
    MonitorReport,
    NodeStates,
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
_QUOTED = 120  # characters of the check's words
_MOST_BEFORE = 2  # lines about earlier slowness
_MOST_LINES = 24  # of the nodes' states
_MOST_OF_NODE = 5
_REASONS = 3  # for which one kind of data is unavailable


class CauseDiagnostician(Diagnostician):
    """Leads from a symptom to its cause, and has that recorded."""

    def __init__(
        self,
        symptom: Callable[[DataManager], Inference | None],
        operators: Sequence[OperatorMaker],
    ) -> None:
        super().__init__(operators)
        self._symptom = symptom

    def observe(self, **kwargs: Any) -> DiagnosisObservation | None:
        """Return the symptom in the collected data, None without one."""
        symptom = self._symptom(kwargs["data_manager"])
        return None if symptom is None else DiagnosisObservation(symptom.name, symptom=symptom)

    def resolve(self, problem: DiagnosisObservation, **kwargs: Any) -> DiagnosisAction:
        """Walk from the symptom to a cause, and put it into words."""
        assert problem.symptom is not None
        data: DataManager = kwargs["data_manager"]
        return EventAction(diagnosed=diagnosed(self.walk(problem.symptom, data), data))


def diagnosed(walk: Walk, data: DataManager) -> Diagnosed:
    """Return the record of the conclusion of a chain."""
    cause = walk.conclusion
    way = walk.way_to(cause)
    evidence = dict.fromkeys(
        line for inference in (cause, *(step.after for step in way)) for line in inference.evidence
    )
    before = slow_before(cause, data)[-_MOST_BEFORE:]
    if cause.blame is Attribution.UNDECIDED and data.get(ScriptEnd) is not None:
        # The words of the cause are evidence already.
        new = [line for line in quotes(data) if not any(text in line for text in evidence)]
        evidence |= dict.fromkeys(new)
    log = data.get(TrainingLog)
    own = log.of_their_own if log and cause.ranks else ()
    failure = next((failure for failure in own if failure.rank in cause.ranks), None)
    # The step before has nothing to add if all ranks made the same mistake.
    is_first = len(way) < 2 or (cause.blame is Attribution.USER and len(cause.ranks) > 1)
    description = cause.description or cause.name
    monitor = data.get(MonitorReport)
    for text in monitor.check if monitor else ():  # the check before the script met the same words
        row = known(text)
        if row is not None and row.name == cause.name and On.LAST_WORDS in row.on:
            description += "; the check before the script met it too:"
            description += f" {cut(one_line(text), _QUOTED)}"
            break
    asked_for = [end for end in walk.ends if ASKS_FOR in end.configs and end != cause]
    return Diagnosed(
        cause=cause.name,
        description=description,
        attribution=cause.blame.value,
        sureness=cause.sureness.name.lower(),
        error=failure.error if failure else "",
        place=failure.place if failure else "",
        first="" if is_first else way[-2].after.description,
        nodes=_of_the_job(cause.nodes, data),
        ranks=list(cause.ranks),
        accused=_of_the_job(cause.accused, data),
        evidence=[*list(evidence)[: _MOST_EVIDENCE - len(before)], *before],
        told=[
            *(
                f"{end.name} asks for {end.configs[ASKS_FOR]}: {end.description}"
                for end in asked_for
            ),
            *_node_lines(data, cause.nodes, ended=cause.blame is Attribution.OUTSIDE),
        ],
        advice=cause.advice,
        advises_process=cause.advises_process,
        chain=[f"{step.operator}: {step.after.name}" for step in way],
        not_collected=[f"{name}: {why}" for name, why in _unavailable(data).items()],
        failed=[
            *(f"collector {name}: {what}" for name, what in data.failed.items()),
            *(f"operator {name}: {what}" for name, what in walk.failed.items()),
        ],
    )


def _of_the_job(nodes: Iterable[str], data: DataManager) -> list[str]:
    """Return the nodes that are the job's: its output may name any."""
    sources: list[ScriptEnd | Standstill | PaceFinding | None]
    sources = [data.get(ScriptEnd), data.get(Standstill), data.get(PaceFinding)]
    of_the_job = {node for source in sources if source is not None for node in source.nodes}
    return [node for node in nodes if node in of_the_job]


def _node_lines(data: DataManager, concerned: Collection[str], *, ended: bool) -> Iterator[str]:
    """Yield lines of the nodes' states that may matter; those of `concerned` nodes first.

    Conditions that all nodes report are normal there. Nor is it news that nodes do not answer a job
    that was `ended`.
    """
    reports = data.get(NodeStates)
    if reports is None:
        return
    if reports.silent and not ended:
        why = reports.why_silent or "no answer in time"
        yield f"{listed(reports.silent)} did not answer: {why}"
    normal = set[str]()
    if len(reports.nodes) > 1:
        normal = set.intersection(*(set(node.state) for node in reports.nodes))
    by_line: dict[str, list[str]] = {}
    for node in sorted(
        reports.nodes, key=lambda node: (node.node not in concerned, not node.kernel)
    ):
        lines = list(node.lost_gpus)
        for line in reversed(node.kernel):
            error = device_error(line)
            lines.append(f"kernel: {line}" + (f" (that is: {error.words})" if error else ""))
        lines += [f"{node.kills} killed for memory"] if node.kills else []
        lines += [line for line in node.state if line not in {*normal, *node.lost_gpus}]
        lines += node.left
        for line in lines[:_MOST_OF_NODE]:
            by_line.setdefault(line, []).append(node.node)
    texts = [f"{listed(nodes)}: {line}" for line, nodes in by_line.items()]
    yield from texts[:_MOST_LINES]


def _unavailable(data: DataManager) -> dict[str, str]:
    """Return the data that was not collected, by collectors or on nodes, and why."""
    reports = data.get(NodeStates)
    reasons: dict[str, dict[str, list[str]]] = {}
    for node in reports.nodes if reports else ():
        for what, why in node.unavailable.items():
            reasons.setdefault(what, {}).setdefault(why, []).append(node.node)
    of_nodes = {
        what: "; ".join(
            f"{why} ({listed(nodes)})" for why, nodes in list(by_why.items())[:_REASONS]
        )
        for what, by_why in reasons.items()
    }
    return {**data.missing, **of_nodes}
