# SPDX-License-Identifier: Apache-2.0
"""How a process ended: by its traceback, or by lines of launchers and frameworks."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

import msgspec

from slurm_health.records.text import one_line
from slurm_health.training.diagnosis.collected import RankFailure
from slurm_health.training.diagnosis.words_of_launchers import is_consequence

_SHORT = 300  # kept characters of a line
_LONG = 500  # of an exception with the lines of NCCL behind it
# Names of signals as strsignal(3) words them, with which srun reports a task's end.
SIGNALS = {
    "Aborted": 6,
    "Bus error": 7,
    "Floating point exception": 8,
    "Hangup": 1,
    "Illegal instruction": 4,
    "Interrupt": 2,
    "Killed": 9,
    "Out Of Memory": 9,
    "Segmentation fault": 11,
    "Terminated": 15,
    "User defined signal 1": 10,
    "User defined signal 2": 12,
}
ABORTED, TERMINATED = 6, 15
# Signals that end a process which does not handle them, as exit statuses have them: a shell adds
# 128, a Python that passes a child's negative status on takes it from 256.
_ENDING = (4, 6, 7, 8, 9, 11, 15)

_FRAME = re.compile(r'\s+File "(?P<file>[^"]*)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
# Of a type: a line such as `usage: train.py` that came in between is none.
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?:_*[A-Z]\w*|(?<=\.)(?:error|timeout|gaierror|herror))(?::\s.*|:)?$"
)
_CHAINED = re.compile(r"(During handling of the above|The above exception was the direct cause)")
_RENDEZVOUS = re.compile(r"\bRendezvous\w{1,20}Error\b")
_WHAT = re.compile(r"\s+what\(\):\s*(?P<text>.*)")
_NCCL_RESULT = re.compile(r"nccl[A-Z]\w+: ")  # the name of the result, in a line of its own
_OF_A_LIBRARY = ("site-packages/", "dist-packages/", "/lib/python", "<frozen", "<string>")
_NOT_WAITS = frozenset({"wrapper", "_wait", "wait"})
# Lines of other launchers and frameworks about the end of a process, some with its rank.
_LAUNCHERS = tuple(
    re.compile(pattern)
    for pattern in (
        # DeepSpeed: [launch.py:324:sigkill_handler] ['python', …] exits with return code = -9
        r"\[launch\.py:\d+:\w+\] .* exits with return code = (?P<code>-?\d{1,3})$",
        # failed (exitcode: -9) local_rank: 0 (pid: 12) of binary: python
        r"failed \(exitcode: (?P<code>-?\d{1,3})\) local_rank: \d{1,4} \(pid",
        # Horovod: Process 1 exit with status code 137.
        r"^Process (?P<rank>\d{1,6}) exit with status code (?P<code>\d{1,3})\.?$",
        # MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD
        r"^MPI_ABORT was invoked on rank (?P<rank>\d{1,6}) in communicator MPI_COMM_WORLD",
        # mpirun noticed that process rank 3 with PID 77 on node n2 exited on signal 9 (Killed).
        r"rank (?P<rank>\d+) with PID \d+ on node (?P<node>\S+) exited on signal (?P<signal>\d+)",
        # Lightning: [rank: 1] Child process with PID 123 terminated with code -9. Forcefully …
        r"^\[rank: (?P<rank>\d{1,6})\] Child process .{1,30} terminated with code (?P<code>-?\d+)",
        # Open MPI, in two lines: Process name: [[18173,1],3] / Exit code:    137
        r"^ *Process name: \[\[\d+,\d+\],(?P<rank>\d{1,6})\]$",
        r"^ *Exit code: {2,8}(?P<code>\d{1,3})$",
        # Hydra, in two: =   RANK 3 PID 4242 RUNNING AT n2 / =   KILLED BY SIGNAL: 9 (Killed)
        r"^=\s+(?:RANK (?P<rank>\d{1,6}) )?PID \d+ RUNNING AT (?P<node>[\w.-]+)$",
        r"^=\s+KILLED BY SIGNAL: (?P<signal>\d{1,2}) ",
        r"^=\s+EXIT CODE: (?P<code>\d{1,3})$",
        r"^YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .+\(signal (?P<signal>\d{1,2})\)$",
        # bash: /var/…/slurm_script: line 12: 12345 Killed                  python train.py
        r": line \d+: +\d{2,9} (?P<how>[A-Z][a-z]+(?: [a-z]+){0,2}) {2,}(?:\(core dumped\) )?\S",
        # torch.multiprocessing: process 3 terminated with signal SIGKILL
        r"process (?P<rank>\d{1,6}) terminated with signal (?P<name>SIG[A-Z]+)",
        r"process (?P<rank>\d{1,6}) terminated with exit code (?P<code>\d{1,3})$",
        # MPICH: application called MPI_Abort(MPI_COMM_WORLD, 1) - process 3
        r"^application called MPI_Abort\(MPI_COMM_WORLD, (?P<code>-?\d+)\) - process (?P<rank>\d+)",
        # MPICH ERROR [Rank 0] [job id 12.0] [Thu Aug 3 00:01:58 2023] [n2] - Abort(1616271) (…
        r"^MPICH ERROR \[Rank (?P<rank>\d{1,6})\] (?:\[[^\]]+\] ){2}\[(?P<node>[\w.-]+)\] - Abort",
        # Fatal Python error: Segmentation fault (faulthandler)
        r"^Fatal Python error: (?P<how>[A-Z][a-z]+(?: [a-z]+){0,2})$",
        # subprocess: died with <Signals.SIGKILL: 9>
        r"died with <Signals\.SIG\w+: (?P<signal>\d{1,2})>",
        # joblib: The exit codes of the workers are {SIGKILL(-9)}
        r"exit codes of the workers are \{(?P<name>SIG[A-Z]+)\(-\d+\)",
    )
)
_OF_A_LAUNCHER = re.compile(
    r"[Ee]xit|EXIT|signal|SIG|MPI_A|MPICH E|terminated with|Process name|RUNNING AT|: line \d+: +\d"
    r"|^Fatal Python"
)


def signal_of(exit_code: int) -> int:
    """Return the signal that an exit status stands for, 0 for none: 137 and 247 are SIGKILL."""
    return next((n for n in _ENDING if exit_code in (128 + n, 256 - n)), 0)


@dataclass
class Traceback:
    """A traceback in the course of reading, and those it is chained to."""

    at: int
    rank: int | None
    task: int | None
    error: str = ""
    place: str = ""
    waits_in: str = ""
    loading: bool = False
    inside: bool = True
    own: bool = False  # the frame before is of the user's own code
    raises: bool = False
    placed: bool = False  # of a chain the first traceback with a line of the user's counts
    original: bool = False
    chained: bool = False
    nccl: bool = False  # its exception is one of NCCL's, which has several lines
    last_error: bool = False  # the next of them is the last, with the cause

    def take(self, text: str) -> bool:
        """Read a line that may belong to it; return whether it does."""
        if what := _WHAT.match(text):
            if self.error and not self.inside and what["text"] not in self.error:
                self.error = one_line(f"{self.error}: {what['text']}")[:_SHORT]
                self.nccl = "NCCL error" in text
            return True
        if not self.inside:
            self.chained |= _CHAINED.match(text) is not None
            if self.nccl and self.last_error:  # the cause in an exception of NCCL's
                self.nccl = self.last_error = False
                if text.strip():
                    self.error = one_line(f"{self.error}: {text.strip()}")[:_LONG]
                return True
            self.last_error = self.nccl and text.startswith("Last error:")
            return self.last_error or (self.nccl and _NCCL_RESULT.match(text) is not None)
        if frame := _FRAME.match(text):
            if not self.placed:
                self._take_frame(frame)
            return True
        if text[:1].isspace() or not text:
            if self.own and text.strip():
                self.raises, self.own = text.lstrip().startswith("raise "), False
            return True
        self.inside = self.chained = False
        self.placed = bool(self.place)
        is_exception = _EXCEPTION.match(text) is not None
        if is_exception and (not self.error or self.original):
            self.error = one_line(text)[:_SHORT]
            self.nccl = "NCCL error" in text
        elif is_exception and (stage := _RENDEZVOUS.search(text)):
            self.error = f"{self.error} ({stage[0]})"  # a store that broke before the ranks met
        return is_exception

    def _take_frame(self, frame: re.Match[str]) -> None:
        file, function = frame["file"], frame["function"] or ""
        self.own = not any(mark in file for mark in _OF_A_LIBRARY)
        self.raises = False
        if self.own:
            self.place = f"{file.rpartition('/')[2]}:{frame['line']}"
            self.waits_in, self.loading = "", False
        elif file.endswith("torch/serialization.py"):
            self.loading |= function == "load"
        elif function == "_engine_run_backward":
            self.waits_in = "backward"
        elif file.endswith("torch/distributed/distributed_c10d.py") and function not in _NOT_WAITS:
            self.waits_in = self.waits_in or function

    def failure(self, rank: int | None, end: RankFailure | None) -> RankFailure:
        """Return the failure of a rank that raised it, and ended so."""
        if passed_on := launcher_end(self.error, self.at):
            return passed_on
        who = f"rank {rank}: " if rank is not None else ""
        return RankFailure(
            rank=rank,
            node=end.node if end else "",
            error=self.error,
            place=self.place,
            raises=self.raises,
            waits_in=self.waits_in,
            loading=self.loading,
            exit_code=end.exit_code if end else 0,
            signal=end.signal if end and end.signal != TERMINATED else 0,
            at=self.at,
            line=f"{who}{self.error}" + (f" ({self.place})" if self.place else ""),
            consequence=is_consequence(self.error),
        )


def launcher_end(text: str, at: int) -> RankFailure | None:
    """Return the end of a process that a line of a launcher or framework reports, else None."""
    if not _OF_A_LAUNCHER.search(text):
        return None
    match = next((match for pattern in _LAUNCHERS if (match := pattern.search(text))), None)
    if match is None:
        return None
    named = match.groupdict()
    code, rank = int(named.get("code") or 0), named.get("rank")
    number = int(named.get("signal") or 0) or max(-code, 0) or signal_of(code)
    if name := named.get("name"):
        number = getattr(signal, name, signal.SIGKILL).value
    elif how := named.get("how"):
        number = SIGNALS.get(how, 0)
        if not number:  # a line of another kind
            return None
    return RankFailure(
        rank=int(rank) if rank else None,
        node=(named.get("node") or "").partition(".")[0],
        exit_code=max(code, 0),
        signal=number,
        at=at,
        line=one_line(text)[:_SHORT],
        consequence=number == TERMINATED,
    )


def by_launcher(end: RankFailure) -> RankFailure:
    """Return an end as a consequence if a launcher ended the other ranks so, with SIGTERM."""
    consequence = end.consequence or end.signal == TERMINATED
    return msgspec.structs.replace(end, consequence=consequence)
