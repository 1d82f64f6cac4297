# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job whose nodes could not be checked, and what is said of it. Pure.

Nothing is known of its nodes then, neither good nor bad: no node is drained, excluded or accused.
"""

from __future__ import annotations

from slurm_health.preflight.decide.decision import Ending
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
from slurm_health.records.records import Disposition, Unchecked
from slurm_health.records.text import REASON_PREFIX, cut, plain

WORD = "UNCHECKED"
_HELD = f"{REASON_PREFIX} held ({WORD}"
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
    """Return what is said of it wherever it is said: that, why, and what to do."""
    return f"{WORD}: {unchecked.reason}; {unchecked.remedy}"


def end(unchecked: Unchecked, choice: OnUnchecked, *, released: bool = False) -> Ending:
    """Decide what becomes of the job.

    With `released` it was held for this before: a person has let it go since, and that is the
    answer.
    """
    reason = text(unchecked)
    match choice:
        case OnUnchecked.PROCEED:
            return _ending(Disposition.PROCEED, reason)
        case OnUnchecked.HOLD if released:
            return _ending(Disposition.PROCEED, f"{reason}; it was held for that and released")
        case OnUnchecked.HOLD:
            return _ending(Disposition.HOLD, f"{reason} (--on-unchecked=hold)")
        case OnUnchecked.STOP:
            return _ending(Disposition.STOP, f"{reason} (--on-unchecked=stop)")


def not_held(unchecked: Unchecked, obstacle: str) -> Ending:
    """Decide for a job that was to be held and cannot be."""
    reason = f"{text(unchecked)}; it cannot be held (--on-unchecked=hold): {obstacle}"
    return _ending(Disposition.STOP, reason)


def note(unchecked: Unchecked) -> str:
    """Return the comment on a job where the journal cannot say it."""
    return f"{REASON_PREFIX} {_short(unchecked)}"


def holding_note(unchecked: Unchecked, job: str) -> str:
    """Return the comment on a job that waits for a person."""
    why = _short(unchecked).removeprefix(WORD)
    return f"{_HELD}{why}). To start it anyway: scontrol release {job}"


def was_held(comment: str) -> bool:
    """Tell from a job's comment whether it was held because it could not be checked."""
    return comment.startswith(_HELD)


def said_in(comment: str) -> str:
    """Return what a job's comment says of a check that could not be; empty where it says nothing.

    The job's own comment behind it is left out.
    """
    own = own_comment(comment)
    ours = "" if own == comment else comment.removesuffix(with_own_comment("", own))
    return ours.removeprefix(REASON_PREFIX).strip() if WORD in ours else ""


def _ending(disposition: Disposition, reason: str) -> Ending:
    return Ending(disposition=disposition, exit_code=ExitCode.UNAVAILABLE, reason=reason)


def _short(unchecked: Unchecked) -> str:
    # A word with an equals sign is taken for a field by who reads a job, and what stands behind a
    # bar may be taken for the job's own comment.
    return cut(plain(text(unchecked)).replace("|", "/").replace("=", " "), _LENGTH)
