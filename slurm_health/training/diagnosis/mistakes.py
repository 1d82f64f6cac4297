# SPDX-License-Identifier: Apache-2.0
"""Mistakes in what was submitted that are no Python exception, known by last words.

Started again, or elsewhere, the same would fail the same way; no node is named for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_health.records.script_records import MOST_LINES, RANK_FAILED, SCRIPT_FAILED
from slurm_health.records.text import listed, ranks_text
from slurm_health.training.diagnosis.collected import ScriptEnd, TrainingLog
from slurm_health.training.diagnosis.known_errors import known
from slurm_health.training.diagnosis.last_words import LastWords, is_consequence
from slurm_health.training.diagnosis.rank_failures import RankFailure, failed_ranks, nodes_of
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

_AGAIN = "started again as it is, it fails again"


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A line that tells of a mistake in what was submitted, and what it means.

    `codes` are the exit codes of a process that wrote it as its last words, empty where it always
    ends by them. With `of_the_place` it may be that one node lacks what the others have.
    """

    name: str
    pattern: re.Pattern[str]
    means: str
    codes: frozenset[int] = frozenset()
    of_the_place: bool = False


# The words of CPython, argparse, click, absl, bash, dash, srun and slurmstepd. Other errors of a
# file, such as a stale handle or one of input and output, are none of a person's.
_GONE = r"No such file or directory|Permission denied|Is a directory|Not a directory"
MISTAKES: tuple[Mistake, ...] = (
    Mistake(
        name="script-not-found",
        pattern=re.compile(r"can't open file '.+': \[Errno (?:2|13|20|21)\]"),
        means="the file that Python was told to run cannot be opened",
        of_the_place=True,
    ),
    Mistake(
        name="wrong-arguments",
        pattern=re.compile(
            r"^\S.*: error: (?:unrecognized arguments|the following arguments are required"
            r"|argument \S+.*: |ambiguous option|one of the arguments )"
            r"|^Error: (?:No such option|Missing (?:option|argument|parameter)|Invalid value"
            r"|Got unexpected extra argument)|FATAL Flags parsing error"
        ),
        means="the program does not take the arguments that it was given",
    ),
    Mistake(
        name="command-not-found",
        # Of the batch script itself it may be that the node has lost slurmd's copy.
        pattern=re.compile(
            rf"error: execve\(\): (?!\S*/slurm_script:).+: (?:{_GONE}|Exec format error)$"
        ),
        means="srun was told to start a program that cannot be started",
        of_the_place=True,
    ),
    Mistake(
        name="shell-syntax",
        pattern=re.compile(
            r": line \d+: (?:syntax error|unexpected EOF while looking for matching)"
            r"|: \d+: Syntax error: "
        ),
        means="the shell cannot read the script",
    ),
    Mistake(
        name="python-syntax",
        pattern=re.compile(r"^(?:SyntaxError|IndentationError|TabError): "),
        means="Python cannot read the program",
    ),
    Mistake(
        name="command-not-found",
        pattern=re.compile(
            rf": command not found$|: \d+: \S+: not found$|: line \d+: .+: (?:{_GONE})$"
        ),
        means="a command of the script does not exist, or may not be run",
        codes=frozenset({126, 127}),
        of_the_place=True,
    ),
    Mistake(
        name="module-not-found",
        pattern=re.compile(r"^\S*python[\d.]*: (?:No module named |Error while finding module)"),
        means="Python was told to run a module that it cannot find",
        of_the_place=True,
    ),
    Mistake(
        name="step-refused",
        pattern=re.compile(
            r"^srun: error: Unable to create step for job \d+: (?:More processors requested"
            r"|Requested node configuration|Invalid generic resource|Memory required by task"
            r"|Invalid (?:node|partition|account|qos))|^srun: (?:unrecognized|invalid) option"
        ),
        means="srun was asked for what the job does not have, or with an option that it does not"
        " know",
    ),
)
# The supervisor's copy, or Slurm's: `/tmp/slurm-health-2__pbe_o/slurm_script: line 4: ...`; `line`
# is bash's. Users know their script by another name, and the path is gone when the job has ended.
_OF_THE_COPY = re.compile(r"^/\S*/slurm_script: (?:line )?(\d+: )")
# What machines, networks and filesystems do to all ranks alike is no mistake of the script.
_OF_SURROUNDINGS = re.compile(
    r"Stale file handle|Input/output error|Transport endpoint|No route to host|unreachable"
    r"|timed? ?out|Connection |Broken pipe|No space left|NCCL|CUDA|\bGPU\b|gloo"
    r"|(?<![a-z])(?:ECC|S?Xid|quotas?)(?![a-z])"  # and not Rebecca, or a quotation
    r"|infiniband|\bib_|rendezvous|Too many open files|Resource temporarily|Cannot allocate memory"
    r"|Node failure|slurmd\b|Socket|Remote I/O",
    re.I,
)


def own_mistake(inference: Inference, data: DataManager) -> Inference | None:
    """The last words of what failed are those of a mistake in what was submitted.

    What one of several nodes alone may lack is not decided.
    """
    last = _last(inference, data)
    if last is None:
        return None
    failures = _own(data) if inference.name == RANK_FAILED else ()
    known_one = mistake(last.text, _code(failures, data))
    if known_one is None:
        return None
    where = nodes_of(failures)
    end = data.get(ScriptEnd)
    alone = len(where) == 1 and end is not None and len(end.nodes) > 1
    if known_one.of_the_place and alone and failures:
        only = f"{known_one.means}, on {listed(where)} alone"
        return Inference(
            name=known_one.name,
            description=f"{only}: {_as_submitted(last)}",
            ranks=failed_ranks(failures),
            nodes=where,
            evidence=(last.text,),
            advice=f"check whether {listed(where)} has the files and programs that the"
            " other nodes have",
        )
    return _of_user(known_one.name, known_one.means, last, failures, Sureness.CERTAIN)


def same_last_words(inference: Inference, data: DataManager) -> Inference | None:
    """All ranks that failed wrote the same last: what they share is to blame, and no node.

    Unless it tells of a peer, a device, a network or a filesystem.
    """
    last, failures = _last(inference, data), _own(data)
    if last is None or not last.complains or last.last < max(2, len(failures)):
        return None
    if mistake(last.text, _code(failures, data)) or is_consequence(last.text):
        return None
    if of_surroundings(last.text) or len({each.exit_code for each in failures}) > 1:
        return None
    meant = known(last.text)
    if meant and meant.attribution is not Attribution.USER:
        return None
    means = meant.means if meant else "the same last words"
    return _of_user("same-last-words", means, last, failures, Sureness.LIKELY)


def known_last_words(inference: Inference, data: DataManager) -> Inference | None:
    """No process told of an exception, and the first or last complaint names a known cause.

    It may have been dealt with, so that nothing is more than possible. Nor is it a rank's user, by
    words that machines do to all ranks.
    """
    log = data.get(TrainingLog)
    if log is None or _last(inference, data) is None:
        return None
    for each in reversed([each for each in log.words if each.complains]):
        meant = known(each.text) if each.first or each.last else None
        if meant is not None and meant.name in _BY_WORDS_ALONE:
            of_user = meant.attribution in (Attribution.USER, Attribution.TRANSIENT)
            alone = of_user and inference.name == SCRIPT_FAILED
            return Inference(
                name=meant.name,
                description=f"{meant.means}, by the last that was written of it",
                attribution=meant.attribution if alone else Attribution.UNDECIDED,
                sureness=Sureness.POSSIBLE,
                evidence=(each.text,),
                nodes=nodes_of(log.of_their_own),
                ranks=failed_ranks(log.of_their_own),
                advice=meant.advice,
            )
    return None


# Causes whose words nothing else has.
_BY_WORDS_ALONE = frozenset(
    {
        "container-not-started",
        "driver-mismatch",
        "duplicate-gpu",
        "gpu-broken",
        "gpu-fabric",
        "gpu-not-supported",
        "locked-memory-limit",
        "network-interface-missing",
        "network-plugin-missing",
        "no-gpu",
        "port-in-use",
        "shared-memory-full",
        "shared-memory-removed",
    }
)


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
    complaints = [each for each in of_failed if each.complains]
    if not complaints and not any(each.error for each in log.of_their_own):
        complaints = of_failed[-1:]
    return [f"{_who(each)} wrote: {each.text}" for each in complaints[:MOST_LINES]]


def _who(words: LastWords) -> str:
    return ranks_text(words.ranks) if words.ranks else "the job"


def _own(data: DataManager) -> tuple[RankFailure, ...]:
    log = data.get(TrainingLog)
    return log.of_their_own if log else ()


def _last(inference: Inference, data: DataManager) -> LastWords | None:
    """Return the last words of what failed, None where an exception or a signal tells more."""
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    if log is None or not log.words or end is None or end.by_a_signal:
        return None
    if any(each.error or each.signal for each in log.of_their_own):
        return None
    if inference.name == SCRIPT_FAILED and log.failures:
        return None
    lasts = [each for each in log.words if each.last]
    return max(lasts, key=lambda each: (each.last, each.at), default=None)


def _code(failures: Sequence[RankFailure], data: DataManager) -> int:
    end = data.get(ScriptEnd)
    return failures[0].exit_code if failures else end.exit_code if end else 0


def _of_user(
    name: str, means: str, last: LastWords, failures: Sequence[RankFailure], sureness: Sureness
) -> Inference:
    ranks = failed_ranks(failures)
    on = f" on {ranks_text(ranks)}" if len(ranks) > 1 else ""
    return Inference(
        name=name,
        description=f"{means}{on}: {_as_submitted(last)}",
        attribution=Attribution.USER,
        sureness=sureness,
        ranks=ranks,
        evidence=(last.text,),
        advice=f"correct what was submitted; {_AGAIN}",
    )


def _as_submitted(last: LastWords) -> str:
    """Return what a shell said of the script, without the path at which a node had its copy."""
    return _OF_THE_COPY.sub(r"line \1", last.text)


def mistake(text: str, code: int) -> Mistake | None:
    """Return the mistake that a line tells of a process that ended with this exit code."""
    found = (each for each in MISTAKES if each.pattern.search(text))
    return next((each for each in found if not each.codes or code in each.codes), None)


def of_surroundings(text: str) -> bool:
    """Tell whether a line is about what a program needs of machines, network and storage."""
    return bool(_OF_SURROUNDINGS.search(text))
