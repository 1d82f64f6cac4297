# SPDX-License-Identifier: Apache-2.0
"""What is said of real processes that end by an error of their device, or by a mistake on it."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slurm_health.records.script_records import Diagnosed
from tests.played_gpu.description import Device, Fault, machine, write
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


def described(directory: Path, **changes: Any) -> Path:
    """Write what a node's two devices are, but for what is changed; where that is."""
    node = machine(2, Device(memory_bytes=1 << 30, tflops=0.01), seed=str(directory))
    write(directory / "gpus", dataclasses.replace(node, **changes))
    return directory / "gpus"


def told(ended: Ended) -> Diagnosed:
    """Return what a post-mortem says of a program on the one node of its job."""
    return diagnosed_by_output(ended.output + ended.errors, ended.status, ("n1",))


def broken(kind: str, value: float, *, device: int = 0, after: float = 0.0) -> dict[str, object]:
    return {"faults": (Fault(device=device, kind=kind, value=value, after=after),)}


UNDECIDED, USERS = "undecided", "user error"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words", "said", "cause", "blame"),
    [
        (broken("open_error", 802), ("none", FOR_EVER), "", "gpu-fabric", None),
        (broken("sticky_error", 214, after=20), ("none", FOR_EVER), "", "gpu-broken", None),
        (broken("sticky_error", 700, after=20), ("none", FOR_EVER), "", "illegal-access", None),
        (broken("sticky_error", 710, after=20), ("none", FOR_EVER), "", "device-assert", None),
        (broken("sticky_error", 719, after=20), ("none", FOR_EVER), "", "launch-failure", None),
        (broken("peer_error", 217, device=1), ("to-neighbour", "1"),
         "peer access is not supported between these two devices", "peer-access", UNDECIDED),
        (broken("cublas_error", 13), ("none", "1"),
         "CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(", "gpu-library-failed",
         UNDECIDED),
        (broken("cudnn_error", 5000), ("normalise", "1"),
         "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "gpu-library-failed", UNDECIDED),
        ({}, ("too-much", "1"), "", "gpu-out-of-memory", USERS),
        # A container that lacks what it takes of the driver.
        ({"driver_version": 0}, ("none", "1"), "Found no NVIDIA driver on your system", "no-gpu",
         UNDECIDED),
        ({"driver_version": 11040}, ("none", "1"),
         "The NVIDIA driver on your system is too old", "driver-mismatch", UNDECIDED),
        ({"devices": ()}, ("none", "1"), "No CUDA GPUs are available", "no-gpu", UNDECIDED),
    ],
)  # fmt: skip
def test_how_a_program_on_a_device_ended_is_told_by_what_it_said(
    played_python: Path,
    tmp_path: Path,
    changes: Mapping[str, object],
    words: tuple[str, str],
    said: str,
    cause: str,
    blame: str | None,
) -> None:
    ended = run(played_python, "mistakes", words, gpus=described(tmp_path, **changes))

    assert said in ended.errors
    found = told(ended)
    assert found.cause == cause
    if blame:
        assert (found.attribution, found.accused) == (blame, [])


@pytest.mark.slow
@pytest.mark.parametrize("which", ["to-neighbour", "normalise"])
def test_where_the_libraries_are_well_the_same_programs_end_well(
    played_python: Path, tmp_path: Path, which: str
) -> None:
    ended = run(played_python, "mistakes", [which, "1"], gpus=described(tmp_path))

    assert ended.status == 0, ended.errors


def test_a_rank_that_its_watchdog_ended_tells_not_who_stayed_away(
    played_python: Path, tmp_path: Path
) -> None:
    at_once = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
    waits, absent = start_ranks(
        played_python,
        "missing_peer",
        ["waits"],
        count=2,
        gpus=described(tmp_path),
        variables=at_once,
    )
    with absent.process:
        found = told(waits.ended())
        absent.process.kill()

    assert (found.cause, found.attribution) == ("collective-timed-out", "undecided")
    assert (found.nodes, found.accused) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "said", "cause", "blame"),
    [
        ("NCCL_SOCKET_IFNAME", "=nothere0", "Bootstrap : no socket interface found",
         "network-interface-missing", UNDECIDED),
        ("NCCL_NET", "Nothere", "Failed to initialize any NET plugin", "network-plugin-missing",
         UNDECIDED),
        ("NCCL_P2P_DISABLE", "1", "No space left on device (28)", "shared-memory-full", USERS),
    ],
)  # fmt: skip
def test_what_nccl_asks_of_the_node_in_vain_accuses_no_node(
    played_python: Path,
    tmp_path: Path,
    variable: str,
    value: str,
    said: str,
    cause: str,
    blame: str,
) -> None:
    python = played_python
    if cause == "shared-memory-full":
        if subprocess.run([*IN_A_NAMESPACE, "true"], check=False, capture_output=True).returncode:
            pytest.skip("there are no user namespaces here")
        python = tmp_path / "python"
        python.write_text(LITTLE_SHARED_MEMORY.format(python=played_python))
        python.chmod(0o755)

    variables, gpus = {variable: value}, described(tmp_path)
    ranks = start_ranks(python, "collectives", count=2, gpus=gpus, variables=variables)
    ends = [rank.ended() for rank in ranks]

    output = "".join(end.output + end.errors for end in ends)
    assert said in output, output
    found = diagnosed_by_output(output, max(end.status for end in ends), ("n1",))
    assert (found.cause, found.attribution, found.accused) == (cause, blame, [])
