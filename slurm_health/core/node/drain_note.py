# SPDX-License-Identifier: Apache-2.0
"""The note a hook leaves on a node it drains: for people, for `nodes`, and to know it again.

For example: `slurm-health: check=gpu job=4711 t=1763661234 GPU 3: 12 uncorrected ECC errors`.
"""

from __future__ import annotations

import re

import msgspec

from slurm_health.core.text import REASON_LENGTH, REASON_PREFIX, plain

_NOTE = re.compile(r"slurm-health: check=(\S+) job=(\d+) t=(\d+) (.*)", re.DOTALL)
# scontrol shows who set a note, and when, behind it.
_SIGNED = re.compile(r"(.*?)\s*\[([^][]*)@([^][@]*)\]\s*", re.DOTALL)


class DrainNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a note says. `job` is 0 when no job was there."""

    checks: tuple[str, ...]
    job: int
    time_s: int
    text: str


def write(note: DrainNote) -> str:
    """Return the note as Slurm gets it: ASCII, one line, cut where Slurm's tools would cut it."""
    # Whoever reads scontrol's output takes `Word=` for a field of the node.
    text = plain(note.text).replace("=", ":")
    names = ",".join(re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) for name in note.checks)
    line = f"{REASON_PREFIX} check={names} job={note.job} t={note.time_s} {text}"
    return line[:REASON_LENGTH].rstrip()


def parse(reason: str) -> DrainNote | None:
    """Return what one of our notes says; None for one that no hook of this version wrote."""
    found = _NOTE.fullmatch(unsigned(reason))
    if found is None:
        return None
    names, job, time_s, text = found.groups()
    return DrainNote(checks=tuple(names.split(",")), job=int(job), time_s=int(time_s), text=text)


def is_ours(reason: str) -> bool:
    """Tell whether slurm-health, of any version, left this note."""
    return reason.startswith(REASON_PREFIX)


def unsigned(reason: str) -> str:
    """Return a note without who set it and when."""
    return signed(reason)[0]


def signed(reason: str) -> tuple[str, str, str]:
    """Return a note, who set it, and when as scontrol writes it; where it does not say, empty."""
    found = _SIGNED.fullmatch(reason)
    return (found[1], found[2], found[3]) if found else (reason.strip(), "", "")
