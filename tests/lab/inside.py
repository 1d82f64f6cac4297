# SPDX-License-Identifier: Apache-2.0
"""A running lab as a place where commands run: where, as whom, with what, and for how long."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from . import cgroups
from .daemons import CLEAN_PATH
from .errors import CommandFailed, DeadlinePassed, LabError
from .layout import CONTROLLER, LabPaths, LabSpec

_ENTER = Path(__file__).with_name("enter.py")


@dataclass(frozen=True, kw_only=True)
class Account:
    """A user, as the lab's passwd file has it."""

    uid: int
    gid: int
    home: str


@dataclass(frozen=True, kw_only=True)
class Result:
    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str


def _find_account(passwd: Path, name: str) -> Account:
    for line in passwd.read_text().splitlines():
        fields = line.split(":")
        if fields[0] == name:
            return Account(uid=int(fields[2]), gid=int(fields[3]), home=fields[5])
    raise LabError(f"no user {name!r} in the lab")


def ask_argv(argv: Sequence[str], *, pid: int) -> list[str]:
    """The command line that runs `argv` as root in the namespaces of a process, and no more.

    No interpreter is started for it, but signals do not reach the command.
    """
    environ = [f"PATH={CLEAN_PATH}", "HOME=/root", "USER=root", "LOGNAME=root", "LANG=C.UTF-8"]
    namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
    return ["nsenter", f"--target={pid}", *namespaces, "--", "env", "-i", *environ, *argv]


def _run(outside: Sequence[str], argv: Sequence[str], stdin: bytes, deadline_s: float) -> Result:
    """Run `outside`, which runs `argv` inside; at its deadline kill its whole group."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        outside, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe
    )
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
    )


Seen = TypeVar("Seen")

_POLL_S = 0.05
# Of the time spent waiting, looking takes a quarter at most: where several labs share a few
# cores, those that wait would otherwise keep back those that work.
_REST_PER_LOOK = 3.0


class Inside:
    """Runs commands on the nodes and on the login node of a running lab."""

    def __init__(self, spec: LabSpec) -> None:
        self.spec = spec
        self.paths: LabPaths = spec.paths
        self.nodes: tuple[str, ...] = spec.nodes
        self.cpu_controller = cgroups.find_cpu_controller()
        self._pids: dict[str, Any] = json.loads(self.paths.state.read_text())

    def home(self, user: str) -> Path:
        return Path(self._account(user).home)

    def pid(self, node: str | None = None) -> int:
        """The process, by its number outside, that holds a node's (or the login node's) place."""
        if node is None or node == CONTROLLER:
            return int(self._pids["init"])
        if node not in self.nodes:
            raise LabError(f"no node {node!r}; the nodes are {' '.join(self.nodes)}")
        return int(self._pids["nodes"][node])

    def argv(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        node: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> list[str]:
        """The command line which, run outside, runs `argv` inside.

        The environment holds PATH, HOME, USER, LOGNAME and LANG, and what `env` adds.
        """
        cgroup = None
        if self.cpu_controller is not None and node in self.nodes:
            cgroup = cgroups.node_cgroup(self.cpu_controller, self.spec.name, str(node))
        account = self._account(user)
        where = {
            "pid": self.pid(node),
            "uid": account.uid,
            "gid": account.gid,
            "groups": [account.gid],
            "cwd": str(cwd or account.home),
            "cgroup": str(cgroup / "cgroup.procs") if cgroup and cgroup.is_dir() else None,
            "env": {
                "PATH": CLEAN_PATH,
                "HOME": account.home,
                "USER": user,
                "LOGNAME": user,
                "LANG": "C.UTF-8",
                **(env or {}),
            },
        }
        return [sys.executable, "-I", "-S", str(_ENTER), json.dumps(where), *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        node: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: bytes = b"",
        deadline_s: float = 60,
        check: bool = True,
    ) -> Result:
        """Run a command inside, in the user's home unless told otherwise, and wait for it.

        Without a `node` it runs on the login node, where slurmctld runs too. At the deadline its
        whole process group is killed. With `check`, another code than 0 is `CommandFailed`.
        """
        outside = self.argv(argv, user=user, node=node, env=env, cwd=cwd)
        result = _run(outside, argv, stdin, deadline_s)
        return _checked(result, f"{node or CONTROLLER} as {user}") if check else result

    def ask(self, *argv: str, check: bool = True, deadline_s: float = 60) -> Result:
        """Ask Slurm as root on the login node: `run` at a tenth of its cost."""
        outside = ask_argv(argv, pid=self.pid())
        result = _run(outside, argv, b"", deadline_s)
        return _checked(result, CONTROLLER) if check else result

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        node: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **options: Any,
    ) -> "subprocess.Popen[bytes]":
        """Start a command inside; signals sent to the Popen reach it, killing it kills it."""
        outside = self.argv(argv, user=user, node=node, env=env, cwd=cwd)
        given = {"stdin": subprocess.DEVNULL, **options}
        # A session of its own, so that a deadline can end all of it.
        return subprocess.Popen(outside, start_new_session=True, **given)

    def _account(self, user: str) -> Account:
        return _find_account(self.paths.etc / "passwd", user)

    def wait_until(
        self,
        look: Callable[[], Seen],
        accept: Callable[[Seen], bool],
        what: str,
        deadline_s: float = 60,
    ) -> Seen:
        """Look again and again until what is seen is accepted, or raise `DeadlinePassed`."""
        end_s = time.monotonic() + deadline_s
        while True:
            began_s = time.monotonic()
            seen = look()
            if accept(seen):
                return seen
            now_s = time.monotonic()
            if now_s > end_s:
                raise DeadlinePassed(what, deadline_s, str(seen))
            time.sleep(max(_POLL_S, _REST_PER_LOOK * (now_s - began_s)))


def _checked(result: Result, where: str) -> Result:
    if result.returncode != 0:
        raise CommandFailed(
            f"{' '.join(result.argv)!r} on {where} ended with {result.returncode}"
            f"\nstdout: {result.stdout.strip()!r}\nstderr: {result.stderr.strip()!r}"
        )
    return result
