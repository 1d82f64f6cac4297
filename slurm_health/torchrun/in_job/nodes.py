# SPDX-License-Identifier: Apache-2.0
"""The last output of this node's workers, and what the nodes of a training tell one another.

They exchange it in torchrun's own store, before they meet again.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from typing import Any

# A node that has not noticed a failure for so long is gone: torchrun polls every 0.1 s by default,
# and gives up a node that is silent for 15 s.
NOTICE_S = 15.0
STOP_S = 60.0  # torchrun gives workers 30 s to end, then kills them
DECIDE_S = 120.0  # as long as the leader waits for reports, and for two of its commands
_HEAR_S = 5.0
_POLL_S = 0.2
_WATCH_S = 1.0
_TAIL_BYTES = 64 * 1024
# A pipe passes on a write of this length in one piece, after all that was written before.
_MARK = b"\0slurm-health\0"
_MARK_S = 1.0
_END_S = 1.0  # a reader that takes nothing for so long at the end is not waited for
_PIECE_BYTES = 4096
_KEY = "slurm-health"


class Tail:
    """Keeps the last of what this process and its workers write to standard error; passes it on."""

    def __init__(self) -> None:
        self.real = os.dup(2)  # standard error itself
        reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        self._kept = b""
        self._written_bytes = 0
        self._lock = threading.Lock()
        self._mark_read = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, args=(reading,), daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return what was written since `clear`, as far as it is kept."""
        sys.stderr.flush()
        self._mark_read.clear()
        os.write(2, _MARK)
        self._mark_read.wait(_MARK_S)
        with self._lock:
            return self._kept.decode(errors="replace")

    def clear(self) -> None:
        """Drop what was written."""
        with self._lock:
            self._kept = b""

    def end(self) -> None:
        """Write to standard error itself again, once all that was written has arrived there.

        A process that a worker has left behind loses its standard error when this process ends.
        """
        sys.stderr.flush()
        os.dup2(self.real, 2)
        before_bytes = -1
        while self._thread.is_alive() and self._written_bytes > before_bytes:
            before_bytes = self._written_bytes
            self._thread.join(_END_S)

    def _pass_on(self, reading: int) -> None:
        with contextlib.suppress(OSError):  # the reader of standard error is gone
            while data := os.read(reading, 1 << 16):
                marked = _MARK in data
                data = data.replace(_MARK, b"")
                with self._lock:
                    self._kept = (self._kept + data)[-_TAIL_BYTES:]
                if marked:
                    self._mark_read.set()
                self._write(data)
        # A writer then gets an error instead of waiting for a reader.
        with contextlib.suppress(OSError):
            os.close(reading)

    def _write(self, data: bytes) -> None:
        """Write all of it, except what a full disk does not take.

        Raises:
            BrokenPipeError: the reader of standard error is gone.
        """
        while data:
            try:
                written = os.write(self.real, data[:_PIECE_BYTES])
            except BlockingIOError:  # a process that shares it has made it so
                select.select([], [self.real], [])
                continue
            except BrokenPipeError:
                raise
            except OSError:
                return
            self._written_bytes += written
            data = data[written:]


class TrainingNodes:
    """The nodes that train together, until they meet again.

    Args:
        store: torchrun's own, in which no one else has the same keys.
        rank: of this node among them.
        count: how many they are.
    """

    def __init__(self, store: Any, rank: int, count: int) -> None:
        self._store, self._rank, self._count = store, rank, count
        self._polled_s = 0.0
        self._noticed = False

    def has_failed(self) -> bool:
        """Tell whether workers of another node have failed, and publish that this node knows.

        Asks the store at most once a second; False while it does not answer.
        """
        now_s = time.monotonic()
        if not self._noticed and now_s - self._polled_s >= _WATCH_S:
            self._polled_s = now_s
            with contextlib.suppress(OSError, RuntimeError):
                self._noticed = self._has("failed")
                if self._noticed:
                    self._store.set(f"{_KEY}/noticed/{self._rank}", "")
        return self._noticed

    def report(self, end: dict[str, Any]) -> None:
        """Publish that the workers here have ended, and how; reports keep their order."""
        self._store.set(f"{_KEY}/failed", str(self._rank))
        order = self._store.add(f"{_KEY}/reports", 1)
        self._store.set(f"{_KEY}/report/{self._rank}", json.dumps({**end, "order": order}))

    def reports(self) -> tuple[list[dict[str, Any]], int]:
        """Return the reports of the nodes that are still there, and how many nodes lack."""
        begun_s = time.monotonic()
        missing = set(range(self._count))
        reports: list[dict[str, Any]] = []
        while missing:
            for rank in sorted(missing):
                if self._has(f"report/{rank}"):
                    reports.append(json.loads(self._store.get(f"{_KEY}/report/{rank}")))
                    missing.discard(rank)
            waited_s = time.monotonic() - begun_s
            late = {r for r in missing if waited_s > STOP_S or not self._has(f"noticed/{r}")}
            if waited_s > NOTICE_S and late == missing:
                break
            if missing:
                time.sleep(_POLL_S)
        return sorted(reports, key=lambda report: int(report["order"])), len(missing)

    def decide(self, decision: dict[str, Any], readers: int) -> None:
        """Publish what all are to do; wait for the readers, since the store may end with us."""
        self._store.set(f"{_KEY}/decision", json.dumps(decision))
        give_up_s = time.monotonic() + _HEAR_S
        while self._store.add(f"{_KEY}/read", 0) < readers and time.monotonic() < give_up_s:
            time.sleep(_POLL_S)

    def decision(self) -> dict[str, Any]:
        """Wait for what all are to do.

        Raises:
            RuntimeError: nothing was decided in time.
        """
        give_up_s = time.monotonic() + DECIDE_S
        # The store's own `wait` would keep torchrun's heartbeat of this node from the store.
        while not self._has("decision"):
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"nothing was decided within {DECIDE_S:g} s")
            time.sleep(_POLL_S)
        decision: dict[str, Any] = json.loads(self._store.get(f"{_KEY}/decision"))
        self._store.add(f"{_KEY}/read", 1)
        return decision

    def _has(self, key: str) -> bool:
        return bool(self._store.check([f"{_KEY}/{key}"]))
