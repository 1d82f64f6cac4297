# SPDX-License-Identifier: Apache-2.0
"""`[notify]`: sends events of nodes to the site's command, or to URLs by apprise.

Hooks start this module as a process of its own and do not wait for it: it reads one event, and the
site's settings, on its standard input. It ends within the time limit whatever the command does, and
logs a failure. URLs may hold passwords, so none is on a command line or in a log.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

import msgspec

from slurm_health.node.rules.settings import Notify
from slurm_health.node.site import Site
from slurm_health.records.decoding import from_json
from slurm_health.records.text import cut, one_line
from slurm_health.system import processes
from slurm_health.system.killable import Answered, Broke, Hung, run_one
from slurm_health.system.telemetry import send_line

_TEXT, _EVIDENCE, _LINES = 600, 100, 30


class EventKind(Enum):
    """The events that a site is notified of."""

    DRAINED = "drained"
    RELAPSE = "relapse"  # drained again within a day
    RELEASED = "released"
    BREAKER = "breaker"
    STEP_FAILED = "step_failed"  # of a repair
    ADMINISTRATOR = "administrator"  # no step is left: the node needs one
    UNCHECKED = "unchecked"  # the config file cannot be used, and the last good one is
    SLURM_DRAINED = "slurm_drained"  # Slurm drained or downed it by itself
    CULPRIT = "culprit"  # a job, an array or a user whose endings drain nodes
    TEST = "test"


_WORDS = {
    EventKind.DRAINED: "drained",
    EventKind.RELAPSE: "drained again within a day",
    EventKind.RELEASED: "returned to service",
    EventKind.BREAKER: "breaker tripped, no more nodes are drained",
    EventKind.STEP_FAILED: "repair step failed",
    EventKind.ADMINISTRATOR: "needs an administrator",
    EventKind.UNCHECKED: "the config file cannot be used",
    EventKind.SLURM_DRAINED: "drained by Slurm",
    EventKind.CULPRIT: "jobs leave nodes unusable",
    EventKind.TEST: "test message, nothing has happened",
}


class NodeEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event of a node. `evidence`: the facts that an administrator needs; `user`: a job's."""

    kind: EventKind
    node: str
    time_s: float
    text: str
    checks: tuple[str, ...] = ()
    job: int = 0
    user: str = ""
    evidence: tuple[str, ...] = ()


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    settings: Notify
    event: NodeEvent


def send(site: Site, event: NodeEvent) -> None:
    """Start a process that sends an event, if the site wants any, without waiting for it."""
    if not (site.notify.command or site.notify.urls):
        return
    short = msgspec.structs.replace(
        event,
        text=cut(event.text, _TEXT),
        evidence=tuple(cut(one_line(line), _EVIDENCE) for line in event.evidence[:_LINES]),
    )
    order = msgspec.json.encode(_Order(settings=site.notify, event=short))
    with contextlib.suppress(OSError):
        processes.start_detached(processes.own_module("slurm_health.node.notify"), {}, stdin=order)


def send_and_wait(settings: Notify, event: NodeEvent) -> list[tuple[str, str]]:
    """Send an event; return the command and the URLs, with the reason of a failure or empty."""
    results = []
    if settings.command:
        problem = ""
        try:
            stdin = document(event, settings.cluster)
            processes.run_for_site(settings.command, settings.limit_s, stdin=stdin)
        except processes.CommandFailed as err:
            problem = str(err)
        results.append((settings.command[0], problem))
    if settings.urls:
        results.append((f"{len(settings.urls)} in urls", _send_to_urls(settings, event)))
    return results


def document(event: NodeEvent, cluster: str) -> bytes:
    """Return the JSON that a command reads on its standard input."""
    try:
        time = datetime.fromtimestamp(event.time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, OSError, ValueError):  # by a clock that is wrong
        time = f"t={event.time_s:g}"
    fields = {
        "version": 1,
        "source": "slurm-health",
        "cluster": cluster,
        "time": time,
        "summary": _summary(event, cluster),
        **msgspec.to_builtins(event),
    }
    return msgspec.json.encode(fields) + b"\n"


def _send_to_urls(settings: Notify, event: NodeEvent) -> str:
    """Send by apprise; return why it did not arrive, empty if it did.

    A child does it: apprise's services have time limits of their own, or none.
    """

    def work() -> bytes:
        try:
            import apprise  # an extra
        except ImportError:
            problem = f"urls needs apprise, which {sys.executable} does not have"
            return f"{problem}: pip install 'slurm-health[notify]'".encode()
        urls: list[str] = []
        for entry in settings.urls:
            if not entry.startswith("/"):
                urls.append(entry)
                continue
            if problem := file_problem(entry):
                return problem.encode()
            lines = Path(entry).read_text(encoding="utf-8", errors="replace").splitlines()
            urls += [line.strip() for line in lines if line.strip() and line.lstrip()[0] != "#"]
        sender = apprise.Apprise()
        for number, url in enumerate(urls, 1):
            if not sender.add(url):
                return f"apprise does not know URL {number} of urls".encode()
        sent = sender.notify(
            title=_summary(event, settings.cluster),
            body="\n".join([event.text, *event.evidence]),
            body_format=apprise.NotifyFormat.TEXT,
        )
        why = "not every URL of urls accepted it: slurm-health doctor --test-notify, as root"
        return b"" if sent else why.encode()

    match run_one(work, settings.limit_s):
        case Answered(data=data):
            return data.decode()
        case Broke(reason=reason):
            return one_line(reason)
        case Hung(limit_s=limit_s):
            return f"no answer from every URL of urls within {limit_s:g} s"


def file_problem(path: str) -> str:
    """Return why a file of URLs, one a line, is not used; empty if only its owner can read it."""
    try:
        status = Path(path).stat()
    except OSError as err:
        return f"{path} cannot be read: {err.strerror}"
    if status.st_uid not in {0, os.getuid()} or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"{path} must be root's, and closed to others: chown root, chmod 600"
    return ""


def _summary(event: NodeEvent, cluster: str) -> str:
    where = f"{cluster}: " if cluster else ""
    return one_line(f"slurm-health: {where}{event.node}: {_WORDS[event.kind]}")


def main() -> int:
    """Send the event on standard input, and log what did not arrive."""
    order = from_json(sys.stdin.buffer.read(), _Order)
    failures = [problem for _, problem in send_and_wait(order.settings, order.event) if problem]
    head = f"slurm-health: notify: node={order.event.node} {order.event.kind.value} not sent"
    for problem in failures:
        send_line("warning", f"{head}: {problem}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
