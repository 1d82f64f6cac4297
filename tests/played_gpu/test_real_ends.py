# SPDX-License-Identifier: Apache-2.0
"""What is said of real processes that end by an error of their device, or by a mistake on it."""

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_health.records.script_records import Diagnosed
from tests.played_gpu.description import Device, Fault, machine, write
from tests.played_gpu.running import Ended, run, start_ranks
from tests.support.ended_jobs import diagnosed_by_output
from tests.support.rows import rows

pytestmark = [pytest.mark.played_gpu, pytest.mark.timeout(600)]
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


class Changes(msgspec.Struct):
    """What a node's devices, and its driver, are otherwise."""

    faults: tuple[Fault, ...] = ()
    driver_version: int = 13000
    no_devices: bool = False


@pytest.mark.slow
@rows
def test_how_a_program_on_a_device_ended_is_told_by_what_it_said(
    played_python: Path,
    tmp_path: Path,
    changes: Changes,
    words: tuple[str, str],
    said: str,
    cause: str,
    blame: str,
) -> None:
    node = {"faults": changes.faults, "driver_version": changes.driver_version}
    node |= {"devices": ()} if changes.no_devices else {}
    ended = run(played_python, "mistakes", words, gpus=described(tmp_path, **node))

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
@rows
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
