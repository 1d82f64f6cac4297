# SPDX-License-Identifier: Apache-2.0
"""What is read from Slurm: jobs through scontrol, nodes through pyslurm where it goes with Slurm.

A reader gets a way to run a command from its owner, which knows how long to wait and whether to
ask again. pyslurm is used where it is installed, tested and fits this Slurm, else scontrol.

The only module that loads pyslurm. Jobs are read through scontrol in either case, which prints all
that is known of one, so that no reader can miss a field; of an array's tasks pyslurm shows one,
which may be another than was meant, and takes task 0 for none. Writes go through scontrol as well.

    python -I -m slurm_health.system.slurm.reads import | nodes [NAME...]

pyslurm runs in a process of its own: importing it without a usable slurm.conf ends the process,
a controller that does not answer holds it for as long as Slurm likes, and only a process can be
killed. What it prints is one JSON document.

A node of which jobs use a part is ALLOCATED here and MIXED for scontrol; nothing asks for that.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ExitCode, SlurmCommandError, SlurmError, UnknownJob
from slurm_health.records.nodeset import fold
from slurm_health.system.slurm.parsing import Job, JobId, Node, job_fields, job_of, node_of

log = logging.getLogger(__name__)
# Releases for which the tests have compared both readers. pyslurm's interface, and the structures
# of Slurm below it, change from one release to the next.
TESTED = frozenset({(22, 5), (24, 11)})
# Slurm was asked and refused, or did not answer. Every other code means that pyslurm is no use.
_REFUSED = int(ExitCode.UNAVAILABLE)
Run = Callable[[Sequence[str]], str]
# Slurm's own words, which its commands and its library share.
_UNKNOWN_JOB = "Invalid job id specified"


class Reads(Protocol):
    """What is asked of Slurm. An empty list of names means every node."""

    def job(self, job_id: JobId) -> Job:
        """Read one job.

        Raises:
            UnknownJob: Slurm does not know it, or no longer.
            SlurmError: Slurm does not answer.
        """
        ...

    def nodes(self, names: Sequence[str]) -> dict[str, Node]:
        """Read some nodes, or all, in one call.

        Raises:
            SlurmError: Slurm does not know one of them, does not answer, or answers nonsense.
        """
        ...


class CommandReads:
    """Reads through scontrol."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def job(self, job_id: JobId) -> Job:
        """Read one job."""
        try:
            text = self._run(["scontrol", "show", "job", "-o", str(job_id)])
        except SlurmCommandError as err:
            if knows_no_job(err):
                raise UnknownJob(job_id) from err
            raise
        return job_of(job_id, job_fields(job_id, text))

    def nodes(self, names: Sequence[str]) -> dict[str, Node]:
        """Read some nodes, or all, in one call."""
        which = ["node", "-o", fold(names)] if names else ["nodes", "-o"]
        text = self._run(["scontrol", "show", *which])
        found = {node.name: node for line in text.splitlines() if (node := node_of(line.strip()))}
        missing = [name for name in names if name not in found] if names else []
        if not found or missing:
            wanted = f"nodes {', '.join(missing)}" if missing else "nodes"
            raise SlurmError(f"scontrol show {which[0]} answered {text[:80]!r}, expected {wanted}")
        return found


def knows_no_job(err: SlurmCommandError) -> bool:
    """Tell whether Slurm refused because it does not know the job."""
    return _UNKNOWN_JOB in err.stderr


class PyslurmReads:
    """Reads through pyslurm, and `instead` from the moment pyslurm turns out to be no use."""

    def __init__(self, run: Run, *, instead: Reads) -> None:
        self._run = run
        self._instead = instead
        self._usable = True

    def job(self, job_id: JobId) -> Job:
        """Read one job, always through `instead`."""
        return self._instead.job(job_id)

    def nodes(self, names: Sequence[str]) -> dict[str, Node]:
        """Read some nodes, or all, in one call."""
        text = self._try("nodes", *names)
        if text is None:
            return self._instead.nodes(names)
        return {node.name: node for node in _decoded(text, list[Node])}

    def ask(self, *question: str) -> str:
        """Put one question to a process that loads pyslurm.

        Raises:
            SlurmError: pyslurm is no use, or Slurm refused or does not answer.
        """
        module = "slurm_health.system.slurm.reads"
        return self._run([sys.executable, "-I", "-m", module, *question])

    def _try(self, *question: str) -> str | None:
        if not self._usable:
            return None
        try:
            return self.ask(*question)
        except SlurmCommandError as err:
            if err.returncode == _REFUSED:
                raise
            self._usable = False
            log.debug("Slurm's commands are used from now on, pyslurm fails: %s", err)
            return None


def _decoded(text: str, kind: Any) -> Any:
    try:
        return from_json(text, kind)
    except msgspec.DecodeError as err:
        raise SlurmError(f"the reader through pyslurm answered nonsense: {err}") from err


# --- which reader is used ------------------------------------------------------------------------


class ChosenReader(NamedTuple):
    """A reader, and in words why it is this one."""

    reads: Reads
    name: str
    why: str


def choose(run: Run) -> ChosenReader:
    """Choose the reader: pyslurm where it is installed, tested and goes with Slurm's release."""
    pyslurm = _installed()
    if pyslurm is None:
        return _commands(run, "pyslurm is not installed")
    try:
        slurm = run(["scontrol", "--version"])
    except SlurmError as err:
        return _commands(run, f"Slurm's release is not known: {err}")
    why_not = mismatch(pyslurm, slurm)
    if why_not:
        return _commands(run, why_not)
    reads = PyslurmReads(run, instead=CommandReads(run))
    return ChosenReader(reads, "pyslurm", f"pyslurm {pyslurm} goes with Slurm {slurm.split()[-1]}")


def proven(choice: ChosenReader, run: Run) -> ChosenReader:
    """Return the choice after a trial: pyslurm that is installed may still not load."""
    if not isinstance(choice.reads, PyslurmReads):
        return choice
    try:
        choice.reads.ask("import")
    except SlurmError as err:
        said = err.stderr.strip().splitlines() if isinstance(err, SlurmCommandError) else []
        return _commands(run, f"pyslurm does not load: {said[-1] if said else err}")
    return choice


def _commands(run: Run, why: str) -> ChosenReader:
    return ChosenReader(CommandReads(run), "commands", why)


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


def _installed() -> str | None:
    """Return the version of the pyslurm of this interpreter, without loading it; None for none."""
    from importlib.util import find_spec

    if find_spec("pyslurm") is None:
        return None
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pyslurm")
    except PackageNotFoundError:
        return "of unknown version"


# --- what runs in the other process --------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Answer one question on standard output."""
    import pyslurm

    question, *words = argv
    try:
        answer: object = None
        if question == "nodes":
            answer = _nodes(pyslurm, words)
        else:
            answer = [pyslurm.__version__, pyslurm.Nodes.__name__]
    except pyslurm.RPCError as err:
        print(err, file=sys.stderr)
        return _REFUSED
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 0


def _nodes(pyslurm: Any, names: Sequence[str]) -> list[Node]:
    if len(names) == 1:
        return [_node(pyslurm.Node.load(names[0]))]
    found = {node.name: node for node in pyslurm.Nodes.load().values()}
    missing = [name for name in names if name not in found]
    if missing:
        raise pyslurm.RPCError(msg=f"Node {', '.join(missing)} not found")
    return [_node(found[name]) for name in (names or found)]


def _node(node: Any) -> Node:
    return Node(
        name=node.name,
        state=node.state,
        reason=_signed(node),
        partitions=tuple(node.partitions or ()),
        features=tuple(node.available_features or ()),
    )


def _signed(node: Any) -> str:
    """Return a node's note with who set it and when, as scontrol shows it."""
    if not node.reason or not node.reason_time:
        return node.reason or ""
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(node.reason_time))
    return f"{node.reason} [{node.reason_user}@{when}]"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
