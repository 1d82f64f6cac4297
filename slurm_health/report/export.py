# SPDX-License-Identifier: Apache-2.0
"""The report for programs: one JSON object, as docs/reference/report.md says.

docs/reference/report.schema.json says the same. Every number has its unit in its name; a number
that is not known is null, a list of figures that were not measured is empty. Keys are added within
a schema version, never changed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from slurm_health.records.probe_catalog import ALLGATHER, MATMUL, unit_of
from slurm_health.records.script_records import TrainingEvent
from slurm_health.report.latest import LatestJob
from slurm_health.report.model import Event, JobReport, NodeReport, RunReport
from slurm_health.report.summary import summary_of

SCHEMA = 1


def figure_key(probe: str) -> str:
    """Return a figure's name with its unit: `allgather_gb_per_s`."""
    unit = unit_of(probe).lower().replace("/", "_per_")
    return f"{probe.replace(' ', '_')}_{unit}"


# JSON has line ends between values, and what is not ASCII in texts only.
_UNLIKE_ASCII = re.compile(r"[^\x20-\x7e\n]")
_ALWAYS = (ALLGATHER, MATMUL)
_UNJUDGED = {
    "level": None,
    "reason": "",
    "component": None,
    "slowdown": None,
    "probability": None,
    "evidence": (),
}
# Fields of the model by the names they have here; all others keep theirs.
RENAMED = {"label": "run", "acts": "actions", "what": "event"}
# What the text of a report is made from, and programs are told in other fields.
LEFT_OUT = {"started", "superseded", "judged", "samples", "measured"}


def as_json(report: JobReport) -> str:
    """Return a job's report as lines of JSON."""
    return _text(_job(report))


def tasks_as_json(
    reports: Sequence[JobReport],
    *,
    others: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the reports of an array's tasks as lines of JSON.

    `others` are tasks without a journal, and why they have none.
    """
    tasks = [_job(report) for report in reports]
    return _text({"tasks": tasks, "without_journal": dict(others)})


def latest_as_json(jobs: Sequence[LatestJob]) -> str:
    """Return the latest jobs as lines of JSON."""
    return _text({"jobs": list(jobs)})


def run_as_json(run: RunReport) -> str:
    """Return one check as lines of JSON: an element of `runs`, with the schema's version."""
    return _text(_run(run))


def _job(report: JobReport) -> dict[str, object]:
    job_ids = [run.started.job_id for run in report.runs if run.started]
    return {
        "job": report.job,
        "job_id": job_ids[-1] if job_ids else None,
        "summary": summary_of(report),
        **_fields(report),
        "runs": [_run(run) for run in report.runs],
        "nodes": [_node(node) for node in report.nodes],
        "paths": _whole(report.paths),
        "leaves": _whole(report.leaves),
    }


def _text(report: dict[str, object]) -> str:
    encoded = msgspec.json.encode({"schema": SCHEMA, **report})
    return shown(msgspec.json.format(encoded, indent=2).decode()) + "\n"


def shown(document: str) -> str:
    """Return the same JSON, of which nothing acts on a terminal that it is printed on."""
    return _UNLIKE_ASCII.sub(
        lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], document
    )


def _fields(value: JobReport | RunReport | Event) -> dict[str, object]:
    """Return the fields of a value by their names here. msgspec encodes what they hold."""
    names = [each.name for each in dataclasses.fields(value)]
    return {RENAMED.get(name, name): getattr(value, name) for name in names if name not in LEFT_OUT}


def _run(run: RunReport) -> dict[str, object]:
    return {
        **_fields(run),
        "disposition": run.disposition or None,
        "nodes": [_node(node) for node in run.nodes],
        "paths": _whole(run.paths),
        "leaves": _whole(run.leaves),
        "post_mortem": _whole([run.post_mortem])[0] if run.post_mortem else None,
        "events": [_event(event) for event in run.events],
        "timeline": [{**_fields(event), "action": event.action or None} for event in run.timeline],
    }


def _event(event: TrainingEvent) -> dict[str, object]:
    why = event.diagnosed
    return {**_whole([event])[0], "diagnosed": _whole([why])[0] if why else None}


def _whole(records: Sequence[msgspec.Struct]) -> list[dict[str, object]]:
    """Return records with all their fields: in the journal those at their default are left out."""
    return [msgspec.structs.asdict(record) for record in records]


def _node(node: NodeReport) -> dict[str, object]:
    judged = msgspec.structs.asdict(node.verdict) if node.verdict else _UNJUDGED
    return {
        "node": node.node,
        "run": node.label,
        **judged,
        "hardware": node.hardware,
        **_figures(node.figures),
    }


def _figures(figures: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    measured = {
        probe: [float(f"{value:.6g}") for value in values] for probe, values in figures.items()
    }
    missing: dict[str, list[float]] = {probe: [] for probe in _ALWAYS}
    return {figure_key(probe): values for probe, values in (missing | measured).items()}
