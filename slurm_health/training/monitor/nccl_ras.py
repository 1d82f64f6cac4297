# SPDX-License-Identifier: Apache-2.0
"""Live collector: how far each rank is by NCCL itself, which answers on every node of a job (RAS).

NCCL has the service since 2.24, and tells it as JSON since 2.28.7. It asks all ranks and gives up
on those that do not answer.
"""

from __future__ import annotations

import os
import socket
import time

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.text import cut, one_line
from slurm_health.training.diagnosis.ras import Communicator, RasStatus
from slurm_health.training.framework import DataCollector, NothingCollected
from slurm_health.training.monitor.connections import listeners

_ADDRESS = "localhost:28028"
_CONNECT_S = 1.0
_RANKS_S = 3  # for which NCCL waits for its ranks
_MOST_BYTES = 64 << 20
_PROTOCOL = 2


class _Answer(msgspec.Struct):
    communicators: tuple[Communicator, ...] = ()


class NcclRas(DataCollector):
    """What NCCL's RAS says of all communicators of the job."""

    kind = "nccl-ras"
    data = RasStatus

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def collect_data(self) -> RasStatus:
        """Ask the NCCL of a rank on this node.

        Raises:
            NothingCollected: there is no answer, or not as JSON, or it was switched off.
        """
        if self.environ.get("NCCL_RAS_ENABLE") == "0":
            raise NothingCollected("NCCL_RAS_ENABLE is 0")
        address = self.environ.get("NCCL_RAS_ADDR") or _ADDRESS
        try:
            return RasStatus(communicators=_status(address, time.monotonic() + self._limit_s))
        except OSError as err:
            why = err.strerror or "no answer in time"
            raise NothingCollected(f"{address}: {why} (NCCL answers there since 2.24)") from err
        except (ValueError, msgspec.MsgspecError) as err:
            raise NothingCollected(cut(one_line(f"{address}: {err}"), 200)) from err


def _status(address: str, until_s: float) -> tuple[Communicator, ...]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as ras:
        # Any process may have taken the port; only what this user's own ranks say is believed.
        there, number = ras.getpeername()[:2]
        if listeners(there, number) != {os.geteuid()}:
            raise ValueError("what listens there is not a process of this user on this node")
        left = _Lines(ras, until_s)
        if not left.ask(f"CLIENT PROTOCOL {_PROTOCOL}").startswith("SERVER PROTOCOL "):
            raise ValueError("this is not NCCL")
        for word in (f"TIMEOUT {_RANKS_S}", "SET FORMAT json"):
            answer = left.ask(word)
            if answer != "OK":
                raise ValueError(f"{answer or 'no answer'} (JSON comes with NCCL 2.28.7)")
        ras.sendall(b"VERBOSE STATUS\n")
        return from_json(left.rest(), _Answer).communicators


class _Lines:
    """Reads what the other end sends until a time."""

    def __init__(self, ras: socket.socket, until_s: float) -> None:
        self._ras = ras
        self._until_s = until_s
        self._buffer = b""

    def ask(self, word: str) -> str:
        """Send a line; return the line that answers it."""
        self._ras.sendall(word.encode() + b"\n")
        while b"\n" not in self._buffer and self._receive():
            pass
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace").strip()

    def rest(self) -> bytes:
        """Return all that comes until the other end closes, which is how an answer ends."""
        while self._receive():
            pass
        return self._buffer

    def _receive(self) -> bool:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._ras.settimeout(left_s)
        data = self._ras.recv(1 << 16)
        self._buffer += data
        if len(self._buffer) > _MOST_BYTES:
            raise ValueError(f"its answer has more than {_MOST_BYTES} bytes")
        return bool(data)
