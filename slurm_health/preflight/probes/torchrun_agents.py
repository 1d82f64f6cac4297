# SPDX-License-Identifier: Apache-2.0
"""Agents of nodes on which no srun starts them: each torchrun has one, and carries its lines.

What the first node's watch says to all agents, and what these answer, travels through torchrun's
own store, a key for each piece. Needs nothing but Python's standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

_KEY = "slurm-health/monitor"
# From one look at the store to the next: a watch waits some seconds for an answer.
_LOOK_S = 0.5
# Nodes that have just met have their names there at once; this is for busy ones.
_NAMES_S = 30.0
_STILL_THERE_S = 10.0
_LEAVE_S = 3.0
_STARTS, _HERE, _ENDS = b"start", b".", b"end"


class Carrier:
    """Runs this node's agent while the watch wants it; on the first node, also serves the watch.

    The watch writes `start` and a number, words for the agents, and `end`. Once all have been
    told to start it reads `started` and that number; what was said before is no answer to it.

    Args:
        store: torchrun's own, where nobody else has the same keys.
        rank: of this node among those that train, as the store has them.
        count: how many they are.
        command: that runs the agent of this node.
        environ: its environment.
    """

    def __init__(
        self, store: Any, rank: int, count: int, command: Sequence[str], environ: dict[str, str]
    ) -> None:
        self._store, self._rank, self._count = store, rank, count
        self._command, self._environ = command, environ
        self._process: subprocess.Popen[bytes] | None = None
        self._number = b""  # of the start that is heard
        self._heard = self._told = self._said = 0
        self._here_s = 0.0
        self._read = [0] * count
        self._torn = b""
        self._from_watch = self._to_watch = -1
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def names(self, own: str) -> list[str]:
        """Tell the others this node's name; return those of all, in the order of their ranks.

        Raises:
            RuntimeError: not all have told theirs.
        """
        self._store.set(f"{_KEY}/name/{self._rank}", own)
        keys = [f"{_KEY}/name/{rank}" for rank in range(self._count)]
        give_up_s = time.monotonic() + _NAMES_S
        while not self._store.check(keys):
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"not all nodes have given their names within {_NAMES_S:g} s")
            time.sleep(_LOOK_S / 5)
        return [self._store.get(key).decode() for key in keys]

    def begin(self) -> None:
        """Carry, until `end`."""
        self._thread.start()

    def serve(self) -> tuple[int, int]:
        """Return where the watch reads what agents say, and where it writes, before `begin`."""
        reading, self._to_watch = os.pipe()
        self._from_watch, writing = os.pipe()
        os.set_blocking(self._from_watch, False)
        return reading, writing

    def end(self) -> None:
        """End the agent, and carry nothing any more."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(_LEAVE_S)

    def _carry(self) -> None:
        # The store ends with the training; then there is nothing to be watched.
        with contextlib.suppress(OSError, RuntimeError):
            while not self._end.wait(_LOOK_S):
                self._hear_watch()
                self._obey()
                self._say()
                self._hear_nodes()
        self._leave()
        for pipe in (self._from_watch, self._to_watch):
            if pipe >= 0:
                os.close(pipe)

    def _hear_watch(self) -> None:
        """Pass on what the watch says, on its node."""
        if self._from_watch < 0 or not select.select([self._from_watch], [], [], 0)[0]:
            return
        *words, self._torn = (self._torn + os.read(self._from_watch, 1 << 16)).split(b"\n")
        for word in words:
            # That it is there each node knows by itself: the store is.
            if word != _HERE:
                self._store.set(f"{_KEY}/word/{self._told}", word)
                self._told += 1

    def _obey(self) -> None:
        while self._store.check([f"{_KEY}/word/{self._heard}"]):
            word = bytes(self._store.get(f"{_KEY}/word/{self._heard}"))
            self._heard += 1
            if word.startswith(_STARTS):
                self._start(word.removeprefix(_STARTS).strip())
            elif word == _ENDS:
                self._leave()
            else:
                self._tell(word)

    def _start(self, number: bytes) -> None:
        self._leave()
        self._number, self._said, self._read = number, 0, [0] * self._count
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environ,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        if self._to_watch >= 0:
            os.write(self._to_watch, b"\nstarted %s\n" % number)

    def _tell(self, word: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            return
        self._here_s = time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), word + b"\n")

    def _say(self) -> None:
        """Say what this node's agent has said meanwhile."""
        if self._process is None or self._process.stdout is None:
            return
        if time.monotonic() - self._here_s >= _STILL_THERE_S:
            self._tell(_HERE)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._process.stdout.fileno(), 1 << 20):
                self._store.set(self._key_of(self._rank, self._said), data)
                self._said += 1

    def _hear_nodes(self) -> None:
        """Have the watch hear what the agents of all nodes say, on its node."""
        if self._to_watch < 0 or self._process is None:
            return
        for rank in range(self._count):
            while self._store.check([key := self._key_of(rank, self._read[rank])]):
                data = self._store.get(key)
                self._store.delete_key(key)
                self._read[rank] += 1
                while data:
                    data = data[os.write(self._to_watch, data) :]

    def _key_of(self, rank: int, place: int) -> str:
        return f"{_KEY}/said/{self._number.decode()}/{rank}/{place}"

    def _leave(self) -> None:
        """End the agent of this node, if it runs: its standard input does."""
        process, self._process = self._process, None
        if process is None or process.stdin is None or process.stdout is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        try:
            process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
