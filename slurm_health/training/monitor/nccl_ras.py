# SPDX-License-Identifier: Apache-2.0
"""Live collector: how far ranks are by NCCL itself, which answers on every node of a job (RAS).

NCCL has the service since 2.24, and JSON since 2.28.7. It asks all ranks, with a timeout.
"""

from __future__ import annotations

import itertools
import os
import socket

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.text import cut, one_line
from slurm_health.training.diagnosis.ras import Communicator, RasStatus
from slurm_health.training.framework import DataCollector, NothingCollected
from slurm_health.training.monitor.connections import listeners

_ADDRESS = "localhost:28028"
_CONNECT_S = 1.0
_RANKS_S = 3  # for which NCCL waits for its ranks
_MOST_BYTES, _MOST_PARTS = 1 << 16, 1024  # of a line; of an answer
_PROTOCOL = 2


class _Answer(msgspec.Struct):
    communicators: tuple[Communicator, ...] = ()


class NcclRas(DataCollector):
    """NCCL's report of all communicators of the job."""

    kind = "nccl-ras"
    data = RasStatus

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def collect_data(self) -> RasStatus:
        """Ask the NCCL of a rank on this node.

        Raises:
            NothingCollected: there is no answer, or none as JSON, or it is switched off.
        """
        if self.environ.get("NCCL_RAS_ENABLE") == "0":
            raise NothingCollected("NCCL_RAS_ENABLE is 0")
        address = self.environ.get("NCCL_RAS_ADDR") or _ADDRESS
        try:
            return RasStatus(communicators=_status(address, self._limit_s))
        except OSError as err:
            why = err.strerror or "no answer in time"
            raise NothingCollected(f"{address}: {why} (NCCL answers there since 2.24)") from err
        except (ValueError, msgspec.MsgspecError) as err:
            raise NothingCollected(cut(one_line(f"{address}: {err}"), 200)) from err


def _status(address: str, limit_s: float) -> tuple[Communicator, ...]:
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as ras,
        ras.makefile("rwb", buffering=0) as lines,
    ):
        # Any process may have taken the port; only this user's own ranks are trusted.
        there, number = ras.getpeername()[:2]
        if listeners(there, number) != {os.geteuid()}:
            raise ValueError("no process of this user on this node listens there")
        ras.settimeout(limit_s)

        def ask(word: str) -> str:
            lines.write(word.encode() + b"\n")
            return lines.readline(_MOST_BYTES).decode(errors="replace").strip()

        if not ask(f"CLIENT PROTOCOL {_PROTOCOL}").startswith("SERVER PROTOCOL "):
            raise ValueError("this is not NCCL")
        for word in (f"TIMEOUT {_RANKS_S}", "SET FORMAT json"):
            answer = ask(word)
            if answer != "OK":
                raise ValueError(f"{answer or 'no answer'} (JSON comes with NCCL 2.28.7)")
        lines.write(b"VERBOSE STATUS\n")
        # The other end closes after its answer; the collector has a time limit for the whole.
        parts = itertools.islice(iter(lambda: lines.read(_MOST_BYTES), b""), _MOST_PARTS)
        data = b"".join(parts)
        return from_json(data, _Answer).communicators
