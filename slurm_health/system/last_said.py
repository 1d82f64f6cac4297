# SPDX-License-Identifier: Apache-2.0
"""What a child says, or the last of it: a command of a site's may say more than there is memory."""

from __future__ import annotations

import os
import select
import selectors
import time
from typing import IO

import msgspec


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended, and what it said."""

    returncode: int
    stdout: bytes
    stderr: bytes


def exchange(
    into: IO[bytes] | None,
    streams: tuple[IO[bytes] | None, ...],
    data: bytes,
    until_s: float,
    last_bytes: int | None,
) -> list[bytes]:
    """Write to a child and read from it until it closes its streams; return what each had.

    Args:
        into: its standard input, which is closed in the end.
        streams: what it writes to.
        data: what it reads.
        until_s: when it must have ended, by the monotonic clock.
        last_bytes: how much of each stream is kept; None for all.

    Raises:
        TimeoutError: a stream was still open then.
    """
    assert into is not None
    left = memoryview(data)
    said = {stream.fileno(): bytearray() for stream in streams if stream is not None}
    with selectors.DefaultSelector() as pipes:
        pipes.register(into, selectors.EVENT_WRITE)
        for each in said:
            pipes.register(each, selectors.EVENT_READ)
        while pipes.get_map():
            if (wait_s := until_s - time.monotonic()) <= 0:
                raise TimeoutError
            for key, _ in pipes.select(wait_s):
                if key.fileobj is into:
                    left = _write(key.fd, left)
                    if not left:
                        pipes.unregister(into)
                        into.close()
                elif chunk := os.read(key.fd, 65536):
                    said[key.fd] += chunk
                    if last_bytes is not None:
                        del said[key.fd][:-last_bytes]
                else:
                    pipes.unregister(key.fd)
    return [bytes(each) for each in said.values()]


def _write(pipe: int, data: memoryview) -> memoryview:
    """Write what a pipe that is ready takes without a wait; return the rest, none if it is shut."""
    try:
        return data[os.write(pipe, data[: select.PIPE_BUF]) :]
    except BrokenPipeError:
        return data[:0]
