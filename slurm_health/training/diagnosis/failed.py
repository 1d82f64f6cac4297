# SPDX-License-Identifier: Apache-2.0
"""Why a script failed, by its output: the first rank that failed, and the meaning of its end.

Rules lead from `script-failed` to `rank-failed`, the first failure, or to `ranks-waited` if all
failures are consequences; and from `rank-failed` to the meaning of its exception, its signal or its
last words. A failure on several nodes is no single node's fault; a failure on one of several nodes
that may lack files is undecided.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from slurm_health.records.script_records import (
    MOST_LINES,
    RANK_FAILED,
    RANKS_WAITED,
)
from slurm_health.records.text import SIGKILL, counted, cut, listed, ranks_text, signal_text
from slurm_health.training.diagnosis.collected import (
    LastWords,
    NodeStates,
    RankFailure,
    ScriptEnd,
    TrainingLog,
    exclude_options,
    failed_nodes,
    failed_ranks,
)
from slurm_health.training.diagnosis.ends import signal_of
from slurm_health.training.diagnosis.rows import (
    OF_THE_PLACE,
    OF_THE_PROGRAM,
    On,
    Row,
    alike,
    kind_of,
)
from slurm_health.training.diagnosis.waits import port_taken
from slurm_health.training.diagnosis.words import known
from slurm_health.training.diagnosis.words_of_launchers import (
    CORRECT,
    SEVERAL_LISTEN,
    is_consequence,
    mistake,
)
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

_QUOTED = 120  # characters of an exception in a sentence; the evidence has more
# What machines, networks and filesystems do to all ranks alike is no mistake of the script.
_OF_SURROUNDINGS = re.compile(
    r"Stale file handle|Input/output error|Transport endpoint|No route to host|unreachable"
    r"|timed? ?out|Connection |Broken pipe|No space left|NCCL|CUDA|\bGPU\b|gloo"
    r"|(?<![a-z])(?:ECC|S?Xid|quotas?)(?![a-z])"  # and not Rebecca, or a quotation
    r"|infiniband|\bib_|rendezvous|Too many open files|Resource temporarily|Cannot allocate memory"
    r"|Node failure|slurmd\b|Socket|Remote I/O",
    re.I,
)
_JAX_TASK = re.compile(r"/task:(\d+)")
# Exceptions whose reason the driver, or NCCL, may have written in a warning before, by its kind.
_EXPLAINED_BEFORE = {"no-gpu": "gpu-start", "gpu-unknown-error": "nccl-warning"}
# By exception: the name of the cause, and what a process did.
_NOT_FOUND = ("file-not-found", "used a file that does not exist")
_NO_MODULE = ("module-not-found", "imported a module that is not installed or cannot be loaded")
_NOT_THERE = {
    "FileNotFoundError": _NOT_FOUND,
    "IsADirectoryError": _NOT_FOUND,
    "NotADirectoryError": _NOT_FOUND,
    "PermissionError": ("permission-denied", "used a file that it may not use"),
    "ImportError": _NO_MODULE,
    "ModuleNotFoundError": _NO_MODULE,
}
_SENT = {1, 2, 10, 12}  # SIGHUP, SIGINT, SIGUSR1, SIGUSR2: no error raises them
# Signals that a processor or the C library raises for errors of a program: see signal(7).
_CRASHES = {
    4: "an illegal instruction",
    6: "it gave up",
    7: "a bus error",
    8: "a wrong division",
    11: "a segmentation fault",
}
# The supervisor's copy, or Slurm's: `/tmp/slurm-health-2__pbe_o/slurm_script: line 4: ...`; `line`
# is bash's. Users know their script by another name, and the path is gone when the job has ended.
_OF_THE_COPY = re.compile(r"^/\S*/slurm_script: (?:line )?(\d+: )")
_PATH = re.compile(r"""(?:'|")(/[^'"]{1,200})(?:'|")\s*$""")


def first_failure(_: Inference, data: DataManager) -> Inference | None:
    """The rank that failed first, as opposed to those that only noticed."""
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    if log is None or not log.failures:
        return None
    # A script that a signal ended may have run on for long after an exception that it wrote.
    if end and end.by_a_signal and all(failure.bare for failure in log.failures):
        return None
    if not log.of_their_own:
        first = log.failures[0]
        return Inference(
            name=RANKS_WAITED,
            description=f"{first.who} gave up first, waiting for others; no rank reported"
            " a failure of its own",
            ranks=failed_ranks([first]),
            evidence=tuple(failure.line for failure in log.failures[:MOST_LINES]),
        )
    first = log.of_their_own[0]
    at_first = " first" if log.ordered else ""
    how = f"failed{at_first}"
    if first.error:
        how += f": {cut(first.error, _QUOTED)}"
    elif first.signal:
        how = f"was ended by {signal_text(first.signal)}{at_first}"
    elif first.exit_code:
        how = f"ended with exit code {first.exit_code}{at_first}"
    others = max(log.failed, len(log.failures)) - 1
    after = "after it" if log.ordered else "too; which was first is not known"
    rest = f"; {counted(others, 'other')} failed {after}" if others else ""
    return Inference(
        name=RANK_FAILED,
        sureness=Sureness.LIKELY,
        description=f"{first.who} {how}{rest}",
        ranks=failed_ranks([first]),
        nodes=failed_nodes([first]),
        evidence=(first.line,),
        advice="look at the last lines of this rank",
    )


def why_rank_failed(_: Inference, data: DataManager) -> Inference | None:
    """The meaning of the first failure of a rank: of its exception, signal or last words."""
    log = data.get(TrainingLog)
    if log is None or not log.of_their_own:
        return None
    first = log.of_their_own[0]
    if first.error:
        # A command that Python ran may itself say why it failed.
        ran = kind_of(first.error) == "CalledProcessError"
        return (_words((), data) if ran else None) or _raised(first, log, data)
    if first.signal:
        # The last words of a library before it crashes say more than the signal.
        words = _words(log.of_their_own, data) if first.signal in _CRASHES else None
        return words or _signalled(first, data)
    if first.cut:
        at = f", at {first.place}" if first.place else ""
        return Inference(
            name="exception-cut-off",
            description=f"{first.who} raised a Python exception{at}, whose words were cut off"
            " when the step was ended: they held the cause",
            sureness=Sureness.LIKELY,
            nodes=failed_nodes([first]),
            ranks=failed_ranks([first]),
            evidence=(first.line,),
            advice="have srun write one file per task (--output=%x-%j-%t.out), or not end the step"
            " at once (without --kill-on-bad-exit): then the exception is in it",
        )
    return _words(log.of_their_own, data)


def last_words(_: Inference, data: DataManager) -> Inference | None:
    """The last words of a script that failed without a known failure of a rank."""
    log = data.get(TrainingLog)
    return _words((), data) if log and not log.failures else None


def _raised(first: RankFailure, log: TrainingLog, data: DataManager) -> Inference | None:
    """The meaning of an exception: by its words, else by its type and the number of its ranks."""
    end = data.get(ScriptEnd)
    several = end is not None and len(end.nodes) > 1
    row = known(first.error, loading=first.loading)
    if row and row.name in _EXPLAINED_BEFORE:
        warnings = log.of(_EXPLAINED_BEFORE[row.name])
        row = next((why for fact in warnings if (why := known(fact.value))), row)
    by_rank: dict[int | None, RankFailure] = {}
    for failure in reversed(log.of_their_own):
        other = known(failure.error, loading=failure.loading) if failure.error else None
        if row is None:
            is_same = alike(failure.error) == alike(first.error)
        else:  # whatever its words
            is_same = other is not None and other.name == row.name
            row = max(row, other, key=lambda row: row.sureness) if is_same and other else row
        if is_same:
            by_rank[failure.rank] = failure
    same = sorted(by_rank.values(), key=lambda failure: failure.at) or [first]
    nodes, ranks = failed_nodes(same), failed_ranks(same)
    if row is None:
        row = _row_by_type(first, same, several=several)
        if row is None:
            return None
    elif row.name == "port-in-use" and len(ranks) > 1 and len(nodes) < 2:
        row = SEVERAL_LISTEN
    elif row.name == "port-in-use" and (taken := log.of("port-taken")):
        return port_taken(taken[0].value, first.line, data)
    cause = row.inference(
        nodes=nodes, ranks=ranks, evidence=tuple(failure.line for failure in same[:MOST_LINES])
    )
    if not row.pattern:
        return cause
    cause = replace(cause, description=cause.description + _where(row, same, data))
    cause = _with_lost_tasks(cause, first.error)
    if On.SHARED in row.on and len(nodes) > 1:
        says = f"{cause.description}: one that they share"
        return replace(cause, attribution=Attribution.USER, description=says)
    if row.blame is Attribution.NODE:
        # A program's words about a device blame no node by themselves: its driver, its kernel or
        # a check has to agree, and all of these are inferences of their own.
        cause = replace(cause, sureness=Sureness.POSSIBLE)
        if len(nodes) != 1:
            return replace(cause, attribution=Attribution.UNDECIDED)
        if end and nodes[0] in end.nodes:
            leave = exclude_options(nodes, data)
            advice = f"leave out {nodes[0]} ({leave}) and tell your administrator"
            return replace(cause, advice=advice)
    if row.blame is Attribution.USER and len(same) > 1:
        return replace(cause, sureness=Sureness.CERTAIN)
    return cause


def _where(row: Row, same: Sequence[RankFailure], data: DataManager) -> str:
    """Return the ranks of a cause, or its path; empty for one rank."""
    if row.name == "not-a-number" and len(same) == 1:
        return ", on this rank alone: a device that computes wrongly is possible, if rare"
    on = _on_how_many(same)
    if row.name in {"disk-full", "filesystem-failed"}:
        on += _on_which_files(same[0], failed_nodes(same), data)
    return on


def _on_which_files(first: RankFailure, nodes: Sequence[str], data: DataManager) -> str:
    """Return ` (/ckpt/a.pt on nfs4, srv:/ckpt), on 1 of 4 nodes`, as far as it is known."""
    reports, end = data.get(NodeStates), data.get(ScriptEnd)
    at = first.place
    if named := _PATH.search(first.error):
        at = path = named[1]
        states = reports.nodes if reports else ()
        mounts = {point: what for state in states for point, what in state.mounts.items()}
        inmost_first = sorted(mounts, key=len, reverse=True)
        above = (point for point in inmost_first if f"{path}/".startswith(f"{point.rstrip('/')}/"))
        at += next((f" on {mounts[point]}" for point in above), "")
    total = len(end.nodes) if end else 0
    shares = f", on {len(nodes)} of {total} nodes" if nodes and total > 1 else ""
    return (f" ({at})" if at else "") + shares


def _row_by_type(first: RankFailure, same: Sequence[RankFailure], *, several: bool) -> Row | None:
    """Return the meaning of an exception without known words; `several`: the job has more nodes."""
    nodes, kind = failed_nodes(same), kind_of(first.error)
    place = f", {first.place}" if first.place else ""
    where = _on_how_many(same).removeprefix(" on ") or first.who
    quoted = f"{cut(first.error, _QUOTED)} ({where}{place})"
    user, certain = Attribution.USER, Sureness.CERTAIN
    of_program = kind in OF_THE_PROGRAM
    if len(same) > 1 and not of_program and of_surroundings(first.error):
        look = "look at what it names on these nodes, and have them checked"
        return Row("same-error-everywhere", "", quoted, look, sureness=Sureness.POSSIBLE)
    if len(same) > 1 and len(nodes) == 1 and several and kind in OF_THE_PLACE:
        # Only the ranks of this node fail: files may be missing there. Else they share the script.
        has = f"check whether {listed(nodes)} has the files and packages that the other nodes have"
        return Row("same-error-everywhere", "", quoted, has, sureness=Sureness.POSSIBLE)
    if len(same) > 1:
        correct = "correct the script or what it reads; starting it again as it is fails again"
        return Row("same-error-everywhere", "", quoted, correct, user, certain)
    # An exception about its machine is no mistake of the script.
    if of_program or (first.raises and not of_surroundings(first.error)):
        look = (
            "look at this place in the script and at the data of this rank; starting it again as"
            " it is most likely fails again"
        )
        return Row("program-error", "", quoted, look, user)
    if kind not in _NOT_THERE:
        return None
    name, did = _NOT_THERE[kind]
    says = f"{first.who} {did}" + (f", at {first.place}" if first.place else "")
    if several:
        on = f"{listed(nodes)} has it as the other nodes have" if nodes else "all nodes have it"
        return Row(name, "", says, f"check whether this rank alone uses it, or whether {on}")
    correct = (
        "correct the path, its permissions or what is installed; starting it again as it is fails"
        " again"
    )
    return Row(name, "", says, correct, user)


def _signalled(first: RankFailure, data: DataManager) -> Inference:
    """A signal from outside, whose sender is not recorded; or a crash, of program or node."""
    reports, end = data.get(NodeStates), data.get(ScriptEnd)
    number = first.signal
    if number == SIGKILL and reports and first.node in reports.silent:
        name, node = "node-silent", first.node
        says = f"was killed, and {node} no longer answers: the node, or the network to it"
        advice = f"check whether Slurm still reaches it: scontrol show node {node}"
    elif number == SIGKILL:
        name, says, advice = "killed", _KILLED, _after_a_kill(end)
    elif number in _SENT:
        name = "killed"
        sent = signal_text(number)
        says = f"was ended by {sent}, which it does not handle"
        advice = (
            "handle it in the program, or have it sent to the batch script alone"
            " (sbatch --signal=B:...); scancel --signal and users send such signals too"
        )
    else:
        name, says, advice = "crashed", _crashed(number), _AFTER_A_CRASH
    return Inference(
        name=name,
        description=f"{first.who} {says}",
        sureness=Sureness.LIKELY,
        nodes=failed_nodes([first]),
        ranks=failed_ranks([first]),
        evidence=(first.line,),
        advice=advice,
    )


def script_crashed(_: Inference, data: DataManager) -> Inference | None:
    """The script, or the last command of its shell, crashed or was killed; no rank failed.

    A crash alone does not show whether program or node is at fault, nor SIGKILL its sender.
    """
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    number = (end.signal or signal_of(end.exit_code)) if end else 0  # a shell says 128 + n
    if number not in {*_CRASHES, SIGKILL} or (log and not all(f.bare for f in log.failures)):
        return None
    ended = f"it ended with {signal_text(number)}"
    if number == SIGKILL:
        return Inference(
            name="killed",
            sureness=Sureness.POSSIBLE,
            description=f"the script, or its last command, {_KILLED}",
            evidence=(ended,),
            advice=_after_a_kill(end),
        )
    words = [words.text for words in log.words if words.complains] if log else []
    return Inference(
        name="crashed",
        sureness=Sureness.LIKELY,
        description=f"the script {_crashed(number)}",
        evidence=(ended, *words[:MOST_LINES]),
        advice=_AFTER_A_CRASH,
    )


_KILLED = (
    "was killed by SIGKILL from outside; the collected data does not show the sender (the kernel,"
    " for memory, or a person)"
)
_AFTER_A_CRASH = (
    "start again with PYTHONFAULTHANDLER=1; if the same node crashes again while others do not,"
    " leave it out"
)


def _after_a_kill(end: ScriptEnd | None) -> str:
    if end is None or end.in_slurm:
        return (
            "look at the job's memory, if Slurm accounts for it (sacct"
            " --format=JobID,MaxRSS,State), and ask your administrator for the kernel's log of the"
            " node"
        )
    return (
        "check on its node whether memory was used up: by the kernel's log (dmesg -T | grep -i"
        " 'killed process'), in a container or a service by oom_kill in its cgroup's memory.events"
    )


def _crashed(number: int) -> str:
    what = f", {_CRASHES[number]}" if number in _CRASHES else ""
    return (
        f"crashed ({signal_text(number)}{what}) in native code: an error of a library or"
        " extension, or, if it stays on one node, of the node"
    )


def _words(failures: Sequence[RankFailure], data: DataManager) -> Inference | None:
    """The meaning of last words, if no exception or signal says more.

    Those of a mistake, and equal ones of all failed ranks, are sure. The program may have handled
    others that name a known cause: these are only possible, and blame the user for no rank.
    """
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    if log is None or end is None or end.by_a_signal:
        return None
    if any(f.error or (f.signal and f.signal not in _CRASHES) for f in failures):
        return None
    last = max(
        (words for words in log.words if words.last),
        key=lambda words: (words.last, words.at),
        default=None,
    )
    if last is None:
        return None
    crashed = failures and failures[0].signal
    if not crashed and (cause := _mistake(last, failures, end)):
        return cause
    for words in reversed([words for words in log.words if words.complains]):
        row = known(words.text)
        if row is not None and (On.CRASH if crashed else On.LAST_WORDS) in row.on:
            alone = row.blame in (Attribution.USER, Attribution.TRANSIENT) and not failures
            cause = replace(
                row.inference(
                    nodes=failed_nodes(failures),
                    ranks=failed_ranks(failures),
                    evidence=(words.text,),
                ),
                attribution=row.blame if alone else Attribution.UNDECIDED,
                sureness=Sureness.POSSIBLE,
            )
            return _with_lost_tasks(cause, words.text)
    return None


def _with_lost_tasks(cause: Inference, text: str) -> Inference:
    """Name the tasks that JAX has lost, instead of those that report it."""
    lost = tuple(sorted({int(number) for number in _JAX_TASK.findall(text)}))
    if cause.name != "peer-lost" or not lost:
        return cause
    says = f"{cause.description}; the error names {ranks_text(lost)}"
    return replace(cause, description=says, ranks=lost, nodes=())


def _mistake(last: LastWords, failures: Sequence[RankFailure], end: ScriptEnd) -> Inference | None:
    """A mistake in the submission, or the same last words of all ranks that failed.

    Trouble of a peer, a device, a network or a filesystem fails all ranks alike, and is none.
    """
    row = mistake(last.text, failures[0].exit_code if failures else end.exit_code)
    # A shell names the script by the path at which a node had its copy.
    text = _OF_THE_COPY.sub(r"line \1", last.text)
    nodes, ranks = failed_nodes(failures), failed_ranks(failures)
    if row is not None and On.ONE_NODE in row.on and len(nodes) == 1 and len(end.nodes) > 1:
        return Inference(
            name=row.name,
            description=f"{row.says}, on {listed(nodes)} alone: {text}",
            ranks=ranks,
            nodes=nodes,
            evidence=(last.text,),
            advice=f"check whether {listed(nodes)} has the files and programs that the other nodes"
            " have",
        )
    if row is None:
        meant = known(last.text)
        of_all = failures and last.complains and last.last >= max(2, len(failures))
        if (
            not of_all
            or is_consequence(last.text)
            or of_surroundings(last.text)
            or len({failure.exit_code for failure in failures}) > 1
            or (meant and meant.blame is not Attribution.USER)
        ):
            return None
        says = meant.says if meant else "the same last words"
        row = Row("same-last-words", "", says, CORRECT, Attribution.USER)
    on = f" on {ranks_text(ranks)}" if len(ranks) > 1 else ""
    return replace(
        row.inference(ranks=ranks, evidence=(last.text,)), description=f"{row.says}{on}: {text}"
    )


def of_surroundings(text: str) -> bool:
    """Return whether a line is about machines, network or storage."""
    return bool(_OF_SURROUNDINGS.search(text))


def quotes(data: DataManager) -> list[str]:
    """Return the first complaints of failed ranks as lines of evidence.

    Without any, and without an exception, it is their last line, which may be mere progress.
    """
    log = data.get(TrainingLog)
    if log is None:
        return []
    failed = set(failed_ranks(log.of_their_own))
    first = [words for words in log.words if words.first and words.times]
    of_failed = [words for words in first if failed.intersection(words.ranks)] or first
    complaints = [
        words
        for words in of_failed
        if words.complains and not any(words.text in failure.error for failure in log.failures)
    ]
    if not complaints and not any(failure.error for failure in log.of_their_own):
        complaints = of_failed[-1:]
    return [
        f"{ranks_text(words.ranks) if words.ranks else 'the job'} wrote: {words.text}"
        for words in complaints[:MOST_LINES]
    ]


def _on_how_many(same: Sequence[RankFailure]) -> str:
    """Return ` on ranks 0-3 of n1`, empty for one rank."""
    ranks, nodes = failed_ranks(same), failed_nodes(same)
    if len(ranks) < 2:
        return ""
    return f" on {ranks_text(ranks)}" + (f" of {listed(nodes)}" if nodes else "")
