# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check` on played GPUs: a well node passes, a broken one is named, no other is."""

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

import msgspec
import pytest

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
# Of this speed whatever else the machine does, so that times say something.
SMALL = Device(tflops=0.002, memory_gb_per_s=4.0)
HEALTHY, BAD, INCONCLUSIVE = 0, 1, 3


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    write(tmp_path / "gpus", machine(6, DEVICE, seed=str(tmp_path)))
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
) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Return the exit code of a check, what is concluded of each node, and all words.

    A node has one device, or its share of so many. A variable names them, unless a program is
    given within which they are found.
    """
    numbers = ",".join(str(number) for number in range(devices or nodes))
    chosen = {} if without_variable else {"CUDA_VISIBLE_DEVICES": numbers}
    site = gpus.parent / "site.toml"
    chosen |= {"SLURM_HEALTH_CONFIG": str(site)} if site.exists() else {}
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


def written(gpus: Path, node: str) -> list[Any]:
    (run,) = (gpus.parent / "journal").glob("local/*/0")
    return [each.record for each in journal.read_all(run, node)]


# --- devices that are well ------------------------------------------------------------------------


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
    (gpus.parent / "site.toml").write_text("[localize]\ncompute_floor = 1.0\n")
    code, nodes, said = check(played_python, gpus, f"--check={checks}", nodes=2)
    assert (levels(nodes), code) == ({"local0": "healthy", "local1": "healthy"}, HEALTHY), said
    assert written(gpus, "local0")


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
    assert (levels(nodes), code) == ({"local0": "healthy", "local1": "healthy"}, HEALTHY), said
    for index, device in enumerate(read(gpus).devices[:2]):
        assert [device.uuid in name for name in ready(gpus, f"local{index}")] == [True]


def ready(gpus: Path, node: str) -> Sequence[str]:
    """Return the devices that a node's workers were ready on, once."""
    (said,) = [each for each in written(gpus, node) if isinstance(each, WorkersReady)]
    return said.devices


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
    assert (levels(nodes), code) == ({"local0": "healthy", "local1": "healthy"}, HEALTHY), said
    samples = [
        each
        for node in nodes
        for each in written(gpus, node)
        if isinstance(each, Sampled) and (each.scope, each.probe) == ("solo", "matmul")
    ]
    rates = [each.flop / median(ms) / 1e9 for each in samples for ms in each.iteration_ms]
    assert rates == [pytest.approx(DEVICE.tflops, rel=0.05)] * 4, said


# --- broken ones ----------------------------------------------------------------------------------


class Broken(msgspec.Struct, kw_only=True):
    """A check of devices with faults: the nodes that are not healthy, and what is said of them."""

    faults: list[Fault]
    check: str
    nodes: int
    bad: dict[str, str]
    words: dict[str, str] = {}
    devices: int = 1  # of each node
    small: bool = False
    undisturbed: list[str] = []  # nodes whose workers ran through
    in_doubt: bool = False  # whether others may be
    is_slow: bool = True


def one(kind: str, device: int, value: float = 0.0) -> Fault:
    return Fault(device=device, kind=kind, value=value)


TABLE = Path(__file__).parents[1] / "data" / "broken-gpus.toml"
BROKEN = msgspec.toml.decode(TABLE.read_bytes(), type=dict[str, Broken])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if case.is_slow else [])
        for name, case in BROKEN.items()
    ],
)
def test_a_broken_device_is_named_and_no_other(
    played_python: Path, gpus: Path, case: Broken
) -> None:
    count = case.nodes * case.devices
    write(gpus, machine(count, SMALL if case.small else DEVICE, seed=str(gpus)))
    strike(gpus, *case.faults)
    words = f"--check={case.check}"
    code, nodes, said = check(played_python, gpus, words, nodes=case.nodes, devices=count)

    bad = {name: level for name, level in levels(nodes).items() if level in {"faulty", "slow"}}
    assert bad == case.bad, said
    assert case.in_doubt or levels(nodes) == {**dict.fromkeys(nodes, "healthy"), **bad}, said
    for name, node in nodes.items():
        assert re.search(case.words.get(name, ""), node["reason"], re.S), said
        assert name in bad or "slowdown" not in node["reason"]
    assert code == BAD
    for name in case.undisturbed:
        kinds = [type(record).__name__ for record in written(gpus, name)]
        assert (kinds.count("WorkersReady"), kinds.count("WorkersStarting")) == (1, 0)


@pytest.mark.slow
def test_what_says_nothing_of_a_devices_health_accuses_nobody(
    played_python: Path, gpus: Path, stranger: int
) -> None:
    strike(
        gpus,
        one("open_slowly", 1, 4),
        one("nccl_version", 2, 22805),
        one("memory_used", 3, DEVICE.memory_bytes),
        one("occupied_by", 3, stranger),
        one("open_error", 4, 46),
        one("occupied_by", 4, stranger),
    )
    code, nodes, said = check(played_python, gpus, "--check=quick", nodes=6)
    well = dict.fromkeys(("local0", "local1", "local5"), "healthy")
    doubt = dict.fromkeys(("local2", "local3", "local4"), "inconclusive")
    assert levels(nodes) == {**well, **doubt}, said
    other_nccl = re.fullmatch(
        r"not compared: torch \S+ with nccl 2\.28\.5 on 1 device there,"
        r" unlike the other nodes \(torch \S+ with nccl 2\.29\.7 on 1 device\)",
        nodes["local2"]["reason"],
    )
    assert other_nccl, said
    user = pwd.getpwuid(os.getuid()).pw_name
    for node, why in (("local3", "CUDA out of memory."), ("local4", "CUDA error: CUDA-capable")):
        assert nodes[node]["reason"].startswith(
            f"could not be measured: device 0 (used by process {stranger}, sleep of {user}): {why}"
        ), said
    assert code == INCONCLUSIVE
