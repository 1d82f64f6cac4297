# SPDX-License-Identifier: Apache-2.0
"""What is known of one node's agent and its workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slurm_health.records import records

# What an agent says of itself.
AgentRecord = (
    records.AgentStarted
    | records.WorkersStarting
    | records.WorkersReady
    | records.WorkersFailed
    | records.DevicesUnopened
    | records.AgentEnded
)


@dataclass(frozen=True, kw_only=True)
class DeviceFailure:
    """What the devices of a node did instead of being opened, by a process with this `torch`.

    `late`: they had only not been opened yet.
    """

    words: str
    torch: str
    late: bool = False


@dataclass
class NodeState:
    """What is known of one node's agent.

    `launches` counts how often it was started by this master, `failed_starts` how often Slurm
    could not. `lost` and `failed` say why the agent or its workers are of no use, `device_failure`
    that this is because of its devices, `no_torch` that its interpreter lacks that, on a node with
    so many `accelerators`.
    """

    launches: int = 0
    launch: int = -1
    launched_s: float = 0.0
    started: records.AgentStarted | None = None
    ready: records.WorkersReady | None = None
    lost: str = ""
    lost_s: float = 0.0
    failed: str = ""
    device_failure: DeviceFailure | None = None
    no_torch: bool = False
    accelerators: int = 0
    failed_starts: int = 0
    no_journal: bool = False
    job_ended: bool = False

    @property
    def gone(self) -> bool:
        """Whether nothing more is to be expected of the agent."""
        return bool(self.lost or self.failed)

    @property
    def usable(self) -> bool:
        """Whether the node can take part in a round now."""
        return self.ready is not None and not self.gone

    @property
    def pending(self) -> bool:
        """Whether the node may yet become usable."""
        return not self.usable and not self.gone

    @property
    def driver_keeps_state(self) -> bool:
        """Whether the driver of its devices is known to stay initialised between processes."""
        return self.started is not None and self.started.driver_keeps_state

    def begin(self, launch: int, time_s: float) -> None:
        """Forget what was said of an earlier agent: a new one has been started."""
        self.launches += 1
        self.launch, self.launched_s = launch, time_s
        self.started = self.ready = None
        self.lost = self.failed = ""
        self.no_journal = self.job_ended = self.no_torch = False
        self.device_failure = None

    def lose(self, cause: records.LossCause, reason: str, time_s: float) -> None:
        """Take it that the agent is gone."""
        if cause in (records.LossCause.NO_JOURNAL, records.LossCause.JOB_ENDED):
            self.failed = reason  # the next agent would fare no better
            self.no_journal = cause is records.LossCause.NO_JOURNAL
            self.job_ended = cause is records.LossCause.JOB_ENDED
        else:
            self.lost, self.lost_s = reason, time_s
            self.failed_starts += cause is records.LossCause.NOT_STARTED

    def heed(self, record: AgentRecord) -> None:
        """Take in what the agent of the current launch says."""
        match record:
            case records.AgentStarted():
                self.started = record
            case records.WorkersStarting():
                self.ready = None
                self.device_failure = None
            case records.WorkersReady():
                self.ready = record
                self.device_failure = None
            case records.DevicesUnopened(devices=devices, waited_s=waited_s, torch=torch):
                numbers = ", ".join(str(device) for device in devices)
                several = "s" if len(devices) > 1 else ""
                words = f"device{several} {numbers} not opened within {waited_s:.0f} s"
                self.device_failure = DeviceFailure(words=words, torch=torch, late=True)
            case records.WorkersFailed(reason=reason, device_failed=device_failed, torch=torch):
                self.failed = reason
                self.no_torch, self.accelerators = record.no_torch, record.accelerators
                if device_failed:
                    self.device_failure = DeviceFailure(words=f"{reason}, twice", torch=torch)
            case records.AgentEnded(reason=reason):
                self.lost = self.lost or f"its agent left: {reason}"


def on_cpus(ready: Iterable[records.WorkersReady]) -> bool:
    """Tell whether these workers compute with CPUs."""
    return all(each.on_cpus for each in ready)
