# SPDX-License-Identifier: Apache-2.0
"""What an Xid or SXid means for the node, by NVIDIA's tables. Pure.

Those of GPUs (Xid) are in its catalogue of Xid errors, those of NVSwitches (SXid) in the user guide
of its Fabric Manager.

A number alone convicts only where the catalogue says that the GPU, the board or its slot is to
blame and that nothing but a reset or a repair helps. Most Xids are a program's own doing.
"""

from __future__ import annotations

import re

from slurm_health.node.rules.finding import Status

_RESET = "reset the GPU"
_REBOOT = "reboot the node; when it comes back, have the hardware inspected"

NODE: dict[int, tuple[str, str]] = {
    46: ("GPU stopped processing", _RESET),
    48: ("uncorrectable memory error", _RESET),
    54: ("auxiliary power is not connected", "have the power cables inspected"),
    62: ("microcontroller halted", _RESET),
    64: ("a memory row could not be remapped", _RESET),
    79: ("GPU has fallen off the bus", _REBOOT),
    95: ("uncontained memory error", _RESET),
    109: ("context switch timed out", _RESET),
    110: ("security fault", _RESET),
    119: ("GPU system processor does not answer", _RESET),
    120: ("GPU system processor error", _RESET),
    136: ("link training failed", _RESET),
    140: ("unrecovered ECC error", _RESET),
    143: ("GPU initialisation failed", _RESET),
    155: ("NVLink: software-defined error", _RESET),
    156: ("resource retirement", _RESET),
    158: ("fatal timeout", _RESET),
    167: ("PCIe fatal timeout", _REBOOT),
}
# Worth a look, and never a reason to drain by themselves.
LOOK: dict[int, str] = {
    63: "a memory row will be remapped at the next reset",
    74: "NVLink error",
    92: "many corrected memory errors",
    94: "contained memory error: the job that met it ended",
    121: "corrected error of the CPU link",
    137: "privilege error on NVLink, which a program's own access to a peer can cause",
    141: "fast path error",
    **dict.fromkeys(range(144, 151), "NVLink 5 error, which its sub-code decides"),
    154: "the driver changed what it wants done to recover",
}
# What stands at the end of an NVLink 5 line: `NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x0214…`. The
# name of a process may stand before it, which its user chooses: the last such words count.
_NVLINK_5 = re.compile(r"(?P<unit>[A-Z][\w/]+) +(?P<word>Fatal|Nonfatal) +XC\d+ i\d+ Link -?\d+")
# Units whose fatal errors end a program and leave the GPU usable, by NVIDIA's catalogue.
_OF_A_PROGRAM = ("TLW_RX", "TLW_TX")
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


def judge_xid(number: int, text: str = "") -> tuple[Status, str]:
    """Return what an Xid means for the node, and in words what it is and what helps.

    Numbers that are in neither table (13, 31, 43, 45 and the like) are a program's own, or
    unknown: they say nothing about the node.

    Args:
        number: of the error.
        text: what the driver says behind it, which decides some; without it they are a warning.
    """
    if number == 154 and (action := _RECOVERY.search(text.rstrip())):
        return _RECOVERIES.get(action["now"], (Status.WARN, LOOK[154]))
    if 144 <= number <= 150 and (links := list(_NVLINK_5.finditer(text))):
        link = links[-1]
        if link["word"] == "Fatal" and not link["unit"].startswith(_OF_A_PROGRAM):
            return Status.NODE_FAULT, f"fatal NVLink error ({link['unit']}); {_RESET}"
        return Status.WARN, f"NVLink error ({link['unit']}) that ends no link"
    if number in NODE:
        what, helps = NODE[number]
        return Status.NODE_FAULT, f"{what}; {helps}"
    if number in LOOK:
        return Status.WARN, LOOK[number]
    return Status.PASS, ""


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
