# SPDX-License-Identifier: Apache-2.0
"""What an Xid or SXid means for the node, by NVIDIA's tables. Pure.

Those of GPUs (Xid) are in its catalogue of Xid errors, those of NVSwitches (SXid) in the user guide
of its Fabric Manager.

A number alone convicts only where the catalogue says that the GPU, the board or its slot is to
blame and that nothing but a reset or a repair helps. Most Xids are a program's own doing.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from slurm_health.node.rules.finding import Remedy, Status

_RESET = "reset the GPU"
_REBOOT = "reboot the node; when it comes back, have the hardware inspected"


class XidKind(NamedTuple):
    """What an Xid is: what it says of the node, in words, whose matter it is, and what helps."""

    status: Status
    what: str
    whose: str
    helps: str


def _of_node(what: str, helps: str = _RESET, whose: str = "GPU") -> XidKind:
    return XidKind(Status.NODE_FAULT, what, whose, helps)


def _to_look_at(what: str, helps: str, whose: str = "GPU") -> XidKind:
    """Return one that is worth a look, and never a reason to drain by itself."""
    return XidKind(Status.WARN, what, whose, helps)


def _of_program(what: str, helps: str = "look at the program, with compute-sanitizer") -> XidKind:
    return XidKind(Status.PASS, what, "program", helps)


LAST_LISTED = 172  # in NVIDIA's catalogue of October 2025
_BY_LINE = "the driver's whole line decides: give it to `slurm-health explain`"
_AGAIN = "start the job again; if it comes back on this node with other jobs, have the GPU tested"
XIDS: dict[int, XidKind] = {
    8: _of_program("work of a program did not end in time", _AGAIN),
    11: _of_program("a program's commands to the GPU were invalid"),
    13: _of_program("graphics engine exception, as of an access out of bounds"),
    25: _of_program("a program's commands to the GPU were illegal"),
    31: _of_program("memory page fault: an address that is not the program's"),
    32: _of_program("a program's commands to the GPU were corrupted", _AGAIN),
    43: _of_program("a program's work was stopped for an error of its own; the GPU is well"),
    45: _of_program(
        "a program was ended and cleaned up after", "look for the Xid or the signal before it"
    ),
    46: _of_node("GPU stopped processing"),
    48: _of_node("uncorrectable memory error"),
    54: _of_node("auxiliary power is not connected", "have the power cables inspected", "board"),
    62: _of_node("microcontroller halted"),
    63: _to_look_at(
        "a memory row will be remapped at the next reset", "reset the GPU when the node is idle"
    ),
    64: _of_node("a memory row could not be remapped"),
    68: _of_program("exception of the video decoder", _AGAIN),
    69: _of_program("graphics engine class error"),
    74: _to_look_at(
        "NVLink error",
        "look at the links (nvidia-smi nvlink --status); a site that drains for it sets"
        " `fatal_link_drains` of its check `xid`, or lists 74 under `fault`",
        "link",
    ),
    79: _of_node("GPU has fallen off the bus", _REBOOT, "GPU, board or slot"),
    80: _of_program("data sent to the GPU was corrupted", _AGAIN),
    92: _to_look_at("many corrected memory errors", "have the GPU's memory tested"),
    94: _to_look_at(
        "contained memory error: the job that met it ended", "reset the GPU when the node is idle"
    ),
    95: _of_node("uncontained memory error"),
    109: _of_node("context switch timed out"),
    110: _of_node("security fault"),
    119: _of_node("GPU system processor does not answer"),
    120: _of_node("GPU system processor error"),
    121: _to_look_at("corrected error of the CPU link", "nothing, unless it repeats", "link"),
    136: _of_node("link training failed", whose="link"),
    137: _to_look_at(
        "privilege error on NVLink, which a program's own access to a peer can cause",
        "look at the program first",
        "program or link",
    ),
    140: _of_node("unrecovered ECC error"),
    141: _to_look_at("fast path error", "nothing, unless it repeats"),
    143: _of_node("GPU initialisation failed"),
    **dict.fromkeys(
        range(144, 151),
        _to_look_at("NVLink 5 error, which its sub-code decides", _BY_LINE, "link"),
    ),
    154: _to_look_at("the driver changed what it wants done to recover", _BY_LINE),
    155: _of_node("NVLink: software-defined error", whose="link"),
    156: _of_node("resource retirement"),
    158: _of_node("fatal timeout"),
    167: _of_node("PCIe fatal timeout", _REBOOT, "GPU, board or slot"),
}
# What stands at the end of an NVLink 5 line: `NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x0214…`. The
# name of a process may stand before it, which its user chooses: the last such words count.
_NVLINK_5 = re.compile(r"(?P<unit>[A-Z][\w/]+) +(?P<word>Fatal|Nonfatal) +XC\d+ i\d+ Link -?\d+")
# Units whose fatal errors end a program and leave the GPU usable, by NVIDIA's catalogue.
_OF_A_PROGRAM = ("TLW_RX", "TLW_TX")
# A unit that reports what the other end of its link did: when one GPU of an NVLink domain fails,
# all others report this, fatal or not.
_OF_A_PEER = ("RLW_",)
# Xid 74 of older links: `NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, …`. A process'
# name, of 15 bytes, cannot hold that. The link also goes down where its other end has failed.
_FATAL_LINK = re.compile(r"NVLink: fatal error detected on (?P<link>link \d{1,3})\(")
# GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)
_RECOVERY = re.compile(
    r" recovery action changed from 0x\w+ \([^)]*\) to 0x\w+ \((?P<now>[^)]*)\)$"
)
_RECOVERIES = {
    "GPU Reset Required": (Status.NODE_FAULT, "the driver wants the GPU reset"),
    "Node Reboot Required": (Status.NODE_FAULT, "the driver wants the node rebooted"),
    "Drain and Reset": (Status.NODE_FAULT, "the driver wants the GPU drained and reset"),
    "Drain P2P": (Status.WARN, "the driver wants access to peers ended"),
    "None": (Status.PASS, ""),
}


def fatal_link(text: str) -> str:
    """Return the link whose error the text of an Xid 74 calls fatal, empty where it does not."""
    found = _FATAL_LINK.search(text)
    return found["link"] if found else ""


def judge_xid(number: int, text: str = "") -> tuple[Status, str]:
    """Return what an Xid means for the node, and in words what it is and what helps.

    A program's own numbers (13, 31, 43, 45 and the like), and those that the catalogue has beside
    the table, say nothing about the node; one that it does not have is a warning.

    Args:
        number: of the error.
        text: what the driver says behind it, which decides some; without it they are a warning.
    """
    if number == 154 and (action := _RECOVERY.search(text.rstrip())):
        return _RECOVERIES.get(action["now"], (Status.WARN, XIDS[154].what))
    if 144 <= number <= 150 and (links := list(_NVLINK_5.finditer(text))):
        link = links[-1]
        if link["unit"].startswith(_OF_A_PEER):
            return Status.WARN, f"NVLink error ({link['unit']}), most often of the link's other end"
        if link["word"] == "Fatal" and not link["unit"].startswith(_OF_A_PROGRAM):
            return Status.NODE_FAULT, f"fatal NVLink error ({link['unit']}); {_RESET}"
        return Status.WARN, f"NVLink error ({link['unit']}) that ends no link"
    if number == 74 and (name := fatal_link(text)):
        return Status.WARN, f"fatal NVLink error on {name}: it, or what is at its other end"
    if number > LAST_LISTED:
        return Status.WARN, "an error of a newer driver, which is not in the table here"
    kind = XIDS.get(number)
    if kind is None or kind.status is Status.PASS:
        return Status.PASS, ""
    if kind.status is Status.NODE_FAULT:
        return kind.status, f"{kind.what}; {kind.helps}"
    return kind.status, kind.what


def remedy_of(text: str) -> Remedy | None:
    """Return what mends an error of a GPU or an NVSwitch, by what was said to help of it above."""
    if _REBOOT in text or "wants the node rebooted" in text:
        return Remedy.REBOOT
    return Remedy.RESET if "reset" in text else None


# What the guide calls always fatal: a reset of the GPUs does not end it.
ALWAYS_FATAL = frozenset({12020, 22003, 22011, *range(23001, 23018)})


def judge_sxid(number: int, *, fatal: bool | None) -> tuple[Status, str]:
    """Return what an NVSwitch's error means for the node, by its number and the driver's own word.

    What the driver calls non-fatal stops no program; with a fatal one beside it, that one counts.
    `fatal` is None where the driver does not say.
    """
    if number in ALWAYS_FATAL:
        return Status.NODE_FAULT, f"always fatal; {_REBOOT}"
    if fatal:
        return Status.NODE_FAULT, "fatal; reset all GPUs and NVSwitches of the node"
    return Status.WARN, "not fatal" if fatal is False else "the driver does not say how severe"
