# SPDX-License-Identifier: Apache-2.0
"""Workers of one node, or of several that play theirs, as agents have them."""

import os
import sys
from typing import Any

import msgspec

from slurm_health.preflight.agent.worker_process import Line, Worker
from slurm_health.records.records import Sampled
from tests.support.supervised import eventually

VALUES = {"name": "values", "scope": "solo", "path": ""}


def plain(line: Line | Sampled) -> dict[str, Any]:
    """Return a line as a dictionary; what a worker measured alone as the event `sample`."""
    if not isinstance(line, Sampled):
        builtins: dict[str, Any] = msgspec.to_builtins(line)
        return builtins
    fields = msgspec.structs.asdict(line)
    return {**fields, "event": "sample", "iteration_ms": line.iteration_ms[0]}


class Bench:
    """Workers of one node, or of several that play theirs, as agents have them."""

    light = False
    python = sys.executable

    def __init__(self, count: int = 1, *, nodes: int = 1, **environ: str) -> None:
        self.local_size = count // nodes
        self.workers = [
            Worker(
                python=self.python,
                local_rank=rank % self.local_size,
                threads=1,
                devices=0,
                environ={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environ},
                light=self.light,
            )
            for rank in range(count)
        ]
        self.events: list[list[dict[str, Any]]] = [[] for _ in self.workers]
        self.ready: list[dict[str, Any]] = []
        self.options: dict[str, float] = {}

    def get_ready(self) -> None:
        self.ready = [self.hears(rank, "ready") for rank in range(len(self.workers))]

    def hears(self, rank: int, kind: str) -> dict[str, Any]:
        worker, events = self.workers[rank], self.events[rank]

        def heard() -> bool:
            gone = worker.gone()
            events.extend(map(plain, worker.read_lines()))
            return any(event["event"] == kind for event in events) or gone is not None

        eventually(heard, f"the event {kind}")
        found = [event for event in events if event["event"] == kind]
        assert found, worker.gone()
        return found[0]

    def round(self, *probes: dict[str, str], **groups: str) -> list[dict[str, Any]]:
        """Run one round; return how it ended on each worker. `groups` are scopes and addresses."""
        self.begin(*probes, **groups)
        return [self.hears(rank, "done") for rank in range(len(self.workers))]

    def begin(self, *probes: dict[str, str], **groups: str) -> None:
        size = len(self.workers)
        for events in self.events:
            events.clear()
        for rank, worker in enumerate(self.workers):
            group = {"rank": rank, "world_size": size, "port": self.ready[0]["store_port"]}
            rail = {
                "rank": rank // self.local_size,
                "world_size": size // self.local_size,
            }
            worker.send(
                {
                    "op": "round",
                    "round": 7,
                    "timeout_s": 30.0,
                    "local_size": self.local_size,
                    "probes": probes,
                    "options": self.options,
                    "groups": {
                        "rail": rail,
                        **{
                            scope: {**group, "address": address, "prefix": f"7/{scope}"}
                            for scope, address in groups.items()
                        },
                    },
                }
            )

    def samples(self, rank: int = 0) -> dict[str, dict[str, Any]]:
        return {e["probe"]: e for e in self.events[rank] if e["event"] == "sample"}


PAIR = {"name": "allgather", "scope": "pair", "path": ""}


def solo(name: str, path: str = "") -> dict[str, str]:
    return {"name": name, "scope": "solo", "path": path}
