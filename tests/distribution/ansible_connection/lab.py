# SPDX-License-Identifier: Apache-2.0
"""Ansible's way into a node of the lab: what the inventory says, with the command behind it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection import ConnectionBase

DOCUMENTATION = """
name: lab
short_description: enter a node of the lab
description: [Runs commands in the namespaces of a node of tests/lab.]
options:
  argv:
    description: JSON, the words that enter the node, behind which a shell's command is put.
    vars: [{name: lab_argv}]
"""


class Connection(ConnectionBase):  # type: ignore[misc]  # ansible has no types
    """One node. It has a shell, and no way for files but that."""

    transport = "lab"
    has_pipelining = True

    def _connect(self) -> Connection:
        self._connected = True
        return self

    def exec_command(
        self, cmd: str, in_data: bytes | None = None, sudoable: bool = True
    ) -> tuple[int, bytes, bytes]:
        """Run a shell's command on the node."""
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        done = self._run(cmd, in_data or b"")
        return done.returncode, done.stdout, done.stderr

    def put_file(self, in_path: str, out_path: str) -> None:
        """Bring a file to the node, whose /tmp is its own."""
        done = self._run(f"cat > {self._shell.quote(out_path)}", Path(in_path).read_bytes())
        if done.returncode != 0:
            raise AnsibleConnectionFailure(f"cannot write {out_path}: {done.stderr!r}")

    def fetch_file(self, in_path: str, out_path: str) -> None:
        """Take a file from the node."""
        done = self._run(f"cat {self._shell.quote(in_path)}", b"")
        if done.returncode != 0:
            raise AnsibleConnectionFailure(f"cannot read {in_path}: {done.stderr!r}")
        Path(out_path).write_bytes(done.stdout)

    def close(self) -> None:
        """Nothing is held between two commands."""
        self._connected = False

    def _run(self, cmd: str, data: bytes) -> subprocess.CompletedProcess[Any]:
        argv = json.loads(self.get_option("argv"))
        return subprocess.run([*argv, cmd], input=data, capture_output=True, check=False)
