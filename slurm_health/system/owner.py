# SPDX-License-Identifier: Apache-2.0
"""Messages to a job's owner: by Slurm's own mail, or by the owner's own command.

`python -m slurm_health.system.owner` reads one message on its standard input and delivers it, in a
process of its own that nothing waits for, as the owner. Mail goes to jobs that asked Slurm for mail
(`sbatch --mail-type`); a site may send it for all jobs. A command stands in the owner's own file:

    # ~/.config/slurm-health.toml
    notify = "curl -s -d @- https://chat.example/hook"

It reads the message as JSON on its standard input. One message goes out per job and kind, and ten
per owner and hour.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from slurm_health.records.allocation import name_in_slurm
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ConfigError, SlurmError
from slurm_health.records.text import cut, one_line
from slurm_health.system import private_files, processes
from slurm_health.system.site_file import SITE_FILE, read
from slurm_health.system.slurm.client import Client
from slurm_health.system.telemetry import send_line

CONFIG = ".config/slurm-health.toml"
MOST_PER_HOUR = 10
_STATE = ".local/state/slurm-health"
_HOUR_S, _KEPT_S = 3600.0, 30 * 86_400.0
_LIMIT_S, _LOCK_S = 20.0, 10.0
_SUBJECT, _BODY = 120, 4000
_NO_MAIL = frozenset({"", "NONE", "(null)"})


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a job for its owner: `kind` is hang, failed, moved, stopped or nodes.

    `array` is the id of its array, whose tasks share one message of a kind.
    """

    kind: str
    job: str
    time_s: float
    subject: str
    text: str
    array: str = ""
    cluster: str = ""
    job_name: str = ""


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    """A message, and the site's file."""

    message: Message
    site: str


class _Sent(msgspec.Struct, kw_only=True):
    """When which messages went out to this owner, by cluster, job and kind."""

    times_s: dict[str, float] = {}


def tell(
    kind: str,
    subject: str,
    text: str,
    environ: Mapping[str, str],
    *,
    wait_s: float = 0.0,
    user: str | None = None,
) -> None:
    """Deliver a message about the job of an environment, in a process of its own.

    With `wait_s`, wait so long for the delivery: when the job ends, Slurm kills that process too.
    Root delivers it as `user`, the job's owner.
    """
    job = name_in_slurm(environ)
    if not job:
        return
    message = Message(
        kind=kind,
        job=job,
        array=environ.get("SLURM_ARRAY_JOB_ID", ""),
        time_s=round(time.time(), 3),
        subject=cut(one_line(f"slurm-health: job {job}: {subject}"), _SUBJECT),
        text=text[:_BODY],
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
        job_name=environ.get("SLURM_JOB_NAME", ""),
    )
    site = environ.get("SLURM_HEALTH_CONFIG") or SITE_FILE
    order = msgspec.json.encode(_Order(message=message, site=site))
    argv = processes.own_module("slurm_health.system.owner")
    with contextlib.suppress(OSError, KeyError):
        if not wait_s:
            processes.start_detached(argv, environ, stdin=order)
            return
        with contextlib.suppress(TimeoutError):
            processes.run(argv, environ=environ, deadline_s=wait_s, stdin=order, user=user)


def deliver(message: Message, home: Path, client: Client, site: Path) -> str:
    """Deliver a message unless it went out before; return why it did not arrive, or empty.

    Args:
        message: about a job of this user.
        home: of this user, with the command and the record of messages.
        client: Slurm, which knows who wants mail.
        site: the site's file.
    """
    command, problem = own_command_of(home)
    if command:
        if why_not := _claim(message, home):
            return why_not
        document = msgspec.json.encode(message) + b"\n"
        problem = _run(["/bin/sh", "-c", command], document, home)
    # Only now: a slurmctld that restarts may not answer before the job's end kills this process.
    mail_to, program = _mail(message, client, site)
    if mail_to and not command and (why_not := _claim(message, home)):
        return why_not
    if mail_to:
        body = f"{message.text}\n\nslurm-health report {message.job}\n".encode()
        problem = _run([program, "-s", message.subject, mail_to], body, home) or problem
    return problem


def own_command_of(home: Path) -> tuple[str, str]:
    """Return the command of a user's own file, and why it is not used; both empty without one."""
    path = home / CONFIG
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(1 << 16)
    except FileNotFoundError:
        return "", ""
    except OSError as err:
        return "", f"{path} cannot be read: {err.strerror}"
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "", f"{path} is not used: only you may be able to write it (chmod go-w)"
    import tomllib

    try:
        command = tomllib.loads(data.decode()).get("notify", "")
    except ValueError as err:
        return "", f"{path} is not TOML: {err}"
    if not isinstance(command, str):
        return "", f"{path}: notify is a command, found {command!r}"
    return command, ""


def _mail(message: Message, client: Client, site: Path) -> tuple[str, str]:
    """Return the address and the program of Slurm's mail; empty if the job wants none."""
    owners = False
    with contextlib.suppress(ConfigError):
        owners = read(site, trusted=False).table("notify").get("owners") is True
    try:
        job = client.job(message.job)
        if job.value("MailType") in _NO_MAIL and not owners:
            return "", ""
        return job.value("MailUser") or pwd.getpwuid(os.getuid()).pw_name, client.mail_program()
    except (SlurmError, KeyError):
        return "", ""


def _claim(message: Message, home: Path) -> str:
    """Record that a message goes out; return why it does not: it did before, or too many do."""
    directory = home / _STATE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(directory / "messages.lock", timeout=_LOCK_S):
            path, sent = directory / "messages.json", _Sent()
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                sent = from_json(path.read_bytes(), _Sent)
            key = f"{message.cluster}/{message.array or message.job}/{message.kind}"
            now_s = message.time_s
            recent = [at_s for at_s in sent.times_s.values() if now_s - at_s < _HOUR_S]
            if key in sent.times_s:
                return "it went out before"
            if len(recent) >= MOST_PER_HOUR:
                return f"{MOST_PER_HOUR} messages went out within an hour"
            times_s = {k: at_s for k, at_s in sent.times_s.items() if now_s - at_s < _KEPT_S}
            private_files.publish(path, msgspec.json.encode(_Sent(times_s={**times_s, key: now_s})))
    except (OSError, Timeout) as err:
        return f"{directory} cannot be used: {err}"
    return ""


def _run(argv: list[str], stdin: bytes, home: Path) -> str:
    environ = {**os.environ, "HOME": str(home)}
    try:
        ended = processes.run(
            argv, environ=environ, deadline_s=_LIMIT_S, stdin=stdin, last_bytes=200
        )
    except TimeoutError:
        return f"{argv[0]} did not end within {_LIMIT_S:g} s"
    except OSError as err:
        return f"{argv[0]} cannot be run: {err.strerror}"
    words = one_line(ended.stderr.decode(errors="replace"))
    return f"{argv[0]} exited with code {ended.returncode}: {words}" if ended.returncode else ""


def main() -> int:
    """Deliver the message on standard input; log why it did not arrive."""
    order = from_json(sys.stdin.buffer.read(), _Order)
    message, home = order.message, Path(pwd.getpwuid(os.getuid()).pw_dir)
    client = Client(os.environ, patience_s=_LIMIT_S)  # slurmctld may be restarting
    problem = deliver(message, home, client, Path(order.site))
    if problem:
        text = f"slurm-health: job {message.job}: its owner was not sent {message.kind}: {problem}"
        send_line("info", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
