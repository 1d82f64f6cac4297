# SPDX-License-Identifier: Apache-2.0
"""One round of a worker: its probes and groups, what it hears and says meanwhile."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from slurm_health.preflight.probes import host, meeting
from slurm_health.preflight.probes.kits import Kit, Membership

# In these a worker waits for workers of other nodes.
WITH_PARTNERS = frozenset({"rail", "pair"})


class Aborted(Exception):
    """The agent said to stop waiting."""


class Channel:
    """Commands from the agent and events to it."""

    def __init__(self) -> None:
        # Libraries print to standard output (NCCL_DEBUG does): keep a private copy for events and
        # send everything else where errors go.
        self._events = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.rounds: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._aborted = -1
        self.on_abort: Callable[[], None] | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, event: str, **fields: object) -> None:
        """Send one event."""
        self._events.write(json.dumps({"event": event, **fields}) + "\n")

    def raise_if_aborted(self, round_index: int) -> None:
        """Raise Aborted once the agent has aborted this round.

        Raises:
            Aborted: it has.
        """
        if self.is_aborted(round_index):
            raise Aborted

    def is_aborted(self, round_index: int) -> bool:
        """Tell whether the agent has aborted this round."""
        return self._aborted >= round_index

    def _listen(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command["op"] == "abort":
                self._aborted = max(self._aborted, int(command["round"]))
                if self.on_abort is not None:
                    self.on_abort()
            else:
                self.rounds.put(command)
        # The agent is gone. The main thread may be stuck in a collective, so leave from here.
        os._exit(0)


class WorkerRound:
    """One round of this worker: its probes one after another, each with its group.

    `probe` is the one in progress, `has_partners` whether a partner can be to blame for it,
    `has_siblings` whether the node has other devices. `connecting` are the members of the
    group that NCCL is connecting at the moment: some of this node by local rank, or all by rank.
    """

    def __init__(
        self, channel: Channel, command: dict[str, Any], kit: Kit, device: Any, local_rank: int
    ) -> None:
        self._channel = channel
        self._kit = kit
        self._command = command
        self._device = device
        self.local_rank = local_rank
        self.probe = ""
        self.has_partners = False
        self.has_siblings = int(command["local_size"]) > 1
        self.connecting: list[int] = []
        self._rail: Any = None
        self._meeting: meeting.GroupMeeting | None = None
        self._membership = kit.membership(device)
        channel.on_abort = functools.partial(_interrupts, self._membership)

    def run(self) -> None:
        """Run every probe that this worker has a group for.

        A rail is part of the process group of the pair, which is formed once for both.
        """
        groups = self._command["groups"]
        scope = formed = ""
        for probe in self._command["probes"]:
            self.probe = probe["name"]
            if probe["scope"] != "solo" and probe["scope"] not in groups:
                continue
            if probe["scope"] != scope:
                scope = probe["scope"]
                wanted = "pair" if scope == "rail" else scope
                if wanted != formed:
                    self._end_group()
                self._say_scope(scope)
                if wanted not in ("solo", formed):
                    self._enter_group(groups[wanted], wanted)
                formed = wanted
                self._exchange_first(scope)
                self.connecting = []
            self._measure(probe, groups.get(scope) or {"rank": 0, "world_size": 1})
        self._end_group()

    def _end_group(self) -> None:
        """Leave the process group once all its members have come to the same.

        NCCL may wait for them in leaving, where no abort is heard: who waits here hears it.
        """
        if self._device.type == "cuda":
            self._meet_all()
        self.leave_group()

    def leave_group(self) -> None:
        """Destroy the process group, if there is one."""
        self._rail = self._meeting = None
        self._membership.leave()

    def leave_broken_group(self) -> bool:
        """Leave the process group, if there is one; tell whether this worker is still good."""
        self._rail = self._meeting = None
        return self._membership.leave_broken()

    def _say_scope(self, scope: str) -> None:
        self.has_partners = scope in WITH_PARTNERS
        self._channel.send("scope", round=int(self._command["round"]), scope=scope)

    def _measure(self, probe: dict[str, Any], group: dict[str, Any]) -> None:
        measure = self._kit.measure_of(probe["name"], probe["path"])
        if measure is None:
            return
        context = self._kit.context(
            self._membership,
            device=self._device,
            local_rank=self.local_rank,
            local_size=int(self._command["local_size"]),
            rank=int(group["rank"]),
            world_size=int(group["world_size"]),
            options=self._command["options"],
            group=self._rail if probe["scope"] == "rail" else None,
            meet=self._meet_all,
        )
        samples = measure(context)
        self._raise_if_aborted()  # what an interrupted collective left behind is no measurement
        for sample in samples:
            figures = dict(sample.figures)
            way = self._kit.ways(self._device, os.environ)
            if way and sample.shared and self.has_partners:
                figures["transport"] = way
            self._channel.send(
                "sample",
                round=int(self._command["round"]),
                probe=probe["name"],
                quantity=sample.quantity,
                scope=probe["scope"] if sample.shared else "solo",
                iteration_ms=sample.iteration_ms,
                taken_ms=sample.taken_ms,
                flop=sample.flop,
                total_bytes=sample.total_bytes,
                world_size=context.world_size,
                figures=figures,
            )

    def _enter_group(self, group: dict[str, Any], scope: str) -> None:
        host.require_interfaces(os.environ)
        timeout = timedelta(seconds=float(self._command["timeout_s"]))
        self._meeting = meeting.GroupMeeting(
            group, self._kit.open_store(timeout), self._raise_if_aborted
        )
        self._meeting.wait_for_all()
        rank, world_size = int(group["rank"]), int(group["world_size"])
        if self._device.type == "cuda":
            if "apart" in self._command["options"]:
                self._connect_apart(self._meeting, rank - self.local_rank, scope, timeout)
            self.connecting = list(range(world_size))
        self._form(self._meeting.store, rank, world_size, timeout)

    def _connect_apart(
        self, place: meeting.GroupMeeting, first_rank: int, scope: str, timeout: timedelta
    ) -> None:
        """Connect this device by itself, and with each of its node: one that hangs is known then.

        Over several nodes only by itself: their devices have been together within each node before.
        """
        turns = meeting.circles(self.local_rank, int(self._command["local_size"]))
        for turn, circle in enumerate(turns[: 1 if scope == "pair" else None]):
            if circle:
                self.connecting = circle
                store = place.part_of_store(f"apart/{turn}/{first_rank + circle[0]}")
                self._form(store, circle.index(self.local_rank), len(circle), timeout)
                self._membership.exchange_first(None, self._raise_if_aborted)
                self.connecting = []
            place.wait_for_all()
            self._membership.leave()

    def _form(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        self._membership.form(
            store, rank=rank, world_size=world_size, timeout=timeout, check=self._raise_if_aborted
        )

    def _exchange_first(self, scope: str) -> None:
        """Connect the members of a scope.

        Each by itself: a rail whose adapter fails is not to hold up the others.
        """
        if scope == "solo":
            return
        if scope == "rail":
            self._rail = self._form_rail(int(self._command["groups"]["pair"]["world_size"]))
        group = self._rail if scope == "rail" else None
        self._membership.exchange_first(group, self._raise_if_aborted)

    def _form_rail(self, world_size: int) -> Any:
        ranks = range(self.local_rank, world_size, int(self._command["local_size"]))
        timeout = timedelta(seconds=float(self._command["timeout_s"]))
        return self._membership.part(list(ranks), timeout=timeout, check=self._raise_if_aborted)

    def _meet_all(self) -> None:
        if self._meeting is None:
            self._raise_if_aborted()
        else:
            self._meeting.wait_for_all()

    @property
    def is_aborted(self) -> bool:
        """Whether the agent has aborted this round."""
        return self._channel.is_aborted(int(self._command["round"]))

    def _raise_if_aborted(self) -> None:
        self._channel.raise_if_aborted(int(self._command["round"]))


def _interrupts(membership: Membership) -> None:
    """Interrupt from a thread of its own, so that whoever heard the abort goes on hearing."""

    def interrupt() -> None:
        with contextlib.suppress(
            Exception
        ):  # a group that cannot be aborted is left by being killed
            membership.interrupt()

    threading.Thread(target=interrupt, daemon=True).start()
