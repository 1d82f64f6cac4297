# SPDX-License-Identifier: Apache-2.0
"""An act that is killed (SIGKILL) after any call to Slurm does nothing twice and loses nothing."""

import os
import signal
from pathlib import Path

import pytest

from slurm_health.node.rules.settings import Breaker
from slurm_health.node.shared import read_ledger
from slurm_health.preflight.decide.policy import Policy
from slurm_health.records.records import Action, ActionDone
from slurm_health.records.verdict import Level
from slurm_health.system import journal
from tests.preflight.acting.test_perform import JOB, Scene

# More than any act takes.
MOST_CALLS = 40
SPARE = Policy(nodes_wanted=2)
pytestmark = pytest.mark.timeout(600)  # each call is a life of its own, on a busy machine


class Mortal(Scene):
    """A scene whose act runs in a process of its own, which can be killed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.slurm.set(admin=True)
        self.slurm.change_job(JOB, Comment="mine")
        self.append = lambda record: self.run.write(journal.MASTER, record)

    def live(self, policy: Policy, *, calls: int = 0) -> bool:
        """Act; be killed once so many calls are done, 0 for never; tell whether it ended."""
        done = len(self.slurm.calls())
        self.slurm.set(kill_at=done + calls if calls else -1)
        pid = os.fork()
        if pid == 0:
            try:
                self.act(uid=0, policy=policy, n3=Level.FAULTY)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in {0, -signal.SIGKILL}
        return code == 0

    def assert_done_once(self, policy: Policy) -> None:
        slurm = self.slurm
        assert len(slurm.calls("scontrol", "update", "NodeName=n3")) == 1
        assert slurm.node("n3")["reason"].startswith("shealth: network")
        entries = read_ledger(Breaker(directory=str(self.shared))).entries
        assert [entry.node for entry in entries] == ["n3"]
        done = [
            entry.record
            for entry in journal.read_all(self.run.directory, journal.MASTER)
            if isinstance(entry.record, ActionDone)
        ]
        assert all(record.succeeded for record in done)
        assert [record.action for record in done].count(Action.DRAIN) == 1
        if policy is SPARE:
            assert slurm.job(JOB)["nodes"] == ["n1", "n2"]
            return
        assert len(slurm.calls("sbatch")) == 1
        assert len(slurm.calls("scontrol", "requeuehold")) == 1
        comment = slurm.job(JOB)["Comment"]
        assert comment.startswith("slurm-health: requeued without n3")
        assert comment.count("mine") == 1


@pytest.mark.heavy
@pytest.mark.parametrize("policy", [Policy(), SPARE], ids=["requeue", "spare"])
def test_an_act_that_is_killed_after_any_call_does_nothing_twice_and_loses_nothing(
    tmp_path: Path, policy: Policy
) -> None:
    for step in range(1, MOST_CALLS):
        scene = Mortal(tmp_path / str(step))
        ended = scene.live(policy, calls=step)
        # Slurm ends a job's processes once it has requeued the job.
        if not ended and scene.slurm.job(JOB)["state"] == "RUNNING":
            assert scene.live(policy)
        scene.assert_done_once(policy)
        if ended:
            assert step > 3
            return
    pytest.fail(f"no end within {MOST_CALLS} calls")
