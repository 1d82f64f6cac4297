# SPDX-License-Identifier: Apache-2.0
"""What a lab consists of: its description, its directory, its names and addresses."""

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

from tests.played_gpu.description import MIB, MOST_DEVICES, Device

from .errors import LabError

# Outside the checkout, because ordinary users must be able to walk to their homes.
BASE = Path("/var/lib/slurm-health-lab")

CHECKOUT = Path(__file__).resolve().parents[2]

CONTROLLER = "ctl"
CONTROLLER_ADDRESS = "10.77.0.1"
PREFIX_LENGTH = 16
MAX_NODES = 200

# Slurm's own ports; the data-network faults spare them. The range for srun lies above the
# kernel's ephemeral ports, so that no other program is given one of them by chance.
SLURMCTLD_PORT = 6817
SLURMD_PORT = 6818
SRUN_PORTS = (61000, 61999)

USERS = {"alice": 4242, "bob": 4243}

# Small and all alike. So slow that times are the clock's, not those of the cores that all share.
GPU = Device(memory_bytes=2048 * MIB, tflops=0.0002, memory_gb_per_s=2, link_gb_per_s=0.5)

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


@dataclass(frozen=True, kw_only=True)
class LabSpec:
    """What was asked for when the lab was started."""

    name: str
    nodes: tuple[str, ...]
    cpus: int = 2
    memory_mb: int = 2000
    slurm_conf_extra: str = ""
    topology_conf: str = ""
    gres_conf: str = ""
    gpus: int = 0
    gpu: Device = GPU
    release: str | None = None
    accounting: bool = False
    network_filesystem_mb: int = 0
    visible: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise LabError(f"{self.name!r} is no lab name: lower-case letters, digits, '-'")
        if not 1 <= len(self.nodes) <= MAX_NODES:
            raise LabError(f"a lab has 1 to {MAX_NODES} nodes")
        if self.gpus and self.gres_conf:
            raise LabError("gpus brings a gres.conf of its own: give one of both")
        if not 0 <= self.gpus <= MOST_DEVICES:
            raise LabError(f"a node has 0 to {MOST_DEVICES} GPUs, not {self.gpus}")

    @property
    def paths(self) -> "LabPaths":
        return LabPaths(BASE / self.name)

    def address(self, node: str) -> str:
        return f"10.77.1.{1 + self.nodes.index(node)}"

    def port(self, node: str) -> str:
        return f"v{1 + self.nodes.index(node)}"


@dataclass(frozen=True)
class LabPaths:
    """The files of one lab, valid inside it and outside."""

    root: Path

    @property
    def etc(self) -> Path:
        """Mounted file by file over /etc inside the lab."""
        return self.root / "etc"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def faults(self) -> Path:
        """Orders to the watchers that kill or stop processes, and what they did."""
        return self.root / "faults"

    def network_fault(self, node: str) -> Path:
        """There while the node's link is throttled or drops packets."""
        return self.root / f"network-fault-{node}"

    @property
    def spec(self) -> Path:
        """The LabSpec, as JSON."""
        return self.root / "spec.json"

    @property
    def state(self) -> Path:
        """The process ids that hold the lab's namespaces, as JSON; there once they exist."""
        return self.root / "state.json"

    @property
    def driver(self) -> Path:
        """The libraries of the played GPUs' driver, if the lab has GPUs."""
        return self.root / "driver"

    def gpus(self, node: str) -> Path:
        """What describes the node's GPUs, and what its kernel says of them."""
        return self.root / "gpus" / node

    @property
    def shared(self) -> Path:
        """Where every node mounts the network filesystem, if the lab has one."""
        return self.root / "shared"

    def home(self, user: str) -> Path:
        return self.root / "home" / user

    def spool(self, node: str) -> Path:
        return self.root / "spool" / node

    def tmp(self, node: str) -> Path:
        return self.root / "tmp" / node


def write_spec(spec: LabSpec) -> None:
    spec.paths.spec.write_text(json.dumps(dataclasses.asdict(spec), indent=1))


def read_spec(root: Path) -> LabSpec:
    fields = json.loads((root / "spec.json").read_text())
    for key in ("nodes", "visible"):
        fields[key] = tuple(fields[key])
    fields["gpu"] = Device(**fields["gpu"])
    return LabSpec(**fields)
