# SPDX-License-Identifier: Apache-2.0
"""Watches a node's GPUs while they are under load: the sampler, started, read and ended."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from slurm_health import device_sampler
from slurm_health.core.burn import Burn, DeviceSample, NotSampled, decode, summarise
from slurm_health.processes import abandon_session, read_available, start_tied

_UNKILLABLE_S = 5.0


class BurnWatch:
    """The sampler of one burn. It is a process, because a sick driver can block whoever asks it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._buffer = b""
        self._samples: list[DeviceSample] = []
        self._not_sampled = ""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = start_tied(
                device_sampler.command(),
                environ=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        except OSError as err:
            self._not_sampled = f"the sampler cannot be started: {err.strerror}"

    def read(self) -> None:
        """Take in what the sampler has written, so that it never waits for a reader."""
        if self._process is None:
            return
        self._buffer += read_available(self._process.stdout)
        read_available(self._process.stderr)
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            found = decode(line)
            if isinstance(found, DeviceSample):
                self._samples.append(found)
            elif isinstance(found, NotSampled):
                self._not_sampled = found.not_sampled

    def end(self) -> tuple[list[Burn], str]:
        """End the sampler; return what it saw of each GPU, and why nothing if it could not.

        It has nothing to put in order, so it is killed; one that hangs in a driver is given up.
        """
        self.read()
        process, self._process = self._process, None
        if process is not None:
            if not abandon_session(process, wait_s=_UNKILLABLE_S):
                self._not_sampled = "the sampler hangs in the kernel and cannot be killed"
            for pipe in (process.stdin, process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()
        return summarise(self._samples), self._not_sampled
