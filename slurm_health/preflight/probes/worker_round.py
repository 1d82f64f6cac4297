# SPDX-License-Identifier: Apache-2.0
"""One round of a worker: its probes and groups, and the lines in between."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from slurm_health.preflight.probes import host
from slurm_health.preflight.probes.context import Device, Group, ProbeContext
from slurm_health.preflight.probes.own import measure_of

# In these a worker waits for workers of other nodes.
WITH_PARTNERS = frozenset({"rail", "pair"})
MakeGroup = Callable[[dict[str, Any], Callable[[], None]], Group]
"""Makes the group of a round: by its command, and what raises once the round is to stop."""


class Aborted(Exception):
    """The agent said to stop waiting."""


class Channel:
    """Commands from the agent and events to it."""

    def __init__(self) -> None:
        # Libraries print to standard output (NCCL_DEBUG does): keep a private copy for events and
        # send everything else where errors go.
        self._events = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.rounds: queue.Queue[dict[str, Any]] = queue.Queue()
        self.aborted = -1  # this round, and all before it
        self.on_abort: Callable[[], None] | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, event: str, **fields: object) -> None:
        """Send one event."""
        self.write({"event": event, **fields})

    def write(self, line: dict[str, object]) -> None:
        """Write a line of JSON."""
        self._events.write(json.dumps(line) + "\n")

    def _listen(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command["op"] == "abort":
                self.aborted = max(self.aborted, int(command["round"]))
                if self.on_abort is not None:
                    # In a thread of its own: this one goes on hearing.
                    threading.Thread(target=_interrupt, args=[self.on_abort], daemon=True).start()
            else:
                self.rounds.put(command)
        # The agent is gone. The main thread may be stuck in a collective, so leave from here.
        os._exit(0)


def _interrupt(interrupt: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):  # a group that cannot be aborted is left by being killed
        interrupt()


class WorkerRound:
    """One round of this worker: its probes one after another, each with its group.

    `probe` is the one in progress, `has_partners` whether a partner can be to blame for it,
    `has_siblings` whether the node has other devices.
    """

    def __init__(
        self,
        channel: Channel,
        command: dict[str, Any],
        device: Device,
        make_group: MakeGroup,
        local_rank: int,
    ) -> None:
        self._channel = channel
        self._command = command
        self.index = int(command["round"])
        self._device = device
        self.local_rank = local_rank
        self.probe = ""
        self.has_partners = False
        self.has_siblings = int(command["local_size"]) > 1
        self.group = make_group(command, self._raise_if_aborted)
        channel.on_abort = self.group.interrupt

    def run(self) -> None:
        """Run every probe that this worker has a group for.

        A rail is part of the process group of the pair, which is formed once for both.
        """
        groups, group = self._command["groups"], self.group
        scope = formed = ""
        for probe in self._command["probes"]:
            self.probe = probe["name"]
            if probe["scope"] != "solo" and probe["scope"] not in groups:
                continue
            if probe["scope"] != scope:
                scope, before = probe["scope"], scope
                wanted = "pair" if scope == "rail" else scope
                if wanted != formed:
                    group.leave()
                self.has_partners = scope in WITH_PARTNERS
                self._channel.send("scope", round=self.index, scope=scope)
                if wanted not in ("solo", formed):
                    host.require_interfaces(os.environ)
                    group.join(groups[wanted], scope)
                formed = wanted
                if scope == "rail":
                    group.join_rail()
                elif before == "rail" and scope == "pair":
                    group.join_all()
            self._measure(probe, groups.get(scope) or {"rank": 0, "world_size": 1})
        group.leave()

    def _measure(self, probe: dict[str, Any], place: dict[str, Any]) -> None:
        measure = measure_of(probe["name"], probe["path"], torch=bool(self._device.torch))
        if measure is None:
            return
        world_size = int(place["world_size"])
        context = ProbeContext(
            self._device,
            local_rank=self.local_rank,
            local_size=int(self._command["local_size"]),
            rank=int(place["rank"]),
            world_size=world_size,
            options=self._command["options"],
            group=self.group.handle,
            meet=self.group.meet,
            peers=self.group,
        )
        samples = measure(context)
        self._raise_if_aborted()  # what an interrupted collective left behind is no measurement
        for sample in samples:
            ways = self.group.figures() if sample.shared and self.has_partners else {}
            # The journal's own record (`records.Sampled`), whose node and group the agent adds.
            self._channel.write(
                {
                    "kind": "sampled",
                    "round": self.index,
                    "probe": probe["name"],
                    "quantity": sample.quantity,
                    "scope": probe["scope"] if sample.shared else "solo",
                    "iteration_ms": [[float(ms) for ms in sample.iteration_ms]],
                    "taken_ms": [[float(ms) for ms in sample.taken_ms]] if sample.taken_ms else [],
                    "flop": float(sample.flop),
                    "total_bytes": int(sample.total_bytes),
                    "world_size": world_size,
                    "figures": {**sample.figures, **ways},
                }
            )

    @property
    def is_aborted(self) -> bool:
        """Whether the agent has aborted this round."""
        return self._channel.aborted >= self.index

    def _raise_if_aborted(self) -> None:
        if self.is_aborted:
            raise Aborted
