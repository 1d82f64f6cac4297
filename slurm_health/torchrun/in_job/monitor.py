# SPDX-License-Identifier: Apache-2.0
"""The monitor beside the workers of a training, and outside Slurm the agent of each node.

Where no srun starts the agents of nodes, each node's torchrun runs its own. The words that the
monitor sends to all agents, and the lines that these answer, go through torchrun's own store, a key
for each piece.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

_KEY = "slurm-health/monitor"
_POLL_S = 0.5  # the monitor waits some seconds for an answer
_NAMES_S = 30.0  # nodes that have just met write their names at once; busy ones later
_HERE_S = 10.0
_LEAVE_S = 3.0
_START, _HERE, _END = b"start ", b".", b"end"  # words of the monitor
_HUNG = 75  # the exit status of a monitor that has found a hang


class Monitor:
    """What watches the training, on the node that has a command for it; it ends with this process.

    Args:
        command: runs it, empty on other nodes.
        agent_command: runs the agent of this node, empty where srun starts the agents.
        node: the name of this node.
        environ: the environment of both.
        output: descriptor for what the monitor prints.
    """

    def __init__(
        self,
        command: Sequence[str],
        agent_command: Sequence[str],
        node: str,
        environ: dict[str, str],
        output: int,
    ) -> None:
        self.command = [*command]
        self._agent_command = agent_command
        self._node, self._environ, self._output = node, environ, output
        self._process: subprocess.Popen[bytes] | None = None
        self._finding: IO[bytes] | None = None
        self._carrier: Carrier | None = None

    def begin(self, store: Any, rank: int, count: int) -> None:
        """Start the monitor, and what carries between it and the agents of all nodes.

        Args:
            store: torchrun's own, in which no one else has the same keys.
            rank: of this node among those that train, as the store has them.
            count: how many they are.

        Raises:
            OSError, RuntimeError: it cannot start, the store does not answer, or not all nodes are
                there.
        """
        if not self._agent_command:
            self._start([], ())
            return
        carrier = Carrier(store, rank, count, self._agent_command, self._environ)
        names = carrier.names(self._node)
        if self.command:
            reading, writing = ends = carrier.open_ends()
            try:
                words = [f"--node={self._node}", f"--nodes={','.join(names)}"]
                self._start([*words, f"--reading={reading}", f"--writing={writing}"], ends)
            finally:
                for end in ends:
                    os.close(end)
        carrier.begin()
        self._carrier = carrier

    def _start(self, options: Sequence[str], files: Sequence[int]) -> None:
        if not self.command:
            return
        self._finding = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this process
        self._process = subprocess.Popen(
            [*self.command, *options],
            pass_fds=files,
            stdin=subprocess.PIPE,
            stdout=self._finding,
            stderr=self._output,
            env=self._environ,
            start_new_session=True,
        )

    def hang(self) -> Any:
        """Return the hang for which the workers are to be ended, None without one."""
        if self._finding is None or self._process is None or self._process.poll() != _HUNG:
            return None
        self._finding.seek(0)
        try:
            return json.loads(self._finding.read())
        except ValueError:  # what ended so is no monitor of ours
            return None

    def end(self) -> None:
        """End the monitor and the agent: they leave when their standard input ends."""
        process, self._process = self._process, None
        carrier, self._carrier = self._carrier, None
        if process is not None:
            _end(process)
        if carrier is not None:
            carrier.end()


class Carrier:
    """Runs this node's agent while the monitor wants it; on the monitor's node also serves that.

    The monitor writes `start` with a number, words for the agents, and `end`. Once it reads
    `started` with that number, what follows was sent after the start.

    Args:
        store, rank, count: as for `Monitor.begin`.
        command: runs the agent of this node.
        environ: its environment.
    """

    def __init__(
        self, store: Any, rank: int, count: int, command: Sequence[str], environ: dict[str, str]
    ) -> None:
        self._store, self._rank, self._count = store, rank, count
        self._command, self._environ = command, environ
        self._agent: subprocess.Popen[bytes] | None = None
        self._start_number = ""
        self._words_read = self._words_written = self._lines_written = 0
        self._lines_read = [0] * count
        self._here_s = 0.0
        self._torn = b""
        self._from_monitor = self._to_monitor = -1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def names(self, own: str) -> list[str]:
        """Publish this node's name; return those of all nodes in the order of their ranks.

        Raises:
            RuntimeError: a node has not published its name in time.
        """
        self._store.set(f"{_KEY}/name/{self._rank}", own)
        keys = [f"{_KEY}/name/{rank}" for rank in range(self._count)]
        give_up_s = time.monotonic() + _NAMES_S
        while not self._store.check(keys):
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"not all nodes have given their names within {_NAMES_S:g} s")
            time.sleep(_POLL_S / 5)
        return [self._store.get(key).decode() for key in keys]

    def open_ends(self) -> tuple[int, int]:
        """Return where the monitor reads what agents send, and where it writes; before `begin`."""
        reading, self._to_monitor = os.pipe()
        self._from_monitor, writing = os.pipe()
        return reading, writing

    def begin(self) -> None:
        """Carry, until `end`."""
        self._thread.start()

    def end(self) -> None:
        """End the agent and carry nothing more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_LEAVE_S)

    def _carry(self) -> None:
        # The store ends with the training, and then nothing is left to watch.
        with contextlib.suppress(OSError, RuntimeError):
            while not self._over.wait(_POLL_S):
                self._publish_words()
                while (word := self._taken(f"word/{self._words_read}")) is not None:
                    self._words_read += 1
                    self._obey(word)
                self._publish_lines()
                self._deliver_lines()
        self._end_agent()
        for pipe in (self._from_monitor, self._to_monitor):
            if pipe >= 0:
                os.close(pipe)

    def _taken(self, key: str) -> bytes | None:
        """Return the value of a key, None without one."""
        key = f"{_KEY}/{key}"
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def _publish_words(self) -> None:
        """Publish what the monitor has written, on its node."""
        if self._from_monitor < 0 or not select.select([self._from_monitor], [], [], 0)[0]:
            return
        *words, self._torn = (self._torn + os.read(self._from_monitor, 1 << 16)).split(b"\n")
        for word in words:
            if word != _HERE:  # each node sends it to its own agent, as long as the store answers
                self._store.set(f"{_KEY}/word/{self._words_written}", word)
                self._words_written += 1

    def _obey(self, word: bytes) -> None:
        if word.startswith(_START):
            self._end_agent()
            self._start_number = word.removeprefix(_START).strip().decode()
            self._lines_written, self._lines_read = 0, [0] * self._count
            self._agent = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._environ,
                start_new_session=True,
            )
            assert self._agent.stdout is not None
            os.set_blocking(self._agent.stdout.fileno(), False)
            if self._to_monitor >= 0:
                os.write(self._to_monitor, f"\nstarted {self._start_number}\n".encode())
        elif word == _END:
            self._end_agent()
        else:
            self._tell(word)

    def _tell(self, word: bytes) -> None:
        """Write a word to this node's agent."""
        self._here_s = time.monotonic()
        if self._agent is not None and self._agent.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._agent.stdin.fileno(), word + b"\n")

    def _publish_lines(self) -> None:
        """Publish what this node's agent has written meanwhile."""
        if self._agent is None or self._agent.stdout is None:
            return
        if time.monotonic() - self._here_s >= _HERE_S:
            self._tell(_HERE)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._agent.stdout.fileno(), 1 << 20):
                key = self._key_of_line(self._rank, self._lines_written)
                self._store.set(f"{_KEY}/{key}", data)
                self._lines_written += 1

    def _deliver_lines(self) -> None:
        """Write to the monitor what the agents of all nodes have published, on its node."""
        if self._to_monitor < 0 or self._agent is None:
            return
        for rank in range(self._count):
            key = self._key_of_line(rank, self._lines_read[rank])
            while (data := self._taken(key)) is not None:
                self._store.delete_key(f"{_KEY}/{key}")
                self._lines_read[rank] += 1
                key = self._key_of_line(rank, self._lines_read[rank])
                while data:
                    data = data[os.write(self._to_monitor, data) :]

    def _key_of_line(self, rank: int, place: int) -> str:
        return f"line/{self._start_number}/{rank}/{place}"

    def _end_agent(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            _end(agent)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process by the end of its standard input, or else by force."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
