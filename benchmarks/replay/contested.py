# SPDX-License-Identifier: Apache-2.0
"""Cases of other tools' tests whose answer is a choice of theirs, or of which no machine tells.

Such a case is counted beside the others, and never where a fault of the node is found here: it
cannot hide an innocent.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Contested(NamedTuple):
    """Cases of a source, by their text, and why what it holds of them is not held here."""

    source: str
    pattern: str
    why: str


CONTESTED: tuple[Contested, ...] = (
    Contested(
        "gpud",
        r"nvme nvme\d+: I/O .* timeout, reset controller$",
        "a reset that helps leaves the disk in use; one that does not has a line of its own",
    ),
    Contested(
        "gpud",
        r"attempt to access beyond end of device$",
        "the half of a message that names no device; a partition table can be wrong on a good disk",
    ),
    Contested(
        "gpud",
        r"Buffer I/O error on dev nvme0n1p1, logical block \d+, lost sync page read$",
        "one block that cannot be read: a test of the disk decides, and the reader was told",
    ),
    Contested(
        "gpud",
        r"Buffer I/O error on dev dm-0, logical block \d+, lost async page write$",
        "a container that is encrypted maps a file of its user's, which can be cut short",
    ),
    Contested(
        "gpud",
        r"^(?:kernel: )?(?:BTRFS: )?"
        r"(?:Remounting filesystem read-only|I/O error while writing superblock)$",
        "the kernel names the device here, and these lines do not: it may be a user's own image",
    ),
    Contested(
        "gpud",
        r"145, RLW_\w+ Fatal ",
        "errors of its link's other end: the GPU that failed has a line of its own",
    ),
    Contested(
        "NVSentinel",
        r"74, .*NVLink: fatal error detected on link \d+\(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0\)",
        "bit 16 of the third register wants a test if it is seen repeatedly, by NVIDIA's workflow",
    ),
    Contested(
        "NVSentinel",
        r": 154 \($",
        "a line cut on purpose, which tells no action: what a parser makes of it is its default",
    ),
    Contested(
        "NVSentinel",
        r": 999, ",
        "no driver has this number, which is a warning here: what a parser makes of it is its own",
    ),
    Contested(
        "gcm",
        r'"Persistence Mode", "results": \[\{"status": "Fail"\}\]',
        "a setting that is off, by DCGM's own table of errors: the GPU is well",
    ),
    Contested(
        "node-problem-detector",
        r"^docker_hung: ",
        "any process that waits for a filesystem can bear the name of a daemon",
    ),
    Contested(
        "pytorch",
        r"^e7 and e7$",
        "both ranks called the same; PyTorch itself reduces into what it was given",
    ),
    Contested(
        "pytorch",
        r"^e1 and e9$",
        "dumps are of different moments: a collective may be over on one rank and not yet on"
        " another",
    ),
)


def why_contested(source: str, case: str) -> str:
    """Return why a case does not count, empty where it does."""
    return next(
        (each.why for each in CONTESTED if each.source == source and re.search(each.pattern, case)),
        "",
    )
