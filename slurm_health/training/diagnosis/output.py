# SPDX-License-Identifier: Apache-2.0
"""Decodes a job's output once: the ends of processes, their last words, facts of the system.

Any text is accepted; unknown lines are skipped. The prefixes of torch (`[rank3]:`), torchrun
(`[default3]:`; `[n5:3]:` with `--role n5:`), mpirun, Ray and `srun --label` (`3: `) name the ranks.
The lines of torchrun, srun, other launchers and NCCL's watchdogs about the end of a rank, and its
own traceback, become one `RankFailure`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from slurm_health.records.nodeset import expand
from slurm_health.records.text import one_line
from slurm_health.training.diagnosis.collected import Fact, LastWords, RankFailure, TrainingLog
from slurm_health.training.diagnosis.ends import (
    ABORTED,
    SIGNALS,
    Traceback,
    by_launcher,
    launcher_end,
    signal_of,
)
from slurm_health.training.diagnosis.rows import On, alike
from slurm_health.training.diagnosis.watchdogs import Watchdogs
from slurm_health.training.diagnosis.words import known
from slurm_health.training.diagnosis.words_of_launchers import WAITS, is_consequence

_LINE_CHARACTERS = 2000  # of a line; an exception may hold a whole tensor
_SHORT = 300  # characters of it that are kept
_MOST_FAILURES = 16_384  # more ranks than any known job has
_KEPT = 500  # of a kind, the first ones
_MOST_FACTS = 200
_MOST_WORDS = 200
_LINES = 40  # the last ones of a process
_MIXED_LINES = 4000  # of a stream that many processes share

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# The prefix of log collectors, with one space: `2026-11-02T10:00:00.123Z `.
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,:+Z-]{0,16} (?:std(?:err|out) [FP] )?")
_PREFIX = re.compile(
    r"(?:\[\d{1,3},(?P<mpi>\d{1,6})\]<std(?:err|out)>: ?)?"  # mpirun --tag-output
    r"(?:\([\w.-]{1,80}(?:\([^()]{0,80}\))? pid=\d{1,9}(?:, ip=[\w.:]{1,40})?\) )?"  # Ray
    r"(?: {2,20}\| )?"  # a group of exceptions
    r"(?:\s{0,6}(?P<task>\d{1,6}): ?)?"
    r"(?:\[(?!rank\d)[A-Za-z_](?:[\w.-]*:|[A-Za-z_]*)\d{1,6}\]:\s?)?"
    r"(?:\[rank(?P<rank>\d{1,6})\]:\s?)?"
)
# Of the logger of vLLM: `ERROR 08-26 22:44:30 worker_base.py:382] `.
_LOGGER = re.compile(r"ERROR \d\d-\d\d [\d:]{8} \[?[\w./-]{1,80}:\d{1,6}\] ")
_TRACEBACK = re.compile(r"(?P<original>Original )?Traceback \(most recent call last\):")
_TERMINATED = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']*)'")
_OF_CHILDREN = re.compile(
    r"\S*(?:ChildFailed|ProcessRaised)E|(?:Base)?ExceptionGroup: "
)  # the children's exceptions stand there too
_NATIVE = re.compile(r"(?:\w+::)+\w+")
# How the exception begins with which NCCL's watchdog ends a process that may have raised before.
_BY_WATCHDOG = "Process group watchdog thread terminated"
# An exception that stands alone, by its name. Python always writes those of syntax so; they are
# mistakes. NCCL's own names stand in the second line of its exceptions, which may be all that is
# left of the mixed lines of many ranks.
_RAISED = re.compile(
    r"(?!SyntaxError|IndentationError|TabError)(?:[A-Za-z_]\w*\.)*_*[A-Z]\w*(?:Error|Exception)(?::\s|$)"
    r"|nccl[A-Z]\w+: "
)
_FILE_LINE = re.compile(r'\s+File "(?:[^"]*/)?(?P<file>[^"/]+)", line (?P<line>\d+)$')
_OF_SYNTAX = ("SyntaxError: ", "IndentationError: ", "TabError: ")

# torchrun's summary, and srun: error: n[3-4]: tasks 2-3: Exited with exit code 1
_ITEM = re.compile(r"\s{2}(?P<key>time|host|rank|exitcode)\s*: (?P<value>.+)")
_TASK = re.compile(
    r"srun: error: (?P<nodes>[^\s:]+): tasks? (?P<tasks>[\d,-]+):"
    r" (?P<how>.+?)(?: \(core dumped\))?$"
)
_EXITED = re.compile(r"Exited with exit code (\d+)")
# srun, or slurmstepd by its order, ends the rest of a step.
_TERMINATING = re.compile(
    r"srun: (?:\S+: ){0,2}(?:Terminating|Job step aborted)|slurmstepd: error: \*\*\* STEP \S+ ON"
)
# Lines of Slurm, the kernel, the driver and NCCL about a job, by kind.
_FACTS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        # In whole phrases: a script may print the counters of its cgroup (`oom_kill 0`).
        # slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks …
        # srun: error: n3: task 2: Out Of Memory
        "memory-kill": r"Detected [1-9]\d* oom[_-]kill event"
        r"|srun: error: \S+: tasks? [\d,-]+: Out Of Memory|[Ee]xceeded (?:job |step )?memory limit"
        r"|[Oo]ut of memory(?: \(\w+\))?: Kill(?:ed)? process \d"
        r"|invoked oom-killer: |oom-kill:constraint=|\bOOMKilled\b|\bOUT_OF_ME(?:MORY\b|\+)",
        "node-lost": r"Node failure on (?P<node>[\w.-]+)",
        # ORTE has lost communication with a remote daemon: Remote daemon: [[3748,0],2] on node n3
        "daemon-lost": r"Remote daemon: ?\[\[.{1,40}\] on node (?P<node>[\w.-]+)",
        # JobState=PENDING Reason=launch_failed_requeued_held; squeue: (launch failed requeued held)
        "held": r"launch[ _]failed[ _]requeued[ _]held",
        # slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO NODE FAILURE,…
        "a-node-lost": r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO NODE FAILURE",
        # slurmstepd: error: *** JOB 12 ON n1 UNCORRECTABLE MEMORY ERROR AT 2026-11-22T10:00:00 ***
        # slurmstepd: error: *** STEP 12.0 STEPD TERMINATED ON n1 AT … DUE TO JOB NOT ENDING WITH …
        "unkillable": r"\*\*\* STEP \S+ STEPD TERMINATED ON (?P<node>[\w.-]+) AT",
        "memory-broken": r"\*\*\* (?:JOB|STEP) \S+ ON (?P<node>[\w.-]+) UNCORRECTABLE MEMORY"
        r" ERROR AT",
        # slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO TIME LIMIT ***
        "cancelled": r"\*\*\* (?:JOB (?P<value>\S+) ON \S+ CANCELLED AT"
        r"|STEP (?P<step>\d[\d_+]*)\.\S+ ON \S+ CANCELLED AT \S+ DUE TO (?:TIME|PREEMPT))",
        # srun: error: Task launch for 47.0 failed on node n-c122: Invalid job credential
        "launch-failed": r"srun: error: (?:Task launch for \S+ failed on node (?P<node>[\w.-]+)"
        r"|Application launch failed|task \S+ launch failed): (?P<value>.+)",
        # slurmctld: slurmd error running JobId=12 on node(s)=n3: Slurmd could not create a batch …
        "batch-refused": r"slurmd error running JobId=\d+ on node\(s\)=(?P<node>[\w.-]+):"
        r" (?P<value>.+)",
        # salloc: Prolog failure on node n3; slurmstepd: error: Prolog hung on node n3
        # slurmstepd: error: TaskProlog failed status=1
        "prolog": r"(?P<value>Prolog (?:failure|hung)(?= on node)|TaskProlog failed status=\d+)"
        r"(?: on node (?P<node>[\w.-]+))?",
        # slurmd: error: Munge decode failed: Rewound credential
        "credential": r"[Mm]unge decode failed: (?P<value>.+)",
        "port-taken": r"server socket has failed to (?:bind to \S*?:|listen on .{1,80}port: )"
        r"(?P<value>\d{1,5})\b.{1,120}[Aa]ddress already in use",
        # UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). … Error 802:
        "gpu-start": r"(?P<value>(?:cudaGetDeviceCount|Failed to initialize NVML: Driver/library"
        r" version mismatch).{0,200})",
        "connect": r"(?:connect(?:ing)? to|network addresses of) \(?(?P<value>[^\s,()]{1,253}),"
        r" \d{1,5}\)",
        # r1:4865:4866 [1] include/socket.h:403 NCCL WARN Connect to 10.1.3.2<56821> failed :
        # Connection refused
        "peer-gone": r"NCCL WARN .{0,40}[Cc]onn.{1,120}"
        r"(?:refused|reset|closed by remote|timed out)|Transport retry count exceeded on",
        # Why NCCL failed: older releases do not repeat it in their exception.
        "nccl-warning": r"NCCL WARN (?P<value>.{0,200}(?:/dev/shm/|posix_fallocate|ibv_\w+ failed"
        r"|NET/OFI|Cuda failure|No route to host|is unreachable|timed out|no socket interface"
        r"|Mismatched NCCL).{0,200})",
        # n2:5776:5902 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_2:1 Got async event : port
        # error. The end of a peer and a broken cable cause the same words, with the adapter's name.
        # A subnet manager that restarts, or scans its network, makes every port report so without
        # a failure.
        "adapter": r"(?P<node>[\w.-]{1,255}):\d+:\d+ \[\d+\] (?:\S+:\d+ )?NCCL WARN NET/IB ?: ?"
        r"(?P<value>(?:\S{1,40}:\d+ )?Got (?:async (?:\w+ )?event|completion (?:from|with error))"
        r"(?!.{0,200}(?i:client reregistration|SM change|LID change|P_?Key change"
        r"|GID (?:table )?change|port active)) ?.{1,200})",
    }.items()
}
_HINT = re.compile(
    r"oom|[Oo]ut [Oo]f [Mm]emory|NCCL WARN|memory limit|Node failure|\*\*\* |failed|onnect|Prolog"
    r"|NET/IB|Remote daemon|OOMKilled|OUT_OF_ME|gai error|retry count|error running|cudaGetDevice"
    r"|NVML"
)
_CANCELLED_AT = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT (?P<time>[\dT:-]{19})")

# Lines that are no program's last words: of launchers, torch's and NCCL's logs, C++ exceptions,
# torchrun's summary, and slurm-health.
_OF_OTHERS = re.compile(
    r"slurm-health: |srun: (?:error: \S+: tasks? |Terminating|Force Terminated|Job step|launch/)"
    r"|slurmstepd\S*: error: \*\*\*|\[?[IWEF]\d{4}[ :]|\S+ FAILED$|Failures:$|Root Cause |\[\d+\]:$"
    r"|Exception raised from \S+ at |frame #\d+: |Last error:$"
    r"|[=*-]{5,}|Fatal Python error: Segm|\S+Warning: |\S+:\d+: \w*Warning: |Exception ignored in"
)
_COMPLAINT = re.compile(
    r"\berror\b|\w*Error(?:: |$)|\bfatal\b|fail(?:ed|ure)\b|invalid|can(?:no|')t\b|could not"
    r"|unable to|not found|no such|unrecogni[sz]ed|unknown|unexpected|missing|required"
    r"|permission denied|not allowed|not supported|unsupported|\bmust\b|No module named|refus"
    r"|not enough|by GPU\b|mismatch|panicked|exceeded|disconnected|marked dead|unreachable"
    r"|abort|double free|corrupt",
    re.I,
)
# Of a container that did not start: lines before them say why.
_NO_CAUSE = re.compile(
    r"(?:slurmstepd\S*: error: )?(?:pyxis: (?:child \d+ failed|container start failed|couldn't"
    r" start|printing|failed to|    \[ERROR\] .* exited with return code)"
    r"|spank: |Failed to invoke spank)"
)
_STEPD = re.compile(r"^slurmstepd-[\w.-]+: ")


def read_output(
    texts: Iterable[tuple[str, str]], *, began: str = "", shared: int = 1
) -> TrainingLog:
    """Return the facts in output files about the end of a training.

    Args:
        texts: the name and the text of every file; the job's own output first.
        began: when the script began, `2026-11-22T10:50:00` by the clock of the batch host: the
            output of an earlier attempt of the job is left out.
        shared: the number of files, the first ones, that all processes of the job write to; any
            further file is a single task's.
    """
    reader = _Reader()
    at, begins = 0, []
    for number, (name, text) in enumerate(texts):
        file = name if number >= shared else ""
        begins.append(at)
        for line in re.split(r"[\r\n]+", text):  # a progress bar's states are lines too
            if not line:
                continue
            at += 1
            short = line[:_LINE_CHARACTERS]
            short = (_ANSI.sub("", short) if "\x1b" in short else short).rstrip()
            earlier = _CANCELLED_AT.search(short) if "CANCELLED AT" in short else None
            if earlier and began and earlier["time"] < began:
                reader = _Reader()
            else:
                reader.take(at, short, file)
    log = reader.log()
    files = {bisect_left(begins, failure.at) for failure in log.of_their_own}
    return msgspec.structs.replace(log, ordered=len(files) < 2)


def facts_of(text: str, order: int = 0) -> Iterator[Fact]:
    """Yield the facts in a line of Slurm, the kernel, a driver or NCCL."""
    if not _HINT.search(text):
        return
    for kind, pattern in _FACTS.items():
        if match := pattern.search(text):
            named = match.groupdict("")
            node = named.get("node", "")
            yield Fact(
                kind=kind,
                value=one_line(named.get("value") or named.get("step", ""))[:200].strip(),
                node=node.partition(".")[0] if kind == "adapter" else node,
                order=order,
                text=one_line(text)[:_SHORT],
            )


@dataclass
class _Stream:
    """The lines behind one prefix of a file: those of one process, or of all that share it."""

    rank: int | None
    task: int | None
    lines: deque[tuple[int, str]]
    traceback: Traceback | None = None
    place: str = ""  # where Python could not read the program
    summary: dict[str, str] = field(default_factory=dict)  # torchrun's, of one worker


@dataclass
class _Group:
    """Lines that differ by figures only."""

    text: str
    at: int
    times: int = 0
    last: int = 0
    first: bool = False
    complains: bool = True
    ranks: set[int] = field(default_factory=set)


class _Reader:
    """Reads lines, those of every stream apart."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._tracebacks: list[Traceback] = []
        self._workers: dict[int | None, RankFailure] = {}  # by torchrun's summary
        self._tasks: dict[int | None, RankFailure] = {}  # by srun
        self._launched: list[RankFailure] = []  # by other launchers
        self._watchdogs = Watchdogs()
        self._facts: dict[tuple[str, str, str, str], Fact] = {}
        self._terminating = False

    def take(self, at: int, whole: str, file: str) -> None:
        """Read a line of a file; the name is empty for the output of all processes."""
        whole = _STAMP.sub("", whole, count=1)
        prefix = _PREFIX.match(whole)
        assert prefix is not None  # it may be empty
        text = _LOGGER.sub("", whole[prefix.end() :], count=1)
        key = file, prefix[0].strip()
        stream = self._streams.get(key)
        if stream is None:
            number = prefix["rank"] or prefix["mpi"]
            stream = _Stream(
                rank=int(number) if number else None,
                task=int(prefix["task"]) if prefix["task"] else None,
                lines=deque(maxlen=_LINES if any(key) else _MIXED_LINES),
            )
            if len(self._streams) < _MOST_FAILURES:
                self._streams[key] = stream
        if self._in_traceback(at, stream, text):
            return
        if where := _FILE_LINE.match(text):  # Python reports wrong syntax without a traceback
            stream.place = f"{where['file']}:{where['line']}"
        elif text.startswith(_OF_SYNTAX) and stream.place:
            text = f"{text} ({stream.place})"
        is_watchdogs = self._watchdogs.take(at, text, stream.rank)
        if not is_watchdogs and (end := launcher_end(text, at)):
            # Some launchers name the process in one line, and its status in the next; MPICH reports
            # a signal as an exit code first.
            before = self._launched.pop() if end.rank is None and self._launched else None
            how = before and (before.signal or before.exit_code)
            if before and how and how != end.signal:
                self._launched.append(before)
            elif before:
                end = msgspec.structs.replace(end, rank=before.rank, node=before.node)
            self._launched.append(end)
        if text[:2] == "  ":
            self._take_summary(at, stream, text)
        elif text.startswith("srun: error: "):
            self._take_task(at, text)
        elif self._tasks and text.startswith(("srun: ", "slurmstepd: ")):
            self._terminating |= _TERMINATING.match(text) is not None
        self._take_facts(text, at)
        if text and not text[0].isspace() and not _OF_OTHERS.match(text):
            stream.lines.append((at, text))

    def log(self) -> TrainingLog:
        """Return the facts of all lines."""
        for stream in self._streams.values():
            self._close(stream)
        words = self._words()
        failures = self._failures()
        if not failures:  # an output with nothing but exceptions in lines of their own
            failures = [
                RankFailure(
                    rank=rank,
                    error=word.text,
                    at=word.at,
                    line=word.text,
                    consequence=is_consequence(word.text),
                    bare=True,
                )
                for word in words
                if word.complains and (_RAISED.match(word.text) or WAITS[0].fits(word.text))
                for rank in word.ranks or (None,)
            ]
        failures = [_with_exception(failure, failures, words) for failure in failures]
        for failure in failures:
            self._take_facts(failure.error, failure.at)
        first = [failure for failure in failures if not failure.consequence][:_KEPT]
        followed = [failure for failure in failures if failure.consequence][:_KEPT]
        return TrainingLog(
            failures=tuple(sorted((*first, *followed), key=lambda failure: failure.at)),
            failed=len(failures),
            facts=tuple(self._facts.values()),
            words=words,
            progress=self._watchdogs.records(),
            watchdogs=bool(self._watchdogs.ends),
            subgroups=self._watchdogs.has_subgroups,
        )

    def _in_traceback(self, at: int, stream: _Stream, text: str) -> bool:
        """Read a line of a traceback; return whether it is one."""
        current = stream.traceback
        if "Traceback (" in text and (begun := _TRACEBACK.search(text)):
            original = begun["original"] is not None
            if current is None or not (current.chained or original):
                self._close(stream)
                stream.traceback = Traceback(at, stream.rank, stream.task, original=original)
            else:
                current.inside, current.original = True, original
            return True
        if "terminate called" in text and (native := _TERMINATED.search(text)):
            if current is None or current.error != native["type"]:  # several end at once
                self._close(stream)
                stream.traceback = Traceback(
                    at, stream.rank, stream.task, error=native["type"], inside=False
                )
            return True
        if current is not None and current.take(text):
            return True
        if "NCCL error in" in text and _RAISED.match(text):  # the last error stands below it
            self._close(stream)
            stream.traceback = Traceback(
                at, stream.rank, stream.task, error=one_line(text)[:_SHORT], inside=False, nccl=True
            )
            return True
        return False

    def _close(self, stream: _Stream) -> None:
        if stream.traceback is not None and len(self._tracebacks) < _MOST_FAILURES:
            self._tracebacks.append(stream.traceback)
        stream.traceback = None

    def _take_facts(self, text: str, at: int) -> None:
        for fact in facts_of(text, at):
            if len(self._facts) < _MOST_FACTS:
                line = "" if fact.kind == "adapter" else fact.text
                self._facts.setdefault((fact.kind, fact.node, fact.value, line), fact)

    def _take_summary(self, at: int, stream: _Stream, text: str) -> None:
        """Read a line of torchrun's summary; the exit code is the last line of a worker."""
        item = _ITEM.match(text)
        if item is None:
            return
        stream.summary[item["key"]] = item["value"].strip()
        if item["key"] != "exitcode":
            return
        summary, stream.summary = stream.summary, {}
        rank = re.match(r"\d{1,6}\b", summary.get("rank", ""))
        code = re.match(r"-?\d{1,4}\b", summary["exitcode"])
        if rank and code and len(self._workers) < _MOST_FAILURES:
            number, node = int(code[0]), summary.get("host", "")
            how = f"signal {-number}" if number < 0 else f"exit code {number}"
            self._workers[int(rank[0])] = RankFailure(
                rank=int(rank[0]),
                node="" if node.startswith("localhost") else node.partition(".")[0],
                exit_code=max(number, 0),
                signal=max(-number, 0) or signal_of(number),
                at=at,
                line=f"torchrun: rank {rank[0]} on {node or 'a node'}: {how}",
            )

    def _take_task(self, at: int, text: str) -> None:
        """Read the end of a task of srun."""
        match = _TASK.match(text)
        if match is None:
            return
        exited = _EXITED.match(match["how"])
        code = int(exited[1]) % 256 if exited else 0
        try:
            nodes = expand(match["nodes"])
            tasks = [int(task.lstrip("t")) for task in expand(f"t[{match['tasks']}]")]
        except ValueError:
            return
        if len(nodes) != len(tasks):  # else one task per node, in their order
            nodes = (nodes[0] if len(nodes) == 1 else "",) * len(tasks)
        for node, task in zip(nodes, tasks[:_MOST_FAILURES], strict=False):
            self._tasks[task] = RankFailure(
                rank=task,
                node=node,
                exit_code=code,
                signal=signal_of(code) if exited else SIGNALS.get(match["how"], 0),
                at=at,
                line=one_line(text)[:_SHORT],
                # srun ends the rest of a step also after ranks that their watchdogs aborted.
                consequence=match["how"] == "Killed"
                and (self._terminating or bool(self._watchdogs.ends and self._tasks)),
            )

    def _failures(self) -> list[RankFailure]:
        """Return one failure per rank, merged from all sources.

        Without torchrun a task of srun is a rank; if it is a torchrun that was killed with all of
        its ranks, no rank is named. A restarted rank counts with its last exception.
        """
        ends = dict(self._workers or self._tasks)
        raised: dict[int, RankFailure] = {}
        # By its words: a program may print an exception that it handles again and again.
        unnamed: dict[str, RankFailure] = {}
        for traceback in self._tracebacks:
            if not traceback.error or _OF_CHILDREN.match(traceback.error):
                continue
            rank = traceback.rank
            if rank is None and not self._workers:
                rank = traceback.task
            failure = traceback.failure(rank, ends.get(rank) if rank is not None else None)
            if rank is None:
                unnamed.setdefault(failure.error, failure)
            elif (
                rank not in raised or raised[rank].consequence or _BY_WATCHDOG not in failure.error
            ):
                raised[rank] = failure
        if unnamed and not raised:
            failures = list(_of_unnamed(list(unnamed.values()), ends))
        else:
            if not raised:
                self._mark_cut(ends)
            failures = [*raised.values()]
            failures += [by_launcher(end) for rank, end in ends.items() if rank not in raised]
            if self._workers:
                killed = (task for task in self._tasks.values() if task.signal)
                failures += [
                    by_launcher(msgspec.structs.replace(task, rank=None)) for task in killed
                ]
        failures = sorted(self._watchdogs.merged(failures), key=lambda failure: failure.at)
        if any(not failure.consequence for failure in failures):
            return failures
        # A bare exit code adds nothing to ranks that only waited, nor how their watchdogs end them.
        by_others = [end for end in self._launched if end.signal or not failures]
        if failures:
            at = failures[0].at
            by_others = [end for end in by_others if end.signal != ABORTED or end.at < at]
        return [*by_others, *failures]

    def _mark_cut(self, ends: dict[int | None, RankFailure]) -> None:
        """Mark the end of a rank whose traceback breaks off: the end of the step cut it."""
        lost = [traceback for traceback in self._tracebacks if not traceback.error]
        bare = [end for end in ends.values() if end.exit_code == 1 and not end.signal]
        if not lost or not bare:
            return
        pairs = [(traceback, ends.get(traceback.rank or traceback.task)) for traceback in lost]
        pairs = [(traceback, end) for traceback, end in pairs if end in bare]
        traceback, end = pairs[0] if pairs else (lost[0], min(bare, key=lambda end: end.at))
        assert end is not None
        ends[end.rank] = msgspec.structs.replace(
            end, cut=True, place=traceback.place, at=traceback.at
        )

    def _words(self) -> tuple[LastWords, ...]:
        """Return the last words of processes, in their order.

        Consequences of others' failures are quoted only if there is nothing else.
        """
        groups: dict[str, _Group] = {}
        for (file, prefix), stream in self._streams.items():
            if not stream.lines:
                continue
            complaints = [line for line in stream.lines if _COMPLAINT.search(line[1])]
            own = [line for line in complaints if not is_consequence(line[1])]
            if any(_NO_CAUSE.match(line[1]) for line in own):
                own = [n for n in own if not _NO_CAUSE.match(n[1]) and known(n[1])] or own
            lines = own or complaints or [stream.lines[-1]]
            keys = []
            for at, line in lines:
                text = _STEPD.sub("", line)
                keys.append(alike(text))
                group = groups.setdefault(
                    keys[-1], _Group(text=text, at=at, complains=bool(complaints))
                )
                group.times += 1
                group.at = min(group.at, at)
                rank = stream.task if stream.rank is None else stream.rank
                group.ranks |= set() if rank is None else {rank}
            groups[keys[0]].first = True
            # In a shared stream, every process that wrote it wrote it last.
            groups[keys[-1]].last += 1 if file or prefix else keys.count(keys[-1])
        lasting = sorted(
            (g for g in groups.values() if g.last or g.first or _before_a_crash(g.text)),
            key=lambda group: group.at,
        )
        return tuple(
            LastWords(
                text=one_line(group.text)[:_SHORT],
                at=group.at,
                times=group.times,
                last=group.last,
                ranks=tuple(sorted(group.ranks)),
                first=group.first,
                complains=group.complains,
            )
            for group in lasting[-_MOST_WORDS:]
        )


def _before_a_crash(text: str) -> bool:
    """Return whether a library writes the line before it ends its process: its end may follow."""
    row = known(text)
    return row is not None and On.CRASH in row.on


def _of_unnamed(
    raised: Sequence[RankFailure], ends: dict[int | None, RankFailure]
) -> Iterator[RankFailure]:
    """Yield failures whose tracebacks name no rank, with the only ranks that can have raised them.

    An exception of C++ that nothing catches aborts its process.
    """
    own = [rank for rank, end in ends.items() if end.exit_code and not end.signal]
    one = len(raised) == 1
    if one and _NATIVE.match(raised[0].error):
        own += [rank for rank, end in ends.items() if end.signal == ABORTED]
    if not one or not own:
        yield from sorted(raised, key=lambda failure: failure.at)
    for rank, end in ends.items():
        if rank not in own:
            yield by_launcher(end)
        elif one:
            yield msgspec.structs.replace(
                raised[0], rank=rank, node=end.node, exit_code=end.exit_code
            )


def _with_exception(
    failure: RankFailure, failures: Sequence[RankFailure], words: Sequence[LastWords]
) -> RankFailure:
    """Return the end of a process with the exception that it wrote last, if no traceback has it.

    An excerpt of an output often begins behind the traceback. Only a last complaint counts: a
    program may go on after an exception that it reports. Without a rank in front of it, it belongs
    to all processes that ended so.
    """
    if failure.error or failure.signal or failure.cut or not failure.exit_code:
        return failure
    own = [word for word in words if failure.rank in word.ranks]
    raised = [word for word in own if word.complains and _RAISED.match(word.text)]
    if not raised and not any(other.error for other in failures):
        own = [word for word in words if not word.ranks]
        raised = [word for word in own if word.complains and _RAISED.match(word.text)]
    # NCCL's own words, and its last error, stand in the lines behind its exception.
    if any("NCCL error" in word.text or word.text.startswith("nccl") for word in raised):
        raised += [word for word in own if word.last and word not in raised]
    if not any(word.last for word in raised) or len({alike(word.text) for word in raised}) > 3:
        return failure
    error = one_line(" ".join(dict.fromkeys(word.text for word in raised)))[:500]
    who = f"rank {failure.rank}: " if failure.rank is not None else ""
    return msgspec.structs.replace(
        failure,
        error=error,
        at=min(word.at for word in raised),
        line=f"{who}{error}",
        consequence=is_consequence(error),
    )
