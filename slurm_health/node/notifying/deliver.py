# SPDX-License-Identifier: Apache-2.0
"""Deliver what hooks have left to be told: one process for all nodes at a time.

The events of all nodes meet in the shared directory, so that a rack that fails is one message.
Whoever delivers holds a lease that runs out; what is there is sent at least once, also where a
node dies in between. No hook waits for any of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from slurm_health.node import event_queue
from slurm_health.node.draining.shared_state import (
    ROOT_ONLY,
    Unusable,
    in_child,
    shared_directory,
    under_lock,
)
from slurm_health.node.notifying.send import send_all
from slurm_health.node.rules import notices
from slurm_health.node.rules.notices import Batch, Due, Event, Failure, Post
from slurm_health.node.site_settings import Site
from slurm_health.records.decoding import from_json
from slurm_health.system.private_files import publish

_FILE = "notify.json"
# Beyond the wait for events to fold: for messages, locks and what comes meanwhile.
_PATIENCE_S = 60.0
_LEASE_MORE_S = 30.0
# Of a child's answer; what has no room in it is sent next.
_MOST_BYTES = 900_000

# Writes a line to the log: its level (error, warning or info), and the text.
Say = Callable[[str, str], None]


def deliver(
    site: Site,
    node: str,
    say: Say,
    *,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    patience_s: float | None = None,
) -> None:
    """Send what is due, and what becomes due within `patience_s`.

    What cannot be sent stays, and the health check of any node takes it up again.
    """
    patience_s = site.notify.fold_s + _PATIENCE_S if patience_s is None else patience_s
    give_up_s = now() + patience_s
    while True:
        try:
            due = _claim(site, node, now)
            if due.batches:
                _send(site, due.batches, say, now)
                continue
        except Unusable as err:
            say("warning", f"events wait on this node: {err}")
            return
        if due.wait_s is None or now() + due.wait_s > give_up_s:
            return
        sleep(due.wait_s)


def _claim(site: Site, node: str, now: Callable[[], float]) -> Due:
    """Take this node's events to the others, and what is due of all."""
    own = event_queue.read(site.state)
    longest_s = max((each.limit_s for each in site.notify.targets.values()), default=0.0)

    def work(shared: Path) -> bytes:
        now_s = now()
        before = _read(shared)
        fresh = [each for each in own.values() if each is not None]
        post = notices.accept(before, fresh, site.notify, now_s)
        found = notices.due(post, site.notify, now_s)
        if found.batches:
            until_s = now_s + longest_s * len(found.batches) + _LEASE_MORE_S
            post = notices.lease(post, node, until_s)
        if post != before:
            publish(shared / _FILE, msgspec.json.encode(post), mode=ROOT_ONLY)
        return _encoded(found)

    due = from_json(under_lock(site, work), Due)
    event_queue.remove(list(own))
    return due


def _encoded(due: Due) -> bytes:
    while len(data := msgspec.json.encode(due)) > _MOST_BYTES and len(due.batches) > 1:
        due = msgspec.structs.replace(due, batches=due.batches[: len(due.batches) // 2])
    return data


def _send(site: Site, batches: tuple[Batch, ...], say: Say, now: Callable[[], float]) -> None:
    outcomes = send_all(batches, site.notify)
    for batch, answer, why_not in outcomes:
        what = f"{batch.events[0].kind.value} of {batch.nodes}"
        if why_not:
            say("warning", f"{batch.target} was not told: {what}: {why_not}")
        else:
            say("info", f"{batch.target} was told: {what}: {answer}")

    def work(shared: Path) -> bytes:
        told = [(batch, why_not) for batch, _, why_not in outcomes]
        post, lost = notices.settle(_read(shared), told, site.notify, now())
        publish(shared / _FILE, msgspec.json.encode(post), mode=ROOT_ONLY)
        return msgspec.json.encode(lost)

    for event in from_json(under_lock(site, work), tuple[Event, ...]):
        say("error", f"given up, could not be delivered: {event.kind.value} of {event.node}")


def read_post(site: Site) -> Post:
    """Return what waits, and what was told.

    Raises:
        Unusable: it cannot be read.
    """
    return _read(shared_directory(site.breaker))


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """How it stands with the targets: how many events wait for each, and which take none, why."""

    waiting: dict[str, int]
    failures: dict[str, Failure]


def standing(site: Site) -> Backlog:
    """Return how it stands, asked in a child.

    Raises:
        Unusable: that cannot be read.
    """

    def look() -> bytes:
        post = read_post(site)
        found = Backlog(waiting=notices.summary(post), failures=post.failures)
        return msgspec.json.encode(found)

    return from_json(in_child(site, look), Backlog)


def _read(shared: Path) -> Post:
    path = shared / _FILE
    try:
        return from_json(path.read_bytes(), Post)
    except FileNotFoundError:
        return Post()
    except msgspec.DecodeError:
        return Post()  # what was to be told is lost; what is told next must not be as well
    except OSError as err:
        raise Unusable(f"{path} cannot be read: {err.strerror}") from err
