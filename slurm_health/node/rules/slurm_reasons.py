# SPDX-License-Identifier: Apache-2.0
"""The reasons with which Slurm drains or downs nodes by itself: their meaning, and what lifts them.

They are those of Slurm 22.05 to 26.05, from its sources. A text that is not in the table is an
administrator's, and nothing of ours lifts it. Pure.
"""

from __future__ import annotations

import re
from enum import Enum

import msgspec


class Return(Enum):
    """What returns a node to service, by its reason."""

    PROCESSES = "the processes are gone and what they waited for answers"
    SPOOL = "SlurmdSpoolDir can be written and has space and inodes"
    REGISTRATION = "Slurm accepts the node's registration"
    ANSWER = "slurmd answers and the checks of the node pass"
    CHECKS = "the checks of the node pass"
    ADMINISTRATOR = "an administrator resumes it"
    SLURM = "Slurm returns it as soon as the job's processes are gone"


class SlurmReason(msgspec.Struct, frozen=True, kw_only=True):
    """One of Slurm's reasons.

    Args:
        name: for commands and records.
        texts: as Slurm writes it: `*` stands for one word, `**` for the rest.
        lifted_by: its rule of return.
        meaning: what happened.
        evidence: where its cause shows.
        advice: what an administrator does.
    """

    name: str
    texts: tuple[str, ...]
    lifted_by: Return
    meaning: str
    evidence: str
    advice: str


REASONS = (
    SlurmReason(
        name="kill-task-failed",
        texts=("Kill task failed", "Kill task failed (JobId=* StepId=*)"),
        lifted_by=Return.PROCESSES,
        meaning="processes of a step outlived SIGKILL for UnkillableStepTimeout",
        evidence="the kernel function they wait in, their mount or GPU; slurmd.log",
        advice="repair the mount or GPU they wait for; reboot the node if they never end",
    ),
    SlurmReason(
        name="step-not-running",
        texts=("Job step not running", "Job step not running (JobId=* StepId=*)"),
        lifted_by=Return.PROCESSES,
        meaning="slurmstepd hung before the step began: container, plugin or home directory",
        evidence="the kernel function slurmstepd waits in; slurmd.log",
        advice="repair what slurmstepd waits for",
    ),
    SlurmReason(
        name="duplicate-job",
        texts=("Duplicate jobid",),
        lifted_by=Return.PROCESSES,
        meaning="a requeued job met its own earlier step, which still runs on the node",
        evidence="the earlier slurmstepd and its processes",
        advice="end the earlier step; reboot the node if it cannot be killed",
    ),
    SlurmReason(
        name="prolog-error",
        texts=("Prolog error", "Prolog/Epilog failure", "Prolog or job env setup failure"),
        lifted_by=Return.ADMINISTRATOR,
        meaning="the Prolog failed, is missing, or was killed",
        evidence="the line `prolog failed: rc:` in slurmd.log, with the script's output",
        advice="repair what the Prolog complains about, then resume the node",
    ),
    SlurmReason(
        name="epilog-error",
        texts=("Epilog error",),
        lifted_by=Return.ADMINISTRATOR,
        meaning="the Epilog failed, is missing, or was killed",
        evidence="the line `epilog failed: rc:` in slurmd.log, with the script's output",
        advice="do by hand what the Epilog left undone, then resume the node",
    ),
    SlurmReason(
        name="batch-failure",
        texts=("batch job complete failure",),
        lifted_by=Return.ADMINISTRATOR,
        meaning="slurmstepd could not run a batch script: a SPANK plugin, the spool or I/O",
        evidence="the line `slurm_rc =` in slurmd.log; several nodes at once: the configuration",
        advice="repair the plugin or the configuration first: each job drains one more node",
    ),
    SlurmReason(
        name="job-environment",
        texts=("Job env setup error",),
        lifted_by=Return.CHECKS,
        meaning="the user's shell profile or home directory failed as Slurm read it (until 24.11)",
        evidence="the user's shell profile; whether the home directory answers",
        advice="the node is not at fault: tell the user",
    ),
    SlurmReason(
        name="spool-full",
        texts=("SlurmdSpoolDir is full",),
        lifted_by=Return.SPOOL,
        meaning="slurmd could not write a credential or a script",
        evidence="df and df -i of SlurmdSpoolDir",
        advice="free space there; keep SlurmdSpoolDir apart from logs and /tmp",
    ),
    SlurmReason(
        name="rebooted",
        texts=("Node unexpectedly rebooted",),
        lifted_by=Return.ANSWER,
        meaning="the node booted without an order of Slurm's: power, kernel panic, watchdog",
        evidence="the kernel's log before the boot, the BMC's event log",
        advice="look for the cause; a second time within a day, take the node out",
    ),
    SlurmReason(
        name="not-responding",
        texts=("Not responding", "ResumeTimeout reached", "reboot timed out"),
        lifted_by=Return.ANSWER,
        meaning="slurmd did not answer for SlurmdTimeout, or did not come back from a boot",
        evidence="whether the machine answers; slurmd's process and log",
        advice="look at the machine; ReturnToService=1 or 2 returns it unchecked once it answers",
    ),
    SlurmReason(
        name="low-resources",
        texts=(
            "Low RealMemory (reported:* < * of configured:*)",
            "Low RealMemory",
            "Low CPUs",
            "Low TmpDisk",
            "Low socket*core*thread count",
            "CoreSpec differ",
        ),
        lifted_by=Return.REGISTRATION,
        meaning="the node has less than slurm.conf says: lost hardware, or a wrong line",
        evidence="the figures in the reason; `slurmd -C` on the node",
        advice="repair the hardware, or correct the node's line in slurm.conf",
    ),
    SlurmReason(
        name="gres",
        texts=(
            "gres/* count reported lower than configured (* < *)",
            "gres/* count too low (* < *)",
            "gres/* count changed and jobs are using them (* != *)",
            "gres/* type (*) reported but not configured",
            "gres/* type changed and jobs are using them",
            "Could not unpack gres data",
        ),
        lifted_by=Return.REGISTRATION,
        meaning="the node reports fewer or other GPUs than slurm.conf says",
        evidence="nvidia-smi, the kernel's log (Xid 79); gres.conf; the driver at boot",
        advice="repair the GPU or gres.conf, then restart slurmd",
    ),
    SlurmReason(
        name="configuration",
        texts=(
            "Reported active features (*) are not a superset **",
            "RestrictedCoresPerGPU**",
            "Failed to parse dynamic_conf nodeline**",
            "Failed to set topology**",
            "gres/* GRES core specification **",
            "gres/* GRES autodetected core affinity **",
        ),
        lifted_by=Return.REGISTRATION,
        meaning="the node's features, cores or topology, or a GPU's cores, do not fit slurm.conf",
        evidence="slurmctld.log; `slurmd -C`",
        advice="correct the configuration, such as Cores= in gres.conf, then restart slurmd",
    ),
    SlurmReason(
        name="plugin",
        texts=("Bad core count", "switch_g_job_postfini failed", "NO NETWORK ADDRESS FOUND"),
        lifted_by=Return.ADMINISTRATOR,
        meaning="a plugin or the name service failed in slurmctld",
        evidence="slurmctld.log",
        advice="repair the plugin or the name service, then resume the node",
    ),
)
# No reason of Slurm's: it drains nothing, and only shows the state.
COMPLETING = SlurmReason(
    name="completing",
    texts=("COMPLETING",),
    lifted_by=Return.SLURM,
    meaning="a job has ended and its node is not free: the Epilog or slurmstepd still runs",
    evidence="the Epilog's process, slurmstepd, processes that cannot be killed",
    advice="look at that process; set EpilogTimeout or PrologEpilogTimeout",
)
BY_NAME = {row.name: row for row in (*REASONS, COMPLETING)}
# The rule of a text of several parts is the strictest of them.
_STRICTEST = (Return.ADMINISTRATOR, Return.PROCESSES, Return.REGISTRATION)
_PARTS = re.compile(r", (?![^(]*\))")
_PATTERNS = {
    row.name: "|".join(
        re.escape(text).replace(r"\*\*", ".*").replace(r"\*", r"\S*") for text in row.texts
    )
    for row in REASONS
}


def kind_of(reason: str) -> SlurmReason | None:
    """Return Slurm's reason in a text without its signature; None for an administrator's text.

    Slurm joins several with commas: every part must be known.
    """
    rows = []
    for part in _PARTS.split(reason.strip()):
        row = next((row for row in REASONS if re.fullmatch(_PATTERNS[row.name], part)), None)
        if row is None:
            return None
        rows.append(row)
    first = {row.lifted_by: row for row in reversed(rows)}
    return next((first[rule] for rule in _STRICTEST if rule in first), rows[0])


def explained(words: str) -> SlurmReason | None:
    """Return the row of a reason, of its name, or of a line of sinfo that holds one."""
    words = re.sub(r"\s*\[[^][]*@[^][]*\]\s*$", "", words.strip())
    named = BY_NAME.get(words.lower()) or (COMPLETING if words == "COMPLETING" else None)
    return named or kind_of(words)


def job_in(reason: str) -> int:
    """Return the job that Slurm names in its reason, 0 for none."""
    match = re.search(r"\(JobId=(\d{1,10})\b", reason)
    return int(match[1]) if match else 0
