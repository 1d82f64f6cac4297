# SPDX-License-Identifier: Apache-2.0
"""Why a script failed, from what it wrote: the first rank that failed, or what its ranks waited in.

Rules lead from `script-failed` to `rank-failed`, the first failure, or to `ranks-waited` where
every failure is only a consequence; and from there to what it means.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from slurm_health.records.script_records import (
    MOST_LINES,
    RANK_FAILED,
    RANKS_WAITED,
    SCRIPT_FAILED,
)
from slurm_health.records.text import SIGKILL, counted, cut, listed, ranks_text, signal_text
from slurm_health.training.diagnosis.collected import (
    LastWords,
    NodesTold,
    RankFailure,
    ScriptEnd,
    TrainingLog,
    failed_nodes,
    failed_ranks,
    leaving_out,
)
from slurm_health.training.diagnosis.ends import signal_of
from slurm_health.training.diagnosis.waited import port_taken
from slurm_health.training.diagnosis.words import (
    OF_THE_PLACE,
    OF_THE_PROGRAM,
    On,
    alike,
    kind_of,
    known,
)
from slurm_health.training.diagnosis.words_of_launchers import MISTAKES, is_consequence, mistake
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
# By exception: the name of the cause, and what a process did.
_NOT_FOUND = ("file-not-found", "used a file that is not there")
_NO_MODULE = ("module-not-found", "imported what is not installed there, or cannot be loaded")
_NOT_THERE = {
    "FileNotFoundError": _NOT_FOUND,
    "IsADirectoryError": _NOT_FOUND,
    "NotADirectoryError": _NOT_FOUND,
    "PermissionError": ("permission-denied", "used a file that it may not use"),
    "ImportError": _NO_MODULE,
    "ModuleNotFoundError": _NO_MODULE,
}
_SENT = {1, 2, 10, 12}  # SIGHUP, SIGINT, SIGUSR1, SIGUSR2: no error raises them
# Signals that a processor or the C library raises for what a program does: see signal(7).
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
    """Which rank failed first, as opposed to those that only noticed."""
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    if log is None or not log.failures:
        return None
    # What a signal ended may have gone on for long after an exception that it told of.
    if end and end.by_a_signal and all(each.bare for each in log.failures):
        return None
    if not log.of_their_own:
        victims = [each for each in log.failures if each.consequence]
        first = victims[0]
        return Inference(
            name=RANKS_WAITED,
            description=f"{_who(first)} gave up first, waiting for others; no rank reported"
            " a failure of its own",
            ranks=failed_ranks([first]),
            evidence=tuple(each.line for each in victims[:MOST_LINES]),
        )
    first = log.of_their_own[0]
    if first.error:
        how = f"raised {kind_of(first.error)}"
    elif first.signal:
        how = f"was ended by {signal_text(first.signal)}"
    else:
        how = f"ended with exit code {first.exit_code}" if first.exit_code else "failed"
    others = max(log.failed, len(log.failures)) - 1
    rest = f"; {counted(others, 'other')} failed after it" if others else ""
    return Inference(
        name=RANK_FAILED,
        sureness=Sureness.LIKELY,
        description=f"{_who(first)} {how} first{rest}",
        ranks=failed_ranks([first]),
        nodes=failed_nodes([first]),
        evidence=(first.line,),
        advice="look at what this rank wrote before it failed",
    )


def why_rank_failed(inference: Inference, data: DataManager) -> Inference | None:
    """What the first failure of a rank means: its exception, its signal, or its last words."""
    log = data.get(TrainingLog)
    if log is None or not log.of_their_own:
        return None
    first = log.of_their_own[0]
    if first.error:
        return _of_exception(first, data)
    if first.signal:
        # A library that says why it crashes knows more than the signal.
        words = _of_last_words(inference, data, sure=False) if first.signal in _CRASHES else None
        return words if words and words.name == "shared-memory-full" else _of_signal(first, data)
    if words := _of_last_words(inference, data, sure=True):
        return words
    if first.cut:
        at = f", at {first.place}" if first.place else ""
        return Inference(
            name="exception-cut-off",
            description=f"{_who(first)} raised a Python exception{at}, whose words were cut off"
            " when the step was ended: whose fault it is was in them",
            sureness=Sureness.LIKELY,
            nodes=failed_nodes([first]),
            ranks=failed_ranks([first]),
            evidence=(first.line,),
            advice="have srun write one file per task (--output=%x-%j-%t.out), or not end the step"
            " at once (without --kill-on-bad-exit): then the exception is in it",
        )
    return _of_last_words(inference, data, sure=False)


def _of_exception(first: RankFailure, data: DataManager) -> Inference | None:
    """What an exception means: by known words, by how many ranks met it, by its type."""
    if known(first.error, loading=first.loading) is not None:
        return _of_known_words(first, data)
    same = _same_as(first, data)
    where, end = failed_nodes(same), data.get(ScriptEnd)
    several = end is not None and len(end.nodes) > 1
    kind = kind_of(first.error)
    if len(same) > 1:
        # What all ranks of one node alone lack may be missing there; else they share the script.
        decided = not (len(where) == 1 and several and kind in OF_THE_PLACE)
        return Inference(
            name="same-error-everywhere",
            description=_quoted(first, _on_how_many(same).removeprefix(" on ") or _who(first)),
            attribution=Attribution.USER if decided else Attribution.UNDECIDED,
            sureness=Sureness.CERTAIN if decided else Sureness.POSSIBLE,
            nodes=where,
            ranks=failed_ranks(same),
            evidence=tuple(each.line for each in same[:MOST_LINES]),
            advice="correct the script or what it reads; starting it again as it is fails again"
            if decided
            else f"check whether {listed(where)} has the files and packages that the other nodes"
            " have",
        )
    of_first = Inference(
        nodes=where,
        ranks=failed_ranks(same),
        evidence=(first.line,),
        sureness=Sureness.LIKELY,
    )
    # What a script raises because of its machine is not its own mistake.
    if kind in OF_THE_PROGRAM or (first.raises and not of_surroundings(first.error)):
        return replace(
            of_first,
            name="program-error",
            description=_quoted(first, _who(first)),
            attribution=Attribution.USER,
            advice="look at this place in the script and at the data of this rank; starting it"
            " again as it is most likely fails again",
        )
    if kind in _NOT_THERE:
        name, means = _NOT_THERE[kind]
        on = f"{listed(where)} has it as the other nodes have" if where else "all nodes have it"
        return replace(
            of_first,
            name=name,
            description=f"{_who(first)} {means}" + (f", at {first.place}" if first.place else ""),
            attribution=Attribution.UNDECIDED if several else Attribution.USER,
            advice=f"check whether this rank alone uses it, or whether {on}"
            if several
            else "correct the path, its permissions or what is installed; starting it again as"
            " it is fails again",
        )
    return None


def _of_known_words(first: RankFailure, data: DataManager) -> Inference:
    """The exception has known words. What several nodes meet is no node's own fault."""
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    row = known(first.error, loading=first.loading)
    assert row is not None
    by_rank: dict[int | None, RankFailure] = {}
    for failure in reversed(log.of_their_own if log else ()):
        other = known(failure.error, loading=failure.loading) if failure.error else None
        if other is not None and other.name == row.name:  # whatever its words
            by_rank[failure.rank] = failure
            row = max(row, other, key=lambda each: each.sureness)
    same = sorted(by_rank.values(), key=lambda failure: failure.at) or [first]
    nodes = failed_nodes(same)
    blame, sureness, advice, says = row.blame, row.sureness, row.advice, row.says
    shared = On.SHARED in row.on and len(nodes) > 1
    if shared:
        blame = Attribution.USER
    elif blame is Attribution.NODE:
        # What a program says of a device blames no node by itself: its driver, its kernel or a
        # check has to agree, and each of these is an inference of its own.
        sureness = Sureness.POSSIBLE
        if len(nodes) != 1:
            blame = Attribution.UNDECIDED
        elif end and nodes[0] in end.nodes:
            leave = leaving_out(nodes, data)
            advice = f"leave out {nodes[0]} ({leave}) and tell your administrator"
    elif blame is Attribution.USER and len(same) > 1:
        sureness = Sureness.CERTAIN
    if row.name == "not-a-number" and len(same) == 1:
        says += ", on this rank alone: a device that computes wrongly is possible, if rare"
    else:
        says += _on_how_many(same)
    if row.name == "disk-full":
        path = _PATH.search(first.error)
        at = path[1] if path else first.place
        says += f" ({at})" if at else ""
    taken = log.of("port-taken") if log and row.name == "port-in-use" else ()
    if taken:
        return port_taken(taken[0].value, first.line, data)
    return Inference(
        name=row.name,
        description=says + (": one that they share" if shared else ""),
        attribution=blame,
        sureness=sureness,
        nodes=nodes,
        ranks=failed_ranks(same),
        evidence=tuple(each.line for each in same[:MOST_LINES]),
        advice=advice,
    )


def _of_signal(first: RankFailure, data: DataManager) -> Inference:
    """A signal from outside, whose sender is not recorded; or a crash, of program or node."""
    told, end = data.get(NodesTold), data.get(ScriptEnd)
    of_first = Inference(
        name="killed",
        sureness=Sureness.LIKELY,
        nodes=failed_nodes([first]),
        ranks=failed_ranks([first]),
        evidence=(first.line,),
    )
    if first.signal == SIGKILL and told and first.node in told.silent:
        return replace(
            of_first,
            name="node-silent",
            description=f"{_who(first)} was killed, and {first.node} does not answer any more: the"
            " node, or the network to it",
            advice=f"check whether Slurm still reaches it: scontrol show node {first.node}",
        )
    if first.signal == SIGKILL:
        return replace(
            of_first,
            description=f"{_who(first)} {_KILLED}",
            advice=_after_a_kill(end),
        )
    if first.signal in _SENT:
        return replace(
            of_first,
            description=f"{_who(first)} was ended by {signal_text(first.signal)}, which was sent to"
            " it and which it does not handle",
            advice="handle it in the program, or have it sent to the batch script alone"
            " (sbatch --signal=B:...); scancel --signal and people send such signals too",
        )
    return replace(
        of_first,
        name="crashed",
        description=f"{_who(first)} {_crashed(first.signal)}",
        advice=_AFTER_A_CRASH,
    )


def last_words(inference: Inference, data: DataManager) -> Inference | None:
    """What a script wrote last that failed without any rank that is known to have failed."""
    sure = _of_last_words(inference, data, sure=True)
    return sure or _of_last_words(inference, data, sure=False)


def script_crashed(_: Inference, data: DataManager) -> Inference | None:
    """The script, or what a shell ran last, was ended by a signal of its own making, or killed.

    No rank is known to have failed. The program or the node: a crash alone does not tell; nor
    SIGKILL, who sent it.
    """
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    number = (end.signal or signal_of(end.exit_code)) if end else 0  # a shell says 128 + n
    if number not in {*_CRASHES, SIGKILL} or (log and not all(each.bare for each in log.failures)):
        return None
    if number == SIGKILL:
        return Inference(
            name="killed",
            sureness=Sureness.POSSIBLE,
            description=f"the script, or what it ran last, {_KILLED}",
            evidence=(f"it ended with {signal_text(number)}",),
            advice=_after_a_kill(end),
        )
    words = [each.text for each in log.words if each.complains] if log else []
    return Inference(
        name="crashed",
        sureness=Sureness.LIKELY,
        description=f"the script {_crashed(number)}",
        evidence=(f"it ended with {signal_text(number)}", *words[:MOST_LINES]),
        advice=_AFTER_A_CRASH,
    )


_KILLED = (
    "was killed by SIGKILL from outside; nothing that was collected says by whom (memory used up on"
    " its node, or a person)"
)
_AFTER_A_CRASH = (
    "start again with PYTHONFAULTHANDLER=1; if the same node crashes again while others do not,"
    " leave it out"
)


def _after_a_kill(end: ScriptEnd | None) -> str:
    if end is None or end.in_slurm:
        return (
            "look at the job's memory, where Slurm keeps account of it"
            " (sacct --format=JobID,MaxRSS,State), and ask your administrator for the kernel's log"
            " of the node"
        )
    return (
        "look on its node whether memory was used up: the kernel's log says so (dmesg -T | grep -i"
        " 'killed process'), and in a container or a service oom_kill in its cgroup's memory.events"
    )


def _crashed(number: int) -> str:
    what = f", {_CRASHES[number]}" if number in _CRASHES else ""
    return (
        f"crashed ({signal_text(number)}{what}) in native code: an error of a library or"
        " extension, or, if it stays on one node, of the node"
    )


def _of_last_words(inference: Inference, data: DataManager, *, sure: bool) -> Inference | None:
    """What last words mean where no exception or signal says more.

    Those of a mistake, and the same of all ranks that failed, are `sure`. Others that name a known
    cause may have been dealt with, and are possible only; nor are they a rank's user, by words that
    machines do to all ranks.
    """
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    if log is None or end is None or end.by_a_signal:
        return None
    failures = log.of_their_own
    if any(each.error or (each.signal and each.signal not in _CRASHES) for each in failures):
        return None
    if inference.name == SCRIPT_FAILED and log.failures:
        return None
    lasts = [each for each in log.words if each.last]
    last = max(lasts, key=lambda each: (each.last, each.at), default=None)
    if last is None:
        return None
    if sure:
        return _mistake(last, failures if inference.name == RANK_FAILED else (), end)
    for each in reversed([each for each in log.words if each.complains]):
        row = known(each.text) if each.first or each.last else None
        if row is not None and On.LAST_WORDS in row.on:
            of_user = row.blame in (Attribution.USER, Attribution.TRANSIENT)
            alone = of_user and inference.name == SCRIPT_FAILED
            return Inference(
                name=row.name,
                description=f"{row.says}, by the last that was written of it",
                attribution=row.blame if alone else Attribution.UNDECIDED,
                sureness=Sureness.POSSIBLE,
                evidence=(each.text,),
                nodes=failed_nodes(failures),
                ranks=failed_ranks(failures),
                advice=row.advice,
            )
    return None


def _mistake(last: LastWords, failures: Sequence[RankFailure], end: ScriptEnd) -> Inference | None:
    """A mistake in what was submitted, or the same last words of all ranks that failed.

    What one of several nodes alone may lack is not decided. Nor is it a mistake that a peer, a
    device, a network or a filesystem fails all ranks alike.
    """
    row = mistake(last.text, failures[0].exit_code if failures else end.exit_code)
    # A shell names the script by the path at which a node had its copy.
    text, where = _OF_THE_COPY.sub(r"line \1", last.text), failed_nodes(failures)
    ranks = failed_ranks(failures)
    if row is None:
        if not failures or not last.complains or last.last < max(2, len(failures)):
            return None
        if (
            is_consequence(last.text)
            or of_surroundings(last.text)
            or len({each.exit_code for each in failures}) > 1
        ):
            return None
        meant = known(last.text)
        if meant and meant.blame is not Attribution.USER:
            return None
        means = meant.says if meant else "the same last words"
        name, sureness = "same-last-words", Sureness.LIKELY
    elif On.ONE_NODE in row.on and failures and len(where) == 1 and len(end.nodes) > 1:
        return Inference(
            name=row.name,
            description=f"{row.says}, on {listed(where)} alone: {text}",
            ranks=ranks,
            nodes=where,
            evidence=(last.text,),
            advice=f"check whether {listed(where)} has the files and programs that the other nodes"
            " have",
        )
    else:
        name, means, sureness = row.name, row.says, row.sureness
    on = f" on {ranks_text(ranks)}" if len(ranks) > 1 else ""
    return Inference(
        name=name,
        description=f"{means}{on}: {text}",
        attribution=Attribution.USER,
        sureness=sureness,
        ranks=ranks,
        evidence=(last.text,),
        advice=MISTAKES[0].advice,
    )


def of_surroundings(text: str) -> bool:
    """Tell whether a line is about what a program needs of machines, network and storage."""
    return bool(_OF_SURROUNDINGS.search(text))


def quotes(data: DataManager) -> list[str]:
    """Return the first complaints of what failed as lines of evidence.

    Where there are none, and no exception either, its last line: that may be mere progress.
    """
    log = data.get(TrainingLog)
    if log is None:
        return []
    failed = set(failed_ranks(log.of_their_own))
    first = [each for each in log.words if each.first and each.times]
    of_failed = [each for each in first if failed.intersection(each.ranks)] or first
    told = [failure.error for failure in log.failures]
    complaints = [
        word
        for word in of_failed
        if word.complains and not any(word.text in error for error in told)
    ]
    if not complaints and not any(each.error for each in log.of_their_own):
        complaints = of_failed[-1:]
    return [
        f"{ranks_text(each.ranks) if each.ranks else 'the job'} wrote: {each.text}"
        for each in complaints[:MOST_LINES]
    ]


def _same_as(first: RankFailure, data: DataManager) -> list[RankFailure]:
    """Return the failures of ranks with this exception, the first one in front."""
    log = data.get(TrainingLog)
    by_rank = {
        each.rank: each
        for each in reversed(log.of_their_own if log else ())
        if alike(each.error) == alike(first.error)
    }
    return sorted(by_rank.values(), key=lambda each: each.at)


def _who(failure: RankFailure) -> str:
    who = f"rank {failure.rank}" if failure.rank is not None else "a process"
    return f"{who} on {failure.node}" if failure.node else who


def _quoted(failure: RankFailure, who: str) -> str:
    """Return an exception and where it was raised: `ValueError: bad label (rank 1, ddp.py:28)`."""
    place = f", {failure.place}" if failure.place else ""
    return f"{cut(failure.error, _QUOTED)} ({who}{place})"


def _on_how_many(same: Sequence[RankFailure]) -> str:
    """Return on how many ranks and nodes, empty for one rank."""
    ranks, nodes = failed_ranks(same), failed_nodes(same)
    if len(ranks) < 2:
        return ""
    return f" on {ranks_text(ranks)}" + (f" of {listed(nodes)}" if nodes else "")
