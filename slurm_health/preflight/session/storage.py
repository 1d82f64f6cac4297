# SPDX-License-Identifier: Apache-2.0
"""Whose fault it is that storage is slow or fails: a node's, the server's or the user's. Pure.

All nodes test the same paths at the same time. A node writes files of its own, and reads those of
its peers, its two neighbours in a ring. What a peer has written well, and a third node has read
well, is well on the server: a node that cannot read it has a bad client, or a bad way to the
server. There is no other proof against a node, because the server may hold each file elsewhere: one
of its disks that fails looks like a random part of the nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from statistics import median

from msgspec.structs import replace

from slurm_health.records.nodeset import fold
from slurm_health.records.probe_catalog import (
    FULL,
    HUNG,
    LATE,
    OK,
    REFUSED,
    STORAGE_LIMIT_S,
    STORAGE_STAGGER_S,
    UNSEEN,
)
from slurm_health.records.records import StorageRead, StorageTested
from slurm_health.records.text import counted
from slurm_health.records.verdict import Level, NodeVerdict, StorageBlame, StorageVerdict

_ORDERS_S = 2.0
ABSENT = frozenset({"ENOENT", "ENOTDIR"})
_WORDS = {
    "ENOSPC": "has no space left (ENOSPC)",
    "EDQUOT": "is over its quota (EDQUOT)",
    HUNG: f"did not answer within {STORAGE_LIMIT_S:g} s",
    UNSEEN: "does not show what its peers write",
    "EROFS": "is read-only",
    "ESTALE": "has a stale handle (ESTALE)",
    "ENOTCONN": "has lost its server (ENOTCONN)",
    "ENOENT": "is not there (ENOENT)",
    "EACCES": "may not be written by this user (EACCES)",
}
# Slower than its peers by this factor and by this much: less costs a job nothing, and happens.
_SLOW_FACTOR, _SLOW_MS = 3.0, 500.0
# More than one in so many bad nodes at once is no fault of clients.
_RARE = 4
_NOT_READ = StorageRead(status=LATE)
_LEAST_NODES = 3  # the one in doubt, and two that are well: one alone proves nothing


def at_most_s(nodes: int) -> float:
    """Return how long the test of so many nodes takes at most, with its orders and its answers."""
    return STORAGE_LIMIT_S + nodes * STORAGE_STAGGER_S + _ORDERS_S


def judge(tests: Iterable[StorageTested]) -> Iterator[NodeVerdict | StorageVerdict]:
    """Yield verdicts on nodes whose client is at fault, and on storage that is not well."""
    by_path: dict[str, dict[str, StorageTested]] = {}
    for test in tests:
        by_path.setdefault(test.path, {})[test.node] = test
    for of_path in by_path.values():
        yield from _Path(of_path).verdicts()


class _Path:
    """All nodes' tests of one path."""

    def __init__(self, tests: Mapping[str, StorageTested]) -> None:
        self._all = tests
        self._tests = {node: test for node, test in tests.items() if test.status not in FULL}
        well = [test for test in tests.values() if test.status == OK]
        reads = [read.ms for test in well for read in test.reads.values()]
        self._small_ms = median([test.small_ms for test in well] or [0.0])
        self._large_ms = median([test.large_ms for test in well if test.server] or [0.0])
        self._read_ms = median([ms for ms in reads if ms] or [0.0])
        self._usual_ms = self._small_ms + self._large_ms + self._read_ms
        # Then a test may fail to end in time by chance, on any node.
        self._all_are_slow = self._usual_ms * _SLOW_FACTOR > STORAGE_LIMIT_S * 1e3
        # The mount that most have; without a server it is a directory of each node's own.
        servers = [(test.server, test.filesystem) for test in tests.values()]
        self._server, filesystem = max(servers, key=servers.count)
        self._path = next(iter(tests.values())).path
        mount = f" ({filesystem}, {self._server})" if self._server else ""
        self._where = f"storage {self._path}{mount}"

    def verdicts(self) -> Iterator[NodeVerdict | StorageVerdict]:
        """Yield what is to be said of it, nothing where all is well."""
        if full := [test for test in self._all.values() if test.status in FULL]:
            free = f"{full[0].free_bytes / 1e9:.2f} of {full[0].total_bytes / 1e9:.2f} GB free"
            what = _words(full[0].status) + (f", {free}" if full[0].total_bytes else "")
            yield self._verdict(StorageBlame.USER, [test.node for test in full], what)
        statuses = {test.status for test in self._tests.values()}
        if statuses <= REFUSED | ABSENT:  # what this user may not write is not tested
            if absent := statuses - REFUSED:
                what = f"{_words(min(absent))}, and was not tested"
                yield self._verdict(StorageBlame.USER, self._tests, what)
            return
        troubles = [self._trouble(test) for test in self._tests.values()]
        for level in (Level.FAULTY, Level.SLOW):
            alike = {bad.node: bad for bad in troubles if bad.level is level}
            rare = len(alike) <= max(1, len(self._tests) // _RARE)
            proven = all(self._is_own(self._tests[node], alike) for node in alike)
            if rare and proven and len(self._tests) >= _LEAST_NODES:
                well = _names([name for name in self._tests if name not in alike])
                for bad in alike.values():
                    reason = f"{self._where} {bad.reason}, and is well on {well}"
                    yield replace(bad, reason=reason, evidence=(reason,))
            elif alike and (level is Level.FAULTY or not rare):  # a few that are slow are chance
                few = len(self._tests) == 1 or len(alike) < len(self._tests) < _LEAST_NODES
                refused = any(self._tests[node].status in REFUSED for node in alike)
                blame = StorageBlame.UNDECIDED if few or refused else StorageBlame.SERVER
                words = [bad.reason for bad in alike.values()]
                yield self._verdict(blame, alike, max(words, key=words.count), level)
                return
        if self._server and self._all_are_slow:
            what = f"takes {self._usual_ms:.0f} ms to write and read 8 MB"
            yield self._verdict(StorageBlame.SERVER, self._tests, what, Level.SLOW)

    def _trouble(self, test: StorageTested) -> NodeVerdict:
        """Return how a node is by itself; whether that is its own fault is another matter."""
        level, reason, slowdown = Level.FAULTY, "", 1.0
        reads = {read.status for read in test.reads.values()} - {LATE}
        times = (test.small_ms, self._small_ms), (test.large_ms, self._large_ms)
        slow = [(ms, usual_ms) for ms, usual_ms in times if _is_slow(ms, usual_ms)]
        if self._is_unmounted(test):
            reason = f"is not mounted ({test.filesystem} is there)"
        elif test.status != OK:
            reason = _words(test.status) + (f" at {test.at}" if test.status == HUNG else "")
        elif reads and OK not in reads:
            reason = _words(min(reads))
        elif slow:
            ms, usual_ms = slow[0]
            level, slowdown = Level.SLOW, ms / max(usual_ms, 1.0)
            reason = f"takes {ms:.0f} ms to write a file, its peers {usual_ms:.0f} ms"
        else:
            level = Level.HEALTHY
        return NodeVerdict(
            node=test.node, level=level, component="storage", slowdown=slowdown, reason=reason
        )

    def _is_unmounted(self, test: StorageTested) -> bool:
        return bool(self._server and not test.server and test.status != HUNG)

    def _is_own(self, test: StorageTested, bad: Collection[str]) -> bool:
        """Tell whether the trouble of a node is proven to be its own."""
        if test.status in REFUSED and not self._is_unmounted(test):
            return False
        if not self._server or test.status == "EROFS" or self._is_unmounted(test):
            return len(self._tests) - len(bad) >= _LEAST_NODES - 1
        # Files that are well on the server: a third node has read them.
        witnesses = [
            read
            for peer, read in test.reads.items()
            if peer not in bad
            and any(
                other.node != test.node and other.reads.get(peer, _NOT_READ).status == OK
                for other in self._tests.values()
            )
        ]
        if self._all_are_slow and HUNG in {test.status, *(read.status for read in witnesses)}:
            return False
        if witnesses and not any(read.status in (OK, LATE) for read in witnesses):
            return True
        large = [read for read in witnesses if read.ms or read.status == HUNG]
        return bool(large) and all(
            read.status == HUNG or _is_slow(read.ms, self._read_ms) for read in large
        )

    def _verdict(
        self,
        blame: StorageBlame,
        nodes: Collection[str],
        what: str,
        level: Level = Level.INCONCLUSIVE,
    ) -> StorageVerdict:
        whose = {
            StorageBlame.SERVER: "the server or the way to it is at fault, no node",
            StorageBlame.USER: "a matter of the user's files, not of the nodes",
            StorageBlame.UNDECIDED: "client or server, undecided",
        }[blame]
        total = len(self._all)
        some = f"{len(nodes)} of {total} nodes ({_names(nodes)})"
        where = some if len(nodes) < total else f"all {total} nodes" if total > 1 else fold(nodes)
        reason = f"{self._where} {what} on {where}: {whose}"
        return StorageVerdict(
            path=self._path, blame=blame, level=level, nodes=tuple(nodes), reason=reason
        )


def _is_slow(ms: float, usual_ms: float) -> bool:
    return ms >= _SLOW_FACTOR * usual_ms and ms - usual_ms >= _SLOW_MS


def _words(status: str) -> str:
    return _WORDS.get(status, f"fails with {status}")


def _names(nodes: Collection[str]) -> str:
    folded = fold(nodes)
    return folded if len(folded) <= 60 else counted(len(nodes), "node")
