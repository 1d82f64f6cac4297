# SPDX-License-Identifier: Apache-2.0
"""Tells those whom the site's file names what has happened to nodes.

No hook waits for it: one process for all nodes at a time takes what hooks have left in
`event_queue` to the shared directory, where the events of all nodes meet, so that a rack that fails
is one message. What is told, and when, is decided in `node.rules`. Whoever delivers holds a lease
that runs out; what is there is sent at least once, also where a node dies in between.

A message goes to a command, on its standard input, or to a webhook. Neither a secret nor a URL's
path, which may be one, comes into an error, a log or a command line.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException, InvalidURL
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from slurm_health.node import event_queue
from slurm_health.node.draining.shared_state import (
    ROOT_ONLY,
    SharedStateUnusable,
    in_child,
    shared_directory,
    under_lock,
)
from slurm_health.node.rules import notices
from slurm_health.node.rules.message_bodies import body_of
from slurm_health.node.rules.notices import Batch, Due, NodeEvent, Post, TargetFailure
from slurm_health.node.rules.settings import Notify, Target
from slurm_health.node.site_settings import Site
from slurm_health.records.decoding import from_json
from slurm_health.records.text import cut, one_line
from slurm_health.system import SYSTEM_PATH, processes
from slurm_health.system.killable import Answered, Broke, Hung, Work, run_all
from slurm_health.system.private_files import publish

_POST = "notify.json"
# Beyond the wait for events to fold: for messages, locks and what comes meanwhile.
_PATIENCE_S = 60.0
_LEASE_MORE_S = 30.0
# Of a child's answer; what has no room in it is sent next.
_MOST_BYTES = 900_000

SIGNATURE = "X-Slurm-Health-Signature"
_ANSWER_BYTES = 4096
_SHOWN = 200
# What a target's child may take beside the message's own limit: it starts, and reads files.
_MORE_S = 2.0

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
                _send_due(site, due.batches, say, now)
                continue
        except SharedStateUnusable as err:
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
        before = _read_post(shared)
        fresh = [each for each in own.values() if each is not None]
        post = notices.accept(before, fresh, site.notify, now_s)
        found = notices.due(post, site.notify, now_s)
        if found.batches:
            until_s = now_s + longest_s * len(found.batches) + _LEASE_MORE_S
            post = notices.lease(post, node, until_s)
        if post != before:
            publish(shared / _POST, msgspec.json.encode(post), mode=ROOT_ONLY)
        return _encoded(found)

    due = from_json(under_lock(site, work), Due)
    event_queue.remove(list(own))
    return due


def _encoded(due: Due) -> bytes:
    while len(data := msgspec.json.encode(due)) > _MOST_BYTES and len(due.batches) > 1:
        due = msgspec.structs.replace(due, batches=due.batches[: len(due.batches) // 2])
    return data


def _send_due(site: Site, batches: tuple[Batch, ...], say: Say, now: Callable[[], float]) -> None:
    outcomes = send_all(batches, site.notify)
    for batch, answer, why_not in outcomes:
        what = f"{batch.events[0].kind.value} of {batch.nodes}"
        if why_not:
            say("warning", f"{batch.target} was not told: {what}: {why_not}")
        else:
            say("info", f"{batch.target} was told: {what}: {answer}")

    def work(shared: Path) -> bytes:
        told = [(batch, why_not) for batch, _, why_not in outcomes]
        post, lost = notices.settle(_read_post(shared), told, site.notify, now())
        publish(shared / _POST, msgspec.json.encode(post), mode=ROOT_ONLY)
        return msgspec.json.encode(lost)

    for event in from_json(under_lock(site, work), tuple[NodeEvent, ...]):
        say("error", f"given up, could not be delivered: {event.kind.value} of {event.node}")


def read_post(site: Site) -> Post:
    """Return what waits, and what was told.

    Raises:
        SharedStateUnusable: it cannot be read.
    """
    return _read_post(shared_directory(site.breaker))


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """How it stands with the targets: how many events wait for each, and which take none, why."""

    waiting: dict[str, int]
    failures: dict[str, TargetFailure]


def standing(site: Site) -> Backlog:
    """Return how it stands, asked in a child.

    Raises:
        SharedStateUnusable: that cannot be read.
    """

    def look() -> bytes:
        post = read_post(site)
        found = Backlog(waiting=notices.summary(post), failures=post.failures)
        return msgspec.json.encode(found)

    return from_json(in_child(site, look), Backlog)


def _read_post(shared: Path) -> Post:
    path = shared / _POST
    try:
        return from_json(path.read_bytes(), Post)
    except FileNotFoundError:
        return Post()
    except msgspec.DecodeError:
        return Post()  # what was to be told is lost; what is told next must not be as well
    except OSError as err:
        raise SharedStateUnusable(f"{path} cannot be read: {err.strerror}") from err


# --- one message to one target ------------------------------------------------------------------


class Undelivered(Exception):
    """A target did not take a message; the text says why."""


def send_all(batches: Sequence[Batch], settings: Notify) -> list[tuple[Batch, str, str]]:
    """Send messages, to all targets at once; return of each what came back, and why it failed.

    Each target has a child of its own with the target's time limit, and gets its messages one
    after another. Why is empty where the message was taken.
    """
    by_target: dict[str, list[Batch]] = {}
    for each in batches:
        by_target.setdefault(each.target, []).append(each)
    outcomes: list[tuple[Batch, str, str]] = []
    while by_target:
        work = {
            name: (_work(waiting[0], settings), settings.targets[name].limit_s + _MORE_S)
            for name, waiting in by_target.items()
        }
        for name, result in run_all(work).items():
            batch = by_target[name].pop(0)
            match result:
                case Answered(data=data):
                    outcomes.append((batch, data.decode(errors="replace"), ""))
                case Broke(reason=reason):
                    outcomes.append((batch, "", one_line(reason)))
                case Hung(limit_s=limit_s):
                    outcomes.append((batch, "", f"no answer within {limit_s:g} s"))
            if outcomes[-1][2]:  # the others of a target that takes none wait as well
                by_target[name].clear()
        by_target = {name: left for name, left in by_target.items() if left}
    return outcomes


def _work(batch: Batch, settings: Notify) -> Work:
    return lambda: send(batch, settings.targets[batch.target], settings).encode()


def send(batch: Batch, target: Target, settings: Notify) -> str:
    """Send one message; return what came back.

    Raises:
        Undelivered: it was not taken.
    """
    body, kind = body_of(batch, target, settings)
    if target.command:
        return _to_command(target, body)
    url = target.url or private(target.url_file).decode(errors="replace")
    if not url.startswith(("http://", "https://")):
        raise Undelivered(f"{target.url_file} holds no URL: it must begin with https://")
    return _to_webhook(target, url, body, {"Content-Type": kind, **_proof(target, body)})


def _to_command(target: Target, body: bytes) -> str:
    environ = {"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8", "HOME": "/root"}
    try:
        ended = processes.run(
            target.command,
            environ=environ,
            deadline_s=target.limit_s,
            stdin=body,
            last_bytes=_ANSWER_BYTES,
        )
    except TimeoutError:
        raise Undelivered(f"{target.command[0]} did not end within {target.limit_s:g} s") from None
    except OSError as err:
        raise Undelivered(f"{target.command[0]} cannot be run: {err.strerror}") from err
    said = _shown(ended.stderr or ended.stdout)
    if ended.returncode:
        code = ended.returncode
        raise Undelivered(f"{target.command[0]} ended with code {code}{said}")
    return f"{target.command[0]} took it{said}"


def _proof(target: Target, body: bytes) -> Mapping[str, str]:
    """Return the header that shows who sends."""
    if not target.secret_file:
        return {}
    secret = private(target.secret_file)
    if target.sign:
        return {SIGNATURE: f"sha256={hmac.new(secret, body, hashlib.sha256).hexdigest()}"}
    return {"Authorization": f"Bearer {secret.decode('latin-1')}"}


def private(path: str) -> bytes:
    """Return what is in a file that only its owner can read: root, or whoever runs this.

    Raises:
        Undelivered: it is not such a file.
    """
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(_ANSWER_BYTES).strip()
    except OSError as err:
        raise Undelivered(f"{path} cannot be read: {err.strerror}") from err
    if found.st_uid not in {0, os.getuid()} or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise Undelivered(f"{path} must be root's, and closed to others: chown root, chmod 600")
    if not data or any(byte < 0x21 or byte == 0x7F for byte in data):
        raise Undelivered(f"{path} must hold one word, in one line")
    return data


def _to_webhook(target: Target, url: str, body: bytes, headers: Mapping[str, str]) -> str:
    try:
        place = urlsplit(url)
    except ValueError:
        raise Undelivered("its URL cannot be taken apart into host and path") from None
    where = f"{place.scheme}://{place.hostname}"
    if "@" in place.netloc:
        raise Undelivered(f"{where}: a URL takes no name and password: use secret_file instead")
    proxies = {place.scheme: target.proxy} if target.proxy else {}
    try:
        trust = ssl.create_default_context(cafile=target.ca_file or None)
        opener = urllib.request.OpenerDirector()
        # No handler of redirects: another address gets neither the message nor the secret. Nor
        # does what the environment names as a proxy.
        for handler in (
            urllib.request.ProxyHandler(proxies),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(context=trust),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
        ):
            opener.add_handler(handler)
        request = urllib.request.Request(  # noqa: S310 - http and https only, by `send`
            url, data=body, method="POST", headers={"User-Agent": "slurm-health", **headers}
        )
        with opener.open(request, timeout=target.limit_s) as answer:
            return f"{where} answered {answer.status}{_shown(answer.read(_ANSWER_BYTES))}"
    except urllib.error.HTTPError as err:
        with err:
            said = _shown(err.read(_ANSWER_BYTES))
        raise Undelivered(f"{where} answered {err.code}{said}") from None
    except urllib.error.URLError as err:
        raise Undelivered(f"{where} cannot be reached: {err.reason}") from None
    except (OSError, HTTPException, ValueError) as err:
        # What these say may hold the URL.
        told = type(err).__name__ if isinstance(err, (ValueError, InvalidURL)) else str(err)
        raise Undelivered(f"{where} did not answer: {told}") from None


def _shown(said: bytes) -> str:
    line = cut(one_line(said[:_ANSWER_BYTES].decode(errors="replace")), _SHOWN)
    return f": {line}" if line else ""
