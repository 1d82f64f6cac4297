# SPDX-License-Identifier: Apache-2.0
"""PyTorch's Flight Recorder dumps, where ranks left them on a filesystem that this node sees."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.text import cut, one_line
from slurm_health.system.proc import own_memory_bytes
from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.collectives import (
    NO_PURPOSE,
    FlightRecord,
    Operation,
    Transfer,
    reached_of,
)
from slurm_health.training.framework import DataCollector, NothingCollected
from slurm_health.training.monitor.collector import EndedJob

Kept = Callable[[tuple[Operation, ...]], tuple[Operation, ...]]

# The prefixes of files, to which torch adds the rank: as it is told, else as it chooses.
_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_OF_CACHE = "torch/comm_lib_trace_rank_"
_OF_OLD = "/tmp/nccl_trace_rank_"  # noqa: S108 - files of other users are passed over
_MOST_RANKS = 8192
_READ_S = 6.0  # of the seconds that a collector has
_MOST_BYTES = 64 << 20
_MOST_TEXT = 8 * _MOST_RANKS  # of numbers, each with what is between them
_MOST_OPERATIONS = 8192  # of all ranks together: what a child answers has a limit
# A pickle of ten bytes may have its reader lay out gigabytes. What is in one takes up to 64 times
# its size: an empty dictionary is one byte there.
_LEAST_MEMORY_BYTES = 64 << 20
_MEMORY_PER_BYTE = 64
_TRANSFER = re.compile(r"(?:\w+:)?(?P<what>send|recv) \d{1,6}(?:->|<-)(?P<peer>\d{1,6})")
# The collectives whose input has the same size on all ranks.
_SAME_SIZES = {"all_reduce", "allreduce", "broadcast", "_all_gather_base", "_reduce_scatter_base"}
_BATCH = "coalesced"  # what ends a batch, as of batch_isend_irecv
_IN_PLACE = {"all_reduce", "allreduce", "broadcast"}  # whose output has the size of the input


class _Plain(pickle.Unpickler):
    """Reads what is made of plain values only: a dump is, and nothing else may run here."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"holds {module}.{name}, which no dump does")


class AnotherTraining(ValueError):
    """A dump has collectives of before this script began, as one at torch's own path may."""


class FlightDumps(DataCollector):
    """The latest collectives of every rank that left a dump since the script began."""

    kind = "flight-recorder"
    data = FlightRecords

    def __init__(self, job: EndedJob, reads: Callable[[Path], bool] = lambda _: True) -> None:
        self._job = job
        self._reads = reads  # whether to read a file that was found

    def files(self) -> dict[int, Path]:
        """Return the files of this job, by rank."""
        return {rank: path for rank, path in _files(self._job) if self._reads(path)}

    def collect_data(self) -> FlightRecords:
        """Read them.

        Raises:
            NothingCollected: there is no file, or none of them is a dump.
        """
        job = self._job
        files = self.files()
        if not files:
            raise NothingCollected("no dump was found (--flight-recorder=on has NCCL leave them)")
        most = max(2, _MOST_OPERATIONS // max(1, len(files)))
        since_s = job.ended_s - job.duration_s
        unclaimed = not any(job.environ.get(name) for name in _VARIABLES)
        until_s = time.monotonic() + _READ_S
        records: list[FlightRecord] = []
        told: set[tuple[str, tuple[int, ...]]] = set()
        problem = ""
        for rank, path in sorted(files.items()):
            unknown = FlightRecord(rank=rank, whole=False, unclaimed=unclaimed)
            if time.monotonic() > until_s:
                records.append(unknown)
                continue
            try:
                record = read_dump(path, rank, lambda found: found[-most:], since_s)
                record = msgspec.structs.replace(record, unclaimed=unclaimed)
                records.append(_once(record, told))
            except AnotherTraining as err:
                problem = f"{path}: {err}"
            except (OSError, ValueError, pickle.UnpicklingError) as err:
                problem = f"{path}: {err}"
                records.append(unknown)
        if not any(each.reached or each.whole for each in records):
            raise NothingCollected(problem)
        return FlightRecords(records=tuple(records))


def _once(record: FlightRecord, told: set[tuple[str, tuple[int, ...]]]) -> FlightRecord:
    """Leave out the members of groups that an earlier record has told: thousands have thousands."""
    new = {name: ranks for name, ranks in record.members.items() if (name, ranks) not in told}
    told |= set(new.items())
    return msgspec.structs.replace(record, members=new)


def _files(job: EndedJob) -> Iterator[tuple[int, Path]]:
    """Yield the dumps of each rank that this user wrote since the script began."""
    since_s = job.ended_s - job.duration_s
    for prefix in prefixes(job.environ):
        path = job.directory / prefix
        try:
            entries = list(os.scandir(path.parent))
        except OSError:
            continue
        named = _names(path.name, job.node)
        for entry in entries:
            match = named.fullmatch(entry.name)
            if match is None:
                continue
            found = entry.stat(follow_symlinks=False)
            ours = found.st_uid == os.geteuid() and entry.is_file(follow_symlinks=False)
            if ours and found.st_mtime >= since_s and int(match["rank"]) < _MOST_RANKS:
                yield int(match["rank"]), Path(entry.path)


def _names(prefix: str, node: str) -> re.Pattern[str]:
    """Return how dumps are called: where a prefix names this node, others' name theirs."""
    pattern = re.escape(prefix)
    host = socket.gethostname()
    for name in sorted({node, host, host.partition(".")[0]} - {""}, key=len, reverse=True):
        whole = rf"(?<![A-Za-z0-9]){re.escape(re.escape(name))}(?![A-Za-z0-9])"
        pattern = re.sub(whole, lambda _: r"[\w.-]{1,255}?", pattern)
    return re.compile(pattern + r"(?P<rank>\d{1,5})")


def prefixes(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths to which torch adds the rank: as it is told, else as it chooses."""
    told = [environ[name] for name in _VARIABLES if environ.get(name)]
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    yield from dict.fromkeys(told or [f"{cache}/{_OF_CACHE}", _OF_OLD])


def read_dump(path: Path, rank: int, kept: Kept, since_s: float = 0.0) -> FlightRecord:
    """Return what a dump in a file says of a rank; `kept` chooses what is told one by one.

    Raises:
        AnotherTraining: it is of one that began before `since_s`.
        OSError: it cannot be read.
        ValueError: it is none.
        pickle.UnpicklingError: it holds what no dump does.
    """
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES)
    try:
        with _memory_within(_LEAST_MEMORY_BYTES + _MEMORY_PER_BYTE * len(data)):
            plain = data[:1] == b"{"
            dump = from_json(data, dict[str, Any]) if plain else _Plain(io.BytesIO(data)).load()
            began_s = _began_s(dump)
            record = record_of(dump, rank, kept)
    except (pickle.UnpicklingError, OSError):
        raise
    except Exception as err:  # a damaged pickle raises anything
        raise ValueError(f"is no dump of the Flight Recorder: {err!r}") from err
    if began_s < since_s:
        raise AnotherTraining("is of a training that began before this one")
    return record


def _began_s(dump: Mapping[str, Any]) -> float:
    """Return when the first of the collectives that a dump still has was called."""
    created_ns = [each["time_created_ns"] for each in dump["entries"] if "time_created_ns" in each]
    return min(created_ns, default=math.inf) / 1e9


@contextlib.contextmanager
def _memory_within(more_bytes: int) -> Iterator[None]:
    """While active, this process can have so much more memory; more is a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    limit = min([own_memory_bytes() + more_bytes, *limits])
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def record_of(
    dump: Mapping[str, Any],
    rank: int,
    kept: Kept,
) -> FlightRecord:
    """Return what a dump says of a rank; `kept` chooses the collectives that are told one by one.

    Raises what there is to raise where it is none.
    """
    entries = _with_states_of_batches(_of_last_life(dump["entries"]))
    found = tuple(_operation(each) for each in entries if not each.get("is_p2p"))
    members = _members(dump)
    transfers, exchanged = _transfers(entries, members)
    return FlightRecord(
        rank=rank,
        operations=kept(found),
        members=members,
        reached=reached_of(found),
        transfers=transfers,
        exchanged=exchanged,
        whole=_is_whole(dump["entries"]),
    )


def _members(dump: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each process group, as `pg_config` has them: a list, or its text."""
    members = {}
    for name, group in dict(dump.get("pg_config") or {}).items():
        ranks = re.findall(r"\d{1,6}", str(group.get("ranks", ""))[:_MOST_TEXT])
        members[_group((name, group.get("desc", "")))] = tuple(map(int, ranks[:_MOST_RANKS]))
    return members


def _group(name: object) -> str:
    """Return a process group's name with what it is for, where the script has said that."""
    number, purpose = (*name, "")[:2] if isinstance(name, list | tuple) else (name, "")
    purpose = "" if purpose in NO_PURPOSE else str(purpose).partition(",")[0].replace(" (", " ")
    return _short(f"{number} {purpose}".strip())


def _of_last_life(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out a group's entries from before its numbers began anew.

    As where a process destroys its groups and makes them again, with the same names.
    """
    last: dict[tuple[str, str], int] = {}
    began: dict[tuple[str, str], int] = {}
    groups = []
    for index, entry in enumerate(entries):
        library = str(entry["profiling_name"]).rpartition(":")[0]
        group = _group(entry["process_group"]), library
        groups.append(group)
        if entry.get("is_p2p"):
            continue
        number = int(entry["collective_seq_id"])
        if number < last.get(group, number):
            began[group] = index
        last[group] = number
    return [each for index, each in enumerate(entries) if index >= began.get(groups[index], 0)]


def _with_states_of_batches(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries, those of a batch with the state of the entry that ends it.

    Torch has no event for each of them: they stay `scheduled` for good, and only the last entry of
    their batch, with the same numbers, goes on. Without that one, nothing is known of them.
    """
    found = [dict(each) for each in entries]
    batches: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for each in found:
        library, _, what = str(each["profiling_name"]).rpartition(":")
        numbers = each.get("collective_seq_id"), each.get("p2p_seq_id")
        key = (_group(each["process_group"]), library, *numbers)
        if what == _BATCH:
            batch = batches.pop(key, [])
            for of_batch in batch:
                of_batch |= {"state": each.get("state"), "retired": each.get("retired")}
            # Not all versions say so of this one.
            each["is_p2p"] = each.get("is_p2p") or any(one.get("is_p2p") for one in batch)
        elif each.get("state") == "scheduled" and not each.get("retired"):
            batches.setdefault(key, []).append(each)
    for batch in batches.values():
        if len(batch) > 1 and all(each.get("is_p2p") for each in batch):  # one may be by itself
            for each in batch:
                each["state"] = None
    return found


def _transfers(
    entries: Sequence[Mapping[str, Any]], members: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Return sends and receives that are not over, and such that are.

    Peers are numbered within their group.
    """
    begun: dict[tuple[int, bool], bool] = {}
    over = set()
    for entry in entries:
        found = entry.get("is_p2p") and _TRANSFER.fullmatch(str(entry["profiling_name"]))
        ranks = members.get(_group(entry["process_group"]), ())
        if not found or int(found["peer"]) >= len(ranks):
            continue
        transfer = ranks[int(found["peer"])], found["what"] == "send"
        if entry.get("retired") or entry.get("state") == "completed":
            over.add(transfer)
        else:
            begun[transfer] = begun.get(transfer, False) or entry.get("state") is not None
    return (
        tuple(Transfer(peer=peer, sends=s, certain=c) for (peer, s), c in sorted(begun.items())),
        tuple(Transfer(peer=peer, sends=sends) for peer, sends in sorted(over)),
    )


def _is_whole(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether no entry was overwritten: those left of a full buffer follow on each other."""
    recorders: dict[str, list[int]] = {}  # each library's has a buffer and numbers of its own
    for each in entries:
        if isinstance(number := each.get("record_id"), int):
            library = str(each["profiling_name"]).rpartition(":")[0]
            recorders.setdefault(library, []).append(number)
    return all(
        numbers[0] == 0 or numbers[-1] - numbers[0] + 1 != len(numbers)
        for numbers in recorders.values()
    )


def latest(found: Sequence[Operation], most: int) -> tuple[Operation, ...]:
    """Return the latest operations of each group."""
    by_group: dict[str, list[Operation]] = {}
    for each in found:
        by_group.setdefault(each.group, []).append(each)
    return tuple(each for group in by_group.values() for each in group[-most:])


def _operation(entry: Mapping[str, Any]) -> Operation:
    library, _, what = str(entry["profiling_name"]).rpartition(":")
    name = _group(entry["process_group"])
    return Operation(
        # Libraries number the collectives of one group each by themselves.
        group=_short(f"{name} ({library})" if library else name),
        sequence=int(entry["collective_seq_id"]),
        what=_short(what),
        sizes=_tensors(entry, what) if what in _SAME_SIZES else "",
        # gloo marks what is over by `retired` only.
        state="retired" if entry.get("retired") else _short(entry.get("state", "")),
    )


def _tensors(entry: Mapping[str, Any], what: str) -> str:
    """Return the sizes and kinds of numbers of what went in, and out where that is not the same."""
    sizes = entry.get("input_sizes", "")
    kinds, made = (_kinds(entry.get(key)) for key in ("input_dtypes", "output_dtypes"))
    told = f"{sizes} {kinds}"
    if what in _IN_PLACE and entry.get("output_sizes", sizes) != sizes:
        told += f" to {entry['output_sizes']}"
    if made and made != kinds:
        told += f" as {made}"
    return _short(told).strip()


def _kinds(told: object) -> str:
    return ", ".join(map(str, told)) if isinstance(told, list | tuple) else str(told or "")


def _short(value: object) -> str:
    return cut(one_line(str(value)), 80)
