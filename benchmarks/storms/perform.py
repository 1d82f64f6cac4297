# SPDX-License-Identifier: Apache-2.0
"""Carries a storm out, and waits for what mends itself."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Sequence

from benchmarks.storms.cluster import Cluster
from benchmarks.storms.plan import Deed, Event, Place
from benchmarks.storms.runners import CLOCK_AHEAD, FLAG

_TICK_S = 2.0
# Between two jobs of half the cluster each: two processors carry no more prologs.
_WIDE_TICKS = 12


class Performance:
    """One storm over one cluster."""

    def __init__(self, cluster: Cluster, events: Sequence[Event], lasts_s: float) -> None:
        self._cluster = cluster
        self._events = list(events)
        self._lasts_s = lasts_s
        self.broken: set[str] = set()
        self._power_done = threading.Event()
        self._power = threading.Thread(
            target=cluster.follow_power, args=(self._power_done,), daemon=True
        )

    def play(self) -> None:
        """Let the storm pass, with jobs submitted all the while."""
        if self._cluster.storm.place is Place.POWER:
            self._power.start()
        nodes, work_s = len(self._cluster.lab.nodes), self._cluster.storm.work_s
        began_s = time.monotonic()
        for tick in itertools.count():
            if time.monotonic() - began_s >= self._lasts_s:
                break
            self._due(time.monotonic() - began_s)
            # Slurm gives small jobs the first nodes again and again; two halves meet all of them.
            if tick % _WIDE_TICKS == 0:
                self._cluster.submit(2, nodes=nodes // 2, work_s=work_s)
            else:
                self._cluster.submit(max(1, nodes // 20), work_s=work_s)
            time.sleep(_TICK_S)
        self._due(float("inf"))

    def mend(self) -> None:
        """Let everything be well again that a person would mend: the machines, not Slurm."""
        for node in self._cluster.lab.nodes:
            self._cluster.remove(node, FLAG)
            self._cluster.remove(node, CLOCK_AHEAD)
        self.broken.clear()

    def end(self) -> None:
        """End what plays a cloud."""
        self._power_done.set()
        if self._power.is_alive():
            self._power.join()

    def _due(self, now_s: float) -> None:
        while self._events and self._events[0].at_s <= now_s:
            event = self._events.pop(0)
            self._perform(event)

    def _perform(self, event: Event) -> None:
        if event.deed is Deed.BREAK:
            self.broken |= {*event.nodes}
        if event.deed is Deed.MEND:
            self.broken -= {*event.nodes}
        _DEEDS[event.deed](self._cluster, event.nodes)


def _touch(cluster: Cluster, nodes: Sequence[str], path: str) -> None:
    for node in nodes:
        cluster.touch(node, path)


def _remove(cluster: Cluster, nodes: Sequence[str], path: str) -> None:
    for node in nodes:
        cluster.remove(node, path)


def _told(cluster: Cluster, *argv: str) -> None:
    """Tell Slurm as root, whatever it says."""
    cluster.lab.run(argv, check=False, deadline_s=300)


_DEEDS: dict[Deed, Callable[[Cluster, Sequence[str]], object]] = {
    Deed.BREAK: lambda it, nodes: _touch(it, nodes, FLAG),
    Deed.MEND: lambda it, nodes: _remove(it, nodes, FLAG),
    Deed.CLOCK_AHEAD: lambda it, nodes: _touch(it, nodes, CLOCK_AHEAD),
    Deed.STOP_SLURMCTLD: lambda it, _: it.signal_slurmctld(signal.SIGSTOP),
    Deed.CONTINUE_SLURMCTLD: lambda it, _: it.signal_slurmctld(signal.SIGCONT),
    Deed.KILL_SLURMCTLD: lambda it, _: it.lab.kill_slurmctld(),
    Deed.START_SLURMCTLD: lambda it, _: it.lab.start_slurmctld(deadline_s=120),
    Deed.STALL_STORAGE: lambda it, _: it.signal_storage(signal.SIGSTOP),
    Deed.CONTINUE_STORAGE: lambda it, _: it.signal_storage(signal.SIGCONT),
    Deed.FILL_STORAGE: lambda it, _: it.fill_storage(),
    Deed.EMPTY_STORAGE: lambda it, _: it.empty_storage(),
    Deed.RECONFIGURE: lambda it, _: _told(it, "scontrol", "reconfigure"),
    Deed.REQUEUE: lambda it, _: it.requeue_running(),
    Deed.POWER_DOWN: lambda it, nodes: _told(
        it, "scontrol", "update", f"NodeName={','.join(nodes)}", "State=POWER_DOWN"
    ),
}
