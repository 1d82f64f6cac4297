# SPDX-License-Identifier: Apache-2.0
"""What the lab's init does before it waits: mounts, network, node holders, daemons."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from . import (
    accounting,
    cgroups,
    daemons,
    gpus,
    kernel,
    network,
    network_filesystem,
    release,
    slurmconf,
    visibility,
)
from .layout import (
    CHECKOUT,
    CONTROLLER,
    CONTROLLER_ADDRESS,
    SLURMCTLD_PORT,
    USERS,
    LabSpec,
)

_STAGING = Path("/run/staging")
_ETC = Path("/run/etc")
_DAEMON_DEADLINE_S = 60


def set_up(spec: LabSpec) -> dict[str, int]:
    """Turn this process's new process namespace into a lab."""
    kernel.unshare(kernel.NEW_MOUNT | kernel.NEW_NET | kernel.NEW_UTS | kernel.NEW_IPC)
    kernel.keep_mounts_private()
    socket.sethostname(CONTROLLER)
    if spec.release is not None:
        release.enter(spec, Path(spec.release), _wanted(spec))
    write_files(spec)
    _mount_controller(spec)
    _ip(network.bridge())
    holders = {node: _Holder(spec, node) for node in spec.nodes}
    _ip([line for node, holder in holders.items() for line in network.port(spec, node, holder.pid)])
    daemons.start_munged(spec)
    if spec.network_filesystem_mb:
        network_filesystem.serve(spec)
        network_filesystem.mount(spec, CONTROLLER)
    if spec.accounting:
        accounting.start(spec)
    daemons.start_slurmctld()
    daemons.await_answer((CONTROLLER_ADDRESS, SLURMCTLD_PORT), "slurmctld")
    for holder in holders.values():
        holder.go()
    for holder in holders.values():
        holder.await_slurmd()
    return {node: holder.pid for node, holder in holders.items()}


def write_files(spec: LabSpec) -> None:
    """Fill the lab's directory: configuration, homes, and an empty place for everything else."""
    paths = spec.paths
    slurm = paths.etc / "slurm"
    slurm.mkdir(parents=True)
    machine_passwd = Path("/etc/passwd").read_text()
    (slurm / "slurm.conf").write_text(slurmconf.slurm_conf(spec))
    if spec.topology_conf:
        (slurm / "topology.conf").write_text(spec.topology_conf)
    if gres_conf := slurmconf.gres_conf(spec):
        (slurm / "gres.conf").write_text(gres_conf)
    (slurm / "cgroup.conf").write_text(slurmconf.cgroup_conf(daemons.slurm_version()))
    (paths.etc / "passwd").write_text(slurmconf.passwd(spec, machine_passwd))
    (paths.etc / "group").write_text(slurmconf.group(Path("/etc/group").read_text()))
    (paths.etc / "hosts").write_text(slurmconf.hosts(spec))
    for path in (paths.log, paths.faults, paths.root / "state", paths.root / "munge"):
        path.mkdir(exist_ok=True)
    shutil.chown(paths.root / "state", "slurm", "slurm")
    for node in spec.nodes:
        paths.spool(node).mkdir(parents=True)
        paths.tmp(node).mkdir(parents=True)
        paths.tmp(node).chmod(0o1777)
    for user, uid in {"root": 0, **USERS}.items():
        home = paths.home(user)
        home.mkdir(parents=True)
        home.chmod(0o700)
        os.chown(home, uid, uid)


def _mount_controller(spec: LabSpec) -> None:
    kernel.mount_fresh("proc", Path("/proc"))
    kernel.mount_fresh("tmpfs", Path("/run"), "mode=0755")
    _STAGING.mkdir()
    _remount_sys()
    Path("/run/slurm").mkdir()
    gpus.PLACE.mkdir()
    _show_own_users(spec)
    kernel.bind(spec.paths.etc / "slurm", Path("/etc/slurm"))
    visibility.open_up(_wanted(spec), _STAGING)


def _show_own_users(spec: LabSpec) -> None:
    """Have users and hosts of the lab's own in an /etc that is otherwise the machine's.

    Files mounted over the machine's would vanish when it replaces those, as `useradd` and `apt` do.
    """
    etc = Path("/etc")
    if spec.release is None:
        upper, work = _ETC / "upper", _ETC / "work"
        for path in (upper, work):
            path.mkdir(parents=True)
        upper.chmod(0o755)
        kernel.mount_overlay(etc, upper, work, etc)
    for name in ("passwd", "group", "hosts"):
        kernel.bind(spec.paths.etc / name, etc / name)


def _remount_sys() -> None:
    """Have /sys show this network namespace's interfaces.

    A fresh sysfs lacks what was mounted below the old one; slurmd ends without its cgroups.
    """
    aside = _STAGING / "cgroup"
    aside.mkdir(exist_ok=True)
    kernel.bind(Path("/sys/fs/cgroup"), aside)
    kernel.mount_fresh("sysfs", Path("/sys"))
    kernel.bind(aside, Path("/sys/fs/cgroup"))
    kernel.unmount(aside)


def _wanted(spec: LabSpec) -> tuple[Path, ...]:
    """What jobs must reach by the path it has outside, none of it below another."""
    # An environment may borrow packages from another one, by a .pth file.
    borrowed = [path for path in map(Path, sys.path) if path.is_absolute() and path.is_dir()]
    borrowed = [path for path in borrowed if Path("/usr") not in path.parents]
    wanted = [CHECKOUT, Path(sys.prefix), Path(sys.base_prefix), *borrowed]
    wanted += map(Path, spec.visible)
    # Open to everyone anyhow; and in another release's root it must be that release's.
    wanted = [path for path in dict.fromkeys(wanted) if path != Path("/usr")]
    return tuple(path for path in wanted if not set(path.parents) & set(wanted))


class _Holder:
    """The process that keeps one node's namespaces alive, and starts its slurmd."""

    def __init__(self, spec: LabSpec, node: str) -> None:
        """Fork it, and wait until its network namespace can be given an interface."""
        self.node = node
        ready_read, ready_write = os.pipe()
        self._done_read, done_write = os.pipe()
        go_read, self._go_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go_write)
            os.close(ready_read)
            _be_node(spec, node, ready_write, go_read, done_write)
        for fd in (ready_write, go_read, done_write):
            os.close(fd)
        _read_word(ready_read, f"{node}: making its namespaces")

    def go(self) -> None:
        """Tell it that its network interface is there."""
        # A word, not the end of the pipe: the holders forked later have this end open too.
        os.write(self._go_write, b"g")
        os.close(self._go_write)

    def await_slurmd(self) -> None:
        _read_word(self._done_read, f"{self.node}: starting slurmd")


def _read_word(fd: int, what: str) -> None:
    with os.fdopen(fd) as pipe:
        if pipe.read() != "ok":
            raise RuntimeError(f"{what} failed")


def _be_node(spec: LabSpec, node: str, ready_fd: int, go_fd: int, done_fd: int) -> None:
    """Be the holder of one node; never returns."""
    try:
        _join_cgroup(spec, node)
        kernel.unshare(kernel.NEW_MOUNT | kernel.NEW_NET | kernel.NEW_UTS | kernel.NEW_IPC)
        socket.sethostname(node)
        os.write(ready_fd, b"ok")
        os.close(ready_fd)
        _remount_sys()
        if spec.gpus:
            gpus.show(spec, node, _STAGING)
        kernel.mount_fresh("tmpfs", Path("/dev/shm"), "mode=1777")
        visibility.replace(Path("/tmp"), spec.paths.tmp(node), _wanted(spec), _STAGING / node)
        os.read(go_fd, 1)
        _ip(network.link(spec, node))
        if spec.network_filesystem_mb:
            network_filesystem.mount(spec, node)
        daemons.start_slurmd(node)
        os.write(done_fd, b"ok")
        os.close(done_fd)
        os.chdir("/")
        while True:
            signal.pause()
    except BaseException:  # the process boundary: the init sees the pipe end, the log says why
        traceback.print_exc()
    finally:
        os._exit(1)


def _join_cgroup(spec: LabSpec, node: str) -> None:
    controller = cgroups.find_cpu_controller()
    if controller is not None:
        directory = cgroups.node_cgroup(controller, spec.name, node)
        if directory.is_dir():
            (directory / "cgroup.procs").write_text("0")


def _ip(commands: Sequence[str]) -> None:
    result = subprocess.run(
        ["ip", "-batch", "-"],
        input="\n".join(commands),
        text=True,
        capture_output=True,
        check=False,
        timeout=_DAEMON_DEADLINE_S,
    )
    if result.returncode != 0:
        raise RuntimeError(f"ip: {result.stderr.strip()}")
