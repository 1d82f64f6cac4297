# SPDX-License-Identifier: Apache-2.0
"""Files and the site's own programs, nhc among them.

A program's failure to run is never the node's fault: only an exit code that the program uses for a
fault is.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from slurm_health.node.checks.check import (
    AbsolutePath,
    Check,
    CheckContext,
    NotNegative,
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
from slurm_health.records.errors import Unmeasured
from slurm_health.system import SYSTEM_PATH

OUTPUT_BYTES = 4 << 20
_NOT_RUN = (125, 126, 127)  # exit codes of shells, env and timeout that have nothing to run
ExitCodes = tuple[Annotated[int, msgspec.Meta(ge=1, le=255)], ...]
Argv = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]

# A site's own program may test whatever it likes.
_ANYTHING = ("node", "device", "compute", "memory", "links", "network", "nic", "storage")


class ProgramRun(NamedTuple):
    """How a program ended (negative: by that signal), and what it printed."""

    code: int
    output: str

    @property
    def first_line(self) -> str:
        """The first line, in which programs print what is wrong."""
        return next((line.strip() for line in self.output.splitlines() if line.strip()), "")


def run_program(argv: Sequence[str], machine: CheckContext) -> ProgramRun:
    """Run a program to its end. The check's own time limit ends it, with all it started.

    It gets Slurm's variables and no others. The beginning of its output is kept.

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
            output = (output + chunk)[:OUTPUT_BYTES]
    return ProgramRun(process.returncode, output.decode(errors="replace"))


def program_of(check: Check) -> str:
    """Return the program that a check runs, empty if it runs none."""
    argv = getattr(check, "argv", ())
    return str(argv[0] if argv else getattr(check, "program", ""))


def is_there(program: str, machine: CheckContext) -> bool:
    """Return whether a program is where `run_program` would look for it."""
    import shutil

    places = os.pathsep.join(str(machine.path(path)) for path in SYSTEM_PATH.split(os.pathsep))
    wanted = str(machine.path(program)) if "/" in program else program
    return shutil.which(wanted, path=places) is not None


def _not_run(run: ProgramRun, program: str) -> Finding | None:
    if run.code < 0:
        return inconclusive(f"{program} was killed by signal {-run.code}")
    if run.code in _NOT_RUN:
        return inconclusive(f"{program} could not run, exit code {run.code}: {run.first_line}")
    return None


class Command(Check, frozen=True, kw_only=True):
    """A program of the site, run as root with a fixed PATH and Slurm's variables.

    0 is a pass; a code that no key names, a signal, or a program that cannot run is inconclusive.
    Its first line becomes the reason of a drain, of which `sinfo -R` shows 20 columns. A job's
    comment and extra, among the variables, are text of a user. For a Nagios plugin, set
    `fault_codes = [2]` and `warn_codes = [1]`; for a systemd unit, `fault_codes = [3, 4]` and
    `argv = ["systemctl", "is-active", "munge"]`.
    """

    COMPONENTS = _ANYTHING

    # The program and its arguments; no shell.
    argv: Argv
    # Codes that mean a node fault.
    fault_codes: ExitCodes = (77,)
    # A user fault.
    user_fault_codes: ExitCodes = ()
    # A warning.
    warn_codes: ExitCodes = ()

    def measure(self, machine: CheckContext) -> Finding:
        """Run it and look the exit code up."""
        run, program = run_program(self.argv, machine), self.argv[0]
        # `sinfo -R` shows 20 columns: the program's own words come first, and its name nowhere.
        text = run.first_line or f"{Path(program).name}: exit code {run.code}"
        if run.code == 0:
            return passed(text)
        for codes, judged in (
            (self.fault_codes, node_fault),
            (self.user_fault_codes, user_fault),
            (self.warn_codes, warned),
        ):
            if run.code in codes:
                return judged(text, exit_code=run.code)
        return _not_run(run, program) or inconclusive(
            f"{program} ended with exit code {run.code}, which is not in the configuration:"
            f" {run.first_line}"
        )


class Nhc(Check, frozen=True, kw_only=True):
    """LBNL Node Health Check with the site's own nhc.conf, unchanged. It marks nothing offline.

    Only a check that nhc reports as failed counts.
    """

    COMPONENTS = _ANYTHING

    # Its path.
    program: AbsolutePath = "/usr/sbin/nhc"
    # Another nhc.conf; empty: its default.
    conf: str = ""

    def measure(self, machine: CheckContext) -> Finding:
        """Run it in the foreground, all checks, without its own way of draining."""
        settings = ["MARK_OFFLINE=0", "DETACHED_MODE=0", "NHC_CHECK_ALL=1", "LOGFILE=-"]
        conf = ["-c", self.conf] if self.conf else []
        return self.judge(run_program([self.program, *conf, *settings], machine))

    def judge(self, run: ProgramRun) -> Finding:
        """Only its own word for a failed check counts; its crash or its watchdog does not. Pure."""
        if run.code == 0:
            return passed("nhc: all checks passed")
        if (stopped := _not_run(run, self.program)) is not None:
            return stopped
        errors = [line.strip() for line in run.output.splitlines() if "ERROR:" in line]
        failed = [line for line in errors if "Health check failed" in line]
        if not failed or any("Watchdog" in line or "timed out" in line for line in errors):
            return inconclusive(f"nhc: {run.first_line or f'exit code {run.code}'}")
        text = failed[0].partition("Health check failed:")[2].strip()
        return node_fault(text or failed[0])


class File(Check, frozen=True, kw_only=True):
    """A file or directory. Do not name anything that users can write."""

    TOGETHER = True
    COMPONENTS = ("node", "storage")

    # Which.
    path: AbsolutePath
    # Whether it must be there.
    exists: bool = True
    # `file`, `directory`, `link`, `block device`, `character device`, `socket` or `pipe`; empty:
    # any.
    kind: str = ""
    # Octal.
    mode: Annotated[str, msgspec.Meta(pattern="^[0-7]{3,4}$")] | None = None
    # Its owner.
    uid: Annotated[int, msgspec.Meta(ge=0)] | None = None
    # Its group.
    gid: Annotated[int, msgspec.Meta(ge=0)] | None = None
    # Since it was last written.
    max_age_s: NotNegative | None = None
    # A regular expression over its first MiB.
    contains: str = ""
    # The same, of what must not be there.
    lacks: str = ""

    def __post_init__(self) -> None:
        if self.kind and self.kind not in _KINDS.values():
            raise ValueError(f"kind: expected one of {', '.join(_KINDS.values())}")
        require_patterns(self.contains, self.lacks)

    def measure(self, machine: CheckContext) -> Finding:
        """Look at it; read it only if its content matters."""
        path = machine.path(self.path)
        try:
            status = path.lstat() if self.kind == "link" else path.stat()
        except (FileNotFoundError, NotADirectoryError):
            text = f"{self.path} does not exist"
            return node_fault(text) if self.exists else passed(text)
        except OSError as err:
            raise Unmeasured(f"{self.path}: {err.strerror}") from err
        if not self.exists:
            return node_fault(f"{self.path} exists")
        wanted = (self.contains or self.lacks) and stat.S_ISREG(status.st_mode)
        text = machine.read(self.path) if wanted else ""
        age_s = machine.now_s - status.st_mtime
        wrong = [node_fault(f"{self.path} {why}") for why in self._differences(status, age_s, text)]
        return joined(wrong, well=f"{self.path} is as expected")

    def _differences(self, status: os.stat_result, age_s: float, text: str) -> Iterator[str]:
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
        mode = stat.S_IMODE(status.st_mode)
        if self.kind and kind != self.kind:
            yield f"is a {kind}, expected a {self.kind}"
        if self.mode is not None and mode != int(self.mode, 8):
            yield f"has mode {mode:04o}, expected {self.mode}"
        if self.uid is not None and status.st_uid != self.uid:
            yield f"belongs to user {status.st_uid}, expected {self.uid}"
        if self.gid is not None and status.st_gid != self.gid:
            yield f"belongs to group {status.st_gid}, expected {self.gid}"
        if self.max_age_s is not None and age_s > self.max_age_s:
            yield f"is older than {self.max_age_s:g} s"
        if self.contains and not re.search(self.contains, text, re.MULTILINE):
            yield f"lacks {self.contains!r}"
        if self.lacks and re.search(self.lacks, text, re.MULTILINE):
            yield f"contains {self.lacks!r}"


_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFBLK: "block device",
    stat.S_IFCHR: "character device",
    stat.S_IFSOCK: "socket",
    stat.S_IFIFO: "pipe",
}
