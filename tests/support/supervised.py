# SPDX-License-Identifier: Apache-2.0
"""Start a script under the supervisor, or alone as Slurm would, and look at the processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

MAIN = Path(__file__).with_name("supervise_main.py")
DEADLINE_S = 100.0
# What stands in for the check, as a shell runs it.
MASTER_THAT_HANGS = """
trap '' TERM USR1 INT
(trap '' TERM; setsid bash -c 'trap "" TERM; while :; do sleep 0.1; done') &
while :; do sleep 0.1; [ -e $LOG ] || echo ready >>$LOG; done
"""
MASTER_THAT_WAITS = (
    "echo ready >>$LOG\nwhile ! [ -e $LOG.go ]; do sleep 0.02; done\n"
    'echo \'{"disposition": "proceed"}\'\n'
)
# Mounts a filesystem that never answers, served by a process that outlives this one, and becomes
# the command that follows. Mounted over a file, it is our standard error, which cannot be read.
_ON_HUNG_FILESYSTEM = """
import os, sys
from pathlib import Path
from tests.node.hooks.hung_filesystem import UNREADABLE, mount, serve
place = Path(sys.argv[1])
is_file = place.is_file()
fuse = mount(place, rootmode="100000") if is_file else mount(place)
if os.fork() == 0:
    if os.fork() == 0:
        Path(sys.argv[2]).write_text(str(os.getpid()))
        serve(fuse, UNREADABLE) if is_file else serve(fuse)
    os._exit(0)
os.wait()
os.close(fuse)
if is_file:
    os.dup2(os.open(place, os.O_WRONLY), 2)
os.execv(sys.argv[3], sys.argv[3:])
"""


def eventually(condition: Callable[[], object], what: str, *, within_s: float = DEADLINE_S) -> None:
    """Wait until a condition holds; fail with `what` when it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)


def write_executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


class Bench:
    """A directory with a script, a master and a log, and the processes started from it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.log = directory / "log"
        self.stdout = directory / "stdout"
        self.stderr = directory / "stderr"
        self.started: list[subprocess.Popen[bytes]] = []
        self.answer("proceed")

    def answer(self, disposition: str, **rest: object) -> None:
        """Have the master end at once with this line."""
        line = json.dumps({"disposition": disposition, **rest})
        self.master(f"cat <<'END'\n{line}\nEND\n")

    def journal(self) -> Path:
        """Have the check answer with a directory of the journal; return that."""
        run = self.directory / "journal" / "lab" / "12" / "0"
        run.mkdir(parents=True)
        self.answer("proceed", directory=str(run))
        return run

    def master(self, body: str) -> None:
        write_executable(self.directory / "master", f"#!/bin/bash\n{body}")

    def after_failure(self, *answers: Mapping[str, object]) -> None:
        """Have what is asked after each failure answer with these lines, and note what it is told.

        The last one is repeated.
        """
        directory = self.directory / "answers"
        directory.mkdir()
        for number, answer in enumerate(answers):
            (directory / str(number)).write_text(json.dumps(answer) + "\n")
        body = (
            f'cd {directory}; echo "$1" >>told; number=$(($(wc -l <told) - 1))\n'
            f"[ -e $number ] || number={len(answers) - 1}\ncat $number\n"
        )
        write_executable(self.directory / "master-after", f"#!/bin/bash\n{body}")

    def told_after_failure(self) -> list[dict[str, object]]:
        """Return what was told of each failure."""
        told = self.directory / "answers" / "told"
        lines = told.read_text().splitlines() if told.exists() else []
        return [json.loads(line.removeprefix("--after-failure=")) for line in lines]

    def script(self, text: str | bytes) -> Path:
        path = self.directory / "script"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        path.chmod(0o755)
        return path

    def environ(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "TMPDIR": str(self.temporary), "LOG": str(self.log)}

    def supervised(
        self,
        text: str | bytes,
        *arguments: str,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        cwd: Path | None = None,
        wrapper: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a script under the supervisor, in a process group of its own."""
        script = self.script(text)
        source = self.directory / "source"
        source.write_bytes(b"one\ntwo\n" + script.read_bytes())
        words = ["--python", str(self.directory / "master"), "--script-name", "train.sh"]
        given = environ or self.environ()
        copy = self.directory / "environ"
        copy.write_bytes(b"".join(os.fsencode(f"{key}={given[key]}") + b"\0" for key in given))
        number = os.open(copy, os.O_RDONLY)
        words += ["--environ-fd", str(number), "--script-line", "3", *options]
        argv = [
            *wrapper,
            sys.executable,
            "-P",
            str(MAIN),
            "supervise",
            *words,
            str(source),
            *arguments,
        ]
        try:
            return self.start(argv, environ=given, stdin=stdin, cwd=cwd, pass_fds=[number])
        finally:
            os.close(number)

    def alone(
        self,
        text: str | bytes,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a script as slurmstepd does, without the supervisor."""
        script = self.script(text)
        return self.start([str(script), *arguments], environ=environ, stdin=stdin, cwd=cwd)

    def start(
        self,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a command with files for its standard streams, as a batch job has them."""
        (self.directory / "stdin").write_bytes(stdin or b"")
        with (
            (self.directory / "stdin").open("rb") as source,
            self.stdout.open("wb") as out,
            self.stderr.open("wb") as err,
        ):
            process = subprocess.Popen(
                list(argv),
                stdin=source,
                stdout=out,
                stderr=err,
                env=dict(environ or self.environ()),
                cwd=cwd,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
        code = process.wait(timeout=DEADLINE_S)
        return code, self.stdout.read_bytes(), self.stderr.read_bytes()

    def lines(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    def wait_for(self, line: str) -> None:
        eventually(lambda: line in self.lines(), f"{line} in the log: {self.lines()}")

    def clean_up(self) -> None:
        for process in self.started:
            for pid in [*descendants(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(timeout=DEADLINE_S)
        # Children that a script left behind: as under sbatch, nobody but Slurm ends them.
        for pid in with_variable("LOG", str(self.log)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Return the processes below one, which may be gone already."""
    children: dict[int, list[int]] = {}
    for pid, fields in _processes():
        children.setdefault(int(fields[1]), []).append(pid)
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def with_variable(name: str, value: str, *, without: Collection[str] = ()) -> list[int]:
    """Return the processes, `without` some, in whose environment a variable has a value."""
    entry = f"{name}={value}".encode()
    found = []
    for pid, fields in _processes(without):
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if entry in environ and fields[0] != b"Z":
                found.append(pid)
    return found


def _processes(without: Collection[str] = ()) -> Iterator[tuple[int, list[bytes]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name not in without:
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_bytes()
                yield int(entry.name), stat.rpartition(b")")[2].split()


@contextlib.contextmanager
def hung_filesystem(
    bench: Bench, *, stderr: bool = False
) -> Iterator[tuple[Path, list[str], dict[str, str]]]:
    """Have a directory answer nothing; yield it, and the words and variables that mount it.

    What they start mounts it for itself and becomes the command behind them; what serves the
    filesystem outlives that, and is ended here. With `stderr` it is no directory, but the file to
    which that command's standard error goes; to read it hangs.
    """
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no /dev/fuse")
    place, server = bench.directory / "run", bench.directory / "server"
    place.touch() if stderr else place.mkdir()
    words = [sys.executable, "-c", _ON_HUNG_FILESYSTEM, str(place), str(server)]
    root = str(Path(__file__).parents[2])
    try:
        yield place, words, {**bench.environ(), "PYTHONPATH": root}
    finally:
        if server.exists():
            os.kill(int(server.read_text()), signal.SIGKILL)
