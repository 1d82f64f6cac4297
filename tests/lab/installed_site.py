# SPDX-License-Identifier: Apache-2.0
"""slurm-health as its users meet it on the lab's cluster: what they type, see and leave behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab import Lab, processes
from tests.lab.inside import Result

COMMAND = str(Path(sys.executable).with_name("slurm-health"))
ENDED = frozenset({"CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "PREEMPTED", "TIMEOUT"})
# A check takes seconds; this is for a machine that is busy with other things.
DEADLINE_S = 150.0
# What runs on a node without jobs.
_IDLE = frozenset({"slurmd", "glusterfs"})

Report = dict[str, Any]
Record = dict[str, Any]


class Site:
    """A lab with slurm-health installed, and its users."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    # --- what a user types ---------------------------------------------------------------------

    def health(self, *words: str, user: str = "alice", **options: Any) -> Result:
        """Run `slurm-health` on the login node; never raises for its exit code."""
        return self.lab.run([COMMAND, *words], user=user, check=False, **options)

    def submit(self, *words: str, user: str = "alice", **options: Any) -> int:
        """Run `slurm-health sbatch --parsable`; the job's id."""
        result = self.health("sbatch", "--parsable", *words, user=user, **options)
        assert result.returncode == 0, result
        return int(result.stdout)

    def check(self, salloc: Sequence[str], *words: str, user: str = "alice") -> Result:
        return self.allocated(salloc, COMMAND, "check", *words, user=user)

    def allocated(self, salloc: Sequence[str], *command: str, user: str = "alice") -> Result:
        return self.lab.run(
            ["salloc", "--quiet", *salloc, *command],
            user=user,
            check=False,
            deadline_s=DEADLINE_S,
        )

    def report(self, job: int | str, user: str = "alice") -> Report:
        result = self.health("report", "--json", str(job), user=user)
        assert result.returncode == 0, result
        found: Report = json.loads(result.stdout)
        return found

    def table(self, job: int | str, user: str = "alice") -> str:
        result = self.health("report", str(job), user=user)
        assert result.returncode == 0, result
        return result.stdout

    # --- files of users ------------------------------------------------------------------------

    def script(self, name: str, text: str, user: str = "alice") -> str:
        """Write an executable file into the user's home; its path."""
        path = self.lab.home(user) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return self._own(path, user)

    def directory(self, name: str, user: str = "alice") -> str:
        """Make a directory in the user's home; its path."""
        path = self.lab.home(user) / name
        path.mkdir(parents=True, exist_ok=True)
        return self._own(path, user)

    def _own(self, path: Path, user: str) -> str:
        home = self.lab.home(user).stat()
        for each in (path, path.parent):
            os.chown(each, home.st_uid, home.st_gid)
        return str(path)

    def read(self, name: str, user: str = "alice") -> str:
        path = self.lab.home(user) / name
        return path.read_text(errors="replace") if path.exists() else ""

    # --- what Slurm says -----------------------------------------------------------------------

    def ended(self, job: int | str, deadline_s: float = DEADLINE_S) -> dict[str, str]:
        """Wait until the job has ended, however; the job."""
        return self.lab.wait_job(job, ENDED, deadline_s)

    def jobs(self) -> dict[str, str]:
        lines = self.lab.ask("squeue", "-ho", "%j %T").stdout.splitlines()
        return dict(line.rsplit(" ", 1) for line in lines)

    def calls(self) -> Counter[str]:
        """How often Slurm has been asked what since `forget_calls`."""
        found: Counter[str] = Counter()
        for line in self.lab.run(["sdiag"]).stdout.splitlines():
            words = line.split()
            if line.startswith("\t") and words[0].startswith(("REQUEST_", "MESSAGE_")):
                found[words[0]] = int(line.partition("count:")[2].split()[0])
        return found

    def forget_calls(self) -> None:
        self.lab.run(["sdiag", "--reset"])

    def controller_log(self) -> str:
        return (self.lab.paths.log / "slurmctld.log").read_text(errors="replace")

    def drained(self) -> dict[str, str]:
        return {
            name: record.get("Reason", "")
            for name, record in self.lab.node_states().items()
            if "DRAIN" in record["State"].rstrip("*").split("+")
        }

    # --- what is left and what was written -----------------------------------------------------

    def leftovers(self) -> list[tuple[str, tuple[str, ...]]]:
        """Every process on a node that an idle node does not have; the lab's own do not count."""
        return [(node, process.argv) for node, process in self._left()]

    def _left(self) -> Iterator[tuple[str, processes.Process]]:
        for node in self.lab.nodes:
            for process in processes.on_node(self.lab.pid(node)):
                ours = any(word.endswith("/tests/lab/watcher.py") for word in process.argv)
                if process.name not in _IDLE and not ours:
                    yield node, process

    def end_leftovers(self) -> None:
        """End what alice has on nodes: without cgroups, Slurm does not know of all of it.

        A node that was cut off when its job ended may run it for minutes, too. What is killed so
        cannot remove its files.
        """
        alice = self.lab.home("alice").stat().st_uid
        for node, process in self._left():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{process.pid}").stat().st_uid == alice:
                    os.kill(process.pid, signal.SIGKILL)
                    for path in self._temporary(node):
                        subprocess.run(["rm", "-rf", path], check=True)

    def assert_nothing_left(self, deadline_s: float = 40) -> None:
        """Wait until no job is in the queue, no process on a node, no file of ours in a /tmp."""
        self.lab.wait_until(self.jobs, lambda jobs: not jobs, "an empty queue", deadline_s)
        self.lab.wait_until(self.leftovers, lambda left: not left, "nothing running", deadline_s)
        temporary = [path for node in self.lab.nodes for path in self._temporary(node)]
        assert temporary == []

    def _temporary(self, node: str) -> list[Path]:
        return list(self.lab.paths.tmp(node).glob("slurm-health-*"))

    def run_directory(self, job: int | str, run: str = "0", user: str = "alice") -> Path:
        """The directory of one check of a job, in the user's own journal."""
        return self.lab.home(user) / ".slurm-health" / "journal" / "lab" / str(job) / run

    def records(
        self, job: int | str, run: str = "0", writer: str = "master", user: str = "alice"
    ) -> list[Record]:
        """The whole records of one writer so far."""
        return records_in(self.run_directory(job, run, user) / f"{writer}.jsonl")

    def wait_record(
        self,
        job: int | str,
        kind: str,
        run: str = "0",
        *,
        writer: str = "master",
        user: str = "alice",
    ) -> Record:
        def look() -> list[Record]:
            return [r for r in self.records(job, run, writer, user) if r["kind"] == kind]

        what = f"{kind} of job {job}"
        return self.lab.wait_until(look, bool, what, DEADLINE_S)[-1]

    # --- our processes -------------------------------------------------------------------------

    def processes_with(self, word: str) -> list[int]:
        """The processes on the nodes with this word in their command line, numbered outside."""
        return [
            process.pid
            for node in self.lab.nodes
            for process in processes.on_node(self.lab.pid(node))
            if word in process.argv
        ]

    def kill_master(self) -> None:
        """Kill (SIGKILL) the master; a child of its that has not become srun yet looks like it."""
        masters = self.processes_with("supervised-check")
        assert masters
        for each in masters:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


def records_in(path: Path) -> list[Record]:
    """Return the records of a journal's file; a torn last line is none."""
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def kinds(records: Iterable[Record]) -> Counter[str]:
    return Counter(record["kind"] for record in records)


def acts(records: Iterable[Record]) -> list[tuple[str, str]]:
    """Return the acts a master recorded, in order: (kind, action)."""
    return [(r["kind"], r["action"]) for r in records if r["kind"].startswith("action_")]


def levels(run: Mapping[str, Any]) -> dict[str, str | None]:
    return {node["node"]: node["level"] for node in run["nodes"]}


def accused(run: Mapping[str, Any]) -> dict[str, str | None]:
    """Node → level of all but the healthy, and those in whom a busy machine leaves doubt."""
    well = {"healthy", "inconclusive"}
    return {node: level for node, level in levels(run).items() if level not in well}


def verdict_of(run: Mapping[str, Any], node: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(each for each in run["nodes"] if each["node"] == node)
    return found


class Gate:
    """A command, first on a job's PATH, that waits to be let through when it is called in a way.

    It is the real command with a door before it: what passes is done by Slurm.
    """

    _TEXT = """#!/bin/bash
case " $* " in
*{when}*)
    if mkdir {here}/reached 2>/dev/null; then
        exec 3<> <(:)
    until [ -e {here}/open ]; do read -rt 0.05 -u 3; done
    fi ;;
esac
PATH=${{PATH#*:}} exec {command} "$@"
"""

    def __init__(self, site: Site, command: str, when: str, user: str = "alice") -> None:
        """Stop the first `command` whose arguments, joined by blanks, hold the pattern `when`."""
        self._lab = site.lab
        self._here = Path(site.directory(f"gate-{command}-{os.urandom(3).hex()}", user))
        text = self._TEXT.format(when=when, here=self._here, command=command)
        site.script(f"{self._here.name}/bin/{command}", text, user)
        self.environ = {"PATH": f"{self._here}/bin:/usr/bin:/bin:/usr/sbin:/sbin"}

    def await_reached(self) -> None:
        reached = self._here / "reached"
        self._lab.wait_until(reached.exists, bool, f"{self._here.name} reached", DEADLINE_S)

    def open(self) -> None:
        (self._here / "open").touch()


def check_by_default(site: Site, rules: str) -> None:
    """Write the config file, and have slurmctld load the submission plugin that it asks for."""
    (site.lab.paths.etc / "rules.toml").write_text(rules)
    install_default(site)
    site.lab.run(["sed", "-i", "1i JobSubmitPlugins=lua", "/etc/slurm/slurm.conf"])
    site.lab.run(["scontrol", "reconfigure"])


def install_default(site: Site) -> None:
    site.lab.run([COMMAND, "init", "default", f"--config={site.lab.paths.etc}/rules.toml"])


def eventually(site: Site, look: Callable[[], object], what: str, deadline_s: float = 40) -> None:
    site.lab.wait_until(look, bool, what, deadline_s)
