# SPDX-License-Identifier: Apache-2.0
"""The first rank that failed, and what its failure means."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_health.records.script_records import MOST_LINES, RANK_FAILED, RANKS_WAITED
from slurm_health.records.text import SIGKILL, counted, cut, listed, ranks_text, signal_text
from slurm_health.training.diagnosis.collected import ScriptEnd, TrainingLog, leaving_out
from slurm_health.training.diagnosis.known_errors import KnownError, known
from slurm_health.training.diagnosis.last_words import (
    OF_THE_PLACE,
    OF_THE_PROGRAM,
    alike,
    kind_of,
)
from slurm_health.training.diagnosis.mistakes import of_surroundings
from slurm_health.training.diagnosis.rank_failures import (
    RankFailure,
    failed_ranks,
    nodes_of,
    signal_of,
)
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

_QUOTED = 120  # characters of an exception in a sentence; the evidence has more


def first_failure(_: Inference, data: DataManager) -> Inference | None:
    """Which rank failed first, as opposed to those that only noticed.

    Where all failures are consequences, no rank failed by itself.
    """
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    if log is None or not log.failures:
        return None
    # What a signal ended may have gone on for long after an exception that it told of.
    if end and end.by_a_signal and all(each.bare for each in log.failures):
        return None
    victims = [each for each in log.failures if each.consequence]
    if not log.of_their_own:
        first = victims[0]
        return Inference(
            name=RANKS_WAITED,
            description=f"{_who(first)} gave up first, waiting for others; no rank reported"
            " a failure of its own",
            ranks=failed_ranks([first]),
            evidence=tuple(each.line for each in victims[:MOST_LINES]),
        )
    first = log.of_their_own[0]
    others = max(log.failed, len(log.failures)) - 1
    rest = f"; {counted(others, 'other')} failed after it"
    return Inference(
        name=RANK_FAILED,
        sureness=Sureness.LIKELY,
        description=f"{_who(first)} {_how(first)} first" + (rest if others else ""),
        ranks=failed_ranks([first]),
        nodes=nodes_of([first]),
        evidence=(first.line,),
        advice="look at what this rank wrote before it failed",
    )


def known_error(_: Inference, data: DataManager) -> Inference | None:
    """The first failure's exception is one whose cause is known by its words.

    What all ranks meet is no node's fault.
    """
    first = _first(data)
    meant = _known(first)
    if meant is None:
        return None
    same, meant = _same_cause(first, meant, data)
    attribution, sureness = meant.attribution, meant.sureness
    shared = meant.name in _OF_STORAGE and len(nodes_of(same)) > 1
    if shared:
        attribution = Attribution.USER
    if attribution is Attribution.NODE and len(nodes_of(same)) != 1:
        attribution, sureness = Attribution.UNDECIDED, Sureness.POSSIBLE
    elif attribution is Attribution.NODE:
        # What a program says of a device blames no node by itself: its driver, its kernel or a
        # check has to agree, and each of these is an inference of its own.
        sureness = Sureness.POSSIBLE
    elif attribution is Attribution.USER and len(same) > 1:
        sureness = Sureness.CERTAIN
    alone = meant.name == "not-a-number" and len(same) == 1
    advice, end = meant.advice, data.get(ScriptEnd)
    nodes = nodes_of(same)
    if attribution is Attribution.NODE and end and nodes[0] in end.nodes:
        advice = f"leave out {nodes[0]} ({leaving_out(nodes, data)}) and tell your administrator"
    doubt = ", on this rank alone: a device that computes wrongly is possible, if rare"
    return Inference(
        name=meant.name,
        description=meant.means
        + (doubt if alone else _on_how_many(same))
        + (": one that they share" if shared else ""),
        attribution=attribution,
        sureness=sureness,
        nodes=nodes,
        ranks=failed_ranks(same),
        evidence=tuple(each.line for each in same[:MOST_LINES]),
        advice=advice,
    )


def same_error_everywhere(_: Inference, data: DataManager) -> Inference | None:
    """Several ranks met the same exception by themselves: what they share is to blame.

    The script; but what all ranks of one node alone lack may be missing there.
    """
    first = _first(data)
    same = _same_as(first, data)
    if len(same) < 2 or _known(first) is not None:
        return None
    one_of_several = len(nodes_of(same)) == 1 and len(_job_nodes(data)) > 1
    of_the_place = kind_of(first.error) in OF_THE_PLACE
    decided = not (one_of_several and of_the_place)
    return Inference(
        name="same-error-everywhere",
        description=_quoted(first, _on_how_many(same).removeprefix(" on ") or _who(first)),
        attribution=Attribution.USER if decided else Attribution.UNDECIDED,
        sureness=Sureness.CERTAIN if decided else Sureness.POSSIBLE,
        nodes=nodes_of(same),
        ranks=failed_ranks(same),
        evidence=tuple(each.line for each in same[:MOST_LINES]),
        advice="correct the script or what it reads; starting it again as it is fails again"
        if decided
        else f"check whether {listed(nodes_of(same))} has the files and packages that the"
        " other nodes have",
    )


def program_error(_: Inference, data: DataManager) -> Inference | None:
    """One rank raised what Python raises for mistakes of a program, or what the script raises.

    The script or its data are to blame; the node is not.
    """
    first = _first(data)
    # What a script raises because of its machine is not its own mistake.
    raised = first.raises and not of_surroundings(first.error)
    of_the_program = kind_of(first.error) in OF_THE_PROGRAM or raised
    if not of_the_program or len(_same_as(first, data)) != 1 or _known(first) is not None:
        return None
    return Inference(
        name="program-error",
        description=_quoted(first, _who(first)),
        attribution=Attribution.USER,
        sureness=Sureness.LIKELY,
        nodes=nodes_of([first]),
        ranks=failed_ranks([first]),
        evidence=(first.line,),
        advice="look at this place in the script and at the data of this rank; starting it"
        " again as it is most likely fails again",
    )


def not_there(_: Inference, data: DataManager) -> Inference | None:
    """One process alone did not find a file or a module, or may not use it.

    Of a job on one node what was submitted is to blame; of several, one may lack it.
    """
    first = _first(data)
    if kind_of(first.error) not in _NOT_THERE or _known(first) is not None:
        return None
    if len(_same_as(first, data)) != 1:
        return None
    name, means = _NOT_THERE[kind_of(first.error)]
    alone = len(_job_nodes(data)) > 1
    where = nodes_of([first])
    on = f"{listed(where)} has it as the other nodes have" if where else "all nodes have it"
    return Inference(
        name=name,
        description=f"{_who(first)} {means}" + (f", at {first.place}" if first.place else ""),
        attribution=Attribution.UNDECIDED if alone else Attribution.USER,
        sureness=Sureness.LIKELY,
        nodes=where,
        ranks=failed_ranks([first]),
        evidence=(first.line,),
        advice=f"check whether this rank alone uses it, or whether {on}"
        if alone
        else "correct the path, its permissions or what is installed; starting it again as"
        " it is fails again",
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


def exception_cut_off(_: Inference, data: DataManager) -> Inference | None:
    """The first failure is an exception whose words were lost: the step was ended meanwhile."""
    first = _first(data)
    if not first.cut:
        return None
    return Inference(
        name="exception-cut-off",
        description=f"{_who(first)} raised a Python exception{_at(first)}, whose words were cut off"
        " when the step was ended: whose fault it is was in them",
        sureness=Sureness.LIKELY,
        nodes=nodes_of([first]),
        ranks=failed_ranks([first]),
        evidence=(first.line,),
        advice="have srun write one file per task (--output=%x-%j-%t.out), or not end the step at"
        " once (without --kill-on-bad-exit): then the exception is in it",
    )


def killed_or_crashed(_: Inference, data: DataManager) -> Inference | None:
    """The first failure is a signal: one from outside the process, or a crash of its own.

    Who sent one is not recorded; a crash may be the program's or the node's.
    """
    first = _first(data)
    if first.signal == 0 or first.error:
        return None
    where = nodes_of([first])
    if first.signal == SIGKILL:
        return Inference(
            name="killed",
            sureness=Sureness.LIKELY,
            description=f"{_who(first)} {_KILLED_BY_WHOM}",
            nodes=where,
            ranks=failed_ranks([first]),
            evidence=(first.line,),
            advice=_after_a_kill(data),
        )
    if first.signal in _SENT:
        return Inference(
            name="killed",
            sureness=Sureness.LIKELY,
            description=f"{_who(first)} was ended by {signal_text(first.signal)}, which was sent to"
            " it and which it does not handle",
            nodes=where,
            ranks=failed_ranks([first]),
            evidence=(first.line,),
            advice=_AFTER_A_SIGNAL,
        )
    return Inference(
        name="crashed",
        sureness=Sureness.LIKELY,
        description=f"{_who(first)} {_crashed(first.signal)}",
        nodes=where,
        ranks=failed_ranks([first]),
        evidence=(first.line,),
        advice=_AFTER_A_CRASH,
    )


def script_crashed(_: Inference, data: DataManager) -> Inference | None:
    """The script, or what a shell ran last, was ended by a signal of its own making, or killed.

    No rank is known to have failed. The program or the node: a crash alone does not tell; nor
    SIGKILL, who sent it.
    """
    number = _crash_of(data)
    log = data.get(TrainingLog)
    if number == 0 or (log is not None and not all(each.bare for each in log.failures)):
        return None
    words = [each.text for each in log.words if each.complains] if log else []
    if number == SIGKILL:
        return Inference(
            name="killed",
            sureness=Sureness.POSSIBLE,
            description=f"the script, or what it ran last, {_KILLED_BY_WHOM}",
            evidence=(f"it ended with {signal_text(number)}",),
            advice=_after_a_kill(data),
        )
    return Inference(
        name="crashed",
        sureness=Sureness.LIKELY,
        description=f"the script {_crashed(number)}",
        evidence=(f"it ended with {signal_text(number)}", *words[:MOST_LINES]),
        advice=_AFTER_A_CRASH,
    )


_KILLED_BY_WHOM = (
    "was killed by SIGKILL from outside; nothing that was collected says by whom (memory used up on"
    " its node, or a person)"
)
_AFTER_A_KILL_IN_SLURM = (
    "look at the job's memory, where Slurm keeps account of it (sacct --format=JobID,MaxRSS,State),"
    " and ask your administrator for the kernel's log of the node"
)
_AFTER_A_KILL_OUTSIDE = (
    "look on its node whether memory was used up: the kernel's log says so (dmesg -T | grep -i"
    " 'killed process'), and in a container or a service oom_kill in its cgroup's memory.events"
)
_AFTER_A_SIGNAL = (
    "handle it in the program, or have it sent to the batch script alone (sbatch --signal=B:...);"
    " scancel --signal and people send such signals too"
)
_AFTER_A_CRASH = (
    "start again with PYTHONFAULTHANDLER=1; if the same node crashes again while others do not,"
    " leave it out"
)
_SENT = {1, 2, 10, 12}  # SIGHUP, SIGINT, SIGUSR1, SIGUSR2: no error raises them
# Signals that a processor or the C library raises for what a program does: see signal(7).
_CRASHES = {4: "an illegal instruction", 6: "it gave up", 7: "a bus error", 8: "a wrong division"}
_CRASHES[11] = "a segmentation fault"


def _crash_of(data: DataManager) -> int:
    """Return the signal of a crash or kill that ended a script, else 0; a shell says 128 + n."""
    end = data.get(ScriptEnd)
    number = (end.signal or signal_of(end.exit_code)) if end else 0
    return number if number in _CRASHES or number == SIGKILL else 0


def _crashed(number: int) -> str:
    what = f", {_CRASHES[number]}" if number in _CRASHES else ""
    return (
        f"crashed ({signal_text(number)}{what}) in native code: an error of a library or"
        " extension, or, if it stays on one node, of the node"
    )


def _after_a_kill(data: DataManager) -> str:
    end = data.get(ScriptEnd)
    return _AFTER_A_KILL_IN_SLURM if end is None or end.in_slurm else _AFTER_A_KILL_OUTSIDE


def _job_nodes(data: DataManager) -> tuple[str, ...]:
    end = data.get(ScriptEnd)
    return end.nodes if end else ()


def _first(data: DataManager) -> RankFailure:
    log = data.get(TrainingLog)
    return log.of_their_own[0] if log and log.of_their_own else RankFailure()


def _known(first: RankFailure) -> KnownError | None:
    return known(first.error, loading=first.loading)


def _same_as(first: RankFailure, data: DataManager) -> list[RankFailure]:
    """Return the failures of ranks with this exception, the first one in front."""
    log = data.get(TrainingLog)
    if log is None or not first.error:
        return []
    by_rank = {
        each.rank: each
        for each in reversed(log.of_their_own)
        if alike(each.error) == alike(first.error)
    }
    return sorted(by_rank.values(), key=lambda each: each.at)


# Causes that are a filesystem's: where several nodes meet it, none of them is at fault.
_OF_STORAGE = {"disk-full"}


def _same_cause(
    first: RankFailure, meant: KnownError, data: DataManager
) -> tuple[list[RankFailure], KnownError]:
    """Return the failures of the same known cause, whatever their words, and its surest words."""
    log = data.get(TrainingLog)
    by_rank: dict[int | None, RankFailure] = {}
    for failure in reversed(log.of_their_own if log else ()):
        other = _known(failure) if failure.error else None
        if other is not None and other.name == meant.name:
            by_rank[failure.rank] = failure
            meant = max(meant, other, key=lambda row: row.sureness)
    return sorted(by_rank.values(), key=lambda failure: failure.at) or [first], meant


def _who(failure: RankFailure) -> str:
    who = f"rank {failure.rank}" if failure.rank is not None else "a process"
    return f"{who} on {failure.node}" if failure.node else who


def _quoted(failure: RankFailure, who: str) -> str:
    """Return an exception and where it was raised: `ValueError: bad label (rank 1, ddp.py:28)`."""
    place = f", {failure.place}" if failure.place else ""
    return f"{cut(failure.error, _QUOTED)} ({who}{place})"


def _how(failure: RankFailure) -> str:
    if failure.error:
        return f"raised {kind_of(failure.error)}"
    if failure.signal:
        return f"was ended by {signal_text(failure.signal)}"
    return f"ended with exit code {failure.exit_code}" if failure.exit_code else "failed"


def _at(failure: RankFailure) -> str:
    return f", at {failure.place}" if failure.place else ""


def _on_how_many(same: Sequence[RankFailure]) -> str:
    """Return on how many ranks and nodes, empty for one rank."""
    ranks = failed_ranks(same)
    if len(ranks) < 2:
        return ""
    nodes = nodes_of(same)
    return f" on {ranks_text(ranks)}" + (f" of {listed(nodes)}" if nodes else "")
