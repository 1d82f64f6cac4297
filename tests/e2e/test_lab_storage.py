# SPDX-License-Identifier: Apache-2.0
"""A check tells whose fault it is that storage fails: a client's, the server's, the user's."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.lab import Lab, processes
from tests.lab.installed_site import COMMAND, Site
from tests.lab.layout import CHECKOUT

pytestmark = [
    pytest.mark.lab(network_filesystem=True),
    pytest.mark.slow,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]

NODES, SIZE_MB = 5, 256
FREED_S = 20.0  # until what the kernel held is gone
SLOW_MBIT = 20.0  # the large file, of 8 MB, takes 3.2 s
FAILING = CHECKOUT / "tests" / "lab" / "failing_filesystem.py"
Fault = Callable[[Lab, str], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """A cluster each of whose nodes has its own client of one volume."""
    with Lab.start(nodes=NODES, network_filesystem_mb=SIZE_MB) as lab:
        for name in ("alice", "stale"):
            lab.run(["install", "-d", "-o", "alice", "-g", "alice", f"{lab.paths.shared}/{name}"])
        yield Site(lab)


def directory(lab: Lab) -> str:
    """Return alice's directory on the volume, which the checks test."""
    return f"{lab.paths.shared}/alice"


def processes_of(lab: Lab, name: str, node: str | None = None) -> list[int]:
    found = [each.pid for each in processes.on_node(lab.pid(node)) if each.name == name]
    assert found
    return found


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def changed(lab: Lab, node: str, change: Sequence[str], undo: Sequence[str]) -> Iterator[None]:
    lab.run(change, node=node)
    try:
        yield
    finally:
        lab.run(undo, node=node)


@contextmanager
def on_all(lab: Lab, fault: Fault) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in lab.nodes:
            stack.enter_context(fault(lab, name))
        yield


def failing(error: str) -> Fault:
    """Return the fault of a node on which alice's directory fails with an error, or hangs."""

    @contextmanager
    def fault(lab: Lab, node: str) -> Iterator[None]:
        point = directory(lab)
        server = lab.popen([sys.executable, str(FAILING), point, error], node=node, stdout=-1)
        assert server.stdout is not None
        assert server.stdout.readline() == b"mounted\n"
        try:
            yield
        finally:
            server.kill()
            server.wait()
            server.stdout.close()
            lab.run(["umount", "--lazy", point], node=node)

    return fault


@contextmanager
def slow_client(lab: Lab, node: str) -> Iterator[None]:
    lab.fault.slow_link(node, mbit=SLOW_MBIT)
    try:
        yield
    finally:
        lab.fault.clear(node)


def hung_client(lab: Lab, node: str) -> AbstractContextManager[None]:
    return stopped(processes_of(lab, "glusterfs", node))


@contextmanager
def dead_client(lab: Lab, node: str) -> Iterator[None]:
    """Kill a node's client: its mount answers with ENOTCONN."""
    shared = str(lab.paths.shared)
    for pid in processes_of(lab, "glusterfs", node):
        os.kill(pid, signal.SIGKILL)
    try:
        yield
    finally:
        lab.run(["umount", "--lazy", shared], node=node)
        lab.run(["glusterfs", f"--volfile={lab.paths.etc}/client.vol", shared], node=node)


def stale_directory(lab: Lab, node: str) -> AbstractContextManager[None]:
    """Have a node see another directory of the volume under the same name."""
    mount = ["mount", "--bind", f"{lab.paths.shared}/stale", directory(lab)]
    return changed(lab, node, mount, ["umount", "--lazy", directory(lab)])


def read_only(lab: Lab, node: str) -> AbstractContextManager[None]:
    # -i: some helpers know no remount.
    how = [["mount", "-i", "-o", f"remount,{mode}", str(lab.paths.shared)] for mode in ("ro", "rw")]
    return changed(lab, node, *how)


@contextmanager
def full_volume(lab: Lab, node: str) -> Iterator[None]:
    ballast = f"{lab.paths.root}/brick/ballast"
    fill = f"dd if=/dev/zero of={ballast} bs=64k count={SIZE_MB * 32} conv=fsync; df {ballast}"
    try:
        assert "100%" in lab.run(["sh", "-c", fill]).stdout
        yield
    finally:
        lab.run(["rm", ballast])


# By name: the fault, the level of the node it is on, if any, and whose matter it is else.
FAULTS: dict[str, tuple[Fault, str, str]] = {
    "healthy": (lambda *_: contextlib.nullcontext(), "", ""),
    "slow client": (slow_client, "slow", ""),
    "hung mount": (hung_client, "faulty", ""),
    "hung mount (FUSE)": (failing("hang"), "faulty", ""),
    "evicted client (ESTALE)": (failing("ESTALE"), "faulty", ""),
    "evicted client (EIO)": (failing("EIO"), "faulty", ""),
    "evicted client (ENOTCONN)": (dead_client, "faulty", ""),
    "stale directory": (stale_directory, "faulty", ""),
    "read-only on one node": (read_only, "faulty", ""),
    "slow server": (lambda lab, _: on_all(lab, slow_client), "", "server"),
    "hung server": (lambda lab, _: stopped(processes_of(lab, "glusterfsd")), "", "server"),
    "full volume": (full_volume, "", "user"),
    "quota": (lambda lab, _: on_all(lab, failing("EDQUOT")), "", "user"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_cause_is_named_and_no_innocent(site: Site, name: str) -> None:
    lab, node = site.lab, "n3"
    fault, level, blame = FAULTS[name]
    with fault(lab, node):
        words = ("--check=storage", f"--paths={directory(lab)}", "--json")
        document = json.loads(site.check([f"-N{NODES}"], *words).stdout)
    accused = {
        each["node"]: (each["level"], each["component"])
        for each in document["nodes"]
        if each["level"] != "healthy"
    }
    assert accused == ({node: (level, "storage")} if level else {}), document
    assert [each["blame"] for each in document["storage"]] == ([blame] if blame else []), document
    # What the kernel held is freed with its server or client.
    lab.wait_until(lambda: left_over(lab), lambda left: not left, "free", FREED_S)
    lab.wait_nodes()


def left_over(lab: Lab) -> list[str]:
    """Name the processes of ours that are still there."""

    def command(pid: int) -> bytes:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        return b""

    return [
        f"{pid} {processes.state(pid)}"
        for pid in processes.host_pids(lab.pid()).values()
        if b"\0slurm_health\0" in command(pid) or COMMAND.encode() in command(pid)
    ]


def test_a_job_leaves_a_node_whose_mount_hangs(site: Site) -> None:
    words = ("--check=storage", f"--paths={directory(site.lab)}", "-N4", "--spares=1")
    with hung_client(site.lab, "n3"):
        job = site.submit(*words, "--wrap", "echo ran on $SLURM_JOB_NODELIST")
        site.lab.wait_until(lambda: site.lab.job_output(job), lambda text: "ran on" in text, "it")
    assert site.ended(job)["JobState"] == "COMPLETED"
    output = site.lab.job_output(job)
    assert "continuing on n[1-2,4-5], without n3: n3: storage" in output
    assert "did not answer within 6 s" in output
    site.assert_nothing_left()
    site.lab.wait_nodes()
