# SPDX-License-Identifier: Apache-2.0
"""Everything the lab can say went wrong.

LabError
├── LabUnavailable     this machine or user cannot run a lab; the message says what is missing
├── LabStartFailed     the lab came up half; carries the tails of its logs
├── CommandFailed      a command inside the lab ended with another code than 0
├── DeadlinePassed     a command, or a state that was waited for, took too long
└── JobEnded           a job reached a final state other than the one waited for
"""

from collections.abc import Sequence


class LabError(Exception):
    """A mistake in how the lab was used, or a fault of the lab itself; one line."""


class LabUnavailable(LabError):
    """This machine or this user cannot run a lab."""


class LabStartFailed(LabError):
    """The lab could not be brought up."""

    def __init__(self, why: str, logs: str) -> None:
        self.why, self.logs = why, logs
        super().__init__(f"the lab did not come up: {why}" + (f"\n{logs}" if logs else ""))


class CommandFailed(LabError):
    """A command inside the lab ended with another code than 0."""

    def __init__(
        self, argv: Sequence[str], where: str, returncode: int, stdout: str, stderr: str
    ) -> None:
        self.argv, self.where, self.returncode = tuple(argv), where, returncode
        self.stdout, self.stderr = stdout, stderr
        super().__init__(
            f"{' '.join(argv)!r} on {where} ended with {returncode}"
            f"\nstdout: {stdout.strip()!r}\nstderr: {stderr.strip()!r}"
        )


class DeadlinePassed(LabError):
    """A command, or a state that was waited for, took longer than allowed."""

    def __init__(self, what: str, deadline_s: float, seen: str) -> None:
        self.what, self.deadline_s, self.seen = what, deadline_s, seen
        super().__init__(f"{what}: not within {deadline_s:g} s; last seen: {seen}")


class JobEnded(LabError):
    """A job reached a final state other than the one waited for."""

    def __init__(self, job: dict[str, str], wanted: Sequence[str], output: str) -> None:
        self.job, self.wanted, self.output = job, tuple(wanted), output
        super().__init__(
            f"job {job.get('JobId')} is {job.get('JobState')} (reason {job.get('Reason')!r}, exit"
            f" {job.get('ExitCode')}), wanted {' or '.join(wanted)}; end of its output:\n{output}"
        )
