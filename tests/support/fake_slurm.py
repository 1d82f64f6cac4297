# SPDX-License-Identifier: Apache-2.0
"""A cluster of commands on the PATH; slurm_bin/fake_slurm.py says what they refuse and lose."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.slurm_bin.fake_slurm import new_job

BIN = Path(__file__).with_name("slurm_bin")
UID = 4242


class FakeSlurm:
    """The state of a fake cluster on which one job runs."""

    def __init__(self, directory: Path, nodes: Sequence[str] = ("n1", "n2", "n3", "n4")) -> None:
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write("nodes", {node: {"state": "IDLE", "reason": ""} for node in nodes})
        self._write("jobs", {})
        settings = {"admin": False, "accounting": "accounting_storage/none"}
        self._write("settings", settings)
        (directory / "calls").touch()

    def environ(self) -> dict[str, str]:
        """Return the environment in which the commands are found."""
        path = f"{BIN}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, **self.variables()}

    def variables(self) -> dict[str, str]:
        return {"FAKE_SLURM_DIR": str(self.directory)}

    def run_job(self, job_id: int | str, nodes: Sequence[str], **changes: object) -> None:
        """Let a job run."""
        jobs = self._read("jobs")
        jobs[str(job_id)] = {**new_job("train", list(nodes)), **changes}
        self._write("jobs", jobs)

    def jobs(self) -> dict[str, dict[str, Any]]:
        return self._read("jobs")

    def job(self, job_id: int) -> dict[str, Any]:
        return self.jobs()[str(job_id)]

    def change_job(self, job_id: int, **changes: object) -> None:
        jobs = self._read("jobs")
        jobs[str(job_id)].update(changes)
        self._write("jobs", jobs)

    def forget_job(self, job_id: int) -> None:
        """Let Slurm drop the record of a job, as it does some minutes after its end."""
        jobs = self._read("jobs")
        del jobs[str(job_id)]
        self._write("jobs", jobs)

    def node(self, name: str) -> dict[str, str]:
        found: dict[str, str] = self._read("nodes")[name]
        return found

    def add_node(self, name: str) -> None:
        self._write("nodes", {**self._read("nodes"), name: {"state": "IDLE", "reason": ""}})

    def change_node(self, name: str, **changes: str) -> None:
        nodes = self._read("nodes")
        nodes[name].update(changes)
        self._write("nodes", nodes)

    def set(self, **settings: object) -> None:
        """Change how the cluster behaves: see where slurm_bin/fake_slurm.py reads settings."""
        self._write("settings", {**self._read("settings"), **settings})

    def calls(self, *beginning: str) -> list[list[str]]:
        """Return the commands that were run and begin with these words."""
        lines = (self.directory / "calls").read_text().splitlines()
        calls: list[list[str]] = [json.loads(line) for line in lines]
        return [call for call in calls if call[: len(beginning)] == list(beginning)]

    def _read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / f"{name}.json").read_text())
        return found

    def _write(self, name: str, content: dict[str, Any]) -> None:
        # Commands read it beside us: whole, or as it was.
        new = self.directory / f"{name}.json.of-test"
        new.write_text(json.dumps(content))
        new.replace(self.directory / f"{name}.json")
