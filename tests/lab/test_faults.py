# SPDX-License-Identifier: Apache-2.0
"""Every fault is real: measured from inside, and gone when it is cleared."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from . import Lab, cgroups

pytestmark = pytest.mark.lab

SERVER = """
import socket, sys
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
while peer.recv(1 << 20):
    pass
peer.sendall(b"done")
"""

CLIENT = """
import socket, sys, time
began = time.monotonic()
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[4]))
peer.sendall(bytes(int(sys.argv[3])))
peer.shutdown(socket.SHUT_WR)
assert peer.recv(4) == b"done"
print(time.monotonic() - began)
"""

PYTHON = [sys.executable, "-I", "-S", "-c"]


def transfer_s(
    lab: Lab, source: str, target: str, size_bytes: int, timeout_s: float = 20
) -> float | None:
    """How long this many bytes take from node to node; None: they did not arrive in time."""
    server = lab.popen([*PYTHON, SERVER], node=target, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().decode().strip()
        client = [*PYTHON, CLIENT, target, port, str(size_bytes), str(timeout_s)]
        result = lab.run(client, node=source, check=False)
        return float(result.stdout) if result.returncode == 0 else None
    finally:
        server.kill()
        server.communicate()


def await_(condition: Callable[[], bool], what: str, deadline_s: float = 60) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


@pytest.mark.heavy
@pytest.mark.parametrize(("source", "target"), [("n1", "n3"), ("n3", "n1")])
def test_slow_link_is_slow_in_both_directions(lab: Lab, source: str, target: str) -> None:
    size_bytes = 8_000_000
    lab.fault.slow_link("n3", mbit=20)
    slow_s = transfer_s(lab, source, target, size_bytes)
    healthy_s = transfer_s(lab, "n1", "n2", size_bytes)
    lab.fault.clear("n3")
    cleared_s = transfer_s(lab, source, target, size_bytes)
    assert slow_s is not None
    assert healthy_s is not None
    assert cleared_s is not None
    assert slow_s > 2.8  # 3.2 s at 20 Mbit/s, less what the bucket lets through
    assert max(healthy_s, cleared_s) < slow_s / 2


@pytest.mark.heavy
def test_dropped_packets_spare_slurm(lab: Lab) -> None:
    lab.fault.drop("n3")
    assert transfer_s(lab, "n1", "n3", 10, timeout_s=1) is None
    assert transfer_s(lab, "n3", "n1", 10, timeout_s=1) is None
    assert transfer_s(lab, "n1", "n2", 10) is not None
    # n1 starts a step on n3: through slurmctld, both slurmd and srun's own ports.
    job_id = lab.sbatch("#!/bin/sh\nsrun -N1 -n1 -w n3 hostname", "-N2", "-w", "n1,n3")
    lab.wait_job(job_id)
    assert lab.job_output(job_id) == "n3\n"
    lab.fault.clear("n3")
    assert transfer_s(lab, "n1", "n3", 10) is not None


@pytest.mark.heavy
def test_a_cut_path_is_between_two_nodes_and_spares_slurm(lab: Lab) -> None:
    lab.fault.cut_path("n3", "n1")
    assert transfer_s(lab, "n1", "n3", 10, timeout_s=1) is None
    assert transfer_s(lab, "n3", "n1", 10, timeout_s=1) is None
    assert transfer_s(lab, "n2", "n3", 10) is not None
    assert transfer_s(lab, "n1", "n2", 10) is not None
    job_id = lab.sbatch("#!/bin/sh\nsrun -N1 -n1 -w n3 hostname", "-N2", "-w", "n1,n3")
    lab.wait_job(job_id)
    assert lab.job_output(job_id) == "n3\n"
    lab.fault.clear("n3")
    assert transfer_s(lab, "n1", "n3", 10) is not None


def test_dropping_everything_cuts_the_node_off(lab: Lab) -> None:
    reach = [*PYTHON, "import socket; socket.create_connection(('ctl', 6817), timeout=1)"]
    assert lab.run(reach, node="n3", check=False).returncode == 0
    lab.fault.drop("n3", everything=True)
    assert lab.run(reach, node="n3", check=False).returncode != 0
    lab.fault.clear("n3")
    assert lab.run(reach, node="n3", check=False).returncode == 0


RECEIVER = """
import socket
inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
inbox.bind(("", 7000))
print("on", flush=True)
count = 0
while True:
    word = inbox.recv(100)
    if word == b"end":
        break
    count += 1
print(count)
"""

SENDER = """
import socket
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(1000):
    out.sendto(b"x", ("n3", 7000))
for _ in range(50):
    out.sendto(b"end", ("n3", 7000))
"""


def test_fraction_of_packets_is_dropped(lab: Lab) -> None:
    lab.fault.drop("n3", fraction=0.5)
    receiver = lab.popen([*PYTHON, RECEIVER], node="n3", stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == b"on\n"
    lab.run([*PYTHON, SENDER], node="n1")
    count, _ = receiver.communicate(timeout=10)
    assert 400 < int(count) < 600


BURN = """
import time
began, used = time.monotonic(), time.process_time()
while time.monotonic() - began < 1:
    pass
print(time.process_time() - used)
"""


def test_starved_node_gets_its_share_of_a_core(lab: Lab) -> None:
    lab.fault.starve_cpu("n3", share=0.2)
    job_id = lab.sbatch(f"#!{sys.executable} -I\n{BURN}", "-w", "n3")
    lab.run([*PYTHON, BURN], node="n2")
    lab.wait_job(job_id)
    starved_s = float(lab.job_output(job_id))
    assert starved_s < 0.3
    assert times_throttled(lab, "n3") > 0
    assert times_throttled(lab, "n2") == 0


def times_throttled(lab: Lab, node: str) -> int:
    assert lab.cpu_controller is not None
    group = cgroups.node_cgroup(lab.cpu_controller, lab.spec.name, node)
    told = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(told["nr_throttled"])


def test_killed_slurmd_is_gone_until_cleared(lab: Lab) -> None:
    running = lab.fault.slurmd_pids("n3")
    assert len(running) == 1
    lab.fault.kill_slurmd("n3")
    assert lab.fault.slurmd_pids("n3") == ()
    assert lab.fault.slurmd_pids("n2") != ()
    lab.fault.clear("n3")
    assert lab.fault.slurmd_pids("n3") not in ((), running)
    lab.wait_job(lab.sbatch("#!/bin/sh\ntrue", "-w", "n3"))


@pytest.fixture
def program(lab: Lab) -> Path:
    """A stand-in for the package: an agent and a worker that live for two seconds."""
    package = lab.home("alice") / "stand-in" / "slurm_health"
    (package / "preflight/probes").mkdir(parents=True, exist_ok=True)
    for path in ("__init__.py", "preflight/__init__.py", "preflight/probes/__init__.py"):
        (package / path).write_text("")
    for path in ("__main__.py", "preflight/probes/worker.py"):
        (package / path).write_text("import time\nprint('on', flush=True)\ntime.sleep(2)\n")
    lab.run(["chown", "-R", "alice:", str(package.parent)])
    return package.parent


def begin(lab: Lab, program: Path, node: str, *argv: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", *argv]
    return lab.popen(command, node=node, user="alice", cwd=program, stdout=subprocess.DEVNULL)


def test_a_strike_meets_the_workers_that_the_node_has_now_and_no_later_ones(
    lab: Lab, program: Path
) -> None:
    before = len(lab.fault.victims("n3"))
    worker = begin(lab, program, "n3", "slurm_health.preflight.probes.worker")
    other = begin(lab, program, "n2", "slurm_health.preflight.probes.worker")

    def struck() -> bool:
        lab.fault.crash_workers_now("n3")
        return len(lab.fault.victims("n3")) > before

    await_(struck, "nobody was killed")
    later = begin(lab, program, "n3", "slurm_health.preflight.probes.worker")

    assert worker.wait(10) == -9
    assert [other.wait(10), later.wait(10)] == [0, 0]
