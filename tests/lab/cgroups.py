# SPDX-License-Identifier: Apache-2.0
"""A cgroup with a CPU quota for each node, in version 1 or 2, whichever the machine has."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Short, so that a starved node is evenly slow rather than halting every tenth of a second.
PERIOD_US = 20_000
_LOWEST_QUOTA_US = 1_000  # the kernel's own bound
# All labs together weigh as much as so many processes beside them: as one, which is usual for a
# cgroup, a cluster in which some dozen work would hardly get a processor beside other tests.
_PROCESSES = 4
_WEIGHTS = {False: ("cpu.shares", 1024), True: ("cpu.weight", 100)}  # and what is usual


@dataclass(frozen=True)
class CpuController:
    """Where the machine's cpu controller is mounted."""

    mount: Path
    unified: bool


def find_cpu_controller(mountinfo: str | None = None) -> CpuController | None:
    """The machine's cpu controller, or None where it has none that can be used."""
    text = mountinfo if mountinfo is not None else Path("/proc/self/mountinfo").read_text()
    unified = None
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fstype, _, options = right.split(" ", 2)
        mount = Path(left.split(" ")[4])
        if fstype == "cgroup" and "cpu" in options.split(","):
            return CpuController(mount, unified=False)
        if fstype == "cgroup2" and unified is None:
            unified = mount
    if unified is None or "cpu" not in _words(unified / "cgroup.controllers"):
        return None
    return CpuController(unified, unified=True)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def node_cgroup(controller: CpuController, lab: str, node: str) -> Path:
    """The node's cgroup."""
    return controller.mount / "slurm-health-lab" / lab / node


def create(controller: CpuController, lab: str, nodes: tuple[str, ...]) -> None:
    """Make the nodes' cgroups, without a quota."""
    for node in nodes:
        node_cgroup(controller, lab, node).mkdir(parents=True, exist_ok=True)
    if controller.unified:
        for parent in (
            controller.mount,
            controller.mount / "slurm-health-lab",
            controller.mount / "slurm-health-lab" / lab,
        ):
            (parent / "cgroup.subtree_control").write_text("+cpu")
    set_weight(controller, lab, 1)


def set_quota(
    controller: CpuController,
    lab: str,
    node: str,
    cores: float | None,
    period_us: int = PERIOD_US,
) -> None:
    """Let the whole node have this many cores' worth of CPU time; None: no limit."""
    directory = node_cgroup(controller, lab, node)
    quota_us = -1 if cores is None else max(_LOWEST_QUOTA_US, int(cores * period_us))
    if controller.unified:
        (directory / "cpu.max").write_text(f"{'max' if cores is None else quota_us} {period_us}")
    else:
        (directory / "cpu.cfs_period_us").write_text(str(period_us))
        (directory / "cpu.cfs_quota_us").write_text(str(quota_us))


def set_weight(controller: CpuController, lab: str, times: int) -> None:
    """Let the lab have so many times the CPU time of anything beside it, as long as it wants it."""
    name, usual = _WEIGHTS[controller.unified]
    top = controller.mount / "slurm-health-lab"
    (top / lab / name).write_text(str(usual * times))
    # All labs together get what the one that is preferred most gets.
    weights = [int(found) for each in top.glob("*/") for found in _words(each / name)]
    (top / name).write_text(str(max((usual * _PROCESSES, *weights))))


def remove(controller: CpuController, lab: str) -> None:
    """Remove the cgroups of a lab whose processes are gone; those in use stay."""
    with suppress(OSError):
        set_weight(controller, lab, 1)
    top = controller.mount / "slurm-health-lab"
    nodes = sorted((top / lab).glob("*/"))
    for directory in (*nodes, top / lab, top):
        with suppress(OSError):
            directory.rmdir()
