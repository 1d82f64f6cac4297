# SPDX-License-Identifier: Apache-2.0
"""What slurm-health asks of Slurm and does in it; Slurm's own commands do all that changes it."""

from __future__ import annotations

import pwd
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from slurm_health.core.nodeset import fold
from slurm_health.errors import SlurmCommandError, SlurmError
from slurm_health.slurm import command
from slurm_health.slurm.parsing import Job, JobId, Node, Partition, Size, parse_pairs, partition_of
from slurm_health.slurm.reads import Reads
from slurm_health.slurm.reads_choice import choose

# The controller did not get to see the request, so it can be sent again.
_UNREACHABLE = re.compile(r"Unable to contact slurm controller|Connection refused")
RETRY_S = 1.0
_SIZE = "NumNodes:.20,NumCPUs:.20,NumTasks:.20"


class Client:
    """Slurm's commands, with an environment that the surrounding job does not disturb.

    A job is named by its id, or as `12_3` where it is a task of an array. A controller that is
    being restarted is asked again for up to `patience_s`.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        patience_s: float = 60.0,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._environ = command.clean_environ(environ)
        self._patience_s = patience_s
        self._monotonic = monotonic
        self._sleep = sleep

    @cached_property
    def _reads(self) -> Reads:
        return choose(lambda argv: self._run(*argv)).reads

    def job(self, job_id: JobId) -> Job:
        """Read one job.

        Raises:
            UnknownJob: Slurm does not know it, or no longer.
            SlurmError: Slurm does not answer.
        """
        return self._reads.job(job_id)

    def nodes(self, names: Sequence[str]) -> dict[str, Node]:
        """Read some nodes in one call.

        Raises:
            SlurmError: Slurm does not know one of them, or does not answer.
        """
        return self._reads.nodes(names)

    def partitions(self) -> dict[str, Partition]:
        """Read all partitions, hidden ones too, in one call.

        Raises:
            SlurmError: Slurm does not answer.
        """
        text = self._run("scontrol", "show", "partition", "-a", "-o")
        found = [partition_of(parse_pairs(line)) for line in text.splitlines() if line.strip()]
        return {partition.name: partition for partition in found}

    def may_drain(self, uid: int) -> bool:
        """Tell whether a user may drain nodes, without trying.

        A refused attempt is logged as a security violation and still costs the controller a
        full pass over its state.

        Raises:
            SlurmError: Slurm does not answer.
        """
        if uid == 0:
            return True
        config = self._run("scontrol", "show", "config")
        slurm_user = re.search(r"^SlurmUser\s*=\s*\S+\((\d+)\)", config, re.MULTILINE)
        if slurm_user and int(slurm_user.group(1)) == uid:
            return True
        if re.search(r"^AccountingStorageType\s*=\s*\S*slurmdbd", config, re.MULTILINE):
            return self._is_administrator(uid)
        return False

    def drain(self, nodes: Sequence[str], reason: str) -> None:
        """Drain nodes in one call.

        Raises:
            SlurmError: it was refused, or Slurm does not answer.
        """
        self._run(
            "scontrol", "update", f"NodeName={fold(nodes)}", "State=DRAIN", f"Reason={reason}"
        )

    def update_job(self, job_id: JobId, **changes: str) -> None:
        """Change fields of a job.

        Raises:
            SlurmError: it was refused, or Slurm does not answer.
        """
        pairs = [f"{key}={value}" for key, value in changes.items()]
        self._run("scontrol", "update", f"JobId={self._reference(job_id)}", *pairs)

    def comment(self, job_id: JobId) -> str:
        """Return the comment of a job that has not ended, whole.

        What `job` reads ends at the first word of it that looks like a field.

        Raises:
            SlurmError: Slurm does not answer.
        """
        text = self._run("squeue", "--noheader", f"--jobs={job_id}", "--format=%k").rstrip("\n")
        return "" if text == "(null)" else text

    def size(self, job_id: JobId) -> Size:
        """Return how much a job asks for, or has.

        Raises:
            SlurmError: Slurm does not answer, or not with numbers.
        """
        text = self._run("squeue", "--noheader", f"--jobs={job_id}", f"--Format={_SIZE}")
        words = text.split()
        if len(words) != 3 or not all(map(str.isdecimal, words)):
            raise SlurmError(f"squeue gives {text!r} as the size of job {job_id}")
        nodes, cpus, tasks = map(int, words)
        return Size(nodes=nodes, cpus=cpus, tasks=tasks)

    def shrink(self, job_id: JobId, keep: Sequence[str], directory: Path) -> None:
        """Let a running job go on with some of its nodes only.

        scontrol leaves shell scripts with the new variables in its working directory, which must
        be writable or the change is refused: `directory` is where they go.

        Raises:
            SlurmError: it was refused, or Slurm does not answer.
        """
        reference = self._reference(job_id)
        self._patiently(
            ["scontrol", "update", f"JobId={reference}", f"NodeList={fold(keep)}"],
            environ=self._environ,
            directory=directory,
        )

    def requeue_held(self, job_id: JobId) -> None:
        """Requeue a job and hold it. Ends the caller when it runs in that job.

        Raises:
            SlurmError: it was refused, or Slurm does not answer.
        """
        self._run("scontrol", "requeuehold", self._reference(job_id))

    def release(self, job_id: JobId) -> None:
        """Release a held job.

        Raises:
            SlurmError: it was refused, or Slurm does not answer.
        """
        self._run("scontrol", "release", self._reference(job_id))

    def submit(self, arguments: Sequence[str], script: str, environ: Mapping[str, str]) -> int:
        """Submit a batch script; return the job's id.

        Raises:
            SlurmError: it was refused, or Slurm does not answer.
        """
        answer = self._patiently(
            ["sbatch", "--parsable", *arguments], environ=environ, stdin=script.encode()
        )
        found = re.match(r"\s*(\d+)", answer)
        if found is None:
            raise SlurmError(f"sbatch --parsable answered {answer.strip()!r}, expected a job id")
        return int(found.group(1))

    def jobs_named(self, name: str, uid: int) -> list[int]:
        """Return the ids of a user's jobs of that name that have not ended.

        Raises:
            SlurmError: Slurm does not answer.
        """
        user = pwd.getpwuid(uid).pw_name
        text = self._run("squeue", "--noheader", f"--user={user}", f"--name={name}", "--format=%A")
        return [int(word) for word in text.split() if word.isdigit()]

    def cancel(self, job_id: int) -> None:
        """Cancel a job.

        Raises:
            SlurmError: it was refused, or Slurm does not answer.
        """
        self._run("scancel", str(job_id))

    def _reference(self, job_id: JobId) -> str:
        """Return what to call a job; a name is one already, a number may be that of an array."""
        return job_id if isinstance(job_id, str) else self.job(job_id).reference

    def _is_administrator(self, uid: int) -> bool:
        try:
            user = pwd.getpwuid(uid).pw_name
            level = self._run(
                "sacctmgr", "--noheader", "--parsable2", "show", "user", user, "format=adminlevel"
            )
        except (KeyError, SlurmCommandError):
            return False
        return "Administrator" in level

    def _run(self, *argv: str) -> str:
        return self._patiently(argv, environ=self._environ)

    def _patiently(
        self,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str],
        stdin: bytes = b"",
        directory: Path | None = None,
    ) -> str:
        give_up_s = self._monotonic() + self._patience_s
        while True:
            try:
                return command.run(argv, environ=environ, stdin=stdin, directory=directory)
            except SlurmCommandError as err:
                if not _UNREACHABLE.search(err.stderr) or self._monotonic() >= give_up_s:
                    raise
            self._sleep(RETRY_S)
