# SPDX-License-Identifier: Apache-2.0
"""A master that acts is killed around each of its writes, and the next one goes on from there."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurm_health.preflight.decide.policy import Policy
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.master.check_settings import CheckSettings
from slurm_health.preflight.master.run_check import _check
from slurm_health.preflight.orders import News
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.phases import phases
from slurm_health.records.records import AgentsLost, VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from tests.lab.site_files import let_root_drain
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import Clock, run_started

NODES = ["n1", "n2", "n3"]
STARTED = run_started(NODES)
VERDICT = VerdictReached(
    nodes=[
        NodeVerdict(node="n1", level=Level.HEALTHY),
        NodeVerdict(node="n2", level=Level.HEALTHY),
        NodeVerdict(node="n3", level=Level.FAULTY, component="network", reason="no allgather"),
    ]
)
BEFORE = (STARTED, VERDICT)
MORE_THAN_IT_WRITES = 7


class NoLauncher:
    """There are no agents any more."""

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        raise AssertionError(f"launch {launch} of {nodes} after the verdict")

    def poll(self) -> list[AgentsLost]:
        return []

    def ring(self) -> None:
        """Have nobody to tell."""

    def wait(self, timeout_s: float, gather_s: float) -> list[News]:
        raise AssertionError(f"waits {timeout_s} s and {gather_s} s for agents after the verdict")

    def stop(self, grace_s: float = 0.0) -> None:
        """Have nothing to stop."""


class Judged:
    """A job whose check has found n3 faulty, and whose master is to act on it."""

    def __init__(self, directory: Path) -> None:
        self.slurm = FakeSlurm(directory / "slurm")
        self.environ = self.slurm.environ() | let_root_drain(directory)
        self.slurm.set(admin=True)
        self.slurm.run_job(12, NODES)
        self.root = directory / "journal"
        self.run = journal.job_directory(self.root, "lab", 12) / "0"
        journal.create(self.run, [journal.MASTER, *NODES])
        journal.Writer(self.run, journal.MASTER, Clock()).append(*BEFORE)

    def act(self, *, fatal_write: int = 0, before: str = "") -> bool:
        """Have a master act, in a process of its own; tell whether it came to its end.

        It is killed after so many writes: before its next deed, or before its next write.
        """
        pid = os.fork()
        if pid == 0:
            try:
                _kill_at(fatal_write, before)
                self._check()
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return not os.WIFSIGNALED(status)

    def _check(self) -> None:
        settings = CheckSettings(
            spec=JobSpec(),
            journal_root=self.root,
            python=sys.executable,
            policy=Policy(),
            limits=TimeLimits(),
            phases=phases(["quick"]),
            probe_environ=self.environ,
            act=True,
        )
        _check(self.run, STARTED, settings, NoLauncher(), {}, self.environ)

    def drains(self) -> list[list[str]]:
        updates = self.slurm.calls("scontrol", "update")
        return [call for call in updates if call[2].startswith("NodeName=")]


def _kill_at(fatal_write: int, before: str) -> None:
    """Have this process die after so many writes, of its own hand but without a word."""
    writes = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal writes
        opened = event == "open" and arguments[0] == "master.jsonl"
        writing = opened and isinstance(arguments[2], int) and bool(arguments[2] & os.O_APPEND)
        if writes == fatal_write and (writing or event == before):
            os.kill(os.getpid(), signal.SIGKILL)
        writes += writing

    if fatal_write:
        sys.addaudithook(watch)


@pytest.mark.heavy
@pytest.mark.parametrize("before", ["subprocess.Popen", "write"])
@pytest.mark.parametrize("fatal_write", range(1, MORE_THAN_IT_WRITES + 1))
def test_no_act_is_done_twice_and_none_is_lost(
    tmp_path: Path, fatal_write: int, before: str
) -> None:
    job = Judged(tmp_path)

    if job.act(fatal_write=fatal_write, before=before):
        without_drain = 0 if os.getuid() == 0 else 2  # its intent, and its result
        assert fatal_write >= MORE_THAN_IT_WRITES - 1 - without_drain
    else:
        assert len(journal.read_all(job.run, journal.MASTER)) == len(BEFORE) + fatal_write
        assert job.act()

    assert len(job.drains()) == (os.getuid() == 0)
    assert len(job.slurm.calls("sbatch")) == 1
    assert len(job.slurm.calls("scontrol", "requeuehold")) == 1
    assert job.slurm.job(12)["Restarts"] == 1
