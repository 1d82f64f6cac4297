# SPDX-License-Identifier: Apache-2.0
"""Workers of one node, or of several that play theirs, as agents have them."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from slurm_health.preflight.agent.worker_process import Worker
from tests.support.supervised import eventually

VALUES = {"name": "values", "scope": "solo", "path": ""}


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
            events.extend(msgspec.to_builtins(event) for event in worker.read_events())
            return any(event["event"] == kind for event in events) or worker.ended() is not None

        eventually(heard, f"the event {kind}")
        found = [event for event in events if event["event"] == kind]
        assert found, worker.ended()
        return found[0]

    def round(self, *probes: dict[str, str], **groups: str) -> list[dict[str, Any]]:
        """Run one round; return how it ended on each worker. `groups` are scopes and addresses."""
        self.begin(*probes, **groups)
        return [self.hears(rank, "done") for rank in range(len(self.workers))]

    def begin(self, *probes: dict[str, str], **groups: str) -> None:
        """Begin a round."""
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
