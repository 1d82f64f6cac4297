# SPDX-License-Identifier: Apache-2.0
"""What a job's output says of its end: tracebacks of ranks, torchrun's summary, Slurm's own lines.

Any text is read; what is not known is passed over. Ranks are told apart by the prefixes that torch
(`[rank3]:`), torchrun (`[default3]:`; `[n5:3]:` with `--role n5:`) and `srun --label` (`3: `) put
before their lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from slurm_health.records.nodeset import expand
from slurm_health.records.text import one_line
from slurm_health.training.diagnosis.collectives import FlightRecord, Reached
from slurm_health.training.diagnosis.last_words import (
    LastWords,
    WordsRead,
    alike,
    is_consequence,
)
from slurm_health.training.diagnosis.rank_failures import (
    SIGNALS,
    RankFailure,
    Traceback,
    continued,
    launcher_end,
    merged,
    signal_of,
    watchdog_end,
)

_LINE_CHARACTERS = 2000  # of a line; an exception may hold a whole tensor
_MOST_FAILURES = 16_384  # that are read; a job of that many ranks is not known to us
_KEPT = 500  # of each kind, the first ones: enough to tell all ranks from some
_MOST_FACTS = 200

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# What a collector of logs puts before each line, with one space: `2026-11-02T10:00:00.123Z `.
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,:+Z-]{0,16} (?:std(?:err|out) [FP] )?")
_FILE_LINE = re.compile(r'\s+File "(?:[^"]*/)?(?P<file>[^"/]+)", line (?P<line>\d+)$')
_OF_SYNTAX = ("SyntaxError: ", "IndentationError: ", "TabError: ")
_PREFIX = re.compile(
    r"(?:\[\d{1,3},(?P<mpi>\d{1,6})\]<std(?:err|out)>: ?)?"  # mpirun --tag-output
    r"(?:\([\w.-]{1,80}(?:\([^()]{0,80}\))? pid=\d{1,9}(?:, ip=[\w.:]{1,40})?\) )?"  # Ray
    r"(?:\s{0,6}(?P<task>\d{1,6}): ?)?"
    r"(?:\[(?!rank\d)[A-Za-z_](?:[\w.-]*:|[A-Za-z_]*)\d{1,6}\]:\s?)?"
    r"(?:\[rank(?P<rank>\d{1,6})\]:\s?)?"
)
_TRACEBACK = re.compile(r"(?P<original>Original )?Traceback \(most recent call last\):")
# One that stands alone: its name says that it is one. Python tells those of syntax so, always, and
# they are known as mistakes. NCCL's own names stand in the second line of its exceptions, which is
# what is left where the lines of many ranks mix.
_RAISED = re.compile(
    r"(?!SyntaxError|IndentationError|TabError)(?:[A-Za-z_]\w*\.)*_*[A-Z]\w*(?:Error|Exception)(?::\s|$)"
    r"|nccl[A-Z]\w+: "
)
_TERMINATED = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']*)'")
_ITEM = re.compile(r"\s{2}(?P<key>time|host|rank|exitcode)\s*: (?P<value>.+)")
# srun: error: n[3-4]: tasks 2-3: Exited with exit code 1
_TASK = re.compile(
    r"srun: error: (?P<nodes>[^\s:]+): tasks? (?P<tasks>[\d,-]+):"
    r" (?P<how>.+?)(?: \(core dumped\))?$"
)
# That srun, or slurmstepd by its order, ends what is left of a step.
_TERMINATING = re.compile(
    r"srun: (?:\S+: ){0,2}(?:Terminating|Job step aborted)|slurmstepd: error: \*\*\* STEP \S+ ON"
)
# [rank3]:[E1123 02:41:16.35 ProcessGroupNCCL.cpp:2174] [PG ID 0 PG GUID 0(default_pg) Rank 3] …
# The month has no leading zero; torch 2.2 told no time, and those before no rank that is sure: what
# is behind them in brackets is numbered within its group.
_WATCHDOG = re.compile(
    r"(?:\[[EF](?:\d{3,4} [\d:.]+)? ?ProcessGroupNCCL\.cpp:\d+\] .*?|^\[Rank \d+\] )"
    r"(?:watchdog thread terminated with exception: (?:\[Rank \d+\] )?(?P<error>.+)"
    r"|(?P<timeout>Watchdog caught collective operation timeout: .+)"
    # Of the watchdog itself, by the thread that looks after it (TORCH_NCCL_ENABLE_MONITORING).
    r"|(?P<stuck>ProcessGroupNCCL's watchdog got stuck for \d+ seconds"
    r"|Terminating the process .{0,80}due to ProcessGroupNCCL watchdog hang)"
    r"|taking the entire process down|Received a dump signal due to a collective timeout)"
)
_NUMBER = re.compile(r"\[Rank (\d{1,6})\] ")
# … [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal … Last enqueued NCCL work: 17,
# last completed NCCL work: 17; and … failure detected by watchdog at work sequence id: 18 PG
# status: last enqueued work: 18, last started work: -1 (), last completed work: 17
_PROGRESS = re.compile(
    r"\[PG ID (?P<group>\d{1,9}) PG GUID [^\]]{1,200} Rank \d+\] .*?"
    r"[Ll]ast enqueued (?:NCCL )?work: (?P<entered>-?\d{1,15}),.{0,80}?"
    r"last completed (?:NCCL )?work: (?P<over>-?\d{1,15})"
)
# What it reports with TORCH_NCCL_DESYNC_DEBUG=1, in lines of their own and by numbers of its group:
#  - [0] Timeout at collective: ALLREDUCE, #3
#    - [0] joined but didn't finish collective #3 (count from 1)
#      [1, 2] finished collective #2, but didn't join collective #3 (count from 1)
_DESYNC = re.compile(
    r"\s*(?:- )?\[(?P<ranks>\d{1,6}(?:, ?\d{1,6})*)\] "
    r"(?:Timeout at collective: \w{1,40}, #(?P<waits>\d{1,15})"
    r"|joined but didn't finish collective #(?P<inside>\d{1,15})"
    r"|finished collective #(?P<over>\d{1,15}), but didn't join)"
)
# Below it, `Snapshot of ranks' latest states:`
#   #315 started ranks:
#     [0, 1, 2] started ALLREDUCE
_SNAPSHOT = re.compile(r"\s*#(?P<number>\d{1,15}) (?P<what>started|finished) ranks:")
_IN_SNAPSHOT = re.compile(
    r"\s*\[(?P<ranks>\d{1,6}(?:, ?\d{1,6})*)\] (?:started|finished) \w{1,40}$"
)
_OF_A_SUBGROUP = re.compile(r"\[PG ID [1-9].{1,300}Watchdog caught")
_EXITED = re.compile(r"Exited with exit code (\d+)")
# What Slurm, the kernel, the driver and NCCL say of a job in a line of their own, by kind.
_FACTS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        # In whole phrases: a script may print the counters of its cgroup (`oom_kill 0`).
        # slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks …
        # srun: error: n3: task 2: Out Of Memory
        "memory-kill": r"Detected [1-9]\d* oom[_-]kill event"
        r"|srun: error: \S+: tasks? [\d,-]+: Out Of Memory|Exceeded job memory limit"
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
        "memory-broken": r"\*\*\* (?:JOB|STEP) \S+ ON (?P<node>[\w.-]+) UNCORRECTABLE MEMORY"
        r" ERROR AT",
        # slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO TIME LIMIT ***
        "cancelled": r"\*\*\* (?:JOB (?P<value>\S+) ON \S+ CANCELLED AT"
        r"|STEP (?P<step>\d[\d_+]*)\.\S+ ON \S+ CANCELLED AT \S+ DUE TO TIME)",
        # srun: error: Task launch for 47.0 failed on node n-c122: Invalid job credential
        "launch-failed": r"srun: error: (?:Task launch for \S+ failed on node (?P<node>[\w.-]+)"
        r"|Application launch failed): (?P<value>.+)",
        "port-taken": r"server socket has failed to (?:bind to \S*?:|listen on .{1,80}port: )"
        r"(?P<value>\d{1,5})\b.{1,120}[Aa]ddress already in use",
        "connect": r"connect(?:ing)? to \(?(?P<value>[^\s,()]{1,253}), \d{1,5}\)",
        # r1:4865:4866 [1] include/socket.h:403 NCCL WARN Connect to 10.1.3.2<56821> failed :
        # Connection refused
        "peer-gone": r"NCCL WARN .{0,40}[Cc]onn.{1,120}"
        r"(?:refused|reset|closed by remote|timed out)|Transport retry count exceeded on",
        # n2:5776:5902 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_2:1 Got async event : port
        # error. What a peer's end causes has the same words as what a cable does, and both name the
        # adapter. But a subnet manager that restarts, or reads its network anew, has every port
        # tell so; nothing failed.
        "adapter": r"(?P<node>[\w.-]{1,255}):\d+:\d+ \[\d+\] (?:\S+:\d+ )?NCCL WARN NET/IB ?: ?"
        r"(?P<value>(?:\S{1,40}:\d+ )?Got (?:async (?:\w+ )?event|completion from peer)"
        r"(?!.{0,200}(?i:client reregistration|SM change|LID change|P_?Key change"
        r"|GID (?:table )?change|port active)) ?.{1,200})",
    }.items()
}
_HINT = re.compile(
    r"oom|[Oo]ut [Oo]f [Mm]emory|memory limit|Node failure|\*\*\* |failed|onnect|NET/IB"
    r"|Remote daemon|OOMKilled|OUT_OF_ME"
)
_CANCELLED_AT = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT (?P<time>[\dT:-]{19})")
_FAILED_OR_TIMED_OUT = "NCCL operations have failed or timed out"


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a line says beside the ends of ranks: its kind, and what it is about.

    `order` is its place in the output, `text` the line.
    """

    kind: str
    value: str = ""
    node: str = ""
    rank: int | None = None
    order: int = 0
    text: str = ""


def facts_of(text: str, order: int = 0) -> Iterator[Fact]:
    """Yield what a line says."""
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
                text=one_line(text)[:300],
            )


class TrainingLog(msgspec.Struct, frozen=True, kw_only=True):
    """What the output says: failures in the order in which they came, and facts of the system.

    Of very many failures the first are kept; `failed` counts all. `words` are what processes wrote
    at their end beside tracebacks, `progress` how far each rank came by NCCL's own watchdog, where
    all work is in the group of all ranks, `watchdogs` whether one wrote at all, and `subgroups`
    whether one named a group of some ranks only. `sources` names the files; `cut` is set where only
    the end of one was read.
    """

    failures: tuple[RankFailure, ...] = ()
    failed: int = 0
    facts: tuple[Fact, ...] = ()
    words: tuple[LastWords, ...] = ()
    progress: tuple[FlightRecord, ...] = ()
    watchdogs: bool = False
    subgroups: bool = False
    sources: tuple[str, ...] = ()
    cut: bool = False

    @property
    def of_their_own(self) -> tuple[RankFailure, ...]:
        """The failures that are no consequence of another one."""
        return tuple(each for each in self.failures if not each.consequence)

    def of(self, kind: str) -> tuple[Fact, ...]:
        """Return the facts of a kind, in their order."""
        return tuple(fact for fact in self.facts if fact.kind == kind)


class _Reading:
    """Reads lines one by one, each rank's apart from the others."""

    def __init__(self) -> None:
        self.open: dict[str, Traceback] = {}
        self.done: list[Traceback] = []
        self.ended: list[RankFailure] = []
        self.tasks: dict[int, RankFailure] = {}
        self.watchdogs: dict[int | None, RankFailure] = {}
        self.of_groups: dict[int | None, RankFailure] = {}  # whose rank is not told, by number
        self.launched: list[
            RankFailure
        ] = []  # what a launcher said that is neither torchrun nor srun
        self.facts: dict[tuple[str, str, str, str], Fact] = {}
        self.words = WordsRead()
        self.progress: dict[int, Reached] = {}
        self.reported: dict[int, Reached] = {}  # by the watchdogs of others
        self.has_subgroups = False
        self._terminating = False
        self._snapshot: tuple[int, bool] | None = None
        self._latest_over = 1 << 60  # of the ranks that a watchdog names as behind
        self._file_lines: dict[str, str] = {}
        self._items: dict[str, dict[str, str]] = {}

    def line(self, at: int, whole: str, file: str) -> None:
        whole = _STAMP.sub("", whole, count=1)
        prefix = _PREFIX.match(whole)
        assert prefix is not None  # it may be empty
        text = whole[prefix.end() :]
        stream = prefix[0].strip()
        number = prefix["rank"] or prefix["mpi"]
        rank = int(number) if number else None
        task = int(prefix["task"]) if prefix["task"] else None
        if self._traceback(at, stream, text, rank, task):
            return
        if where := _FILE_LINE.match(text):  # Python tells of syntax without a traceback
            self._file_lines[stream] = f"{where['file']}:{where['line']}"
        elif text.startswith(_OF_SYNTAX) and (place := self._file_lines.get(stream)):
            text = f"{text} ({place})"
        if "ProcessGroupNCCL" in text or text.startswith("[Rank "):
            self._watchdog(at, text, rank)
        elif " collective" in text and (reported := _DESYNC.match(text)):
            self._desync(reported)
        elif snapshot := _SNAPSHOT.match(text):
            self._snapshot = int(snapshot["number"]), snapshot["what"] == "finished"
        elif self._snapshot and (listed := _IN_SNAPSHOT.match(text)):
            number, finished = self._snapshot
            # A work that was started may be one of many that were: the first counts that is not
            # over on any rank, and that is behind what a rank finished last.
            over = number if finished else min(number - 1, self._latest_over)
            inside = None if finished else (over + 1, number)
            self._report(listed["ranks"], Reached(number, over, inside))
        elif end := launcher_end(text, at):
            self.launched.append(end)
        if text[:2] == "  ":
            self._summary(at, stream, text)
        elif text.startswith("srun: error: "):
            self._task(at, text)
        elif self.tasks and text.startswith(("srun: ", "slurmstepd: ")):
            self._terminating |= _TERMINATING.match(text) is not None
        self.take_facts(text, at)
        self.words.line(at, (file, stream), task if rank is None else rank, text)

    def _traceback(
        self, at: int, stream: str, text: str, rank: int | None, task: int | None
    ) -> bool:
        """Read a line of a traceback; tell whether it was one."""
        current = self.open.get(stream)
        if begun := _TRACEBACK.search(text):
            original = begun["original"] is not None
            if current is None or not (current.chained or original):
                self._finish(stream)
                self.open[stream] = Traceback(at=at, rank=rank, task=task, original=original)
            else:
                current.inside, current.original = True, original
            return True
        if terminated := _TERMINATED.search(text):
            self._finish(stream)
            error = terminated["type"]
            self.open[stream] = Traceback(at=at, rank=rank, task=task, error=error, inside=False)
            return True
        if current is None:
            return False
        return continued(current, text)

    def _finish(self, stream: str) -> None:
        if (current := self.open.pop(stream, None)) and len(self.done) < _MOST_FAILURES:
            self.done.append(current)

    def _watchdog(self, at: int, text: str, rank: int | None) -> None:
        """Read what NCCL's watchdog says before it ends the process; the exception counts."""
        if rank is not None:
            self._progress(text, rank)
        self.has_subgroups |= _OF_A_SUBGROUP.search(text) is not None
        match = _WATCHDOG.search(text)
        if match is None or len(self.watchdogs) >= _MOST_FAILURES:
            return
        error = match["error"] or match["timeout"] or match["stuck"]
        number = _NUMBER.search(text) if error and rank is None else None
        if number and len(self.of_groups) < _MOST_FAILURES:
            self.of_groups[int(number[1])] = watchdog_end(rank, one_line(error)[:300], at)
        known = self.watchdogs.get(rank)
        if error and (known is None or not known.error.startswith("Watchdog caught")):
            self.watchdogs[rank] = watchdog_end(rank, one_line(error)[:300], at)
        elif known is None:
            self.watchdogs[rank] = watchdog_end(rank, _FAILED_OR_TIMED_OUT, at)

    def _progress(self, text: str, rank: int) -> None:
        match = _PROGRESS.search(text)
        if match is None or len(self.progress) >= _MOST_FAILURES:
            return
        entered, over = int(match["entered"]), int(match["over"])
        if match["group"] != "0":
            # A rank that is behind in one of several groups may wait in another, unseen.
            self.has_subgroups = True
        elif entered >= 0:
            inside = (over + 1, entered) if entered > over else None
            self.progress[rank] = Reached(entered, over, inside)

    def take_facts(self, text: str, at: int) -> None:
        """Read what a line says of the job; the same is kept once."""
        for fact in facts_of(text, at):
            if len(self.facts) < _MOST_FACTS:
                line = "" if fact.kind == "adapter" else fact.text
                self.facts.setdefault((fact.kind, fact.node, fact.value, line), fact)

    def _desync(self, reported: re.Match[str]) -> None:
        """Read who is where by the report of a watchdog, which numbers works in its own way."""
        inside = reported["waits"] or reported["inside"]
        if inside:
            reached = Reached(int(inside), int(inside) - 1, (int(inside), int(inside)))
        else:
            reached = Reached(int(reported["over"]), int(reported["over"]))
            self._latest_over = int(reported["over"])
        self._report(reported["ranks"], reached)

    def _report(self, ranks: str, reached: Reached) -> None:
        for rank in map(int, ranks.split(",")):
            if len(self.reported) < _MOST_FAILURES:
                self.reported[rank] = reached

    def _summary(self, at: int, stream: str, text: str) -> None:
        item = _ITEM.match(text)
        if item is None:
            return
        said = self._items.setdefault(stream, {})
        said[item["key"]] = item["value"].strip()
        if item["key"] != "exitcode":
            return
        del self._items[stream]
        rank = re.match(r"\d{1,6}\b", said.get("rank", ""))
        code = re.match(r"-?\d{1,4}\b", said["exitcode"])
        if rank and code and len(self.ended) < _MOST_FAILURES:
            number = int(code[0])
            node = said.get("host", "")
            self.ended.append(
                RankFailure(
                    rank=int(rank[0]),
                    node="" if node.startswith("localhost") else node.partition(".")[0],
                    exit_code=max(number, 0),
                    signal=max(-number, 0) or signal_of(number),
                    at=at,
                    line=f"torchrun: rank {rank[0]} on {node or 'a node'}: "
                    + (f"signal {-number}" if number < 0 else f"exit code {number}"),
                )
            )

    def _task(self, at: int, text: str) -> None:
        match = _TASK.match(text)
        if match is None:
            return
        how = match["how"]
        exited = _EXITED.match(how)
        code = int(exited[1]) % 256 if exited else 0
        try:
            nodes = expand(match["nodes"])
            tasks = [int(each.lstrip("t")) for each in expand(f"t[{match['tasks']}]")]
        except ValueError:
            return
        for task in tasks[:_MOST_FAILURES]:
            self.tasks[task] = RankFailure(
                rank=task,
                node=nodes[0] if len(nodes) == 1 else "",
                exit_code=code,
                signal=signal_of(code) if exited else SIGNALS.get(how, 0),
                at=at,
                line=one_line(text)[:300],
                consequence=self._terminating and how == "Killed",
            )

    def failures(self) -> tuple[RankFailure, ...]:
        for stream in list(self.open):
            self._finish(stream)
        told = merged(self.done, self.ended, self.tasks, self.watchdogs, self.of_groups)
        of_their_own = any(not failure.consequence for failure in told)
        # A launcher's bare exit code says nothing beside ranks that only waited.
        launched = [each for each in self.launched if each.signal or not told]
        return told if of_their_own else (*launched, *told)


def read_log(
    texts: Iterable[tuple[str, str]], *, cut: bool = False, began: str = "", shared: int = 1
) -> TrainingLog:
    """Return what the texts of files, by their names, say of the end of a training.

    Args:
        texts: the name and the text of each file; the job's own output first.
        cut: whether only the end of one was read.
        began: when the script began, `2026-11-22T10:50:00` by the clock of the batch host: what
            an earlier attempt of the job wrote before is left out.
        shared: how many of the files, the first ones, all processes of the job write to; each
            further one is a task's.
    """
    reading = _Reading()
    sources: list[str] = []
    at = 0
    for name, text in texts:
        file = name if len(sources) >= shared else ""
        sources.append(name)
        for line in _lines(text):
            at += 1
            earlier = _CANCELLED_AT.search(line) if "CANCELLED AT" in line else None
            if earlier and began and earlier["time"] < began:
                reading = _Reading()
                continue
            reading.line(at, line, file)
    words = reading.words.words()
    failures = reading.failures() or tuple(_without_traceback(words))
    failures = tuple(_with_exception(failure, failures, words) for failure in failures)
    for failure in failures:
        reading.take_facts(failure.error, failure.at)
    first = [each for each in failures if not each.consequence][:_KEPT]
    followed = [each for each in failures if each.consequence][:_KEPT]
    return TrainingLog(
        failures=tuple(sorted((*first, *followed), key=lambda each: each.at)),
        failed=len(failures),
        facts=tuple(reading.facts.values()),
        words=words,
        progress=tuple(
            FlightRecord(rank=rank, reached={"0": reached}, whole=False)
            # Whichever tells of more ranks; they number works in ways of their own.
            for rank, reached in sorted(max(reading.progress, reading.reported, key=len).items())
            if not reading.has_subgroups
        ),
        watchdogs=bool(reading.watchdogs),
        subgroups=reading.has_subgroups,
        sources=tuple(sources),
        cut=cut,
    )


def _with_exception(
    failure: RankFailure, failures: Sequence[RankFailure], words: Sequence[LastWords]
) -> RankFailure:
    """Return the end of a process with the exception that it wrote last, if no traceback tells it.

    What people quote of an output, and what is left of one, often begins behind the traceback. Only
    a last complaint counts: a program may go on after an exception that it reports. Without the
    rank in front of it, it is that of all processes that ended so.
    """
    if failure.error or failure.signal or failure.cut or not failure.exit_code:
        return failure
    own = [word for word in words if failure.rank in word.ranks]
    raised = [word for word in own if word.complains and _RAISED.match(word.text)]
    if not raised and not any(other.error for other in failures):
        own = [word for word in words if not word.ranks]
        raised = [word for word in own if word.complains and _RAISED.match(word.text)]
    # NCCL's own words, and the last error that it met, stand in the lines behind its exception.
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


def _without_traceback(words: Sequence[LastWords]) -> Iterator[RankFailure]:
    """Yield the exceptions that were told in a line of their own, where nothing else was."""
    told = [each for each in words if each.complains and _RAISED.match(each.text)]
    for each in told:
        for rank in each.ranks or (None,):
            yield RankFailure(
                rank=rank,
                error=each.text,
                at=each.at,
                line=each.text,
                consequence=is_consequence(each.text),
                bare=True,
            )


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, without colours; a progress bar's states are lines too."""
    for line in re.split(r"[\r\n]+", text):
        if line:
            short = line[:_LINE_CHARACTERS]
            yield (_ANSI.sub("", short) if "\x1b" in short else short).rstrip()
