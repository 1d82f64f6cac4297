# SPDX-License-Identifier: Apache-2.0
"""The report for programs: one JSON object, whose schema is docs/reference/report.schema.json.

Every number has its unit in its name; a number that is not known is null. Keys are added within a
schema version, never changed.
"""

from __future__ import annotations

import inspect
import json
import re
from typing import Any, Literal

import msgspec

from slurm_health.report.story import Run, Story
from slurm_health.report.summary import Summary, summary_of

# JSON has line ends between values, and what is not ASCII in texts only.
_UNLIKE_ASCII = re.compile(r"[^\x20-\x7e\n]")
Schema = Literal[2]


class LatestJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job in a list: how it stands, by its journal and by Slurm.

    `state` is Slurm's word, or the report's where Slurm does not know the job or does not answer;
    `found` the outcome in a sentence. `started_s` is None if no check has begun, `age_s` how long
    ago it began or was submitted; `nodes` counts those of the last check.
    """

    job: str
    state: str
    found: str
    severity: str = "info"
    cluster: str = ""
    name: str = ""
    script: str = ""
    started_s: float | None = None
    age_s: float | None = None
    nodes: int = 0
    attempts: int = 0


class JobDocument(Story, frozen=True, kw_only=True):
    """What `report JOBID --json` prints."""

    schema: Schema = 2
    summary: Summary | None = None


class CheckDocument(Run, frozen=True, kw_only=True):
    """What `check --json` prints."""

    schema: Schema = 2


class ListDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What `report --json` prints: jobs, or the tasks of an array."""

    jobs: list[LatestJob]
    schema: Schema = 2


Document = JobDocument | CheckDocument | ListDocument


def job_document(story: Story) -> JobDocument:
    """Return the report of a job for programs."""
    return JobDocument(**msgspec.structs.asdict(story), summary=summary_of(story))


def check_document(run: Run) -> CheckDocument:
    """Return the report of one check for programs."""
    return CheckDocument(**msgspec.structs.asdict(run))


def as_json(document: Document) -> str:
    """Return a document as lines of JSON, of which nothing acts on a terminal."""
    text = msgspec.json.format(msgspec.json.encode(_whole(document)), indent=2).decode()
    return _UNLIKE_ASCII.sub(
        lambda match: match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1], text
    )


def schema() -> dict[str, Any]:
    """Return the JSON Schema. It allows further keys, because a later version may add some."""
    documents = (JobDocument, CheckDocument, ListDocument)
    references, parts = msgspec.json.schema_components(documents, ref_template="#/$defs/{name}")
    for part in parts.values():  # before 0.23, msgspec left the indentation of docstrings
        if "description" in part:
            part["description"] = inspect.cleandoc(part["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What slurm-health report --json prints",
        "anyOf": list(references),
        "$defs": parts,
    }


def _whole(value: object) -> object:
    """Return a value with all its fields: a journal leaves out those at their default."""
    match value:
        case msgspec.Struct():
            config = value.__struct_config__
            tag = {config.tag_field: config.tag} if config.tag_field else {}
            return {**tag, **{k: _whole(v) for k, v in msgspec.structs.asdict(value).items()}}
        case dict():
            return {key: _whole(item) for key, item in value.items()}
        case list() | tuple():
            return [_whole(item) for item in value]
        case _:
            return value
