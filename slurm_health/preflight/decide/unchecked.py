# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job whose nodes could not be checked, and what is said of it. Pure.

Nothing is known of its nodes then, neither good nor bad: no node is drained, excluded or accused.
"""

from __future__ import annotations

from slurm_health.preflight.decide.facts import own_comment, with_own_comment
from slurm_health.preflight.decide.policy import OnUnchecked
from slurm_health.records.errors import (
    AllocationError,
    ConfigError,
    ExitCode,
    JournalBusy,
    JournalError,
    RecordTooNew,
    SlurmError,
    SlurmHealthError,
)
from slurm_health.records.records import Disposition, JobOutcome, Unchecked
from slurm_health.records.text import REASON_PREFIX, cut, plain

WORD = "UNCHECKED"
_LENGTH = 400  # of a reason with its remedy within a comment
_AGAIN = "correct that and submit the job again"


def unchecked_by(err: SlurmHealthError) -> Unchecked:
    """Return what is to be recorded of a check that an error kept from measuring."""
    match err:
        case RecordTooNew() | JournalBusy():
            remedy = _AGAIN
        case JournalError() if "--journal" not in str(err):
            remedy = "name a directory that every node can use with --journal DIR"
        case SlurmError():
            remedy = "see whether Slurm's commands work in a job: srun hostname"
        case AllocationError():
            remedy = "see the job's variables: env | grep SLURM"
        case ConfigError() | JournalError():
            remedy = _AGAIN
        case _:
            remedy = "report it as an error of slurm-health"
    return Unchecked(reason=str(err), remedy=remedy)


def text(unchecked: Unchecked) -> str:
    """Return what is said of it everywhere: that, why, and what to do."""
    return f"{WORD}: {unchecked.reason}; {unchecked.remedy}"


def outcome(unchecked: Unchecked, choice: OnUnchecked) -> JobOutcome:
    """Decide what becomes of the job."""
    stops = choice is OnUnchecked.STOP
    return JobOutcome(
        disposition=Disposition.STOP if stops else Disposition.PROCEED,
        exit_code=ExitCode.UNAVAILABLE,
        reason=text(unchecked) + (" (--on-unchecked=stop)" if stops else ""),
    )


def note(unchecked: Unchecked) -> str:
    """Return the comment on a job if the journal cannot say it.

    A reader of a job takes a word with an equals sign for a field, and what stands behind a bar
    may be taken for the job's own comment.
    """
    words = plain(text(unchecked)).replace("|", "/").replace("=", " ")
    return f"{REASON_PREFIX} {cut(words, _LENGTH)}"


def said_in(comment: str) -> str:
    """Return what a job's comment says of a check that could not be; empty if it says nothing.

    The job's own comment behind it is left out.
    """
    own = own_comment(comment)
    ours = "" if own == comment else comment.removesuffix(with_own_comment("", own))
    return ours.removeprefix(REASON_PREFIX).strip() if WORD in ours else ""
