# SPDX-License-Identifier: Apache-2.0
"""The reason of a node that we drain: for administrators, for `nodes`, and to recognise it.

`sinfo -R` shows 20 columns of it, so the fault comes first. For example:
`shealth: /scratch is not mounted check=fs-scratch job=4711 t=1763661234`.
"""

from __future__ import annotations

import re

import msgspec

from slurm_health.records.text import REASON_LENGTH, one_line, plain

_PREFIX = "shealth:"
_NOTE = re.compile(r"shealth: ?(.*) check=(\S+) job=(\d{1,19}) t=(\d{1,19})", re.DOTALL)
# scontrol shows who set a note, and when, behind it.
_SIGNED = re.compile(r"(.*?)\s*\[([^][]*)@([^][@]*)\]\s*", re.DOTALL)
# What slurmctld adds to the note of a node that it reboots (on 22.05): no edit.
_REBOOTED = re.compile(r"(?: : reboot (?:requested|issued|complete))+$")
_NAMES_LENGTH = 80


class DrainNote(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a note. `job` is 0 without a job."""

    checks: tuple[str, ...]
    job: int
    time_s: int
    text: str


def write(note: DrainNote) -> str:
    """Return the note as Slurm gets it: ASCII, one line, cut where Slurm's tools would cut it."""
    names = ",".join(re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) for name in note.checks)
    # Programs that parse scontrol's output take `Word=` for a field of the node.
    text = plain(note.text).replace("=", ":")
    head = f"{_PREFIX} {text}"
    tail = f" check={names[:_NAMES_LENGTH] or '-'} job={note.job} t={note.time_s}"
    return head[: REASON_LENGTH - len(tail)].rstrip() + tail


def parse(reason: str) -> DrainNote | None:
    """Return the parts of one of our notes; None for any other text."""
    parts = _NOTE.fullmatch(unsigned(reason))
    if parts is None:
        return None
    text, names, job, time_s = parts.groups()
    return DrainNote(
        checks=tuple(names.split(",")), job=int(job), time_s=int(time_s), text=one_line(text)
    )


def is_ours(reason: str) -> bool:
    """Return whether slurm-health left this note."""
    return reason.startswith(_PREFIX)


def is_edited(reason: str, written: str = "") -> bool:
    """Return whether a note of ours was edited since it was set: the drain is its editor's now.

    Args:
        reason: as Slurm shows it.
        written: the note as it was set, empty if that is unknown.
    """
    bare = unsigned(reason)
    return bare != written if written else bare.startswith(_PREFIX) and parse(bare) is None


def bare_text(reason: str) -> str:
    """Return a note of ours without its prefix, if it does not parse."""
    return one_line(unsigned(reason).removeprefix(_PREFIX))


def unsigned(reason: str) -> str:
    """Return a note without who set it and when, and without what a reboot has added."""
    return _REBOOTED.sub("", signed(reason)[0])


def signed(reason: str) -> tuple[str, str, str]:
    """Return a note, who set it, and when, as scontrol writes it; empty if it does not say."""
    match = _SIGNED.fullmatch(reason)
    return (match[1], match[2], match[3]) if match else (reason.strip(), "", "")
