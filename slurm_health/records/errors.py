# SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet, as one tree, with its exit code.

    SlurmHealthError                            70
    ├─ UsageError                               2   the command was called in a way it cannot serve
    ├─ ConfigError(source, key)                 2   an option, a #HEALTH line, a file or a variable
    ├─ AllocationError(variable)                4   not inside a job, or its node list is unreadable
    ├─ SlurmError                               4
    │  ├─ SlurmCommandMissing(command)
    │  ├─ SlurmCommandError(argv, returncode, stderr)
    │  ├─ SlurmTimeoutError(argv, deadline_s)
    │  └─ UnknownJob(job_id)
    ├─ JournalError(path)                       4
    │  ├─ RecordTooNew(path, version)
    │  └─ JournalBusy(path)
    ├─ RunNotFound(job, root)                   4
    ├─ IndexUnusable(where)                     4
    ├─ ChannelError(address)                    4   node 0 of a run, or its port, cannot be used
    ├─ PackageMissing(package)                  4
    ├─ NotWritten(path)                         4
    ├─ NoRoom(name)                             4
    └─ LocalizeError                            70  results that no planned round can have produced

A message has what, on what, why, and what to do next; the facts are attributes. One place,
`slurm_health.cli.main`, turns them into a line on stderr and an exit code. `Unmeasured` is apart
from them: no user meets it, it becomes a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path

_MOST_SHOWN = 200  # of one word of a command


class ExitCode(IntEnum):
    """Exit codes of every command except a wrapped job, which ends with its script's own code."""

    HEALTHY = 0
    BAD_NODES = 1
    USAGE = 2
    INCONCLUSIVE = 3
    UNAVAILABLE = 4
    INTERNAL = 70


class Unmeasured(Exception):
    """A check cannot measure; the text says why."""


class SlurmHealthError(Exception):
    """Root of all errors raised on purpose."""

    exit_code: ExitCode = ExitCode.INTERNAL


class UsageError(SlurmHealthError):
    """The command was called in a way it cannot serve."""

    exit_code = ExitCode.USAGE


class ConfigError(SlurmHealthError):
    """A setting is unknown or impossible; or its source is itself, and then `key` is empty."""

    exit_code = ExitCode.USAGE

    def __init__(self, source: str, key: str, problem: str, *, valid: Iterable[str] = ()) -> None:
        self.source = source
        self.key = key
        self.valid = tuple(valid)
        import difflib  # slow to load, and few configurations are mistaken

        near = difflib.get_close_matches(key, self.valid, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if self.valid and not near:
            hint = f"; valid: {', '.join(self.valid)}"
        what = f"{source}: {key}:" if key else source
        super().__init__(f"{what} {problem}{hint}")


class AllocationError(SlurmHealthError):
    """The allocation cannot be read from the environment."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, variable: str, problem: str) -> None:
        self.variable = variable
        super().__init__(f"{variable}: {problem}")


class SlurmError(SlurmHealthError):
    """Slurm refused a request, or did not answer it."""

    exit_code = ExitCode.UNAVAILABLE

    @property
    def in_short(self) -> str:
        """The error without the options of the command that was run."""
        return str(self)


class SlurmCommandMissing(SlurmError):
    """A Slurm command is not on the PATH."""

    def __init__(self, command: str) -> None:
        self.command = command
        super().__init__(
            f"{command} not found on PATH: load Slurm's environment, or run this on a node of the"
            " cluster"
        )


# The words of Slurm's commands on a machine with no other part of Slurm.
_NO_CLUSTER = "Could not establish a configuration source"


class SlurmCommandError(SlurmError):
    """A Slurm command ended with a non-zero code."""

    def __init__(self, argv: Sequence[str], returncode: int, stderr: str) -> None:
        self.argv = tuple(argv)
        self.returncode = returncode
        self.stderr = stderr
        message = " / ".join(line.strip() for line in stderr.splitlines() if line.strip())
        if _NO_CLUSTER in stderr:  # instead of its lines about DNS
            message = "no slurm.conf here; run this on a node of the cluster, or set SLURM_CONF"
        self._how = f"failed with code {returncode}: {message or '(no output)'}"
        super().__init__(f"{_shown(argv)} {self._how}")

    @property
    def in_short(self) -> str:
        """The error with the name of the command alone."""
        return f"{self.argv[0]} {self._how}"


def _shown(argv: Sequence[str]) -> str:
    """Return a command to read: the list of a thousand nodes is cut."""
    return " ".join(
        word if len(word) <= _MOST_SHOWN else f"{word[:_MOST_SHOWN]}..." for word in argv
    )


class UnknownJob(SlurmError):
    """Slurm has no such job, or has forgotten it."""

    def __init__(self, job_id: int | str, *, accounts: bool | None = None) -> None:
        self.job_id = job_id
        where = {
            None: f"where Slurm keeps accounts, look for it with: sacct -j {job_id}",
            True: f"look for it with: sacct -j {job_id}",
            False: "Slurm keeps no accounts here to look it up",
        }[accounts]
        super().__init__(
            f"Slurm does not know job {job_id}: it ended some time ago, or there never was one;"
            f" {where}"
        )


class SlurmTimeoutError(SlurmError):
    """A Slurm command did not end before its deadline and was killed."""

    def __init__(self, argv: Sequence[str], deadline_s: float) -> None:
        self.argv = tuple(argv)
        self.deadline_s = deadline_s
        self._how = (
            f"did not answer within {deadline_s:g} s;"
            " see whether slurmctld is up with: scontrol ping"
        )
        super().__init__(f"{_shown(argv)} {self._how}")

    @property
    def in_short(self) -> str:
        """The error with the name of the command alone."""
        return f"{self.argv[0]} {self._how}"


class JournalError(SlurmHealthError):
    """The journal cannot be read or written."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        super().__init__(f"journal {path}: {problem}")


class RecordTooNew(JournalError):
    """A record was written by a newer slurm-health than this one."""

    def __init__(self, path: Path, version: int, known: int) -> None:
        self.version = version
        super().__init__(
            path,
            f"holds records of version {version}, this slurm-health reads up to {known};"
            " use the slurm-health that wrote it, or a newer one",
        )


class JournalBusy(JournalError):
    """Another master is at work on the same run."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "another master is running this check; wait for it, or end it first")


class RunNotFound(SlurmHealthError):
    """There is no journal of the requested job.

    `clusters` have one of that id, if a job of another cluster was requested.
    """

    exit_code = ExitCode.UNAVAILABLE

    def __init__(
        self,
        job: str,
        root: Path,
        near: Iterable[str] = (),
        reason: str = "",
        clusters: Iterable[str] = (),
    ) -> None:
        self.job = job
        self.root = root
        self.near = tuple(near)
        self.clusters = tuple(clusters)
        newest = f" (newest there: {', '.join(self.near)})" if self.near else ""
        why = reason.rstrip() or "was it submitted with slurm-health sbatch?"
        super().__init__(
            f"no journal of job {job} under {root}{'' if reason else newest}; "
            + (why if why.endswith((".", "?")) else f"{why}.")
            + " If its journal is elsewhere, give --journal DIR"
        )

    def with_reason(self, reason: str) -> RunNotFound:
        """Return the same error with Slurm's reason, empty for none."""
        return RunNotFound(self.job, self.root, self.near, reason, self.clusters)


class IndexUnusable(SlurmHealthError):
    """The index of the history cannot be used where it lies."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(
        self,
        where: Path | str,
        problem: str,
        *,
        fix: str = "choose another directory with XDG_CACHE_HOME",
    ) -> None:
        self.where = where
        super().__init__(f"history index {where}: {problem}; {fix}")


class ChannelError(SlurmHealthError):
    """The nodes of a run that share no directory cannot talk with node 0."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, address: str, problem: str) -> None:
        self.address = address
        super().__init__(f"{address}: {problem}")


class PackageMissing(SlurmHealthError):
    """A request needs a package of an extra."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, what: str, package: str, extra: str) -> None:
        self.package = package
        super().__init__(
            f"{what} needs {package}, which is not installed: pip install 'slurm-health[{extra}]'"
        )


class NotWritten(SlurmHealthError):
    """A file that the user named cannot be written."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, path: Path, err: OSError) -> None:
        self.path = path
        super().__init__(
            f"{path} cannot be written: {err.strerror or err}; name a file in another directory"
        )


class NoRoom(SlurmHealthError):
    """No temporary directory has room for a file."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, name: str, problem: str) -> None:
        self.name = name
        super().__init__(
            f"{name}: no temporary directory takes a copy of it: {problem};"
            " set TMPDIR to a directory with room"
        )


class LocalizeError(SlurmHealthError):
    """Results do not belong to a round that was planned."""
