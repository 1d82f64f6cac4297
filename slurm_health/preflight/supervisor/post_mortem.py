# SPDX-License-Identifier: Apache-2.0
"""The post-mortem of a failed script: a process with a time limit."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence

import msgspec

from slurm_health.preflight.supervisor.check_process import HARMLESS
from slurm_health.preflight.supervisor.signal_witness import ALL_SIGNALS
from slurm_health.system.processes import abandon_session, own_module, start_tied

# Slurm kills what is left of a cancelled job 30 s after its SIGTERM (KillWait), of which the script
# may have used some.
POST_MORTEM_S = 20.0
ENDED_BY_SIGNAL = "the post-mortem was ended by a signal"
_UNKILLABLE_S = 1.0  # a process that hangs in the kernel is left behind


class EndedScript(msgspec.Struct, frozen=True, kw_only=True):
    """A start of the script that has ended, as its post-mortem reads it.

    Args:
        status: its wait status.
        name: the user's name for it.
        source: the file that contains it.
        directory: of the run in the journal, empty without one.
        ended_s: when it ended, in seconds since the epoch; the post-mortem may begin late.
        duration_s: how long it ran.
        output_from: where its own output begins in the files of our standard output and error.
        told_to_end: it received a signal that ends jobs.
        quiet: its post-mortem adds nothing to the job's output.
    """

    status: int
    name: str
    source: str
    directory: str
    ended_s: float
    duration_s: float
    output_from: tuple[int, ...] = ()
    told_to_end: bool = False
    quiet: bool = False

    @property
    def command(self) -> tuple[str, ...]:
        """The command of its post-mortem."""
        return own_module("slurm_health.training.monitor", msgspec.json.encode(self).decode())


def run(
    argv: Sequence[str],
    *,
    environ: Mapping[bytes, bytes],
    mask: Collection[int],
    limit_s: float = POST_MORTEM_S,
) -> str:
    """Run a post-mortem to its end, a signal, or its limit; return what went wrong.

    Every signal must be blocked; the post-mortem gets `mask`, and our standard streams.
    """
    while signal.sigtimedwait(ALL_SIGNALS, 0) is not None:
        pass  # the signals that ended the script are not for the post-mortem
    sys.stdout.flush()
    try:
        process = start_tied(argv, environ=environ, stdout=1, stderr=None, signal_mask=mask)
    except OSError as err:
        return f"no post-mortem: it cannot be started: {err}"
    deadline = time.monotonic() + limit_s
    try:
        while process.poll() is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return f"no post-mortem: it did not end within {limit_s:g} s"
            info = signal.sigtimedwait(ALL_SIGNALS, remaining)
            if info is not None and info.si_signo not in HARMLESS:
                return ENDED_BY_SIGNAL
    finally:
        abandon_session(process, wait_s=_UNKILLABLE_S)
    if process.returncode == -signal.SIGTERM:  # Slurm signals every process of a job
        return ENDED_BY_SIGNAL
    return "" if process.returncode == 0 else "the post-mortem failed; the job ends as it would"
