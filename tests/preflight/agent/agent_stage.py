# SPDX-License-Identifier: Apache-2.0
"""One agent as a real process; a test plays the master, a fake interpreter the workers."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from slurm_health.preflight import orders
from slurm_health.preflight.agent.workers import AgentSettings
from slurm_health.preflight.master.run_check import agent_command
from slurm_health.records.records import GroupAborted, ProbeUsed, Record, Rendezvous, RoundStarted
from slurm_health.system import journal
from tests.support.supervised import descendants, eventually

FAKE_WORKER = Path(__file__).parents[2] / "support" / "fake_worker.py"
_R = TypeVar("_R", bound=Record)


class Stage:
    """A journal whose master is the test, and the agent of n1."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "run"
        self.behaviour = directory / "workers"
        self.behaviour.mkdir()
        journal.create(self.directory, ["n1"])
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self, run_id: str = "r1") -> None:
        self._orders = orders.OrderWriter(self.directory, run_id, ["n1", "n2", "n3"])

    def says(self, *records: Record) -> None:
        self._orders.append(*records)

    def settings(self, python: str = str(FAKE_WORKER), silence_s: float = 60.0) -> AgentSettings:
        return AgentSettings(
            node="n1",
            directory=self.directory,
            run_id="r1",
            launch=0,
            python=python,
            poll_s=0.01,
            silence_s=silence_s,
        )

    def start(
        self,
        how: str = "well",
        *,
        python: str | Path = FAKE_WORKER,
        poll_s: float = 0.01,
        bell: int | None = None,
        programs: Sequence[str] | None = None,
        **environ: str,
    ) -> subprocess.Popen[bytes]:
        self.behave(how)
        command = agent_command(
            self.directory, run_id="r1", nodes=1, python=str(python), programs=programs
        )
        process = subprocess.Popen(
            [*command(0, "n1"), f"--poll-s={poll_s}"],
            stdin=bell,
            stdout=bell,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "FAKE_WORKER_DIR": str(self.behaviour),
                "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
                "CUDA_VISIBLE_DEVICES": "",
                **environ,
            },
        )
        self.processes.append(process)
        return process

    def behave(self, how: str) -> None:
        (self.behaviour / "n1").write_text(how)

    def records(self) -> list[Record]:
        return [e.record for e in journal.read_all(self.directory, "n1") if e.record is not None]

    def hears(self, kind: type[_R], count: int = 1) -> _R:
        """Wait until the agent has written so many records of a kind; return the last."""

        def of_kind() -> list[_R]:
            return [record for record in self.records() if isinstance(record, kind)]

        eventually(lambda: len(of_kind()) >= count, f"{count} {kind.__name__}: {self.records()}")
        return of_kind()[count - 1]

    def round(
        self,
        index: int = 0,
        group: Sequence[str] = ("n1",),
        *,
        port: int = 4711,
        probes: Sequence[ProbeUsed] = (),
    ) -> None:
        begun = RoundStarted(
            round=index,
            name=f"round {index}",
            groups=[list(group)],
            rendezvous=[Rendezvous(address="127.0.0.1", port=port)],
            deadline_s=30.0,
            probes=list(probes),
        )
        self.says(begun)

    def abort(self, index: int = 0, group: Sequence[str] = ("n1",), **more: bool) -> None:
        self.says(GroupAborted(round=index, group=list(group), reason="n2 is gone", **more))

    def kinds(self) -> list[str]:
        return [type(record).__name__ for record in self.records()]

    def clean_up(self) -> None:
        for process in self.processes:
            below = descendants(process.pid)
            process.kill()
            process.wait(10)
            assert process.stderr is not None
            process.stderr.close()
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def end_of(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    assert process.stderr is not None
    code = process.wait(20)
    return code, process.stderr.read().decode()
