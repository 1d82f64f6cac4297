# SPDX-License-Identifier: Apache-2.0
"""What is said of real processes that end by an error of their device, or by a mistake on it."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from slurm_health.records.script_records import Diagnosed
from tests.played_gpu.description import Device, Fault, machine, strike, write
from tests.played_gpu.running import Ended, run, start_ranks
from tests.support.ended_jobs import diagnosed_by_output

pytestmark = [pytest.mark.played_gpu, pytest.mark.timeout(600)]
FOR_EVER = "1000000"
IN_A_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
# As in a container: a file system of its own, and no privilege on the node.
LITTLE_SHARED_MEMORY = f"""\
#!/bin/sh
exec {" ".join(IN_A_NAMESPACE)} sh -c '
    mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$@"' {{python}} "$@"
"""


def told(ended: Ended) -> Diagnosed:
    """Return what a post-mortem says of a program on the one node of its job."""
    return diagnosed_by_output(ended.output + ended.errors, ended.status, ("n1",))


def told_of_two(python: Path, gpus: Path, said: str, variables: dict[str, str]) -> Diagnosed:
    """Return what a post-mortem says of two ranks of a node, of which one or both said this."""
    ranks = start_ranks(python, "collectives", count=2, gpus=gpus, variables=variables)
    ends = [rank.ended() for rank in ranks]
    output = "".join(end.output + end.errors for end in ends)
    assert said in output, output
    return diagnosed_by_output(output, max(end.status for end in ends), ("n1",))


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    device = Device(memory_bytes=1 << 30, tflops=0.01)
    write(tmp_path / "gpus", machine(2, device, seed=str(tmp_path)))
    return tmp_path / "gpus"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault(device=0, kind="open_error", value=802), "gpu-fabric"),
        (Fault(device=0, kind="sticky_error", value=214, after=20), "gpu-broken"),
        (Fault(device=0, kind="sticky_error", value=700, after=20), "illegal-access"),
        (Fault(device=0, kind="sticky_error", value=710, after=20), "device-assert"),
        (Fault(device=0, kind="sticky_error", value=719, after=20), "launch-failure"),
    ],
    ids=lambda value: f"{value.value}" if isinstance(value, Fault) else "",
)
def test_an_error_of_a_device_is_told_by_what_its_process_said(
    played_python: Path, gpu: Path, fault: Fault, cause: str
) -> None:
    strike(gpu, fault)

    found = told(run(played_python, "mistakes", ["none", FOR_EVER], gpus=gpu))

    assert found.cause == cause


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "which", "said", "cause"),
    [
        (
            Fault(device=1, kind="peer_error", value=217),
            "to-neighbour",
            "CUDA error: peer access is not supported between these two devices",
            "peer-access",
        ),
        (
            Fault(device=0, kind="cublas_error", value=13),
            "none",
            "CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(",
            "gpu-library-failed",
        ),
        (
            Fault(device=0, kind="cudnn_error", value=5000),
            "normalise",
            "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
            "gpu-library-failed",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_what_a_library_of_the_device_refuses_is_told_by_what_pytorch_said_of_it(
    played_python: Path, gpu: Path, fault: Fault, which: str, said: str, cause: str
) -> None:
    strike(gpu, fault)

    ended = run(played_python, "mistakes", [which, "1"], gpus=gpu)

    assert said in ended.errors
    found = told(ended)
    assert (found.cause, found.attribution, found.accused) == (cause, "undecided", [])


@pytest.mark.slow
@pytest.mark.parametrize("which", ["to-neighbour", "normalise"])
def test_where_the_libraries_are_well_the_same_programs_end_well(
    played_python: Path, gpu: Path, which: str
) -> None:
    ended = run(played_python, "mistakes", [which, "1"], gpus=gpu)

    assert ended.status == 0, ended.errors


@pytest.mark.slow
def test_too_much_memory_of_a_device_is_its_users_mistake(played_python: Path, gpu: Path) -> None:
    found = told(run(played_python, "mistakes", ["too-much", "1"], gpus=gpu))

    assert (found.cause, found.attribution) == ("gpu-out-of-memory", "user error")
    assert found.accused == []


def test_a_rank_that_its_watchdog_ended_tells_not_who_stayed_away(
    played_python: Path, gpu: Path
) -> None:
    at_once = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
    waits, absent = start_ranks(
        played_python, "missing_peer", ["waits"], count=2, gpus=gpu, variables=at_once
    )
    with absent.process:
        found = told(waits.ended())
        absent.process.kill()

    assert (found.cause, found.attribution) == ("collective-timed-out", "undecided")
    assert (found.nodes, found.accused) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "said", "cause"),
    [
        (
            "NCCL_SOCKET_IFNAME",
            "=nothere0",
            "Bootstrap : no socket interface found",
            "network-interface-missing",
        ),
        ("NCCL_NET", "Nothere", "Failed to initialize any NET plugin", "network-plugin-missing"),
    ],
)
def test_a_network_that_a_variable_asks_for_and_no_node_has_accuses_nobody(
    played_python: Path, gpu: Path, variable: str, value: str, said: str, cause: str
) -> None:
    found = told_of_two(played_python, gpu, said, {variable: value})

    assert (found.cause, found.attribution, found.accused) == (cause, "undecided", [])


@pytest.mark.slow
def test_shared_memory_without_room_for_nccl_is_its_users_mistake(
    played_python: Path, gpu: Path, tmp_path: Path
) -> None:
    if subprocess.run([*IN_A_NAMESPACE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("there are no user namespaces here")
    python = tmp_path / "python"
    python.write_text(LITTLE_SHARED_MEMORY.format(python=played_python))
    python.chmod(0o755)

    said = "No space left on device (28)"
    found = told_of_two(python, gpu, said, {"NCCL_P2P_DISABLE": "1"})

    assert (found.cause, found.attribution) == ("shared-memory-full", "user error")
    assert found.accused == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver_version", "devices", "said", "cause"),
    [
        (0, 1, "Found no NVIDIA driver on your system", "no-gpu"),
        (11040, 1, "The NVIDIA driver on your system is too old", "driver-mismatch"),
        (13000, 0, "No CUDA GPUs are available", "no-gpu"),
    ],
    ids=["no driver", "another driver", "no device"],
)
def test_a_container_that_lacks_what_it_takes_of_the_driver_accuses_no_node(
    played_python: Path, tmp_path: Path, driver_version: int, devices: int, said: str, cause: str
) -> None:
    node = machine(devices, Device(memory_bytes=1 << 30), seed=str(tmp_path))
    write(tmp_path / "gpus", dataclasses.replace(node, driver_version=driver_version))

    ended = run(played_python, "mistakes", ["none", "1"], gpus=tmp_path / "gpus")

    assert said in ended.errors
    found = told(ended)
    assert (found.cause, found.attribution, found.accused) == (cause, "undecided", [])
