# SPDX-License-Identifier: Apache-2.0
"""A running lab as a place where commands run."""

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from . import cgroups, commands
from .commands import Result
from .errors import CommandFailed, DeadlinePassed, LabError
from .layout import CONTROLLER, LabPaths, LabSpec

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
        """The user's home directory, valid inside the lab and outside."""
        return Path(self._account(user).home)

    def pid(self, node: str | None = None) -> int:
        """The process, by its number outside, that holds a node's (or the login node's) place.

        Raises:
            LabError: no such node.
        """
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
        """The command line which, run outside, runs `argv` inside."""
        cgroup = None
        if self.cpu_controller is not None and node in self.nodes:
            cgroup = cgroups.node_cgroup(self.cpu_controller, self.spec.name, str(node))
        return commands.enter_argv(
            argv,
            pid=self.pid(node),
            account=self._account(user),
            cgroup_procs=cgroup / "cgroup.procs" if cgroup and cgroup.is_dir() else None,
            cwd=None if cwd is None else str(cwd),
            env=env or {},
        )

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
        """Run a command inside and wait for it.

        Args:
            argv: the command.
            user: root, alice, bob, or a user of the machine.
            node: default: the login node, where slurmctld runs too.
            env: added to a clean environment.
            cwd: default: the user's home.
            stdin: what the command reads.
            deadline_s: then its whole process group is killed.
            check: raise when it ends with another code than 0.

        Raises:
            CommandFailed: with everything known.
            DeadlinePassed: likewise.
        """
        outside = self.argv(argv, user=user, node=node, env=env, cwd=cwd)
        result = commands.run(outside, argv, stdin, deadline_s)
        return _checked(result, f"{node or CONTROLLER} as {user}") if check else result

    def ask(self, *argv: str, check: bool = True, deadline_s: float = 60) -> Result:
        """Ask Slurm as root on the login node.

        It is `run` at a tenth of its cost, for what is asked again and again.

        Raises:
            CommandFailed: with everything known.
            DeadlinePassed: likewise.
        """
        outside = commands.ask_argv(argv, pid=self.pid())
        result = commands.run(outside, argv, b"", deadline_s)
        return _checked(result, CONTROLLER) if check else result

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        node: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
    ) -> "subprocess.Popen[bytes]":
        """Start a command inside; signals sent to the Popen reach it, killing it kills it."""
        outside = self.argv(argv, user=user, node=node, env=env, cwd=cwd)
        return commands.start(outside, stdin=stdin, stdout=stdout, stderr=stderr)

    def _account(self, user: str) -> commands.Account:
        return commands.find_account(self.paths.etc / "passwd", user)

    def wait_until(
        self,
        look: Callable[[], Seen],
        accept: Callable[[Seen], bool],
        what: str,
        deadline_s: float = 60,
    ) -> Seen:
        """Look again and again until what is seen is accepted.

        Raises:
            DeadlinePassed: with what was seen last.
        """
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
        raise CommandFailed(result.argv, where, result.returncode, result.stdout, result.stderr)
    return result
