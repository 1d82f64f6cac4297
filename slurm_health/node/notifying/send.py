# SPDX-License-Identifier: Apache-2.0
"""One message to one target: a command with the body on its standard input, or a webhook.

Neither a secret nor a URL's path, which may be one, comes into an error, a log or a command line.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
import stat
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException, InvalidURL
from pathlib import Path
from urllib.parse import urlsplit

from slurm_health.node.rules.message_bodies import body_of
from slurm_health.node.rules.notices import Batch
from slurm_health.node.rules.settings import Notify, Target
from slurm_health.records.text import cut, one_line
from slurm_health.system import processes
from slurm_health.system.killable import Answered, Broke, Hung, Work, run_all

SIGNATURE = "X-Slurm-Health-Signature"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ANSWER_BYTES = 4096
_SHOWN = 200
# What a target's child may take beside the message's own limit: it starts, and reads files.
_MORE_S = 2.0


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
        return _run(target, body)
    url = target.url or private(target.url_file).decode(errors="replace")
    if not url.startswith(("http://", "https://")):
        raise Undelivered(f"{target.url_file} holds no URL: it must begin with https://")
    return _post(target, url, body, {"Content-Type": kind, **_proof(target, body)})


def _run(target: Target, body: bytes) -> str:
    environ = {"PATH": PATH, "LC_ALL": "C.UTF-8", "HOME": "/root"}
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


def _post(target: Target, url: str, body: bytes, headers: Mapping[str, str]) -> str:
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
