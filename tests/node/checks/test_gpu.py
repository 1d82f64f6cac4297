# SPDX-License-Identifier: Apache-2.0
"""GPUs through NVML: a played library has those that are broken."""

import ctypes
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_health.node.checks.check import Check, CheckContext
from slurm_health.node.checks.gpu import Gpu, GpuProcesses
from slurm_health.node.rules.finding import CheckResult, Finding, Status
from slurm_health.node.run import run_checks
from slurm_health.system.nvml import GpuDevice, Gpus
from tests.node.checks.conftest import planned
from tests.played_gpu import nvml_library
from tests.played_gpu.description import VARIABLE, Fault, Machine, machine, with_faults, write
from tests.support.rows import rows


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_library.built(tmp_path_factory)


class Player(Check, frozen=True, kw_only=True):
    """A check with the played NVML loaded and told what to play, in the check's own child."""

    check: Check
    library: str
    state: str

    def measure(self, machine: CheckContext) -> Finding:
        os.environ[VARIABLE] = self.state
        ctypes.CDLL(self.library)  # from now on the library of that name
        return self.check.measure(machine)


class Bench:
    def __init__(self, library: Path, directory: Path) -> None:
        self.library = library
        self.state = directory / "state"
        self.environ: dict[str, str] = {}
        self.context = "healthcheck"

    def play(
        self, check: Check, *faults: Fault, limit_s: float = 10, count: int = 8
    ) -> CheckResult:
        return self.play_on(with_faults(machine(count), *faults), check, limit_s=limit_s)

    def play_on(self, played: Machine, check: Check, *, limit_s: float = 10) -> CheckResult:
        write(self.state, played)

        player = Player(check=check, library=str(self.library), state=str(self.state))
        node = CheckContext(environ=self.environ, context=self.context)
        (result,) = run_checks([planned(player, "gpu", limit_s)], node)
        return result


@pytest.fixture
def bench(library: Path, tmp_path: Path) -> Bench:
    return Bench(library, tmp_path)


def fault(device: int, kind: str, value: float = 1) -> Fault:
    return Fault(device=device, kind=kind, value=value)


def everywhere(kind: str, value: float, count: int = 8) -> tuple[Fault, ...]:
    return tuple(fault(device, kind, value) for device in range(count))


def every(rows: list[Fault], count: int = 8) -> list[Fault]:
    """Return the faults; one of device -1 is of every GPU."""
    return [
        one
        for row in rows
        for one in (everywhere(row.kind, row.value, count) if row.device < 0 else [row])
    ]


@rows
def test_a_gpu_is_judged_by_its_fault_and_no_other_is_named(
    bench: Bench, count: int, faults: list[Fault], status: Status | None, text: str
) -> None:
    played = every(faults, count or 8)
    check = Gpu(count=count or 8, nvlinks=18, min_pcie_generation=5)
    result = bench.play(check, *played, count=count or 8)
    # Links that are down soon after a boot are a warning.
    assert result.status in ({status} if status else {Status.NODE_FAULT, Status.WARN}), result
    assert text in result.finding.text
    named = {int(number) for number in re.findall(r"GPU (\d+)\b", result.finding.text)}
    assert named <= {each.device for each in played}, "an innocent one"
    assert status is not Status.NODE_FAULT or count or named == {each.device for each in played}


@pytest.mark.parametrize(
    ("is_settled", "status"), [(False, Status.WARN), (True, Status.NODE_FAULT)]
)
def test_links_down_soon_after_a_boot_may_still_train(is_settled: bool, status: Status) -> None:
    device = GpuDevice(index=0, bus="00000000:18:00.0", links_active=16, links_down=(0, 1))
    finding = Gpu(nvlinks=18).judge(Gpus(driver="1", devices=(device,)), is_settled=is_settled)
    assert finding.status is status
    assert finding.text.startswith("GPU 0 has 16 of 18 NVLinks (down: 0, 1) (0000:18:00)")


@rows
def test_nvml_that_does_not_start_is_inconclusive(
    bench: Bench, code: int, status: Status, text: str
) -> None:
    """Unless it says that the driver is not there, or does not fit."""
    result = bench.play_on(dataclasses.replace(machine(8), nvml_start=code), Gpu(count=8))
    assert result.status is status, result
    assert text in result.finding.text


@rows
def test_what_a_gpu_does_not_tell_is_not_held_against_it(bench: Bench, faults: list[Fault]) -> None:
    result = bench.play(Gpu(count=8, min_pcie_generation=5), *every(faults))
    assert result.status is Status.PASS, result


@pytest.mark.parametrize("bit", [0x8, 0x40, 0x80, 0x20])
def test_throttling_warns_unless_the_site_says_more(bench: Bench, bit: int) -> None:
    slowed = fault(4, "clock_reasons", bit)
    assert bench.play(Gpu(), slowed).status is Status.WARN
    assert bench.play(Gpu(throttling="ignore"), slowed).status is Status.PASS


def test_a_hung_driver_is_inconclusive_after_its_limit(bench: Bench) -> None:
    played = dataclasses.replace(machine(8), nvml_start=-1)
    result = bench.play_on(played, Gpu(count=8), limit_s=0.5)
    assert result.hung
    assert result.status is Status.INCONCLUSIVE


def test_slurms_count_is_enough_where_the_site_names_none(bench: Bench) -> None:
    bench.environ = {"SLURM_JOB_GPUS": "0,7"}
    assert bench.play(Gpu()).status is Status.PASS
    assert bench.play(Gpu(), count=7).status is Status.NODE_FAULT
    result = bench.play(Gpu(count=8), count=7)
    assert result.status is Status.NODE_FAULT, result
    assert result.finding.text == "7 GPUs, Slurm expects 8"


def test_a_retest_that_knows_no_count_finds_faults_and_proves_nothing_else(bench: Bench) -> None:
    """The GPU that was lost may have left the bus, and those that remain are well."""
    assert bench.play(Gpu(), count=7).status is Status.PASS
    bench.context = "retest"
    result = bench.play(Gpu(), count=7)
    assert result.status is Status.INCONCLUSIVE
    assert result.finding.text == "7 GPUs, and the expected number is unknown: set count"
    assert bench.play(Gpu(), fault(4, "remap_failed")).status is Status.NODE_FAULT
    assert bench.play(Gpu(count=8)).status is Status.PASS
    assert bench.play(Gpu(), *everywhere("mig_mode", 1)).status is Status.PASS
    bench.environ = {"SLURM_JOB_GPUS": "0,7"}
    assert bench.play(Gpu()).status is Status.PASS


PROCESS_ON_5 = fault(5, "occupied_by", 4711)


def test_slurms_numbers_do_not_count_gpus_that_are_divided(bench: Bench) -> None:
    """With MIG they number instances: 13 is a half of the second GPU, and 5 a part of the first."""
    bench.environ = {"SLURM_JOB_GPUS": "5,13"}
    assert bench.play(Gpu(), count=2).status is Status.NODE_FAULT
    assert bench.play(Gpu(), fault(0, "mig_mode"), count=2).status is Status.PASS
    assert (
        bench.play(Gpu(count=3), *everywhere("mig_mode", 1, 2), count=2).status is Status.NODE_FAULT
    )
    assert bench.play(Gpu(), *everywhere("mig_mode", -1)).status is Status.NODE_FAULT
    processes = bench.play(GpuProcesses(), *everywhere("mig_mode", 1), PROCESS_ON_5)
    assert processes.status is Status.NOT_APPLICABLE
    assert "divided (MIG)" in processes.finding.text


def test_a_process_on_the_jobs_gpu_is_the_users_fault_and_on_another_nobodys(bench: Bench) -> None:
    bench.environ = {"SLURM_JOB_GPUS": "2,3"}
    result = bench.play(GpuProcesses(), fault(3, "occupied_by", 4711))
    assert result.status is Status.USER_FAULT
    assert "GPU 3 is in use by PID 4711" in result.finding.text
    assert bench.play(GpuProcesses(), PROCESS_ON_5).status is Status.PASS


@pytest.mark.parametrize("error", [fault(2, "nvml_error", 999), fault(2, "off_bus")])
def test_a_gpu_that_hides_its_processes_is_not_called_free(bench: Bench, error: Fault) -> None:
    bench.environ = {"SLURM_JOB_GPUS": "2,3"}
    result = bench.play(GpuProcesses(), error)
    assert result.status is Status.INCONCLUSIVE, result
    assert "GPU 2" in result.finding.text
    bench.environ = {"SLURM_JOB_GPUS": "4,5"}
    assert bench.play(GpuProcesses(), error).status is Status.PASS


def test_without_the_binding_the_checks_can_be_configured_and_say_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['pynvml'] = None\n"
        "from slurm_health.node.checks.gpu import Gpu\n"
        "from slurm_health.node.checks.check import CheckContext, Unmeasured\n"
        "try: Gpu(count=8).measure(CheckContext())\n"
        "except Unmeasured as err: print(err)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "nvidia-ml-py is not installed" in ran.stdout
