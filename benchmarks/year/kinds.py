# SPDX-License-Identifier: Apache-2.0
"""What a fault of each kind does to a job, and who sees it: the table that the replay rests on.

The trace says what was wrong, never which test would have shown it, so these are assumptions, each
with its reason; `halved` is how they are doubted. Shares are of the faults of a kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Effect(Enum):
    """What a fault does to a job on its node."""

    STOPS = "stops"  # the job ends at once, and so does each that starts there
    SLOWS = "slows"  # the job goes on, slower
    STRIKES = "strikes"  # under load, now and then, it ends the job
    LOST = "lost"  # Slurm itself loses the node
    NONE = "none"  # a board's controller says so; the node leaves when its job ends


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Faults that behave alike.

    Args:
        effect: on a job.
        local: the share that a test on the node sees, as the hooks of slurm-health make it.
        check: the share that a check sees before a script starts.
        stress: the share that minutes of full load see.
        named: the share of failures for which the post-mortem names the node.
        slowdown: of the job, for SLOWS.
        why: where the shares come from.
    """

    effect: Effect
    local: float = 0.0
    check: float = 0.0
    stress: float = 0.0
    named: float = 0.0
    slowdown: float = 1.0
    why: str


KINDS = {
    "gone": Kind(
        effect=Effect.STOPS, local=1.0, check=1.0, stress=1.0, named=0.9,
        why="a device or adapter that is not there is counted (docs/admin/checks.md); the"
        " post-mortem named 27 of 30 played causes (docs/explanation/played-training.md)",
    ),
    "memory": Kind(
        effect=Effect.STOPS, local=1.0, check=1.0, stress=1.0, named=0.9,
        why="double-bit errors above a threshold are a counter of the device, which stays",
    ),
    "xid": Kind(
        effect=Effect.STOPS, local=0.9, check=0.9, stress=0.9, named=0.9,
        why="the driver's message is in the kernel's log until a reboot; some Xids accuse nobody"
        " (docs/explanation/recordings.md: 89 of 108 lines of gpud)",
    ),
    "device": Kind(
        effect=Effect.STOPS, local=0.5, check=0.7, stress=0.8, named=0.5,
        why="'device unknow error': assumed; a device that fails its work is seen by working",
    ),
    "link": Kind(
        effect=Effect.STOPS, local=1.0, check=1.0, stress=1.0, named=0.5,
        why="a port's state is read (docs/admin/checks.md); after the failure it may be up again",
    ),
    "address": Kind(
        effect=Effect.STOPS, local=0.5, check=1.0, stress=1.0, named=0.5,
        why="a wrong GID lets no pair connect, which a check with partners sees",
    ),
    "narrow": Kind(
        effect=Effect.SLOWS, local=1.0, check=0.9, stress=1.0, slowdown=1.3,
        why="link width and speed are read; 1.3: assumed, between the 5 % and 3x of the literature"
        " (arXiv:2505.05713)",
    ),
    "hot": Kind(
        effect=Effect.SLOWS, local=0.5, check=0.7, stress=1.0, slowdown=1.5,
        why="a device throttles under load, seconds of which do not always suffice: assumed",
    ),
    "silent": Kind(
        effect=Effect.STRIKES, local=0.0, check=0.3, stress=0.7, named=0.1,
        why="ByteRobust (arXiv:2509.16293): the vendor's own diagnosis recalls 70 %",
    ),
    "loaded": Kind(
        effect=Effect.STRIKES, local=0.1, check=0.5, stress=1.0, named=0.3,
        why="'stress test failed': a stress test saw each; of a check, half is assumed",
    ),
    "suspect": Kind(
        effect=Effect.STRIKES, local=0.1, check=0.3, stress=0.7, named=0.5,
        why="a machine taken out after a training failed on it: assumed",
    ),
    "unknown": Kind(
        effect=Effect.STRIKES, local=0.2, check=0.4, stress=0.7, named=0.3,
        why="'unknown error', a quarter of all faults: assumed, below what is known of the others",
    ),
    "crash": Kind(effect=Effect.LOST, why="Slurm calls a node without slurmd down"),
    "files": Kind(
        effect=Effect.STOPS, local=1.0, check=0.5, stress=0.5, named=0.5,
        why="a filesystem that is read-only is tested by writing (docs/admin/checks.md)",
    ),
    "board": Kind(
        effect=Effect.NONE, why="fans, power, batteries: the board's controller alone knows"
    ),
    "planned": Kind(effect=Effect.NONE, why="a person took the node out"),
}  # fmt: skip

# The trace's Class and Desc; the second is empty for all others of a class.
_OF = {
    ("GPU", "GPU DBE(Double Bit ECC) > Threshold"): "memory",
    ("GPU", "GPU SBE(Single Bit ECC) > Threshold"): "memory",
    ("GPU", "GPU xid Error"): "xid",
    ("GPU", "nvidia-smi Timeout"): "xid",
    ("GPU", "GPU Lost"): "gone",
    ("GPU", "GPU device not found"): "gone",
    ("GPU", "GPU device unknow error"): "device",
    ("GPU", "GPU PCI link width low"): "narrow",
    ("GPU", "GPU P2P Bandwidth Low"): "narrow",
    ("GPU", "GPU Temperature High"): "hot",
    ("GPU", "Silent Data Corruption"): "silent",
    ("NIC", "NIC Lost"): "gone",
    ("NIC", "Rnic Gid Error"): "address",
    ("NIC", ""): "narrow",
    ("Parameter Plane Cable", ""): "link",
    ("Power Supply", ""): "board",
    ("Fan", ""): "board",
    ("Motherboard Battery", ""): "board",
    ("RAID Card", ""): "board",
    ("Riser Card", ""): "crash",
    ("Motherboard", ""): "crash",
    ("CPU", ""): "crash",
    ("Operating System", ""): "crash",
    ("System Crash", ""): "crash",
    ("Software Tool", ""): "crash",
    ("File System", ""): "files",
    ("Firmware", ""): "narrow",
    ("Stress Test Failure", ""): "loaded",
    ("Training Task Troubleshooting", ""): "suspect",
    ("Change", ""): "planned",
    ("Test", ""): "planned",
}

# A fault that comes and goes ends a job after so many hours under load on average. Assumed: with
# days, hardly any job would have met them, and with minutes no check could miss them.
STRIKES_AFTER_H = 6.0
# One that comes and goes shows itself in so many of the tests that can see it. Assumed.
SHOWS = 0.5
# One that a repair has left, before it fails again, shows itself in so many. Assumed.
SHOWS_LATENT = 0.25


def kind_of(what: tuple[str, str]) -> str:
    """Return which kind a fault of the trace is."""
    return _OF.get(what) or _OF.get((what[0], "")) or "unknown"


def halved(kinds: dict[str, Kind]) -> dict[str, Kind]:
    """Return the table as if every test and the post-mortem saw half of each kind."""
    return {
        name: replace(
            kind,
            local=kind.local / 2,
            check=kind.check / 2,
            stress=kind.stress / 2,
            named=kind.named / 2,
        )
        for name, kind in kinds.items()
    }
