# SPDX-License-Identifier: Apache-2.0
"""Jobs and nodes, read from Slurm: through scontrol, nodes through pyslurm if it fits this Slurm.

The caller provides a function that runs a command, with its timeouts and retries. Jobs are read
through scontrol in either case, which prints every field; of an array's tasks pyslurm shows one,
which may be another than the one requested, and takes task 0 for none. Writes go through scontrol
as well.

    python -I -m slurm_health.system.slurm.reads [NODE...]

pyslurm runs in a process of its own: importing it without a usable slurm.conf ends the process,
a controller that does not answer blocks it without a limit, and only a process can be killed. It
prints one JSON document. A node of which jobs use a part is ALLOCATED here and MIXED for scontrol;
no caller depends on it.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ExitCode, SlurmCommandError, SlurmError, UnknownJob
from slurm_health.records.nodeset import fold
from slurm_health.system.slurm.parsing import Job, JobId, Node, job_fields, job_of, node_of

log = logging.getLogger(__name__)
# Releases for which the tests have compared both readers. pyslurm's interface, and the structures
# of Slurm below it, change from one release to the next.
TESTED = frozenset({(22, 5), (24, 11)})
# Slurm refused, or did not answer. Every other code means that pyslurm does not work.
_REFUSED = int(ExitCode.UNAVAILABLE)
Run = Callable[[Sequence[str]], str]
# Slurm's own words, which its commands and its library share.
_UNKNOWN_JOB = "Invalid job id specified"


class Reads:
    """Reads jobs and nodes; with `pyslurm` nodes are read through it, as long as it works."""

    def __init__(self, run: Run, *, pyslurm: bool) -> None:
        self._run = run
        self._pyslurm = pyslurm

    def job(self, job_id: JobId) -> Job:
        """Read one job.

        Raises:
            UnknownJob: Slurm does not know it, or no longer.
            SlurmError: Slurm does not answer.
        """
        try:
            text = self._run(["scontrol", "show", "job", "-o", str(job_id)])
        except SlurmCommandError as err:
            if _UNKNOWN_JOB in err.stderr:
                raise UnknownJob(job_id) from err
            raise
        return job_of(job_id, job_fields(job_id, text))

    def nodes(self, names: Sequence[str]) -> dict[str, Node]:
        """Read some nodes, or all if none is named, in one call.

        Raises:
            SlurmError: Slurm does not know one of them, does not answer, or answers nonsense.
        """
        if self._pyslurm:
            try:
                text = self._run([sys.executable, "-I", "-m", __name__, *names])
                return {node.name: node for node in from_json(text, list[Node])}
            except msgspec.DecodeError as err:
                raise SlurmError(f"the reader through pyslurm answered nonsense: {err}") from err
            except SlurmCommandError as err:
                if err.returncode == _REFUSED:
                    raise
                self._pyslurm = False
                log.debug("Slurm's commands are used from now on, pyslurm fails: %s", err)
        which = ["node", "-o", fold(names)] if names else ["nodes", "-o"]
        text = self._run(["scontrol", "show", *which])
        nodes = {node.name: node for line in text.splitlines() if (node := node_of(line.strip()))}
        missing = [name for name in names if name not in nodes]
        if not nodes or missing:
            wanted = f"nodes {', '.join(missing)}" if missing else "nodes"
            raise SlurmError(f"scontrol show {which[0]} answered {text[:80]!r}, expected {wanted}")
        return nodes


def pyslurm_obstacle(run: Run) -> str:
    """Return why nodes are not read through pyslurm, empty if they are."""
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    if find_spec("pyslurm") is None:
        return "pyslurm is not installed"
    try:
        return mismatch(version("pyslurm"), run(["scontrol", "--version"]))
    except PackageNotFoundError:
        return "pyslurm is of an unknown version"
    except SlurmError as err:
        return f"Slurm's release is not known: {err}"


def mismatch(pyslurm: str, slurm: str) -> str:
    """Return why a version of pyslurm does not fit `scontrol --version`; empty if it does."""
    theirs, ours = release(slurm), release(pyslurm)
    if theirs is None:
        return f"the release of Slurm is unknown: {slurm.strip()!r}"
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
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


# --- the process that loads pyslurm --------------------------------------------------------------


def main(names: Sequence[str]) -> int:
    """Print these nodes, or all."""
    import pyslurm

    try:
        if len(names) == 1:
            nodes = [pyslurm.Node.load(names[0])]
        else:
            known = {node.name: node for node in pyslurm.Nodes.load().values()}
            nodes = [known[name] for name in (names or known)]
    except (pyslurm.RPCError, KeyError) as err:
        print(f"Node {err} not found" if isinstance(err, KeyError) else err, file=sys.stderr)
        return _REFUSED
    sys.stdout.buffer.write(msgspec.json.encode([_node(node) for node in nodes]))
    return 0


def _node(node: Any) -> Node:
    reason = node.reason or ""
    if reason and node.reason_time:  # with who set it and when, as scontrol shows it
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(node.reason_time))
        reason = f"{reason} [{node.reason_user}@{when}]"
    return Node(
        name=node.name,
        state=node.state,
        reason=reason,
        partitions=tuple(node.partitions or ()),
        features=tuple(node.available_features or ()),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
