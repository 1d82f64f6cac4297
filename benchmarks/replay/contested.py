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
        "no driver has this number: what a parser makes of it is its default",
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
