# SPDX-License-Identifier: Apache-2.0
"""What processes wrote before they failed: what an exception says, and what else is no traceback.

The words of an exception tell its kind, whose it is, and what it is a consequence of. A shell, an
interpreter or a parser of options says in a line what it cannot do, and ends. Such lines are known
by their words; others count where all ranks that failed wrote the same last.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from slurm_health.records.text import one_line

_END_OF_NAME = re.compile(r"(?<!:):(?!:)")  # two colons are C++'s, within the name
# Exceptions that Python raises for a program's own mistakes, whatever their words.
OF_THE_PROGRAM = frozenset(
    {
        "AssertionError",
        "AttributeError",
        "IndentationError",
        "IndexError",
        "KeyError",
        "NameError",
        "NotImplementedError",
        "SyntaxError",
        "TypeError",
        "UnboundLocalError",
        "ValueError",
        "ZeroDivisionError",
    }
)
# Exceptions that what is on the node, or is not there, may cause.
OF_THE_PLACE = frozenset(
    {
        "FileNotFoundError",
        "ImportError",
        "IsADirectoryError",
        "ModuleNotFoundError",
        "NotADirectoryError",
        "OSError",
        "PermissionError",
    }
)
# The words of gloo, NCCL, torch's stores and rendezvous for a peer that does not answer any more.
_OF_A_PEER = re.compile(
    r"[Cc]onnection (reset|closed|refused|was closed)|Broken pipe|Socket ?[Cc]losed"
    r"|Timed out (?:waiting|initializing process group)|Socket Timeout|wait timeout"
    r"|timeout after|timed out after"
    r"|collective operation timeout|failed to recv, got 0 bytes|Failed to recv"
    r"|ncclRemoteError|remote process exited|ncclSystemError|unhandled system error"
    r"|communicator was aborted|ProcessGroupNCCL.*(watchdog|[Hh]eartbeat)"
    r"|\bDist(Backend|Store|Network)Error\b|\bRendezvous\w*Error\b|SignalException|ChildFailedError"
    r"|NCCL operations have failed or timed out"
    # DDP compares sizes that an exchange which timed out did not bring; a rank that has none raises
    # something else before.
    r"|DDP expects same model .{0,80} inconsistent 0 params"
)
# The same exceptions with a cause of their own.
_OF_ITSELF = re.compile(
    r"[Mm]ismatch|Duplicate GPU|invalid usage|ncclInvalid|CUDA error|[Cc](?:UDA|uda) failure|ECC"
    r"|out of memory|OutOfMemory|[Aa]ddress already in use|EADDRINUSE|No space left"
    r"|shared memory|no socket interface found|is neither AF_INET|Call to ibv_reg_"
)
_LINES = 40  # of a stream that is one process's: what it wrote at its end
_MIXED_LINES = 4000  # of one that many share
_MOST_STREAMS = 16_384
_MOST_WORDS = 200
_CHARACTERS = 300

# Lines of launchers, of torch's and NCCL's logs and C++ exceptions, and of ours; the summary of
# torchrun.
_OF_OTHERS = re.compile(
    r"slurm-health: |srun: (?:error: \S+: tasks? |Terminating|Force Terminated|Job step|launch/)"
    r"|slurmstepd\S*: error: \*\*\*|\[?[IWEF]\d{4}[ :]|\S+ FAILED$|Failures:$|Root Cause |\[\d+\]:$"
    r"|Exception raised from \S+ at |frame #\d+: |Last error:$"
    r"|[=*-]{5,}|Fatal Python error: Segm|\S+Warning: |\S+:\d+: \w*Warning: |Exception ignored in"
)
_COMPLAINT = re.compile(
    r"\berror\b|\w*Error: |\bfatal\b|fail(?:ed|ure)\b|invalid|can(?:no|')t\b|could not|unable to"
    r"|not found|no such|unrecogni[sz]ed|unknown|unexpected|missing|required|permission denied"
    r"|not allowed|not supported|unsupported|\bmust\b|No module named|refus|abort",
    re.I,
)
_STEPD = re.compile(r"^slurmstepd-[\w.-]+: ")


def kind_of(error: str) -> str:
    """Return the name of an exception without its module or namespace: `KeyError`."""
    name = _END_OF_NAME.split(error, maxsplit=1)[0]
    return name.rpartition(".")[2].rpartition("::")[2].strip()


def alike(error: str) -> str:
    """Return an exception without what differs from rank to rank: figures and addresses."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", error)


def is_consequence(error: str) -> bool:
    """Tell whether an exception only says that another rank, or the way to it, has failed."""
    return bool(_OF_A_PEER.search(error)) and not _OF_ITSELF.search(error)


class LastWords(msgspec.Struct, frozen=True, kw_only=True):
    """A line that processes wrote before their end.

    Args:
        text: the line.
        at: its place in the output, where it stands first.
        times: how often it was written.
        last: for how many processes it was the last complaint, as far as they can be told apart.
        ranks: those that wrote it, as far as their lines name them.
        first: it was the first complaint of a process.
        complains: it reads like an error; else it is only the last line of a process.
    """

    text: str
    at: int
    times: int = 1
    last: int = 0
    ranks: tuple[int, ...] = ()
    first: bool = False
    complains: bool = True


@dataclass
class _Group:
    text: str
    at: int
    times: int = 0
    last: int = 0
    first: bool = False
    complains: bool = True


class WordsRead:
    """Takes in the lines of an output that belong to no traceback, each stream's apart."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], deque[tuple[int, str]]] = {}
        self._ranks: dict[tuple[str, str], int] = {}

    def line(self, at: int, stream: tuple[str, str], rank: int | None, text: str) -> None:
        """Take in a line.

        Args:
            at: its place in the output.
            stream: the file, empty for the job's own, and the prefix of the line.
            rank: whose it is, None where nothing says it.
            text: the line without its prefix.
        """
        if not text or text[0].isspace() or _OF_OTHERS.match(text):
            return
        lines = self._streams.get(stream)
        if lines is None:
            if len(self._streams) >= _MOST_STREAMS:
                return
            lines = deque(maxlen=_LINES if any(stream) else _MIXED_LINES)
            self._streams[stream] = lines
        lines.append((at, text))
        if rank is not None:
            self._ranks[stream] = rank

    def words(self) -> tuple[LastWords, ...]:
        """Return what was written at the end, in the order in which it came."""
        groups: dict[str, _Group] = {}
        ranks: dict[str, set[int]] = {}
        for stream, lines in self._streams.items():
            for key in self._of_stream(stream, lines, groups):
                if stream in self._ranks:
                    ranks.setdefault(key, set()).add(self._ranks[stream])
        found = sorted(groups.items(), key=lambda each: each[1].at)
        lasting = [each for each in found if each[1].last or each[1].first]
        return tuple(
            LastWords(
                text=one_line(group.text)[:_CHARACTERS],
                at=group.at,
                times=group.times,
                last=group.last,
                ranks=tuple(sorted(ranks.get(key, ()))),
                first=group.first,
                complains=group.complains,
            )
            for key, group in lasting[-_MOST_WORDS:]
        )

    def _of_stream(
        self,
        stream: tuple[str, str],
        lines: Iterable[tuple[int, str]],
        groups: dict[str, _Group],
    ) -> Iterator[str]:
        every = list(lines)
        complaints = [each for each in every if _COMPLAINT.search(each[1])]
        # What others' failures brought about is quoted only where nothing else is to be had.
        complaints = [each for each in complaints if not is_consequence(each[1])] or complaints
        told = complaints or every[-1:]
        keys = [alike(_STEPD.sub("", text)) for _, text in told]
        for key, (at, text) in zip(keys, told, strict=True):
            group = groups.setdefault(
                key, _Group(text=_STEPD.sub("", text), at=at, complains=bool(complaints))
            )
            group.times += 1
            group.at = min(group.at, at)
        groups[keys[0]].first = True
        # In what many share, each that wrote it wrote it as its last.
        groups[keys[-1]].last += 1 if any(stream) else keys.count(keys[-1])
        return iter(dict.fromkeys(keys))
