# SPDX-License-Identifier: Apache-2.0
"""The monitor beside the script: it starts and ends with the script, within time limits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from slurm_health.preflight.supervisor.recorder import tell
from slurm_health.system import processes

OFF = "off"
# Exit status of a monitor that leaves a hang to the supervisor.
SCRIPT_HANGS = 75
# A script that ends sooner has no agents: thousands of short jobs of an array must not cost as many
# steps.
AFTER_S = 10.0
_LEAVE_S = 3.0  # what it needs to end the agents of all nodes
_UNKILLABLE_S = 1.0


# Torch's names today, and until 2.8: a user who sets one of the two has chosen.
_ENTRIES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
# Torch makes a pipe per rank, through which the monitor asks for a dump while it runs.
PIPES = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_RENAMED, _MAJOR_AND_MINOR = (2, 9), 2
_MOST_ENTRIES = "2000"  # as torch since 2.9; before, none unless told
PREFIX = "flight-rank-"


class Monitoring:
    """The monitor beside a script, if there is one."""

    def __init__(self, process: processes.Process | None) -> None:
        self._process = process

    def script_hangs(self) -> bool:
        """Return whether it has ended because the script hangs, and must be ended."""
        return self._process is not None and self._process.poll() == SCRIPT_HANGS


@contextlib.contextmanager
def beside(
    mode: str,
    *,
    directory: str,
    script_source: Path,
    environ: Mapping[bytes, bytes],
    mask: Collection[int],
    after_s: float = AFTER_S,
    quiet: bool = False,
) -> Iterator[Monitoring]:
    """While active, the monitor watches the script; its failures raise nothing.

    `mode` is what the monitor does about a hang, or OFF. It begins after `after_s`, and writes to
    the journal in `directory`, and to the job's output unless `quiet`. The script is in
    `script_source`.
    """
    if mode == OFF:
        yield Monitoring(None)
        return
    argv = processes.own_module(
        "slurm_health.training.monitor.watch",
        f"--directory={directory}",
        f"--on-hang={mode}",
        f"--after-s={after_s:g}",
        f"--script-source={script_source}",
        *(["--quiet"] if quiet else []),
    )
    out = processes.NOTHING if quiet else 1
    with running(
        argv, environ=environ, stdout=out, mask=mask, after_s=after_s, quiet=quiet
    ) as monitoring:
        yield monitoring


@contextlib.contextmanager
def running(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] | Mapping[bytes, bytes],
    stdout: int,
    mask: Collection[int] | None = None,
    after_s: float = 0.0,
    quiet: bool = False,
) -> Iterator[Monitoring]:
    """While active, a monitor runs, which begins after `after_s`; its failures raise nothing."""
    began_s = time.monotonic()
    try:
        # Its standard input closes with us, however we end.
        process = processes.start_tied(
            argv,
            environ=environ,
            stdin=processes.PIPE,
            stdout=stdout,
            stderr=processes.NOTHING if quiet else None,
            signal_mask=mask,
        )
    except OSError as err:
        tell(f"no monitor: it cannot be started: {err}", quiet=quiet)
        yield Monitoring(None)
        return
    try:
        yield Monitoring(process)
    finally:
        processes.close_pipes(process)
        if time.monotonic() - began_s >= after_s:
            processes.ends_within(process, _LEAVE_S)
        processes.abandon_session(process, wait_s=_UNKILLABLE_S)


def flight_environ(environ: Mapping[str, str], directory: str, torch: str = "") -> dict[str, str]:
    """Return the variables to set for a script in this environment, none that it has already.

    The dumps go to `directory`, which must be one that all nodes share. Of each variable's names
    the one that this version of torch knows is set, because a newer one warns of the older name;
    all of them where the version is not known.
    """
    # Torch knows one of two names; without its version both are set.
    numbers, known = torch.split(".")[:2], slice(None)
    if len(numbers) == _MAJOR_AND_MINOR and all(number.isdecimal() for number in numbers):
        known = slice(0, 1) if tuple(map(int, numbers)) >= _RENAMED else slice(1, 2)
    wanted = {
        _ENTRIES: _MOST_ENTRIES,
        _FILES: f"{directory}/{PREFIX}",
        _ON_TIMEOUT: "1",
        (PIPES,): f"{directory}/{PREFIX}",
    }
    return {
        name: value
        for names, value in wanted.items()
        if not any(name in environ for name in names)
        for name in (names[known] if len(names) > 1 else names)
    }


def heartbeat_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable to set for the ranks of a script to have a heartbeat by themselves."""
    here = str(Path(__file__).resolve().parents[2] / "training" / "in_ranks")
    before = environ.get("PYTHONPATH", "")
    if here in before.split(":"):
        return {}
    return {"PYTHONPATH": f"{here}:{before}" if before else here}
