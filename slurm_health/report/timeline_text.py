# SPDX-License-Identifier: Apache-2.0
"""The timeline of a job's checks as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from slurm_health.report.layout import printable, table
from slurm_health.report.model import Event, RunReport
from slurm_health.report.phrases import attempt_text, nodes_text
from slurm_health.report.timeline import acted

# What is done, before it is done and after, and what it is called where it failed.
_WORDS = {
    "drain": ("drain", "drained", "did not drain"),
    "exclude": ("exclude", "excluded", "did not exclude"),
    "drop": ("give back", "gave back", "could not give back"),
    "requeue": ("requeue the job", "released the job", "did not requeue the job"),
    "hold": ("hold the job", "held the job", "did not hold the job"),
    "proceed": ("go on with", "went on with", "did not go on with"),
}
_ON_THE_JOB = {"requeue", "hold"}
_DISPOSITIONS = {
    "proceed": "the job goes on",
    "requeue": "the job leaves, to be requeued",
    "hold": "the job leaves, to be held",
    "stop": "the job ends",
}


def timeline_lines(runs: Sequence[RunReport], width: int | None, *, unicode: bool) -> list[str]:
    """Return the timeline of every check, if anything was done in one of them."""
    if not any(acted(run.timeline) for run in runs):
        return []
    rows: list[list[str]] = []
    remarks: list[str] = []
    for run in runs:
        label = attempt_text(run)
        for event in run.timeline:
            rows.append([label, f"{event.after_s:7.1f}"])
            remarks.append(printable(_text(event), unicode=unicode))
            label = ""
    return table([("TIMELINE", ""), ("SECONDS", "")], rows, remarks, "EVENT", width)


def _text(event: Event) -> str:
    match event.what:
        case "run_started":
            return f"began to check {nodes_text(event.nodes)}"
        case "master_resumed":
            return "a new master took over"
        case "verdict_reached":
            return f"verdict: {event.detail}"
        case "action_intended":
            return f"going to {_named(event, 0)}"
        case "action_done":
            said = f" ({event.detail})" if event.detail else ""
            return f"{_named(event, 1 if event.succeeded else 2)}{said}"
        case "run_finished":
            on = f" with {nodes_text(event.nodes)}" if event.nodes else ""
            return f"{_DISPOSITIONS.get(event.detail, event.detail)}{on}"
        case "script_started":
            return f"{PurePath(event.detail).name or 'the script'} started"
        case _:
            return f"the script ended, {event.detail}"


def _named(event: Event, tense: int) -> str:
    words = _WORDS.get(event.action, (event.action,) * 3)[tense]
    who = "" if event.action in _ON_THE_JOB or not event.nodes else f" {nodes_text(event.nodes)}"
    return f"{words}{who}"
