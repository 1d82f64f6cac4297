# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own process group over NCCL does on played GPUs what it does on real ones."""

import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from slurm_health.preflight.supervisor.monitor_process import PREFIX, flight_environ
from tests.played_gpu.description import Fault, machine, strike, write
from tests.played_gpu.running import Started, start_ranks

pytestmark = [pytest.mark.played_gpu, pytest.mark.timeout(600)]
# Else the watchdog, before it ends a rank, leaves the others a minute for their dumps.
AT_ONCE = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    write(tmp_path / "gpus", machine(4, seed=str(tmp_path)))
    return tmp_path / "gpus"


@pytest.mark.parametrize(("count", "eager"), [(2, ""), (4, "1")])
def test_collectives_have_the_right_data_and_are_pending_until_the_peers_come(
    played_python: Path, gpus: Path, count: int, eager: str
) -> None:
    started = start_ranks(
        played_python, "collectives", count=count, gpus=gpus, variables={"EAGER": eager}
    )
    for ended in [each.ended() for each in started]:
        assert ended.status == 0, ended.errors
        assert ended.output.splitlines() == [
            "is_success NotImplementedError WorkNCCL::isSuccess() is deprecated",
            "done",
        ]


def missing_peer(
    python: Path, gpus: Path, does: str, variables: Mapping[str, str]
) -> tuple[Started, Started]:
    first, second = start_ranks(
        python, "missing_peer", [does], count=2, gpus=gpus, variables={**AT_ONCE, **variables}
    )
    return first, second


def test_the_watchdog_ends_a_rank_whose_peer_does_not_come_and_leaves_dumps(
    played_python: Path, gpus: Path, tmp_path: Path
) -> None:
    """With the variables of a job's script: torch warns of none, and dumps where they say."""
    asked = [
        str(played_python),
        "-c",
        "from importlib.metadata import version; print(version('torch'))",
    ]
    torch = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    variables = flight_environ({}, str(tmp_path), torch)
    waits, absent = missing_peer(played_python, gpus, "waits", variables)
    with absent.process:
        ended = waits.ended()
        absent.process.kill()
    assert ended.status == -signal.SIGABRT, ended.errors
    assert "Watchdog caught collective operation timeout" in ended.errors
    assert ended.output == "pending True\n"
    assert (tmp_path / f"{PREFIX}0").stat().st_size > 0
    assert "deprecated" not in ended.errors


@pytest.mark.slow
def test_ranks_that_call_different_collectives_wait_until_the_watchdog_ends_them(
    played_python: Path, gpus: Path
) -> None:
    started = start_ranks(
        played_python, "mismatch", ["operation"], count=2, gpus=gpus, variables=AT_ONCE
    )
    for ended in [each.ended() for each in started]:
        assert ended.status == -signal.SIGABRT, ended.errors
        assert "Watchdog caught collective operation timeout" in ended.errors
        assert ended.output == ""


@pytest.mark.slow
def test_of_two_sizes_the_greater_waits_and_the_smaller_goes_on_with_wrong_data(
    played_python: Path, gpus: Path
) -> None:
    greater, smaller = start_ranks(
        played_python, "mismatch", ["size"], count=2, gpus=gpus, variables=AT_ONCE
    )
    ended = greater.ended()
    assert "Watchdog caught collective operation timeout" in ended.errors
    assert ended.output == ""
    smaller.process.kill()
    assert smaller.ended().output == "went on\n"


def test_an_abort_ends_what_is_pending(played_python: Path, gpus: Path) -> None:
    waits, absent = missing_peer(played_python, gpus, "abort", {"LIMIT_S": "100"})
    with absent.process:
        ended = waits.ended()
        absent.process.kill()
    assert ended.status == 0, ended.errors
    # Completed is not "it worked".
    assert ended.output == "pending True\naborted True\n"


@pytest.mark.slow
def test_a_peer_that_is_gone_is_a_remote_error(played_python: Path, gpus: Path) -> None:
    survivor, gone = missing_peer(played_python, gpus, "gone", {"LIMIT_S": "100"})
    assert gone.ended().status == 3
    ended = survivor.ended()
    assert ended.status == -signal.SIGABRT, ended.errors
    assert "remote process exited or there was a network error" in ended.errors


@pytest.mark.slow
def test_ranks_with_different_releases_of_nccl_refuse_each_other(
    played_python: Path, gpus: Path
) -> None:
    strike(gpus, Fault(device=1, kind="nccl_version", value=22703))
    for ended in [e.ended() for e in start_ranks(played_python, "collectives", count=2, gpus=gpus)]:
        assert ended.status == 1
        assert "Mismatched NCCL version" in ended.errors
