# SPDX-License-Identifier: Apache-2.0
"""Whose a node is: still ours alone, or in somebody else's hands by now.

Checks take tens of seconds, and an administrator does not wait for them. So Slurm is asked again
right before anything is done to a node.
"""

from __future__ import annotations

import re

from slurm_health.node.rules import drain_note
from slurm_health.system.slurm.parsing import Node

# What a node that waits for nothing but mending is; CLOUD and DYNAMIC say where it is from.
_IDLE = frozenset({"IDLE", "DRAIN", "CLOUD", "DYNAMIC_NORM"})
# What our own reservation adds to that.
_RESERVED = frozenset({"MAINTENANCE", "RESERVED"})
# Marks behind the word of a state: down, rebooting, powered down, in maintenance.
_MARKS = "*@^$~!%#"
_RESERVED_MARK = "$"
# Whatever else a node in our reservation is, it runs no test then.
_OUT_OF_SERVICE = ("DOWN", "FAIL", "FUTURE", "INVAL", "NOT_RESP", "POWER", "REBOOT")
# What slurmctld says of a node that it takes down itself. It signs with the name of SlurmUser,
# which need not be this.
_BY_SLURM = re.compile(
    r"Not responding|Node unexpectedly rebooted|Node silently failed and came back"
    r"|reboot timed out|ResumeTimeout reached"
)
_SLURM_USER = "slurm"


class NotOurs(Exception):
    """Nothing is done to a node, for it is in somebody else's hands by now; the text says how."""


def why_not_now(now: Node, note: str, *, reserved: bool = False) -> str:
    """Return why nothing may be done to a node now; empty where it is ours alone, and idle.

    With `reserved` it is in a reservation of our own.
    """
    if not now.drained or drain_note.unsigned(now.reason) != note:
        return f"it is no longer drained by us alone: {now.state}: {now.reason or '(no reason)'}"
    idle, marks = (_IDLE | _RESERVED, _RESERVED_MARK) if reserved else (_IDLE, "")
    if not now.states <= idle or any(mark in now.state for mark in _MARKS if mark not in marks):
        return f"it is {now.state}"
    return ""


def require_ours(now: Node, note: str, *, reserved: bool = False) -> None:
    """Let something be done to a node only where it is still ours alone, and idle.

    Raises:
        NotOurs: it is not.
    """
    why_not = why_not_now(now, note, reserved=reserved)
    if why_not:
        raise NotOurs(why_not)


def taken(now: Node) -> str:
    """Return how a node in our quarantine has come into other hands; empty where it has not.

    One that Slurm itself took down is in nobody's, and may come back by itself.
    """
    if now.drained:
        return f"it was drained again while in quarantine: {now.reason or '(no reason)'}"
    if _is_out_of_service(now) and now.reason and not (_is_of_slurm(now.reason) or _ours(now)):
        return f"it was taken out of service while in quarantine: {now.state}: {now.reason}"
    return ""


def why_not_drained(now: Node) -> str:
    """Return why a node in our quarantine, which nobody has taken, must not be drained now.

    Empty where it may be: it is in service, with no note but one of ours.
    """
    if _is_out_of_service(now):
        return f"it is {now.state}: {now.reason or '(no reason)'}"
    if now.reason and not _ours(now):
        return f"it has a note already: {now.reason}"
    return ""


def _is_out_of_service(now: Node) -> bool:
    marks = _MARKS.replace(_RESERVED_MARK, "")
    return any(word.startswith(_OUT_OF_SERVICE) for word in now.states) or any(
        mark in now.state for mark in marks
    )


def _is_of_slurm(reason: str) -> bool:
    text, who, _ = drain_note.signed(reason)
    return who == _SLURM_USER or _BY_SLURM.fullmatch(text) is not None


def _ours(now: Node) -> bool:
    return drain_note.is_ours(now.reason) and not drain_note.is_edited(now.reason)
