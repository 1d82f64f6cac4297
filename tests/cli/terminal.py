# SPDX-License-Identifier: Apache-2.0
"""Commands on a terminal of their own."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from tests.support.command_line import COMMAND

DEADLINE_S = 60.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]|\x1b[=>78]")


class Terminal:
    """A process on a pseudoterminal, and all that it has drawn."""

    def __init__(self, process: subprocess.Popen[bytes], side: int) -> None:
        self.process, self._side, self.drawn = process, side, ""

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def type(self, keys: bytes) -> None:
        os.write(self._side, keys)

    def read_until(self, text: str) -> str:
        """Read on until the text is drawn, or, where there is no text, until the process ends."""
        until_s = time.monotonic() + DEADLINE_S
        while not (text and text in ESCAPES.sub("", self.drawn)):
            assert time.monotonic() < until_s, self.drawn
            try:
                read = os.read(self._side, 4096)
            except OSError:  # the other side is closed
                read = b""
            if not read:
                assert not text, self.drawn
                break
            self.drawn += read.decode(errors="replace")
        return ESCAPES.sub("", self.drawn)

    def read_to_the_end(self, code: int) -> str:
        """Read until the process has ended, with this code."""
        drawn = self.read_until("")
        assert self.process.wait(DEADLINE_S) == code, drawn
        assert "Traceback" not in drawn
        return drawn


@contextmanager
def terminal(
    *words: str, environ: Mapping[str, str] | None = None, columns: int = 100
) -> Iterator[Terminal]:
    """Run a command on a terminal of so many columns; it ends with the block."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, **(environ or {})},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(DEADLINE_S)
        os.close(ours)
