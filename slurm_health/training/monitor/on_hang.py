# SPDX-License-Identifier: Apache-2.0
"""What is done about a hang beside saying it: nothing, the job is cancelled, the script ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slurm_health.preflight.decide.policy import Monitor
from slurm_health.records.errors import SlurmError
from slurm_health.records.records import Action, ActionDone, ActionIntended
from slurm_health.records.script_records import HangFound
from slurm_health.system.slurm.client import Client
from slurm_health.training.monitor.findings import Findings

OnHang = Callable[[HangFound, Findings], None]


class ScriptToEnd(Exception):
    """The training hangs, and who started the monitor is to end it and to see what follows."""

    def __init__(self, hang: HangFound) -> None:
        self.hang = hang
        super().__init__(hang.found.cause)


def acting(mode: str, environ: Mapping[str, str]) -> OnHang:
    """Return what does about a hang what the user has asked for.

    Outside Slurm a training is stopped by whoever started the monitor, as where it is to restart.
    """
    job = environ.get("SLURM_JOB_ID")

    def act(hang: HangFound, findings: Findings) -> None:
        if not is_sure(hang):
            return
        if mode == Monitor.STOP.value and job is not None:
            _cancel(int(job), environ, findings)
        elif mode in (Monitor.STOP.value, Monitor.RESTART.value):
            _end_script(hang, findings, mode)

    return act


def is_sure(hang: HangFound) -> bool:
    """Tell whether something may be done about a hang: never on what output alone guesses.

    A job may print nothing for good reasons; so where that is all, the place must be known.
    """
    return hang.located or not hang.line


def _cancel(job: int, environ: Mapping[str, str], findings: Findings) -> None:
    findings.record(ActionIntended(action=Action.CANCEL, reason="it hangs (--monitor=stop)"))
    findings.say("monitor: the job is cancelled because it hangs (--monitor=stop)")
    try:
        Client(environ).cancel(job)
    except SlurmError as err:
        findings.say(f"monitor: it could not be cancelled: {err}")
        findings.record(ActionDone(action=Action.CANCEL, succeeded=False, detail=str(err)))


def _end_script(hang: HangFound, findings: Findings, mode: str) -> None:
    reason = f"it hangs (--monitor={mode})"
    findings.record(ActionIntended(action=Action.END_SCRIPT, reason=reason))
    findings.say(f"monitor: the script is ended because {reason}")
    raise ScriptToEnd(hang)
