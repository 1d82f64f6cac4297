# SPDX-License-Identifier: Apache-2.0
"""The report as one JSON object, for programs. docs/howto/read-a-report.md describes it.

Every number has its unit in its name. A number that is not known is null, a list of figures
that were not measured is empty. Keys are added within a schema version, never changed.
"""

from __future__ import annotations

import msgspec

from slurm_health.core.verdict import LinkVerdict
from slurm_health.report.acts import Act
from slurm_health.report.figures import ALLGATHER, MATMUL, Figure, unit_of
from slurm_health.report.model import Event, JobReport, NodeReport, RunReport, ScriptOutcome

SCHEMA = 1

_ALWAYS = (ALLGATHER, MATMUL)


def as_json(report: JobReport, *, raw: bool = False) -> str:
    """Return a job's report as lines of JSON, with every sample as it was measured if `raw`."""
    return _text(job_object(report, raw=raw))


def run_as_json(run: RunReport, *, raw: bool = False) -> str:
    """Return one check as lines of JSON: an element of `runs`, with the schema's version."""
    return _text({"schema": SCHEMA, **run_object(run, raw=raw)})


def job_object(report: JobReport, *, raw: bool = False) -> dict[str, object]:
    """Return a job's report as what JSON can hold."""
    job_ids = [run.started.job_id for run in report.runs if run.started]
    return {
        "schema": SCHEMA,
        "job": report.job,
        "job_id": job_ids[-1] if job_ids else None,
        "script": report.script,
        "cluster": report.cluster,
        "partition": report.partition,
        "runs": [run_object(run, raw=raw) for run in report.runs],
        "nodes": [_node(node) for node in report.nodes],
        "paths": [_path(path) for path in report.paths],
        "leaves": [_path(leaf) for leaf in report.leaves],
    }


def run_object(run: RunReport, *, raw: bool = False) -> dict[str, object]:
    """Return one check as what JSON can hold."""
    found: dict[str, object] = {
        "run": run.label,
        "attempt": run.attempt,
        "check": run.check,
        "state": run.state.value,
        "note": run.note,
        "started_s": run.started_s,
        "rounds": run.rounds,
        "duration_s": run.duration_s,
        "disposition": run.disposition or None,
        "reason": run.reason,
        "exit_code": run.exit_code,
        "nodes": [_node(node) for node in run.nodes],
        "paths": [_path(path) for path in run.paths],
        "leaves": [_path(leaf) for leaf in run.leaves],
        "actions": [_act(act) for act in run.acts],
        "timeline": [_event(event) for event in run.timeline],
        "script": _script(run.script) if run.script else None,
    }
    if raw:
        found["samples"] = [
            {field: getattr(sample, field) for field in sample.__struct_fields__}
            for sample in run.samples
        ]
    return found


def _text(value: dict[str, object]) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def _node(node: NodeReport) -> dict[str, object]:
    verdict = node.verdict
    return {
        "node": node.node,
        "run": node.label,
        "level": verdict.level.value if verdict else None,
        "reason": verdict.reason if verdict else "",
        "component": verdict.component if verdict else None,
        "slowdown": verdict.slowdown if verdict else None,
        "probability": verdict.probability if verdict else None,
        "evidence": list(verdict.evidence) if verdict else [],
        **_figures(node.figures),
    }


def _figures(figures: tuple[Figure, ...]) -> dict[str, list[float]]:
    measured = {
        figure.probe: [float(f"{value:.6g}") for value in figure.values] for figure in figures
    }
    missing: dict[str, list[float]] = {probe: [] for probe in _ALWAYS}
    return {_key(probe): values for probe, values in (missing | measured).items()}


def _key(probe: str) -> str:
    """Return a figure's name with its unit: `allgather_gb_per_s`."""
    unit = unit_of(probe).lower().replace("/", "_per_")
    return f"{probe.replace(' ', '_')}_{unit}"


def _path(path: LinkVerdict) -> dict[str, object]:
    return {
        "ends": path.ends,
        "level": path.level.value,
        "reason": path.reason,
        "slowdown": path.slowdown,
        "probability": path.probability,
        "evidence": path.evidence,
    }


def _act(act: Act) -> dict[str, object]:
    return {
        "action": act.action,
        "nodes": list(act.nodes),
        "progress": act.progress.value,
        "reason": act.reason,
        "detail": act.detail,
    }


def _event(event: Event) -> dict[str, object]:
    return {
        "after_s": event.after_s,
        "event": event.what,
        "action": event.action or None,
        "nodes": list(event.nodes),
        "succeeded": event.succeeded,
        "detail": event.detail,
    }


def _script(script: ScriptOutcome) -> dict[str, object]:
    return {
        "name": script.name,
        "exit_code": script.exit_code,
        "signal": script.signal,
        "duration_s": script.duration_s,
    }
