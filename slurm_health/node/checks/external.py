# SPDX-License-Identifier: Apache-2.0
"""Everything else: files, and programs of the site, Nagios plugins and nhc among them.

A program's failure to run is never the node's fault: only an exit code that the program uses to
say so is.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Annotated

import msgspec

from slurm_health.node.checks.check import (
    AbsolutePath,
    Check,
    CheckContext,
    NotNegative,
    Seen,
    Unmeasured,
    require_patterns,
)
from slurm_health.node.rules.finding import (
    Finding,
    inconclusive,
    joined,
    node_fault,
    passed,
    user_fault,
    warned,
)
from slurm_health.system import SYSTEM_PATH

_OUTPUT_BYTES = 64 << 10
_NOT_RUN = (125, 126, 127)  # what shells, env and timeout say when there is nothing to run
ExitCodes = tuple[Annotated[int, msgspec.Meta(ge=1, le=255)], ...]
Argv = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]

# A site's own program may test whatever it likes.
_ANYTHING = ("node", "device", "compute", "memory", "links", "network", "nic", "storage")


class ProgramSeen(Seen, frozen=True, kw_only=True):
    """How a program ended (negative: by that signal), and what it said."""

    code: int
    output: str

    @property
    def said(self) -> str:
        """The first line, which is where programs say what is wrong."""
        return next((line.strip() for line in self.output.splitlines() if line.strip()), "")


def run_program(
    argv: list[str], machine: CheckContext, *, most_bytes: int = _OUTPUT_BYTES
) -> ProgramSeen:
    """Run a program to its end. The check's own time limit ends it, with all it started.

    Args:
        argv: the program and its arguments.
        machine: where it is run.
        most_bytes: what is kept of its output, from its beginning.

    Raises:
        Unmeasured: it cannot be executed.
    """
    import shutil
    import subprocess

    from slurm_health.system.processes import die_with_parent

    kept = {name: text for name, text in machine.environ.items() if name.startswith("SLURM")}
    environ = {**kept, "PATH": SYSTEM_PATH, "LC_ALL": "C", "HOME": "/root"}
    if shutil.which(argv[0], path=SYSTEM_PATH) is None:
        raise Unmeasured(f"{argv[0]} not found or not executable")
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd="/",
            preexec_fn=die_with_parent(),  # noqa: PLW1509 - a check's process has one thread
        )
    except OSError as err:
        raise Unmeasured(f"{argv[0]}: {err.strerror}") from err
    output = b""
    with process:
        assert process.stdout is not None
        while chunk := process.stdout.read(65536):
            output = (output + chunk)[:most_bytes]
    return ProgramSeen(code=process.returncode, output=output.decode(errors="replace"))


def json_in(output: str) -> object:
    """Return the JSON that a program printed, without the lines that libraries print around it.

    None where there is none.
    """
    import json

    starts = [place for place in map(output.find, "{[") if place >= 0]
    if not starts:
        return None
    start = min(starts)
    end = output.rfind("}" if output[start] == "{" else "]")
    try:
        found: object = json.loads(output[start : end + 1])
    except (ValueError, RecursionError):
        return None
    return found


def program_of(check: Check) -> str:
    """Return the program that a check runs, empty where it runs none."""
    argv = getattr(check, "argv", ())
    return str(argv[0] if argv else getattr(check, "program", ""))


def is_there(program: str, machine: CheckContext) -> bool:
    """Tell whether a program is where `run_program` would find it."""
    import shutil

    places = os.pathsep.join(str(machine.path(each)) for each in SYSTEM_PATH.split(os.pathsep))
    wanted = str(machine.path(program)) if "/" in program else program
    return shutil.which(wanted, path=places) is not None


def _not_run(seen: ProgramSeen, program: str) -> Finding | None:
    if seen.code < 0:
        return inconclusive(f"{program} was killed by signal {-seen.code}")
    if seen.code in _NOT_RUN:
        return inconclusive(f"{program} could not run, exit code {seen.code}: {seen.said}")
    return None


class Command(Check, frozen=True, kw_only=True):
    """A program of the site. Its exit codes mean what the table says, everything else nothing."""

    SEEN = ProgramSeen
    COMPONENTS = _ANYTHING

    argv: Argv
    fault_codes: ExitCodes = (77,)
    user_fault_codes: ExitCodes = ()
    warn_codes: ExitCodes = ()

    def collect(self, machine: CheckContext) -> ProgramSeen:
        """Run it."""
        return run_program(list(self.argv), machine)

    def judge(self, seen: ProgramSeen) -> Finding:
        """Look the exit code up."""
        # `sinfo -R` shows 20 columns: what the program says comes first, and its name nowhere.
        text = seen.said or f"{Path(self.argv[0]).name}: exit code {seen.code}"
        if seen.code == 0:
            return passed(text)
        for codes, judged in (
            (self.fault_codes, node_fault),
            (self.user_fault_codes, user_fault),
            (self.warn_codes, warned),
        ):
            if seen.code in codes:
                return judged(text, exit_code=seen.code)
        return _not_run(seen, self.argv[0]) or inconclusive(
            f"{self.argv[0]} ended with exit code {seen.code}, which is not in the configuration:"
            f" {seen.said}"
        )


class Nagios(Check, frozen=True, kw_only=True):
    """A Nagios plugin: 0 fine, 1 warning, 2 critical; 3 and everything else unknown."""

    SEEN = ProgramSeen
    COMPONENTS = _ANYTHING

    argv: Argv

    def collect(self, machine: CheckContext) -> ProgramSeen:
        """Run it."""
        return run_program(list(self.argv), machine)

    def judge(self, seen: ProgramSeen) -> Finding:
        """Translate the exit code, without the performance data."""
        text = seen.said.partition("|")[0].strip() or f"exit code {seen.code}"
        known = {0: passed, 1: warned, 2: node_fault}
        if seen.code in known:
            return known[seen.code](text)
        return _not_run(seen, self.argv[0]) or inconclusive(f"{self.argv[0]}: {text}")


class Nhc(Check, frozen=True, kw_only=True):
    """LBNL Node Health Check with the site's own nhc.conf, unchanged. It marks nothing offline."""

    SEEN = ProgramSeen
    COMPONENTS = _ANYTHING

    program: AbsolutePath = "/usr/sbin/nhc"
    conf: str = ""

    def collect(self, machine: CheckContext) -> ProgramSeen:
        """Run it in the foreground, all checks, without its own way of draining."""
        settings = ["MARK_OFFLINE=0", "DETACHED_MODE=0", "NHC_CHECK_ALL=1", "LOGFILE=-"]
        conf = ["-c", self.conf] if self.conf else []
        return run_program([self.program, *conf, *settings], machine)

    def judge(self, seen: ProgramSeen) -> Finding:
        """Only its own word for a failed check counts; its crash or its watchdog does not."""
        failed = [line.strip() for line in seen.output.splitlines() if "ERROR:" in line]
        checks = [line for line in failed if "Health check failed" in line]
        if seen.code == 0:
            return passed("nhc: all checks passed")
        if (stopped := _not_run(seen, self.program)) is not None:
            return stopped
        if not checks or any("Watchdog" in line or "timed out" in line for line in failed):
            return inconclusive(f"nhc: {seen.said or f'exit code {seen.code}'}")
        text = checks[0].partition("Health check failed:")[2].strip()
        return node_fault(f"nhc: {text or checks[0]}")


class FileSeen(Seen, frozen=True, kw_only=True):
    """A path as `lstat` and its first 64 KiB show it."""

    exists: bool
    kind: str = ""
    mode: int = 0
    uid: int = 0
    gid: int = 0
    age_s: float = 0.0
    text: str = ""


class File(Check, frozen=True, kw_only=True):
    """A file or directory: there or not, of a kind, mode, owner, age and content."""

    SEEN = FileSeen
    TOGETHER = True
    COMPONENTS = ("node", "storage")

    path: AbsolutePath
    exists: bool = True
    kind: str = ""
    mode: Annotated[str, msgspec.Meta(pattern="^[0-7]{3,4}$")] | None = None
    uid: Annotated[int, msgspec.Meta(ge=0)] | None = None
    gid: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_age_s: NotNegative | None = None
    contains: str = ""
    lacks: str = ""

    def __post_init__(self) -> None:
        if self.kind and self.kind not in _KINDS.values():
            raise ValueError(f"kind: expected one of {', '.join(_KINDS.values())}")
        require_patterns(self.contains, self.lacks)

    def collect(self, machine: CheckContext) -> FileSeen:
        """Look at it; read it only when its content matters."""
        path = machine.path(self.path)
        try:
            found = path.lstat() if self.kind == "link" else path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return FileSeen(exists=False)
        except OSError as err:
            raise Unmeasured(f"{self.path}: {err.strerror}") from err
        wanted = self.contains or self.lacks
        return FileSeen(
            exists=True,
            kind=_KINDS.get(stat.S_IFMT(found.st_mode), "other"),
            mode=stat.S_IMODE(found.st_mode),
            uid=found.st_uid,
            gid=found.st_gid,
            age_s=machine.now_s - found.st_mtime,
            text=machine.read(self.path) if wanted and stat.S_ISREG(found.st_mode) else "",
        )

    def judge(self, seen: FileSeen) -> Finding:
        """Compare what the site asks for."""
        if seen.exists is not self.exists:
            return node_fault(f"{self.path} {'does not exist' if self.exists else 'exists'}")
        if not seen.exists:
            return passed(f"{self.path} does not exist")
        wrong = [node_fault(f"{self.path} {text}") for text in self._differences(seen)]
        return joined(wrong, well=f"{self.path} is as expected")

    def _differences(self, seen: FileSeen) -> list[str]:
        found = []
        if self.kind and seen.kind != self.kind:
            found.append(f"is a {seen.kind}, expected a {self.kind}")
        if self.mode is not None and seen.mode != int(self.mode, 8):
            found.append(f"has mode {seen.mode:04o}, expected {self.mode}")
        if self.uid is not None and seen.uid != self.uid:
            found.append(f"belongs to user {seen.uid}, expected {self.uid}")
        if self.gid is not None and seen.gid != self.gid:
            found.append(f"belongs to group {seen.gid}, expected {self.gid}")
        if self.max_age_s is not None and seen.age_s > self.max_age_s:
            found.append(f"is {seen.age_s:.0f} s old, limit {self.max_age_s:g}")
        if self.contains and not re.search(self.contains, seen.text, re.MULTILINE):
            found.append(f"lacks {self.contains!r}")
        if self.lacks and re.search(self.lacks, seen.text, re.MULTILINE):
            found.append(f"contains {self.lacks!r}")
        return found


_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFBLK: "block device",
    stat.S_IFCHR: "character device",
    stat.S_IFSOCK: "socket",
    stat.S_IFIFO: "pipe",
}
