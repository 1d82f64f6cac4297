# SPDX-License-Identifier: Apache-2.0
"""Who is let in to a server behind a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.node.hooks.doorman import MOST_OF_USER, Doorman
from slurm_health.system.accounts import Accounts


@contextlib.contextmanager
def door(subuid: str) -> Iterator[Path]:
    """Have a doorman before a server that greets whoever has come in."""
    with (
        tempfile.TemporaryDirectory(prefix="s") as place,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server,
    ):
        Path(place).chmod(0o755)
        file = Path(place, "subuid")
        file.write_text(subuid)
        server.bind(f"{place}/inner")
        # A change of user is one of all threads.
        Path(place, "inner").chmod(0o666)
        server.listen()
        server.settimeout(60)
        doorman = Doorman(Path(place, "inner"), Accounts(file))
        doorman.open_at(Path(place, "door"))
        Path(place, "door").chmod(0o666)
        try:
            yield Path(place, "door")
        finally:
            doorman.close()


def called(stack: contextlib.ExitStack, path: Path, uid: int) -> socket.socket:
    """Call there as a user."""
    caller = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    caller.settimeout(60)
    os.seteuid(uid)
    try:
        caller.connect(str(path))
    finally:
        os.seteuid(0)
    return caller


@pytest.mark.root
def test_who_has_many_ids_is_let_in_as_often_as_others() -> None:
    with contextlib.ExitStack() as stack, door("4242:100000:65536\n") as path:
        callers = [called(stack, path, 100_000 + number) for number in range(MOST_OF_USER)]
        last = [called(stack, path, uid) for uid in (4242, 165_535)]
        assert [each.recv(1) for each in last] == [b"", b""]
        for each in callers:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)
