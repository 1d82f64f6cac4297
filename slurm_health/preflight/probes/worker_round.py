# SPDX-License-Identifier: Apache-2.0
"""One round of a worker: its probes and groups, what it hears and says meanwhile.

By which way data goes between nodes is what NCCL says of itself, or the
interface of gloo: NCCL has no call for it, but logs it for each connection. It writes its log into
memory, from which it is read here.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_health.preflight.probes.meeting import Meeting

# In these a worker waits for workers of other nodes.
WITH_PARTNERS = frozenset({"rail", "pair"})
_OWN_LOG = "/proc/self/fd/"
# n1:71:93 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
# By way of a neighbour (PXN) the rank of that follows: NET/IB/3(2)/GDRDMA
_WAY = re.compile(r" via (NET/\w+)/\d+(?:\(\d+\))?(/GDRDMA)?")


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


class Round:
    """One round of this worker: its probes one after another, each with its group.

    `probe` is the one in progress, `has_partners` whether a partner can be to blame for it,
    `has_siblings` whether the node has other devices.
    """

    def __init__(
        self, channel: Channel, command: dict[str, Any], device: Any, local_rank: int
    ) -> None:
        self._channel = channel
        self._command = command
        self._device = device
        self._local_rank = local_rank
        self.probe = ""
        self.has_partners = False
        self.has_siblings = int(command["local_size"]) > 1
        self._rail: Any = None
        self._meeting: Meeting | None = None
        from slurm_health.preflight.probes.membership import Membership, interrupts

        self._membership = Membership(device)
        channel.on_abort = functools.partial(interrupts, self._membership)

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
                    self._enter_group(groups[wanted])
                formed = wanted
                self._exchange_first(scope)
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
        from slurm_health.preflight.probes import load
        from slurm_health.preflight.probes.context import ProbeContext

        context = ProbeContext(
            device=self._device,
            local_rank=self._local_rank,
            local_size=int(self._command["local_size"]),
            rank=int(group["rank"]),
            world_size=int(group["world_size"]),
            options=self._command["options"],
            group=self._rail if probe["scope"] == "rail" else None,
            meet=self._meet_all,
        )
        samples = load.measure_of(probe["name"], probe["path"])(context)
        self._raise_if_aborted()  # what an interrupted collective left behind is no measurement
        for sample in samples:
            figures = dict(sample.figures)
            way = ways_used(os.environ, on_cuda=context.on_cuda)
            if way and sample.shared and self.has_partners:
                figures["transport"] = way
            self._channel.send(
                "sample",
                round=int(self._command["round"]),
                probe=probe["name"],
                quantity=sample.quantity,
                scope=probe["scope"] if sample.shared else "solo",
                iteration_ms=sample.iteration_ms,
                flop=sample.flop,
                total_bytes=sample.total_bytes,
                world_size=context.world_size,
                figures=figures,
            )

    def _enter_group(self, group: dict[str, Any]) -> None:
        from slurm_health.preflight.probes import device as devices_of
        from slurm_health.preflight.probes import meeting

        devices_of.require_interfaces(os.environ)
        timeout = timedelta(seconds=float(self._command["timeout_s"]))
        self._meeting = meeting.Meeting(group, timeout, self._raise_if_aborted)
        self._meeting.wait_for_all()
        self._membership.form(
            self._meeting.store,
            rank=int(group["rank"]),
            world_size=int(group["world_size"]),
            timeout=timeout,
            check=self._raise_if_aborted,
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
        ranks = range(self._local_rank, world_size, int(self._command["local_size"]))
        timeout = timedelta(seconds=float(self._command["timeout_s"]))
        return self._membership.part(list(ranks), timeout=timeout, check=self._raise_if_aborted)

    def _meet_all(self) -> None:
        if self._meeting is not None:
            self._meeting.wait_for_all()

    def _raise_if_aborted(self) -> None:
        self._channel.raise_if_aborted(int(self._command["round"]))


def record_ways(environ: MutableMapping[str, str]) -> None:
    """Have NCCL write of its network into memory, unless the user wants its log elsewhere."""
    if "NCCL_DEBUG" in environ or "NCCL_DEBUG_FILE" in environ:
        return
    environ["NCCL_DEBUG"] = "INFO"
    environ["NCCL_DEBUG_SUBSYS"] = "NET"
    environ["NCCL_DEBUG_FILE"] = f"{_OWN_LOG}{os.memfd_create('nccl-log')}"


def ways_used(environ: Mapping[str, str], *, on_cuda: bool) -> str:
    """Return the ways by which data has gone so far, empty where that is not known."""
    if not on_cuda:
        return environ.get("GLOO_SOCKET_IFNAME", "")
    log = environ.get("NCCL_DEBUG_FILE", "")
    if not log.startswith(_OWN_LOG):
        return ""
    found = _WAY.findall(Path(log).read_text(errors="replace"))
    ways = (way + (" with GPUDirect RDMA" if direct else "") for way, direct in found)
    return " and ".join(sorted(set(ways)))
