# SPDX-License-Identifier: Apache-2.0
"""The faults of a lab. Each is real: nothing pretends to be slow or dead."""

import os
import signal
from contextlib import suppress

from . import cgroups, gpus, network_faults, processes, watching
from .errors import LabError
from .gpu_faults import GpuFaults

_DEADLINE_S = 60


class Faults(GpuFaults):
    """Breaks the nodes of one lab, and mends them."""

    # -- network ------------------------------------------------------------------------------

    def slow_link(self, node: str, mbit: float = 200) -> None:
        """Throttle the node's network link to this many Mbit/s, in both directions."""
        network_faults.throttle(self._lab, node, mbit)

    def drop(self, node: str, *, everything: bool = False) -> None:
        """Drop all packets between the node and other nodes.

        Slurm's own ports are spared, as where training has a network of its own, unless
        `everything` is set: then nothing passes, not even to slurmctld.
        """
        network_faults.drop(self._lab, node, everything=everything)

    def cut_path(self, node: str, other: str) -> None:
        """Drop the packets between two nodes, which reach all others; Slurm's ports are spared.

        To `clear` the first one mends it. On one node, this and `drop` replace each other.
        """
        network_faults.cut(self._lab, node, other)

    # -- CPU ----------------------------------------------------------------------------------

    def starve_cpu(self, node: str, share: float = 0.2) -> None:
        """Let all processes of the node together have this share of one core."""
        self._lab.pid(node)
        self._set_quota(node, share)

    def _set_quota(self, node: str, cores: float | None) -> None:
        controller = self._lab.cpu_controller
        name = self._lab.spec.name
        if controller is None or not cgroups.node_cgroup(controller, name, node).is_dir():
            if cores is None:
                return
            raise LabError("this machine offers no cpu cgroup that the lab may use")
        try:
            cgroups.set_quota(controller, name, node, cores)
        except OSError as err:
            raise LabError(f"cannot set the CPU quota of {node}: {err}") from err

    # -- processes ----------------------------------------------------------------------------

    def kill_slurmd(self, node: str) -> None:
        """Kill the node's slurmd (SIGKILL); running steps live on."""
        for pid in self.slurmd_pids(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._lab.wait_until(
            lambda: self.slurmd_pids(node),
            lambda pids: not pids,
            f"slurmd of {node} dead",
            _DEADLINE_S,
        )

    def stop_slurmd(self, node: str) -> None:
        """Stop the node's slurmd (SIGSTOP): it takes connections and answers none."""
        for pid in self.slurmd_pids(node):
            os.kill(pid, signal.SIGSTOP)

    def start_slurmd(self, node: str) -> None:
        """Start the node's slurmd unless it runs, and let one go on that was stopped."""
        for pid in self.slurmd_pids(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if not self.slurmd_pids(node):
            self._lab.run(["slurmd", "-N", node], node=node, cwd="/", deadline_s=_DEADLINE_S)

    def slurmd_pids(self, node: str) -> tuple[int, ...]:
        """The node's running slurmd, by its number outside; empty when there is none."""
        found = processes.on_node(self._lab.pid(node))
        return tuple(process.pid for process in found if process.name == "slurmd")

    def kill_agent(self, node: str, times: int | None = 1) -> None:
        """Kill (SIGKILL) the slurm-health agent of this node when it appears, so many times.

        None and 0: until cleared.
        """
        watching.start(self._lab, node, times=times)

    def crash_workers_now(self, node: str) -> None:
        """Kill (SIGKILL) the probe workers that this node has now, and no later ones."""
        watching.strike_workers(self._lab, node, "crash-worker", signal.SIGKILL)

    def stop_workers_now(self, node: str) -> None:
        """Stop (SIGSTOP) the probe workers that this node has now, for good, and no later ones."""
        watching.strike_workers(self._lab, node, "hang-worker", signal.SIGSTOP)

    def victims(self, node: str) -> list[str]:
        """Which fault has killed or stopped each process of this node that one has, in order."""
        return watching.victims(self._lab, node)

    # -- mending ------------------------------------------------------------------------------

    def clear(self, node: str) -> None:
        """Mend the node: undo every fault, start a dead slurmd."""
        watching.stop(self._lab, node)
        network_faults.clear(self._lab, node)
        self._set_quota(node, None)
        if self._lab.spec.gpus:
            gpus.mend(self._lab.spec, node)
        self.start_slurmd(node)

    def clear_all(self) -> None:
        """Mend every node."""
        for node in self._lab.nodes:
            self.clear(node)
