# SPDX-License-Identifier: Apache-2.0
"""PyTorch's Flight Recorder dumps, on filesystems of this node.

An entry is decoded once into an `_Entry`; damaged and hostile dumps are refused within a limit of
memory.
"""

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

# The prefixes of files, to which torch adds the rank: the job's, else torch's own.
_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_OF_CACHE = "torch/comm_lib_trace_rank_"
_OF_OLD = "/tmp/nccl_trace_rank_"  # noqa: S108 - files of other users are passed over
_MOST_RANKS = 8192
_READ_S = 6.0  # of the seconds that a collector has
_MOST_BYTES = 64 << 20
_MOST_TEXT = 8 * _MOST_RANKS  # of numbers, with what is between them
_MOST_OPERATIONS = 8192  # of all ranks together: what a child answers has a limit
# A pickle of ten bytes may make its reader allocate gigabytes. The content of an honest one takes
# up to 64 times its size: an empty dictionary is one byte there.
_LEAST_MEMORY_BYTES = 64 << 20
_MEMORY_PER_BYTE = 64
_TRANSFER = re.compile(r"(?P<what>send|recv) \d{1,6}(?:->|<-)(?P<peer>\d{1,6})")
# The collectives whose input has the same size on all ranks, and whose output has that size too.
_SAME_SIZES = {"all_reduce", "allreduce", "broadcast", "_all_gather_base", "_reduce_scatter_base"}
_IN_PLACE = {"all_reduce", "allreduce", "broadcast"}
_BATCH = "coalesced"  # what ends a batch, as of batch_isend_irecv


class _Plain(pickle.Unpickler):
    """Reads plain values only, as in a dump; no code may run here."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"holds {module}.{name}, which no dump does")


class StaleDump(ValueError):
    """A dump has collectives from before the script began, as one at torch's own path may."""


class FlightDumps(DataCollector):
    """The latest collectives of every rank that left a dump since the script began."""

    kind = "flight-recorder"
    data = FlightRecords

    def __init__(self, job: EndedJob, reads: Callable[[Path], bool] = lambda _: True) -> None:
        self._job = job
        self._reads = reads  # whether to read a file

    def files(self) -> dict[int, Path]:
        """Return the dumps of this job, by rank: files of this user since the script began.

        A prefix that names this node stands for those of others, which name theirs.
        """
        job, files = self._job, {}
        hosts = {job.node, socket.gethostname(), socket.gethostname().partition(".")[0]} - {""}
        for prefix in prefixes(job.environ):
            path = job.directory / prefix
            pattern = re.escape(path.name)
            for host in sorted(hosts, key=len, reverse=True):
                word = rf"(?<![A-Za-z0-9]){re.escape(re.escape(host))}(?![A-Za-z0-9])"
                pattern = re.sub(word, lambda _: r"[\w.-]{1,255}?", pattern)
            with contextlib.suppress(OSError):
                for entry in os.scandir(path.parent):
                    match = re.fullmatch(pattern + r"(?P<rank>\d{1,5})", entry.name)
                    if match is None or int(match["rank"]) >= _MOST_RANKS:
                        continue
                    status = entry.stat(follow_symlinks=False)
                    own = status.st_uid == os.geteuid() and entry.is_file(follow_symlinks=False)
                    if own and status.st_mtime >= job.ended_s - job.duration_s:
                        files[int(match["rank"])] = Path(entry.path)
        return {rank: path for rank, path in files.items() if self._reads(path)}

    def collect_data(self) -> FlightRecords:
        """Read them.

        Raises:
            NothingCollected: there is no file, or none of them is a dump.
        """
        job = self._job
        files = self.files()
        if not files:
            raise NothingCollected("there is no dump (--flight-recorder=on makes NCCL write them)")
        most = max(2, _MOST_OPERATIONS // len(files))
        unclaimed = not any(job.environ.get(name) for name in _VARIABLES)
        until_s = time.monotonic() + _READ_S
        records: list[FlightRecord] = []
        named: set[tuple[str, tuple[int, ...]]] = set()
        problem = ""
        for rank, path in sorted(files.items()):
            record = FlightRecord(rank=rank, whole=False)
            try:
                if time.monotonic() < until_s:
                    record = read_dump(
                        path, rank, lambda read: read[-most:], job.ended_s - job.duration_s
                    )
            except StaleDump as err:
                problem = f"{path}: {err}"
                continue
            except (OSError, ValueError, pickle.UnpicklingError) as err:
                problem = f"{path}: {err}"
            # Only one record has the members of a group: thousands of ranks have thousands.
            members = {name: of for name, of in record.members.items() if (name, of) not in named}
            named |= set(members.items())
            records.append(msgspec.structs.replace(record, members=members, unclaimed=unclaimed))
        if not any(record.reached or record.whole for record in records):
            raise NothingCollected(problem)
        return FlightRecords(records=tuple(records))


def prefixes(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths to which torch adds the rank: the job's, else torch's own."""
    own = [environ[name] for name in _VARIABLES if environ.get(name)]
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    yield from dict.fromkeys(own or [f"{cache}/{_OF_CACHE}", _OF_OLD])


def read_dump(path: Path, rank: int, kept: Kept, since_s: float = 0.0) -> FlightRecord:
    """Return the record of a rank in a dump; `kept` chooses the single collectives.

    Raises:
        StaleDump: its training began before `since_s`.
        OSError: it cannot be read.
        ValueError: it is no dump.
        pickle.UnpicklingError: it holds types that no dump has.
    """
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES)
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        most_bytes = own_memory_bytes() + _LEAST_MEMORY_BYTES + _MEMORY_PER_BYTE * len(data)
        resource.setrlimit(resource.RLIMIT_AS, (min([most_bytes, *limits]), hard))
        try:  # more memory is a MemoryError
            plain = data[:1] == b"{"
            dump = from_json(data, dict[str, Any]) if plain else _Plain(io.BytesIO(data)).load()
            created_ns = [entry.get("time_created_ns", math.inf) for entry in dump["entries"]]
            record = record_of(dump, rank, kept)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    except (pickle.UnpicklingError, OSError):
        raise
    except Exception as err:  # a damaged pickle raises anything
        raise ValueError(f"is no dump of the Flight Recorder: {err!r}") from err
    if min(created_ns, default=math.inf) / 1e9 < since_s:
        raise StaleDump("is of a training that began before this one")
    return record


class _Entry(msgspec.Struct):
    """One call, or the end of a batch of calls.

    `library` numbers the calls of a group by itself; `transfer` numbers sends and receives. `state`
    is None if unknown; `over`: the device has left it, which is all that gloo marks.
    """

    group: str
    library: str
    what: str
    number: int
    transfer: int
    p2p: bool
    state: str | None
    over: bool
    record: object
    sizes: str


def _entry(raw: Mapping[str, Any]) -> _Entry:
    library, _, what = str(raw["profiling_name"]).rpartition(":")
    sizes = ""
    if what in _SAME_SIZES:  # sizes and types of the input, and of an output that differs
        given = raw.get("input_sizes", "")
        types, made = (
            ", ".join(map(str, of)) if isinstance(of, list | tuple) else str(of or "")
            for of in (raw.get("input_dtypes"), raw.get("output_dtypes"))
        )
        sizes = f"{given} {types}"
        if what in _IN_PLACE and raw.get("output_sizes", given) != given:
            sizes += f" to {raw['output_sizes']}"
        if made and made != types:
            sizes += f" as {made}"
    p2p = bool(raw.get("is_p2p"))
    state = raw.get("state")
    return _Entry(
        group=_group(raw["process_group"]),
        library=library,
        what=_short(what),
        number=int(raw.get("collective_seq_id") or 0) if p2p else int(raw["collective_seq_id"]),
        transfer=int(raw.get("p2p_seq_id") or 0),
        p2p=p2p,
        state=None if state is None else _short(state),
        over=bool(raw.get("retired")),
        record=raw.get("record_id"),
        sizes=_short(sizes).strip(),
    )


def record_of(dump: Mapping[str, Any], rank: int, kept: Kept) -> FlightRecord:
    """Return the record of a rank in a dump; `kept` chooses the single collectives.

    Raises any exception if it is no dump.
    """
    recorded = [_entry(raw) for raw in dump["entries"]]
    # No entry was overwritten: the entries of a full buffer follow on each other.
    recorders: dict[str, list[int]] = {}  # a library has a buffer and numbers of its own
    for entry in recorded:
        if isinstance(entry.record, int):
            recorders.setdefault(entry.library, []).append(entry.record)
    whole = all(
        numbers[0] == 0 or numbers[-1] - numbers[0] + 1 != len(numbers)
        for numbers in recorders.values()
    )
    entries = _of_last_life(recorded)
    _take_states_of_batches(entries)
    operations = tuple(
        Operation(
            group=_short(f"{entry.group} ({entry.library})" if entry.library else entry.group),
            sequence=entry.number,
            what=entry.what,
            sizes=entry.sizes,
            state="retired" if entry.over else entry.state or "",
        )
        for entry in entries
        if not entry.p2p
    )
    members = {}
    for name, group in dict(dump.get("pg_config") or {}).items():  # ranks as a list, or its text
        ranks = re.findall(r"\d{1,6}", str(group.get("ranks", ""))[:_MOST_TEXT])
        members[_group((name, group.get("desc", "")))] = tuple(map(int, ranks[:_MOST_RANKS]))
    transfers, exchanged = _transfers(entries, members)
    return FlightRecord(
        rank=rank,
        operations=kept(operations),
        members=members,
        reached=reached_of(operations),
        transfers=transfers,
        exchanged=exchanged,
        whole=whole,
    )


def _group(name: object) -> str:
    """Return a process group's name with its purpose, if the script has given one."""
    number, purpose = (*name, "")[:2] if isinstance(name, list | tuple) else (name, "")
    purpose = "" if purpose in NO_PURPOSE else str(purpose).partition(",")[0].replace(" (", " ")
    return _short(f"{number} {purpose}".strip())


def _of_last_life(entries: Sequence[_Entry]) -> list[_Entry]:
    """Return entries without those from before their group's numbers began anew.

    A process may destroy its groups and make them again, with the same names.
    """
    last: dict[tuple[str, str], int] = {}
    began: dict[tuple[str, str], int] = {}
    for index, entry in enumerate(entries):
        group = entry.group, entry.library
        if not entry.p2p:
            if entry.number < last.get(group, entry.number):
                began[group] = index
            last[group] = entry.number
    return [
        entry
        for index, entry in enumerate(entries)
        if index >= began.get((entry.group, entry.library), 0)
    ]


def _take_states_of_batches(entries: Sequence[_Entry]) -> None:
    """Give the entries of a batch the state of the entry that ends it.

    Torch has no events for them: they stay `scheduled`, and only the last entry of their batch,
    with the same numbers, goes on. Without that one, their states are unknown.
    """
    batches: dict[tuple[object, ...], list[_Entry]] = {}
    for entry in entries:
        key = entry.group, entry.library, entry.number, entry.transfer
        if entry.what == _BATCH:
            batch = batches.pop(key, [])
            for call in batch:
                call.state, call.over = entry.state, entry.over
            # Some versions of torch do not mark this one.
            entry.p2p = entry.p2p or any(call.p2p for call in batch)
        elif entry.state == "scheduled" and not entry.over:
            batches.setdefault(key, []).append(entry)
    for batch in batches.values():
        if len(batch) > 1 and all(call.p2p for call in batch):  # one may be by itself
            for call in batch:
                call.state = None


def _transfers(
    entries: Sequence[_Entry], members: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Return sends and receives that are not over, and such that are.

    Peers are numbered within their group.
    """
    begun: dict[tuple[int, bool], bool] = {}
    over = set()
    for entry in entries:
        match = _TRANSFER.fullmatch(entry.what) if entry.p2p else None
        ranks = members.get(entry.group, ())
        if match is None or int(match["peer"]) >= len(ranks):
            continue
        transfer = ranks[int(match["peer"])], match["what"] == "send"
        if entry.over or entry.state == "completed":
            over.add(transfer)
        else:
            begun[transfer] = begun.get(transfer, False) or entry.state is not None
    return (
        tuple(Transfer(peer=peer, sends=s, certain=c) for (peer, s), c in sorted(begun.items())),
        tuple(Transfer(peer=peer, sends=sends) for peer, sends in sorted(over)),
    )


def latest(operations: Sequence[Operation], most: int) -> tuple[Operation, ...]:
    """Return the latest operations of every group."""
    by_group: dict[str, list[Operation]] = {}
    for operation in operations:
        by_group.setdefault(operation.group, []).append(operation)
    return tuple(operation for group in by_group.values() for operation in group[-most:])


def _short(value: object) -> str:
    return cut(one_line(str(value)), 80)
