# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of what `slurm-health report --json` prints, made from what that is made of.

docs/reference/report.schema.json is its text; tests hold it to that and every report to it.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from types import GenericAlias, MappingProxyType
from typing import Any

import msgspec

from slurm_health.records.records import Unchecked
from slurm_health.records.script_records import Diagnosed
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict
from slurm_health.report.export import LEFT_OUT, RENAMED, SCHEMA
from slurm_health.report.latest import LatestJob
from slurm_health.report.model import Event, JobReport, RunReport
from slurm_health.report.rounds import Hardware
from slurm_health.report.summary import Summary

# A probe's figures on a node: their names depend on the probes that were run.
_FIGURES = {"^.+_(gb_per_s|gflop_per_s|ms)$": {"type": "array", "items": {"type": "number"}}}
_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


def schema() -> dict[str, Any]:
    """Return the schema. It allows further keys, because a later version may add some."""
    references, parts = msgspec.json.schema_components(_documents(), ref_template="#/$defs/{name}")
    parts["Node"]["patternProperties"] = _FIGURES
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What slurm-health report --json prints",
        "anyOf": list(references),
        "$defs": parts,
    }


def as_text() -> str:
    """Return the schema as lines of JSON."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode() + "\n"


def _documents() -> list[Any]:
    """Return the types of whole documents: a job, an array's tasks, the latest jobs, a check."""
    link = _type("Link", LinkVerdict)
    unjudged = {
        "level": Level | None,
        "component": str | None,
        "slowdown": float | None,
        "probability": float | None,
    }
    node = _type("Node", NodeVerdict, {**unjudged, "run": str, "hardware": Hardware | None})
    judged = {"nodes": _list(node), "paths": _list(link), "leaves": _list(link)}
    of_run = {
        **judged,
        "disposition": str | None,
        "unchecked": _type("Unchecked", Unchecked) | None,
        "post_mortem": _type("PostMortem", Diagnosed) | None,
        "timeline": _list(_type("Event", Event, {"action": str | None})),
    }
    run = _type("Run", RunReport, of_run)
    of_job = {"summary": Summary, **judged, "job_id": int | None, "runs": _list(run)}
    version = {"schema": typing.Literal[1]}
    assert typing.get_args(version["schema"]) == (SCHEMA,)
    tasks = {"tasks": _list(_type("Job", JobReport, of_job)), "without_journal": dict[str, str]}
    return [
        _type("JobDocument", JobReport, {**version, **of_job}),
        _type("TasksDocument", None, {**version, **tasks}),
        _type("LatestDocument", None, {**version, "jobs": list[LatestJob]}),
        _type("CheckDocument", RunReport, {**version, **of_run}),
    ]


def _type(name: str, model: Any, changed: Mapping[str, Any] = _NO_FIELDS) -> Any:
    """Return the type of an object with the fields of a model, some of them changed or added."""
    fields = {RENAMED.get(key, key): kind for key, kind in _fields(model) if key not in LEFT_OUT}
    described: list[Any] = [
        (key, kind, msgspec.UNSET) if msgspec.UnsetType in typing.get_args(kind) else (key, kind)
        for key, kind in {**fields, **changed}.items()
    ]
    return msgspec.defstruct(name, described, kw_only=True)


def _fields(model: Any) -> list[tuple[str, Any]]:
    if model is None:
        return []
    hints = typing.get_type_hints(model)
    if dataclasses.is_dataclass(model):
        return [(field.name, hints[field.name]) for field in dataclasses.fields(model)]
    return [(field.name, field.type) for field in msgspec.structs.fields(model)]


def _list(kind: Any) -> Any:
    return GenericAlias(list, (kind,))
