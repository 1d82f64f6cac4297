# SPDX-License-Identifier: Apache-2.0
"""Which reader is used: pyslurm where it is installed, tested and fits this Slurm, else scontrol.

Writes go through scontrol in either case.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from slurm_health.errors import SlurmCommandError, SlurmError
from slurm_health.slurm import pyslurm_client
from slurm_health.slurm.reads import CommandReads, Reads, Run

# Releases for which the tests have compared both readers. pyslurm's interface, and the structures
# of Slurm below it, change from one release to the next.
TESTED = frozenset({(22, 5)})


class Choice(NamedTuple):
    """A reader, and in words why it is this one."""

    reads: Reads
    name: str
    why: str


def choose(run: Run) -> Choice:
    """Choose the reader: pyslurm where it is installed, tested and goes with Slurm's release."""
    commands = CommandReads(run)
    pyslurm = pyslurm_client.installed()
    if pyslurm is None:
        return Choice(commands, "commands", "pyslurm is not installed")
    try:
        slurm = run(["scontrol", "--version"])
    except SlurmError as err:
        return Choice(commands, "commands", f"Slurm's release is not known: {err}")
    why_not = mismatch(pyslurm, slurm)
    if why_not:
        return Choice(commands, "commands", why_not)
    reads = pyslurm_client.PyslurmReads(run, instead=commands)
    return Choice(reads, "pyslurm", f"pyslurm {pyslurm} goes with Slurm {slurm.split()[-1]}")


def proven(choice: Choice, run: Run) -> Choice:
    """Return the choice after a trial: pyslurm that is installed may still not load."""
    if not isinstance(choice.reads, pyslurm_client.PyslurmReads):
        return choice
    try:
        choice.reads.ask("import")
    except SlurmCommandError as err:
        said = err.stderr.strip().splitlines() or [str(err)]
        return Choice(CommandReads(run), "commands", f"pyslurm does not load: {said[-1]}")
    except SlurmError as err:
        return Choice(CommandReads(run), "commands", f"pyslurm does not load: {err}")
    return choice


def mismatch(pyslurm: str, slurm: str) -> str:
    """Return why a version of pyslurm does not do for `scontrol --version`; empty when it does."""
    theirs, ours = release(slurm), release(pyslurm)
    if theirs is None:
        return f"cannot tell which Slurm this is: {slurm.strip()!r}"
    shown = f"{theirs[0]}.{theirs[1]:02d}"
    if ours != theirs:
        return (
            f"pyslurm {pyslurm} does not go with Slurm {shown}: install pyslurm"
            f" {theirs[0]}.{theirs[1]}.x, or none"
        )
    if ours not in TESTED:
        return f"pyslurm {pyslurm}: slurm-health has not been tested with pyslurm for Slurm {shown}"
    return ""


def release(text: str) -> tuple[int, int] | None:
    """Return the release in a version, as two numbers: pyslurm's 22.5 is Slurm's 22.05."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else None
