# SPDX-License-Identifier: Apache-2.0
"""ib_write_bw of the package perftest: how it is started, what it prints, and when it listens."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TOOL = "ib_write_bw"
# 17 GB: a third of a second at 400 Gbit/s, 14 s at 10.
MESSAGE_BYTES, MESSAGES = 8 << 20, 2000
FEW_MESSAGES = 200  # where a check is to take a second: five times what the tool writes by itself
_HELP_S = 5.0
_LISTEN = "0A"
_TABLES = ("net/tcp", "net/tcp6")
# bytes, iterations, peak and average Gbit/s, messages per microsecond
_ROW = re.compile(rf"^\s*{MESSAGE_BYTES}\s+\d+\s+[\d.]+\s+([\d.]+)\s", re.M)


@dataclass(frozen=True)
class RunEnd:
    """One end of a run: an adapter, a TCP port for its two ends to meet, and a GPU (-1: none).

    With a GPU the data comes from its memory, or goes there, by GPUDirect.
    """

    adapter: str
    port: int = 0
    gpu: int = -1
    messages: int = MESSAGES


def command(tool: str, place: RunEnd, server: str, environ: Mapping[str, str]) -> list[str]:
    """Return the command line of one end; that of the serving one has no `server`.

    RoCE needs the number of an address: the one that NCCL is given is taken.
    """
    gid = environ.get("NCCL_IB_GID_INDEX", "")
    return [
        *(tool, "-d", place.adapter, "-p", str(place.port), "-F", "--report_gbits"),
        *("-s", str(MESSAGE_BYTES), "-n", str(place.messages)),
        *(("-x", gid) if gid.isdecimal() else ()),
        *((f"--use_cuda={place.gpu}",) if place.gpu >= 0 else ()),
        *((server,) if server else ()),
    ]


def takes_gpus(tool: str, environ: Mapping[str, str]) -> bool:
    """Tell whether it was built with GPUDirect: most distributions' is not."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(
            [tool, "--help"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_HELP_S,
        )
        return b"--use_cuda" in said.stdout + said.stderr
    return False


def is_listening(port: int, proc: Path = Path("/proc/self")) -> bool:
    """Tell whether somebody on this machine listens on a port: to connect would use it up."""
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in (proc / table).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                    return True
    return False


class Run:
    """One end of a run, in a process of its own. What it prints is less than a pipe holds."""

    def __init__(self, words: list[str], environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            words,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with self._process:  # waits, and closes its pipe
            pass

    def has_ended(self) -> bool:
        """Tell whether it has."""
        return self._process.poll() is not None

    def said(self) -> float | str:
        """Return the average in Gbit/s, or its own last words where it has none."""
        if not self.has_ended():
            return "no result in time"
        assert self._process.stdout is not None
        output = self._process.stdout.read()
        found = _ROW.search(output)
        if found and not self._process.returncode:
            return float(found.group(1))
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        return f"{TOOL}: {lines[-1] if lines else f'exit code {self._process.returncode}'}"
