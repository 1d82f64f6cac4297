# SPDX-License-Identifier: Apache-2.0
"""What an Xid, an SXid or a line of the kernel's log means, for a person who has met one. Pure.

It says what the checks `xid` and `kernel-log` make of it by default, from the tables they judge by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.kernel_lines import (
    KINDS,
    LOST_GPU,
    SXID,
    XID,
    is_evidence,
    without_stamp,
)
from slurm_health.node.rules.xid import ALWAYS_FATAL, XIDS, judge_sxid, judge_xid

_LOST = 79  # the Xid of a GPU that has fallen off the bus
_XID_TABLE = "NVIDIA's catalogue of Xid errors"
_SXID_TABLE = "the user guide of NVIDIA's Fabric Manager"
_KERNEL = "the kernel's own words"
_NUMBER = re.compile(r"(?:(?P<kind>s?xid)\s*[-:#]?\s*)?(?P<number>\d{1,5})", re.I)


class Meaning(msgspec.Struct, frozen=True, kw_only=True):
    """What something is, whose matter, what the named check makes of it, and what helps.

    `status` is the check's finding of it; only a node fault keeps jobs away and drains a node.
    """

    name: str
    what: str
    whose: str
    check: str
    status: Status
    helps: str
    source: str


def meaning_of(words: str) -> Meaning | None:
    """Return what a number (`79`, `xid 79`, `sxid 22003`), a name or a whole line means.

    None where it is nothing that the checks know.
    """
    words = words.strip()
    if number := _NUMBER.fullmatch(words):
        if (number["kind"] or "xid").lower() == "sxid":
            return _of_sxid(int(number["number"]), None, "")
        return _of_xid(int(number["number"]), "")
    named = next((each for each in _of_lines() if each.name == words), None)
    return named or _of_line(without_stamp(words))


def all_meanings() -> list[Meaning]:
    """Return all that is known by itself, Xids first."""
    xids = (_of_xid(number, "") for number in sorted(XIDS))
    sxids = (_of_sxid(number, None, "") for number in sorted(ALWAYS_FATAL))
    return [each for each in (*xids, *sxids, *_of_lines()) if each is not None]


def _of_xid(number: int, text: str) -> Meaning | None:
    kind = XIDS.get(number)
    if kind is None:
        return None
    status, said = judge_xid(number, text)
    what, helps = kind.what, kind.helps
    if (status, said) != judge_xid(number):  # the line has decided
        what, _, helps = said.partition("; ")
        helps = helps or "look at the GPU and its links"
        if status is Status.PASS:
            what, helps = "the driver wants nothing more done to recover", "nothing"
    return Meaning(
        name=f"Xid {number}",
        what=what,
        whose=kind.whose,
        check="xid",
        status=status,
        helps=helps,
        source=_XID_TABLE,
    )


def _of_sxid(number: int, word: str | None, text: str) -> Meaning:
    status, said = judge_sxid(number, fatal={"Fatal": True, "Non-fatal": False}.get(word or ""))
    what, _, helps = said.partition("; ")
    return Meaning(
        name=f"SXid {number}",
        what=f"{text}: {what}" if text else what,
        whose="NVSwitch or its links",
        check="xid",
        status=status,
        helps=helps or "look at the driver's whole line, which says whether it is fatal",
        source=_SXID_TABLE,
    )


def _of_lines() -> Iterator[Meaning]:
    """Return the kinds of lines by their names, each once."""
    for kind in {each.name: each for each in KINDS}.values():
        yield Meaning(
            name=kind.name,
            what=kind.what,
            whose=kind.whose,
            check="kernel-log",
            status=kind.status,
            helps=kind.helps,
            source=_KERNEL,
        )


def _of_line(line: str) -> Meaning | None:
    if xid := re.search(XID, line):
        return _of_xid(int(xid["number"]), xid["text"])
    if re.search(LOST_GPU, line):
        return _of_xid(_LOST, "")
    if sxid := re.search(SXID, line):
        return _of_sxid(int(sxid["number"]), sxid["word"], sxid["text"])
    if not is_evidence(line):
        return Meaning(
            name="line of a process",
            what="it begins with the name of a process, which its user chooses",
            whose="program",
            check="kernel-log",
            status=Status.PASS,
            helps="look at the program; such a line is never held against a node",
            source=_KERNEL,
        )
    kind = next((each for each in KINDS if re.search(each.pattern, line)), None)
    return next((each for each in _of_lines() if kind and each.name == kind.name), None)
