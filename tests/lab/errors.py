# SPDX-License-Identifier: Apache-2.0
"""Everything the lab can say went wrong.

LabError
├── LabUnavailable     this machine or user cannot run a lab; the message says what is missing
├── LabStartFailed     the lab came up half; carries the tails of its logs
├── CommandFailed      a command inside the lab ended with another code than 0
├── DeadlinePassed     a command, or a state that was waited for, took too long
└── JobEnded           a job reached a final state other than the one waited for
"""


class LabError(Exception):
    """A mistake in how the lab was used, or a fault of the lab itself; one line."""


class LabUnavailable(LabError):
    pass


class LabStartFailed(LabError):
    def __init__(self, why: str, logs: str) -> None:
        super().__init__(f"the lab did not come up: {why}" + (f"\n{logs}" if logs else ""))


class CommandFailed(LabError):
    pass


class DeadlinePassed(LabError):
    def __init__(self, what: str, deadline_s: float, seen: str) -> None:
        self.what, self.deadline_s, self.seen = what, deadline_s, seen
        super().__init__(f"{what}: not within {deadline_s:g} s; last seen: {seen}")


class JobEnded(LabError):
    pass
