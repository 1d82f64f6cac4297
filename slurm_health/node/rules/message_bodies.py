# SPDX-License-Identifier: Apache-2.0
"""One message to one target as the bytes that it takes: JSON, text, mail, chat, alerts. Pure.

Texts of events may hold what users chose, such as names of processes: nothing of it becomes a
mention, a link, a header or another line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.message import EmailMessage
from typing import Any

import msgspec

from slurm_health.node.rules.notices import Batch, EventKind, NodeEvent
from slurm_health.node.rules.settings import Format, Notify, Target
from slurm_health.records.text import cut, one_line

# A message of many nodes names so many in full; JSON has them all.
_MOST_SHOWN = 20
_LENGTH = 500
_MOST_EVIDENCE = 40
# An alert that nobody resolves ends by itself: a node may be replaced without a word.
_ALERT_S = 7 * 24 * 3600.0
# OpenTelemetry's SeverityNumber.
_WARNING = (13, "WARN")
_SEVERITIES = {
    EventKind.RELEASED: (9, "INFO"),
    EventKind.TEST: (9, "INFO"),
    EventKind.BREAKER: (17, "ERROR"),
    EventKind.TICKET: (17, "ERROR"),
}
# The last second that 64 bits of nanoseconds can tell.
_LAST_S = 2.0**64 / 1e9 - 1
_WORDS = {
    EventKind.DRAINED: "drained",
    EventKind.RELAPSE: "drained again within a day",
    EventKind.RELEASED: "returned to service",
    EventKind.BREAKER: "breaker tripped, no more nodes are drained",
    EventKind.STEP_FAILED: "mending step failed",
    EventKind.TICKET: "needs a person",
    EventKind.TEST: "test message, nothing has happened",
}


def body_of(batch: Batch, target: Target, settings: Notify) -> tuple[bytes, str]:
    """Return the body of a message, and its type as HTTP names it."""
    make, kind = _FORMATS[target.format]
    return make(batch, target, settings), kind


def subject(batch: Batch, settings: Notify) -> str:
    """Return what happened, in one line."""
    nodes = {each.node for each in batch.events}
    count = f"{len(nodes)} nodes " if len(nodes) > 1 else ""
    where = f"{settings.cluster}: " if settings.cluster else ""
    return f"slurm-health: {where}{count}{cut(batch.nodes, 120)}: {_WORDS[batch.events[0].kind]}"


def text(batch: Batch, settings: Notify) -> str:
    """Return it for a person: what happened, then a line for each node, and the evidence."""
    return "\n".join([subject(batch, settings), *_lines(batch)]) + "\n"


def _lines(batch: Batch) -> list[str]:
    lines = []
    for event in batch.events[:_MOST_SHOWN]:
        job = f" (job {event.job})" if event.job else ""
        lines.append(f"{_time(event.time_s)} {event.node}: {_said(event)}{job}")
        lines += [f"    {cut(one_line(each), _LENGTH)}" for each in event.evidence[:_MOST_EVIDENCE]]
    more = len(batch.events) - _MOST_SHOWN
    return [*lines, *([f"and {more} more"] if more > 0 else [])]


def _said(event: NodeEvent) -> str:
    return cut(one_line(event.text), _LENGTH)


def _time(time_s: float) -> str:
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, OSError, ValueError):  # by a clock that is wrong
        return f"t={time_s:g}"


def _encoded(document: object) -> bytes:
    return json.dumps(document).encode()


def _as_json(batch: Batch, _: Target, settings: Notify) -> bytes:
    times = [each.time_s for each in batch.events]
    events: Sequence[dict[str, Any]] = msgspec.to_builtins(batch.events)
    return _encoded(
        {
            "version": 1,
            "source": "slurm-health",
            "cluster": settings.cluster,
            "kind": batch.events[0].kind.value,
            "nodes": batch.nodes,
            "count": len({each.node for each in batch.events}),
            "first": _time(min(times)),
            "last": _time(max(times)),
            "text": subject(batch, settings),
            "events": events,
        }
    )


def _as_text(batch: Batch, _: Target, settings: Notify) -> bytes:
    return text(batch, settings).encode(errors="replace")


def _as_mail(batch: Batch, target: Target, settings: Notify) -> bytes:
    mail = EmailMessage()
    mail["To"] = ", ".join(target.mail_to)
    if target.mail_from:
        mail["From"] = target.mail_from
    mail["Subject"] = one_line(subject(batch, settings))
    mail["Auto-Submitted"] = "auto-generated"  # RFC 3834: no answer by a machine
    mail.set_content(text(batch, settings))
    return mail.as_bytes()


def _as_slack(batch: Batch, _: Target, settings: Notify) -> bytes:
    """Return an incoming webhook's body: `text`, with Slack's three characters escaped.

    What may hold words of users stands in a block of code: there `@all` of Mattermost, an address
    and markdown are text and nothing else. What would end the block is another character.
    """
    lines = "\n".join(_lines(batch)).replace("`", "'")
    said = f"{subject(batch, settings)}\n```\n{lines}\n```"
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        said = said.replace(character, entity)
    return _encoded({"text": said})


def _as_teams(batch: Batch, _: Target, settings: Notify) -> bytes:
    """Return a message with an adaptive card; its runs of text know no markdown, so no links."""
    head = {"type": "TextRun", "text": subject(batch, settings), "weight": "Bolder"}
    runs = [[head], *([{"type": "TextRun", "text": line}] for line in _lines(batch))]
    card = {
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [{"type": "RichTextBlock", "inlines": inlines} for inlines in runs],
    }
    content = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return _encoded({"type": "message", "attachments": [content]})


def _as_alerts(batch: Batch, _: Target, settings: Notify) -> bytes:
    """Return Alertmanager's alerts (API v2): one for each node; a release resolves the drain's."""
    alerts = []
    for event in batch.events:
        kind = event.kind
        of_pool = kind in (EventKind.DRAINED, EventKind.RELAPSE, EventKind.RELEASED)
        # Alertmanager knows an alert by its labels: what differs from event to event is no label.
        name = "Drained" if of_pool else kind.value.title().replace("_", "")
        released = kind is EventKind.RELEASED
        labels = {"alertname": f"SlurmHealth{name}", "node": event.node}
        alerts.append(
            {
                "labels": labels | ({"cluster": settings.cluster} if settings.cluster else {}),
                "annotations": {
                    "summary": f"{event.node}: {_WORDS[kind]}",
                    "description": "\n".join([_said(event), *event.evidence[:_MOST_EVIDENCE]]),
                    "checks": ",".join(event.checks),
                },
                **({} if released else {"startsAt": _time(event.time_s)}),
                "endsAt": _time(event.time_s if released else event.time_s + _ALERT_S),
            }
        )
    return _encoded(alerts)


def _as_otlp(batch: Batch, _: Target, settings: Notify) -> bytes:
    """Return OTLP's request for logs, as JSON (opentelemetry.io, OTLP/HTTP): a record an event."""
    resources = []
    for event in batch.events:
        about = {"service.name": "slurm-health", "host.name": event.node}
        said = {
            "slurm.cluster.name": settings.cluster,
            "slurm.job.id": str(event.job or ""),
            "slurm_health.checks": ",".join(event.checks),
            "slurm_health.evidence": "\n".join(event.evidence[:_MOST_EVIDENCE]),
        }
        number, severity = _SEVERITIES.get(event.kind, _WARNING)
        # Whole nanoseconds as text: JSON's numbers are not long enough.
        time_ns = str(int(min(max(event.time_s, 0.0), _LAST_S)) * 1_000_000_000)
        record = {
            "timeUnixNano": time_ns,
            "observedTimeUnixNano": time_ns,
            "severityNumber": number,
            "severityText": severity,
            "eventName": f"slurm_health.node.{event.kind.value}",
            "body": {"stringValue": f"{event.node} {_WORDS[event.kind]}: {_said(event)}"},
            "attributes": _attributes(said),
        }
        scope = {"scope": {"name": "slurm_health.notify"}, "logRecords": [record]}
        resources.append({"resource": {"attributes": _attributes(about)}, "scopeLogs": [scope]})
    return _encoded({"resourceLogs": resources})


def _attributes(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in values.items() if value]


_JSON = "application/json"
_FORMATS: dict[Format, tuple[Callable[[Batch, Target, Notify], bytes], str]] = {
    Format.JSON: (_as_json, _JSON),
    Format.TEXT: (_as_text, "text/plain; charset=utf-8"),
    Format.MAIL: (_as_mail, "message/rfc822"),
    Format.SLACK: (_as_slack, _JSON),
    Format.TEAMS: (_as_teams, _JSON),
    Format.ALERTMANAGER: (_as_alerts, _JSON),
    Format.OTLP: (_as_otlp, _JSON),
}
