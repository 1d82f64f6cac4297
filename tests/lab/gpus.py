# SPDX-License-Identifier: Apache-2.0
"""The played GPUs of the nodes: what is where, and how each node comes to have its own.

Every node finds its description at one path, the device files and the kernel's log in a /dev of its
own, and NVML where the dynamic linker looks.
"""

import os
import shutil
import stat
import subprocess
from pathlib import Path

from tests.played_gpu import kernel_log, nvml_library
from tests.played_gpu.description import Machine, machine, read, write

from . import kernel
from .errors import LabError
from .layout import LabSpec

# Where every played library looks that no variable tells otherwise.
PLACE = Path("/run/played-gpus")
_CACHE = Path("/etc/ld.so.cache")
_DEADLINE_S = 60
# What a real driver has beside one file for each GPU.
_CONTROL = ("nvidiactl", "nvidia-uvm")
_NULL = os.makedev(1, 3)
# What of the machine's own /dev a node keeps.
_KEPT = {"console", "full", "fuse", "null", "ptmx", "random", "tty", "urandom", "zero"}
_SHARED = {"hugepages", "mqueue", "pts", "shm"}


def prepare(spec: LabSpec) -> None:
    """Write every node's description and kernel log, and build the driver's libraries."""
    reason = nvml_library.missing()
    if reason is not None:
        raise LabError(f"no played GPUs: {reason}")
    libraries = spec.paths.driver
    libraries.mkdir()
    nvml_library.build(libraries)
    conf = spec.paths.root / "ld.so.conf"
    conf.write_text(f"{libraries}\ninclude /etc/ld.so.conf\n")
    cache = ["ldconfig", "-X", "-C", str(spec.paths.root / _CACHE.name), "-f", str(conf)]
    subprocess.run(cache, check=True, timeout=_DEADLINE_S, env={"PATH": "/usr/sbin:/sbin"})
    for node in spec.nodes:
        spec.paths.gpus(node).mkdir(parents=True)
        mend(spec, node)


def well(spec: LabSpec, node: str) -> Machine:
    return machine(spec.gpus, spec.gpu, address=spec.address(node), seed=node)


def mend(spec: LabSpec, node: str) -> None:
    """Have the node's GPUs as they were when it was started, and the kernel's log too."""
    write(description(spec, node), well(spec, node))
    messages = [kernel_log.loaded()]
    # Not replaced: it is mounted at /dev/kmsg.
    _log(spec, node).write_text(kernel_log.records(messages, first=0, uptime_s=_uptime_s()))


def description(spec: LabSpec, node: str) -> Path:
    """Return the file that describes the node's GPUs, valid outside the lab."""
    return spec.paths.gpus(node) / "machine"


def described(spec: LabSpec, node: str) -> Machine:
    """Return the node's GPUs as they are now."""
    if not spec.gpus:
        raise LabError("this lab has no GPUs (python -m tests.lab up --gpus 2)")
    return read(description(spec, node))


def say(spec: LabSpec, node: str, messages: list[str]) -> None:
    path = _log(spec, node)
    count = len(path.read_text().splitlines())
    with path.open("a") as log:
        log.write(kernel_log.records(messages, first=count, uptime_s=_uptime_s()))


def _log(spec: LabSpec, node: str) -> Path:
    return spec.paths.gpus(node) / "kmsg"


def _uptime_s() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def show(spec: LabSpec, node: str, staging: Path) -> None:
    """Let the calling process's mount namespace have the node's GPUs."""
    kernel.bind(spec.paths.gpus(node), PLACE)
    kernel.bind(spec.paths.root / _CACHE.name, _CACHE)
    own = staging / f"dev-{node}"
    own.mkdir(parents=True)
    kernel.mount_fresh("tmpfs", own, "mode=0755")
    _copy_devices(Path("/dev"), own)
    for name in (*(f"nvidia{index}" for index in range(spec.gpus)), *_CONTROL):
        _make_device(own / name, 0o666, _NULL)  # never a real one, should there be one
    (own / "kmsg").touch()
    kernel.bind(_log(spec, node), own / "kmsg")
    kernel.bind(own, Path("/dev"))
    kernel.unmount(own)


def _copy_devices(source: Path, target: Path) -> None:
    """Make what belongs into every node's /dev, which has none of the machine's own devices."""
    for entry in source.iterdir():
        status = entry.lstat()
        place = target / entry.name
        if entry.is_symlink():
            place.symlink_to(entry.readlink())
        elif entry.name in _SHARED:
            place.mkdir()
            kernel.bind(entry, place)
        elif entry.name in _KEPT:
            _make_device(place, stat.S_IMODE(status.st_mode), status.st_rdev)
            shutil.chown(place, status.st_uid, status.st_gid)


def _make_device(path: Path, mode: int, number: int) -> None:
    os.mknod(path, stat.S_IFCHR | mode, number)
    path.chmod(mode)  # whatever the umask
