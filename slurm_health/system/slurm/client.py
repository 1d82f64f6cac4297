# SPDX-License-Identifier: Apache-2.0
"""Queries of Slurm, and changes in it by Slurm's own commands."""

from __future__ import annotations

import math
import pwd
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

from slurm_health.records.errors import LocalizeError, SlurmCommandError, SlurmError, UnknownJob
from slurm_health.records.nodeset import fold
from slurm_health.records.text import whole_number
from slurm_health.system import SYSTEM_PATH
from slurm_health.system.slurm import command, parsing
from slurm_health.system.slurm.command import PRINT_EPOCH
from slurm_health.system.slurm.job_gres import NodeGres, gres_of
from slurm_health.system.slurm.parsing import parse_topology
from slurm_health.system.slurm.reads import Reads, Run, pyslurm_obstacle, release

# The controller never received the request, so it can be sent again.
_UNREACHABLE = re.compile(r"Unable to contact slurm controller|Connection refused")
RETRY_S = 1.0
_FORGETS_AT_ONCE = (23, 2)
_MAIL = "/bin/mail"  # Slurm's default (slurm.conf(5), MailProg)
_SIZE = "NumNodes:.20,NumCPUs:.20,NumTasks:.20"


class Client:
    """Slurm's commands, in an environment without variables of the surrounding job.

    Every method raises SlurmError if Slurm refuses, does not answer within `deadline_s`, or gives
    an answer that cannot be read. While a controller restarts, requests are retried for up to
    `patience_s`. No request starts, and none is waited for, after `give_up_s` of the monotonic
    clock.

    A job is named by its id, but one task of an array always as `12_3`: its id may be that of the
    whole array, and a command with that id means every task.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        patience_s: float = 60.0,
        deadline_s: float = command.DEADLINE_S,
        give_up_s: float = math.inf,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        kept = command.clean_environ(environ)
        # With it scontrol shows users the nodes that are in hidden partitions only.
        self._environ = {**kept, "SCONTROL_ALL": "1", "PATH": environ.get("PATH") or SYSTEM_PATH}
        self._patience_s = patience_s
        self._deadline_s = deadline_s
        self._give_up_s = give_up_s
        self._monotonic = monotonic
        self._sleep = sleep

    @classmethod
    def for_hook(
        cls, environ: Mapping[str, str], *, limit_s: float, give_up_s: float = math.inf
    ) -> Self:
        """Return a client that does not retry: the node waits for its hook."""
        return cls(environ, patience_s=0.0, deadline_s=limit_s, give_up_s=give_up_s)

    @cached_property
    def _reads(self) -> Reads:
        run: Run = lambda argv: self._run(*argv)  # noqa: E731 - needed twice
        return Reads(run, pyslurm=not pyslurm_obstacle(run))

    @cached_property
    def config(self) -> dict[str, str]:
        """The fields of slurm.conf as slurmctld has them."""
        return parsing.parse_config(self._run("scontrol", "show", "config"))

    # --- queries ---------------------------------------------------------------------------------

    def job(self, job_id: parsing.JobId) -> parsing.Job:
        """Read one job.

        Raises:
            UnknownJob: Slurm does not know it, or no longer.
        """
        try:
            return self._reads.job(job_id)
        except UnknownJob as err:
            raise UnknownJob(err.job_id, accounts=self.keeps_accounts()) from err

    def keeps_accounts(self) -> bool | None:
        """Return whether sacct knows jobs that have ended, None if that is unknown."""
        try:
            storage = self.config.get("AccountingStorageType", "")
        except SlurmError:
            return None
        return storage not in {"", "accounting_storage/none"}

    def nodes(self, names: Sequence[str] = ()) -> dict[str, parsing.Node]:
        """Read some nodes, or all, in one call; one that Slurm does not know is an error."""
        return self._reads.nodes(names)

    def node(self, name: str) -> parsing.Node:
        """Read one node."""
        return self._reads.nodes([name])[name]

    def partitions(self) -> dict[str, parsing.Partition]:
        """Read all partitions, hidden ones too, in one call."""
        text = self._run("scontrol", "show", "partition", "-a", "-o")
        lines = (line for line in text.splitlines() if line.strip())
        partitions = (parsing.partition_of(parsing.parse_pairs(line)) for line in lines)
        return {partition.name: partition for partition in partitions}

    def listed_nodes(self, partition: str) -> list[parsing.ListedNode]:
        """List the nodes of a partition, hidden or not, in one call."""
        which = ("--Node", f"--partition={partition}", f"--format={parsing.LISTED_NODE}")
        text = self._run("sinfo", "--noheader", *which)
        return [node for line in text.splitlines() if (node := parsing.listed_node_of(line))]

    def reservations(self) -> dict[str, dict[str, str]]:
        """Return the fields of every reservation that Slurm shows, by name."""
        # All of them: for a name that does not exist, scontrol fails without a message.
        lines = self._run("scontrol", "show", "reservation", "-o").splitlines()
        shown = [parsing.parse_pairs(line) for line in lines]
        return {
            fields["ReservationName"]: fields for fields in shown if "ReservationName" in fields
        }

    def leaves(self) -> dict[str, tuple[str, ...]]:
        """Return the nodes below every leaf switch; none if Slurm has no topology."""
        try:
            return parse_topology(self._run("scontrol", "show", "topology"))
        except (SlurmCommandError, LocalizeError):
            return {}

    def comment(self, job_id: parsing.JobId) -> str:
        """Return the whole comment of a job that Slurm still knows.

        In the fields of `job` it ends at the first word that looks like a field.
        """
        text = self._squeue("--states=all", f"--jobs={job_id}", "--format=%k").rstrip("\n")
        return "" if text == "(null)" else text

    def batch_script(self, job_id: parsing.JobId) -> str:
        """Return a batch job's script, which Slurm shows to its owner and to administrators."""
        return self._run("scontrol", "write", "batch_script", str(job_id), "-")

    def size(self, job_id: parsing.JobId) -> parsing.Size:
        """Return how much a job requests, or has."""
        text = self._squeue(f"--jobs={job_id}", f"--Format={_SIZE}")
        words = text.split()
        if len(words) != 3 or not all(map(str.isdecimal, words)):
            raise SlurmError(f"squeue gives {text!r} as the size of job {job_id}")
        nodes, cpus, tasks = map(int, words)
        return parsing.Size(nodes=nodes, cpus=cpus, tasks=tasks)

    def start_s(self, job_id: parsing.JobId) -> int:
        """Return the start of a job that has not ended, in seconds since the epoch.

        0 without one. A requeued job has none, or one in the future.
        """
        text = self._squeue(f"--jobs={job_id}", "--format=%S").strip()
        return whole_number(text) or 0

    def gres(self, job_id: parsing.JobId) -> dict[str, NodeGres]:
        """Return the generic resources of a running job, by node."""
        text = self._run("scontrol", "show", "job", "-d", "-o", str(job_id))
        try:
            return gres_of(text)
        except ValueError as err:
            raise SlurmError(f"scontrol show job {job_id} names nodes strangely: {err}") from err

    def jobs_named(self, name: str, uid: int) -> list[int]:
        """Return the ids of a user's jobs of that name that have not ended."""
        text = self._squeue(f"--user={uid}", f"--name={name}", "--format=%A")
        return [int(word) for word in text.split() if word.isdigit()]

    def jobs_of(self, uid: int) -> list[parsing.ListedJob]:
        """Return a user's jobs that Slurm still knows, those that have ended too."""
        text = self._squeue("--states=all", f"--user={uid}", f"--Format={parsing.LISTED_JOB}")
        return [
            job for line in text.splitlines() if (job := parsing.listed_job_of(line)) is not None
        ]

    def completing(self) -> list[parsing.CompletingJob]:
        """Return the jobs in COMPLETING, with the nodes that are not free yet."""
        text = self._squeue("--states=COMPLETING", f"--format={parsing.COMPLETING_JOB}")
        jobs = (parsing.completing_job_of(line) for line in text.splitlines())
        return [job for job in jobs if job is not None]

    def unended(self, uid: int | None) -> list[int]:
        """Return the ids of jobs that wait, run or end, of a user or of all users.

        Array tasks that Slurm still keeps together have the id of the array.
        """
        whose = () if uid is None else (f"--user={uid}",)
        text = self._squeue("--array", *whose, "--format=%A")
        return [int(word) for word in text.split() if word.isdigit()]

    def cluster_name(self) -> str:
        """Return the name of the cluster whose Slurm answers."""
        cluster = self.config.get("ClusterName", "")
        if not cluster:
            raise SlurmError("scontrol show config names no cluster")
        return cluster

    def mail_program(self) -> str:
        """Return the program by which Slurm sends mail to users."""
        return self.config.get("MailProg", "") or _MAIL

    def forgets_late(self) -> bool:
        """Return whether a node may take a requeued job for an ended one for two seconds.

        slurmd before release 23.02 purges ended jobs at most every two seconds
        (`_clear_expired_job_states` in slurm_cred.c). If the prolog runs at allocation, a requeued
        job that comes back sooner runs no prolog; if its script follows later, slurmd waits 20 s
        for that prolog, drains the node ("Prolog or job env setup failure"), and the job waits two
        minutes for another attempt.

        Raises:
            SlurmError: Slurm does not answer.
        """
        version = release(self.config.get("SLURM_VERSION", ""))
        flags = self.config.get("PrologFlags", "").lower().split(",")
        return version is not None and version < _FORGETS_AT_ONCE and "alloc" in flags

    def cancelled_by(self, job_id: parsing.JobId) -> int | None:
        """Return the uid of the user who cancelled a job; None if Slurm's accounts have none.

        scontrol never shows it. sacct's state of such a job is `CANCELLED by UID`.
        """
        if not self.keeps_accounts():
            return None
        which = ("--allocations", f"--jobs={job_id}", "--format=State%64")
        text = self._run("sacct", "--noheader", "--parsable2", *which)
        match = re.match(r"CANCELLED by (\d{1,10})$", text.strip(), re.ASCII)
        return int(match[1]) if match else None

    def may_drain(self, uid: int) -> bool:
        """Return whether a user may drain nodes, without trying.

        A refused attempt is logged as a security violation and still costs the controller a
        full pass over its state.
        """
        if uid == 0:
            return True
        if self.config.get("SlurmUser", "").endswith(f"({uid})"):
            return True
        if not self.config.get("AccountingStorageType", "").endswith("slurmdbd"):
            return False
        try:
            which = ("show", "user", pwd.getpwuid(uid).pw_name, "format=adminlevel")
            level = self._run("sacctmgr", "--noheader", "--parsable2", *which)
        except (KeyError, SlurmCommandError):
            return False
        return "Administrator" in level

    # --- changes ---------------------------------------------------------------------------------

    def drain(self, nodes: Sequence[str], reason: str) -> None:
        """Drain nodes in one call."""
        self._update(f"NodeName={fold(nodes)}", State="DRAIN", Reason=reason)

    def undrain(self, node: str) -> None:
        """Lift a drain, and nothing else: a node that is down stays down."""
        self._update(f"NodeName={node}", State="UNDRAIN")

    def resume(self, node: str) -> None:
        """Return a node to service that is down."""
        self._update(f"NodeName={node}", State="RESUME")

    def reboot(self, node: str, reason: str) -> None:
        """Reboot a node that is drained, and keep it drained with this reason.

        Without ASAP and nextstate: on 22.05, with either of them, the node returns to the pool
        unchecked as soon as it is up, and its reason is gone.
        """
        self._run("scontrol", "reboot", f"reason={reason}", node)

    def update_job(self, job_id: parsing.JobId, **changes: str) -> None:
        """Change fields of a job."""
        self._update(f"JobId={job_id}", **changes)

    def shrink(self, job_id: parsing.JobId, keep: Sequence[str], directory: Path) -> None:
        """Let a running job continue with some of its nodes only.

        scontrol writes shell scripts with the new variables into its working directory, and
        refuses the change if it cannot: they go to `directory`.
        """
        change = [f"JobId={job_id}", f"NodeList={fold(keep)}"]
        self._run("scontrol", "update", *change, directory=directory)

    def requeue_held(self, job_id: parsing.JobId) -> None:
        """Requeue a job and hold it. Ends the caller if it runs in that job."""
        self._run("scontrol", "requeuehold", str(job_id))

    def requeue(self, job_id: parsing.JobId) -> None:
        """Requeue a job, which Slurm starts again after two minutes at the earliest."""
        self._run("scontrol", "requeue", str(job_id))

    def release(self, job_id: parsing.JobId) -> None:
        """Release a held job."""
        self._run("scontrol", "release", str(job_id))

    def submit(self, arguments: Sequence[str], script: str, environ: Mapping[str, str]) -> int:
        """Submit a batch script with its environment; return the job's id."""
        sbatch = command.find_sbatch(environ)
        words = [sbatch.path or "sbatch", "--parsable", *arguments]
        answer = self._run(*words, environ=sbatch.environ, stdin=script.encode())
        job_id = re.match(r"\s*(\d+)", answer)
        if job_id is None:
            raise SlurmError(f"sbatch --parsable answered {answer.strip()!r}, expected a job id")
        return int(job_id[1])

    def cancel(self, job_id: parsing.JobId) -> None:
        """Cancel a job."""
        self._run("scancel", str(job_id))

    def steps_of(self, job_id: parsing.JobId) -> list[str]:
        """Return the running steps of a job's script, without slurm-health's own."""
        text = self._squeue("--steps", f"--jobs={job_id}", "--format=%i %j")
        lines = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
        return [
            step
            for step, *name in lines
            if step.rpartition(".")[2].isdigit() and not "".join(name).startswith(command.OWN_STEPS)
        ]

    def kill_steps(self, steps: Sequence[str]) -> None:
        """Send SIGKILL to the tasks of steps, all at once."""
        self._run("scancel", "--signal=KILL", *steps)

    def _update(self, what: str, **changes: str) -> None:
        pairs = [f"{key}={value}" for key, value in changes.items()]
        self._run("scontrol", "update", what, *pairs)

    def _squeue(self, *words: str) -> str:
        """Return squeue's output, hidden partitions too; times are seconds since the epoch."""
        argv = ["squeue", "--all", "--noheader", *words]
        return self._run(*argv, environ={**self._environ, **PRINT_EPOCH})

    def _run(
        self,
        *argv: str,
        environ: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        directory: Path | None = None,
    ) -> str:
        patient_until_s = self._monotonic() + self._patience_s
        while True:
            left_s = self._give_up_s - self._monotonic()
            if left_s <= 0:
                raise SlurmError(f"no time is left to ask: {' '.join(argv)}")
            try:
                return command.run(
                    argv,
                    environ=self._environ if environ is None else environ,
                    stdin=stdin,
                    deadline_s=min(self._deadline_s, left_s),
                    directory=directory,
                )
            except SlurmCommandError as err:
                if not _UNREACHABLE.search(err.stderr) or self._monotonic() >= patient_until_s:
                    raise
            self._sleep(RETRY_S)
