# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check` on played GPUs: a well node passes, a broken one is named, no other is."""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from slurm_health.preflight.agent.workers import OPEN_S
from slurm_health.records.records import Sampled, WorkersReady
from slurm_health.system import journal
from tests.played_gpu import nvml_library
from tests.played_gpu.description import VARIABLE, Device, Fault, machine, read, strike, write
from tests.played_gpu.running import CRASHED
from tests.support.command_line import start

pytestmark = [pytest.mark.played_gpu, pytest.mark.timeout(600)]
LONGEST_S = 400
# So slow that a busy CPU that plays it is still faster: its times are the described ones.
DEVICE = Device(
    memory_bytes=4 << 30, tflops=0.002, memory_gb_per_s=8, link_gb_per_s=0.02, jitter=0.005
)
HOST_GB_PER_S = 0.06
HEALTHY, BAD, INCONCLUSIVE = 0, 1, 3
MOST_NODES = 5


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    write(tmp_path / "gpus", machine(MOST_NODES, DEVICE, seed=str(tmp_path)))
    return tmp_path / "gpus"


@pytest.fixture(scope="module", autouse=True)
def _nvml(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have the played NVML found as the driver's is: by agents too, which load nothing of CUDA."""
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("LD_LIBRARY_PATH", str(nvml_library.built(tmp_path_factory).parent))
        yield


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process that is none of ours: whose parent is that of workers counts as one of them."""
    shell = ["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"]
    number = int(subprocess.run(shell, stdout=subprocess.PIPE, check=True).stdout)
    yield number
    os.kill(number, signal.SIGKILL)


def check(
    python: Path,
    gpus: Path,
    *words: str,
    nodes: int,
    devices: int = 0,
    without_variable: Sequence[str] = (),
    site: Path | None = None,
) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Return the exit code of a check, what is concluded of each node, and all words.

    A node has one device, or its share of so many. A variable names them, unless a program is
    given within which they are found.
    """
    numbers = ",".join(str(number) for number in range(devices or nodes))
    chosen = {} if without_variable else {"CUDA_VISIBLE_DEVICES": numbers}
    chosen |= {"SLURM_HEALTH_CONFIG": str(site)} if site else {}
    process = start(
        "check",
        f"--local={nodes}",
        "--json",
        f"--journal={gpus.parent / 'journal'}",
        f"--python={python}",
        *words,
        environ={VARIABLE: str(gpus), "OMP_NUM_THREADS": "1", **chosen},
        within=without_variable,
    )
    try:
        stdout, stderr = process.communicate(timeout=LONGEST_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in stderr, stderr
    assert CRASHED not in stderr, stderr
    concluded = {node["node"]: node for node in json.loads(stdout)["nodes"]}
    return process.returncode, concluded, stdout + stderr


def levels(nodes: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: str(node["level"]) for name, node in nodes.items()}


@pytest.mark.parametrize(
    "checks",
    [
        "standard",
        *(
            pytest.param(checks, marks=pytest.mark.slow)
            for checks in ("quick", "thorough", "network-check", "straggler-detection")
        ),
    ],
)
def test_nodes_that_are_well_pass(played_python: Path, gpus: Path, checks: str) -> None:
    # How fast memory is copied to a played device is the machine's, which others use.
    site = gpus.parent / "site.toml"
    site.write_text("[localize]\ncompute_floor = 1.0\n")
    code, nodes, said = check(played_python, gpus, f"--check={checks}", nodes=2, site=site)
    assert levels(nodes) == {"local0": "healthy", "local1": "healthy"}, said
    assert code == HEALTHY
    (run,) = (gpus.parent / "journal").glob("local/*/0")
    assert journal.read_all(run, "local0")


@pytest.mark.slow
@pytest.mark.root
def test_devices_that_no_variable_names_are_those_that_the_driver_lists(
    played_python: Path, gpus: Path
) -> None:
    """Its files are played in a mount namespace, as no other place may hold them."""
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no mount namespace")
    listed = " ".join(f'"/proc/driver/nvidia/gpus/{number}"' for number in range(2))
    script = f'mount -t tmpfs none /proc/driver && mkdir -p {listed} && exec "$@"'
    driver = ("unshare", "-m", "sh", "-c", script, "sh")
    code, nodes, said = check(
        played_python, gpus, "--check=matmul", nodes=2, without_variable=driver
    )
    assert levels(nodes) == {"local0": "healthy", "local1": "healthy"}, said
    assert code == HEALTHY
    (run,) = (gpus.parent / "journal").glob("local/*/0")
    for index, device in enumerate(read(gpus).devices[:2]):
        said_by = [each.record for each in journal.read_all(run, f"local{index}")]
        (ready,) = [each for each in said_by if isinstance(each, WorkersReady)]
        assert [device.uuid in name for name in ready.devices] == [True]


@pytest.mark.slow
def test_two_devices_on_each_of_two_nodes_are_as_steady_as_described(
    played_python: Path, gpus: Path
) -> None:
    """However busy the machine is that plays them: of a device's work its own clock tells."""
    steady = dataclasses.replace(DEVICE, jitter=0)
    write(gpus, machine(4, steady, seed=str(gpus)))
    code, nodes, said = check(
        played_python, gpus, "--check=values,matmul,memory_copy", nodes=2, devices=4
    )
    assert levels(nodes) == {"local0": "healthy", "local1": "healthy"}, said
    assert code == HEALTHY
    (run,) = (gpus.parent / "journal").glob("local/*/0")
    written = [each.record for name in nodes for each in journal.read_all(run, name)]
    samples = [each for each in written if isinstance(each, Sampled) and each.scope == "solo"]
    rates = [
        each.flop / median(times_ms) / 1e9
        for each in samples
        if each.probe == "matmul"
        for times_ms in each.iteration_ms
    ]
    assert rates == [pytest.approx(DEVICE.tflops, rel=0.05)] * 4, said


def test_devices_that_are_broken_each_in_its_own_way_are_named_and_no_other(
    played_python: Path, gpus: Path
) -> None:
    """What each shows by itself: one check tells all of them apart."""
    write(gpus, machine(8, DEVICE, seed=str(gpus)))
    strike(
        gpus,
        Fault(device=1, kind="slow", value=0.55),
        Fault(device=2, kind="open_error", value=999),
        Fault(device=4, kind="wrong_bit", value=2),
        Fault(device=5, kind="sticky_error", value=214, after=3),
        Fault(device=7, kind="off_bus", after=3),
    )
    code, nodes, said = check(played_python, gpus, "--check=standard", nodes=8)
    well = dict.fromkeys(("local0", "local3", "local6"), "healthy")
    faulty = dict.fromkeys(("local2", "local4", "local5", "local7"), "faulty")
    assert levels(nodes) == {**well, **faulty, "local1": "slow"}, said
    reasons = {name: node["reason"] for name, node in nodes.items()}
    assert "matmul" in reasons["local1"]
    assert "unknown error" in reasons["local2"]
    assert "wrong" in reasons["local4"]
    assert "uncorrectable ECC error" in reasons["local5"]
    assert "unknown error" in reasons["local7"]  # it does not open again
    assert code == BAD


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "checks", "devices", "level", "words"),
    [
        (Fault(device=2, kind="link_slow", value=0.005), "standard", 1, "slow", ""),
        (Fault(device=2, kind="nccl_async_error", value=2, after=1), "standard", 1, "faulty", ""),
        (Fault(device=2, kind="link_drop", after=1), "standard", 1, "faulty", ""),
        (Fault(device=2, kind="nccl_init_hang"), "standard", 1, "faulty", ""),
        (Fault(device=7, kind="link_slow", value=0.005), "peer_copy", 3, "slow", ":device 1 "),
        (Fault(device=7, kind="link_flip", value=1), "peer_copy", 3, "faulty", " to device 1: "),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else str(value),
)
def test_a_device_that_breaks_its_groups_is_named_and_no_other(
    played_python: Path,
    gpus: Path,
    fault: Fault,
    checks: str,
    devices: int,
    level: str,
    words: str,
) -> None:
    write(gpus, machine(4 * devices, DEVICE, seed=str(gpus)))
    strike(gpus, fault)
    code, nodes, said = check(
        played_python, gpus, f"--check={checks}", nodes=4, devices=4 * devices
    )
    assert nodes["local2"]["level"] == level, said
    assert words in nodes["local2"]["reason"]
    assert {name for name, node in nodes.items() if node["level"] in {"faulty", "slow"}} == {
        "local2"
    }, said
    assert code == BAD


@pytest.mark.slow
def test_slow_memory_memory_that_changes_and_a_slow_host_are_named_on_their_devices_and_no_other(
    played_python: Path, gpus: Path
) -> None:
    write(gpus, machine(10, DEVICE, seed=str(gpus)))
    strike(
        gpus,
        Fault(device=3, kind="slow_memory", value=0.4),
        Fault(device=4, kind="wrong_memory", value=17),
        # All of them, so that the machine's own load is less than what the device is described by.
        *(
            Fault(device=number, kind="slow_host", value=HOST_GB_PER_S / (3 if number == 7 else 1))
            for number in range(10)
        ),
    )
    code, nodes, said = check(
        played_python, gpus, "--check=memory_copy,memory_pattern,host_copy", nodes=5, devices=10
    )
    well = dict.fromkeys(("local0", "local4"), "healthy")
    broken = {"local1": "slow", "local2": "faulty", "local3": "slow"}
    assert levels(nodes) == {**well, **broken}, said
    assert "memory_copy:device 1 " in nodes["local1"]["reason"]
    assert "memory of device 0 does not give back" in nodes["local2"]["reason"]
    assert re.search(r"host_copy to_(device|host):device 1 ", nodes["local3"]["reason"]), said
    assert code == BAD


@pytest.mark.slow
def test_a_device_that_gets_hot_is_slow_and_what_throttles_it_is_told_of_no_other(
    played_python: Path, gpus: Path
) -> None:
    strike(gpus, Fault(device=2, kind="throttle", value=0.4, after=1))
    code, nodes, said = check(played_python, gpus, "--check=matmul", nodes=3)
    assert levels(nodes) == {"local0": "healthy", "local1": "healthy", "local2": "slow"}, said
    assert "matmul" in nodes["local2"]["reason"]
    uuid = read(gpus).devices[2].uuid
    assert f"GPU 2 ({uuid}): hardware thermal slowdown during the burn" in nodes["local2"]["reason"]
    assert "slowdown" not in nodes["local0"]["reason"] + nodes["local1"]["reason"], said
    assert code == BAD


@pytest.mark.slow
def test_what_says_nothing_of_a_devices_health_accuses_nobody(
    played_python: Path, gpus: Path, stranger: int
) -> None:
    strike(
        gpus,
        Fault(device=1, kind="open_slowly", value=4),
        Fault(device=2, kind="nccl_version", value=22805),
        Fault(device=3, kind="memory_used", value=DEVICE.memory_bytes),
        Fault(device=3, kind="occupied_by", value=stranger),
    )
    code, nodes, said = check(played_python, gpus, "--check=quick", nodes=5)
    well = dict.fromkeys(("local0", "local1", "local4"), "healthy")
    assert levels(nodes) == {**well, "local2": "inconclusive", "local3": "inconclusive"}, said
    other_nccl = re.fullmatch(
        r"not compared: torch \S+ with nccl 2\.28\.5 on 1 device there,"
        r" unlike the other nodes \(torch \S+ with nccl 2\.29\.7 on 1 device\)",
        nodes["local2"]["reason"],
    )
    assert other_nccl, said
    user = pwd.getpwuid(os.getuid()).pw_name
    assert nodes["local3"]["reason"].startswith(
        f"could not be measured: device 0 (used by process {stranger}, sleep of {user}):"
        " CUDA out of memory."
    ), said
    assert code == INCONCLUSIVE


@pytest.mark.slow
def test_a_device_is_accused_of_opening_slowly_only_beyond_the_limit_which_is_told(
    played_python: Path, gpus: Path
) -> None:
    strike(
        gpus,
        Fault(device=1, kind="open_slowly", value=OPEN_S + 1),
        Fault(device=2, kind="open_slowly", value=LONGEST_S),
    )
    code, nodes, said = check(played_python, gpus, "--check=quick", nodes=4)
    well = dict.fromkeys(("local0", "local1", "local3"), "healthy")
    assert levels(nodes) == {**well, "local2": "faulty"}, said
    told = re.fullmatch(
        r"device 0 not opened within (\d+) s; most nodes can use theirs", nodes["local2"]["reason"]
    )
    assert told, said
    assert int(told[1]) >= OPEN_S
    assert code == BAD
