# SPDX-License-Identifier: Apache-2.0
"""Runs commands inside a lab: where, as whom, with which environment, and for how long."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .daemons import CLEAN_PATH
from .errors import DeadlinePassed, LabError

_ENTER = Path(__file__).with_name("enter.py")


@dataclass(frozen=True, kw_only=True)
class Account:
    """A user, as the lab's passwd file has it."""

    name: str
    uid: int
    gid: int
    home: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a command inside the lab ended."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    elapsed_s: float


def find_account(passwd: Path, name: str) -> Account:
    """Look a user up in the lab's passwd file.

    Raises:
        LabError: no such user.
    """
    for line in passwd.read_text().splitlines():
        fields = line.split(":")
        if fields[0] == name:
            return Account(name=name, uid=int(fields[2]), gid=int(fields[3]), home=fields[5])
    raise LabError(f"no user {name!r} in the lab")


def enter_argv(
    argv: Sequence[str],
    *,
    pid: int,
    account: Account,
    cgroup_procs: Path | None,
    cwd: str | None,
    env: Mapping[str, str],
) -> list[str]:
    """The command line that runs `argv` in the namespaces of a process.

    The environment holds PATH, HOME, USER, LOGNAME and LANG, and what `env` adds.
    """
    where = {
        "pid": pid,
        "uid": account.uid,
        "gid": account.gid,
        "groups": [account.gid],
        "cwd": cwd or account.home,
        "cgroup": None if cgroup_procs is None else str(cgroup_procs),
        "env": {
            "PATH": CLEAN_PATH,
            "HOME": account.home,
            "USER": account.name,
            "LOGNAME": account.name,
            "LANG": "C.UTF-8",
            **env,
        },
    }
    return [sys.executable, "-I", "-S", str(_ENTER), json.dumps(where), *argv]


def ask_argv(argv: Sequence[str], *, pid: int) -> list[str]:
    """The command line that runs `argv` as root in the namespaces of a process, and no more.

    No interpreter is started for it, but signals do not reach the command.
    """
    environ = [f"PATH={CLEAN_PATH}", "HOME=/root", "USER=root", "LOGNAME=root", "LANG=C.UTF-8"]
    namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
    return ["nsenter", f"--target={pid}", *namespaces, "--", "env", "-i", *environ, *argv]


def start(argv: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a command in a session of its own, so that a deadline can end all of it."""
    return subprocess.Popen(argv, start_new_session=True, **options)


def run(outside: Sequence[str], argv: Sequence[str], stdin: bytes, deadline_s: float) -> Result:
    """Run `outside`, which runs `argv` inside; at its deadline kill its whole group.

    Raises:
        DeadlinePassed: it ran too long; what it had printed is in the message.
    """
    began_s = time.monotonic()
    pipe = subprocess.PIPE
    process = start(outside, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        stdout, stderr = process.communicate(stdin, timeout=deadline_s)
    except BaseException as err:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        if not isinstance(err, subprocess.TimeoutExpired):
            raise
        seen = f"stdout {stdout.decode(errors='replace')!r}, "
        seen += f"stderr {stderr.decode(errors='replace')!r}"
        raise DeadlinePassed(" ".join(argv), deadline_s, seen) from None
    return Result(
        argv=tuple(argv),
        returncode=process.returncode,
        stdout=stdout.decode(errors="replace"),
        stderr=stderr.decode(errors="replace"),
        elapsed_s=time.monotonic() - began_s,
    )
