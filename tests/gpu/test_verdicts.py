# SPDX-License-Identifier: Apache-2.0
"""What `make gpu` calls wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import chosen_devices, figures_file
from benchmarks.gpu.check_local import Fault
from benchmarks.gpu.figures_file import Figures, Measured
from benchmarks.gpu.gpt_memory import compared
from benchmarks.gpu.group_cycles import drift
from benchmarks.gpu.machine import Device, Facts, Unusable, driver
from benchmarks.gpu.nccl_log import in_log
from benchmarks.gpu.partner_death import wrong_in
from benchmarks.gpu.step import Figure
from slurm_health.preflight.session.gpt_sizing import CONTEXT_BYTES, CPU, TABLE, bytes_needed
from slurm_health.records.verdict import Level, NodeVerdict

FACTS = Facts(
    torch="2.9.0+cu129",
    collective_library="nccl 2.27.5",
    driver="570.86.15",
    runtime="12.9",
    model="NVIDIA H200",
    devices=[Device(name="NVIDIA H200", uuid="4f2a", total_bytes=150_000_000_000)],
    python="3.12.3",
    linux="6.8.0",
)


def verdicts(*levels: str) -> dict[str, NodeVerdict]:
    return {
        f"local{number}": NodeVerdict(node=f"local{number}", level=Level(level), reason="why")
        for number, level in enumerate(levels)
    }


@pytest.mark.parametrize(
    ("levels", "fault", "shared", "is_right"),
    [
        (("healthy", "healthy"), Fault.NONE, False, True),
        (("healthy", "slow"), Fault.NONE, True, True),
        (("healthy", "slow"), Fault.NONE, False, False),
        (("healthy", "faulty"), Fault.NONE, True, False),
        (("inconclusive", "inconclusive"), Fault.KILLED, True, True),
        (("faulty", "inconclusive"), Fault.KILLED, True, False),
        (("healthy", "healthy"), Fault.STOPPED, True, False),
        (("healthy", "faulty", "healthy", "healthy"), Fault.RAISES, True, True),
        (("healthy", "inconclusive", "healthy", "healthy"), Fault.RAISES, True, False),
    ],
)
def test_a_verdict_is_right_if_it_spares_partners_and_names_a_victim_that_can_be_told(
    levels: tuple[str, ...], fault: Fault, shared: bool, is_right: bool
) -> None:
    assert (wrong_in(verdicts(*levels), fault, shared=shared) == "") is is_right


def test_a_batch_that_the_estimate_allows_must_fit() -> None:
    model = TABLE[0]
    fit = {"peak_bytes": bytes_needed(model), "micro_batch": model.batch}

    assert not any(each.wrong for each in compared(model, fit, small=False))
    halved = compared(model, {**fit, "micro_batch": model.batch // 2}, small=False)
    assert [each.name for each in halved if each.wrong] == ["sequences that fit"]


def test_an_allocators_peak_is_compared_with_an_estimate_without_the_drivers_context() -> None:
    fit = {"peak_bytes": bytes_needed(CPU) - CONTEXT_BYTES, "micro_batch": CPU.batch}

    (share,) = [each for each in compared(CPU, fit, small=True) if each.name == "peak / estimate"]

    assert share.value == 1.0


@pytest.mark.parametrize(("each", "wrong"), [(0, False), (1, True)])
def test_a_descriptor_that_every_cycle_leaves_is_a_leak(each: int, wrong: bool) -> None:
    cycles = [{"descriptors": 20.0 + each * number} for number in range(30)]

    assert bool(drift(cycles, "descriptors").wrong) is wrong


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, ["1 accelerators", "2 accelerators", "gloo", "gloo", "here, none of"]),
        (1, ["1 ready with nccl", "torch 2.9.0 can use 1", "gloo", "gloo", "here, 1 of"]),
        (8, ["8 ready with nccl", "2 ready with nccl", "gloo", "gloo", "8 ready"]),
    ],
)
def test_what_workers_must_say_depends_on_how_many_devices_there_are(
    count: int, expected: list[str]
) -> None:
    cases = chosen_devices.cases([f"uuid{number}" for number in range(count)], "2.9.0")

    assert all(part in case.expected for part, case in zip(expected, cases, strict=True))


def test_version_and_transport_are_read_from_the_log_of_nccl() -> None:
    log = (
        "n1:71:71 [0] NCCL INFO cudaDriverVersion 12090\n"
        "NCCL version 2.27.5+cuda12.9\n"
        "n1:71:80 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0\n"
    )

    assert [each.value for each in in_log(log)] == [3, "2.27.5+cuda12.9", "NET/Socket/0"]


def test_the_driver_is_named_by_the_kernel(tmp_path: Path) -> None:
    version = tmp_path / "driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
        "GCC version:  gcc version 12.3.0\n"
    )

    assert driver(tmp_path) == "570.86.15"
    assert driver(tmp_path / "nothing") == ""


# --- the file ------------------------------------------------------------------------------------


def measured(step: str, **rest: object) -> Measured:
    return Measured(section=3, step=step, date="2026-11-22", elapsed_s=1.0, **rest)  # type: ignore[arg-type]


def test_a_later_call_finds_what_was_measured_and_tries_the_rest_again(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    figures = Figures(facts=FACTS)
    figures = figures.with_step(measured("a", figures=[Figure(name="time", value=1.5, unit="s")]))
    figures = figures.with_step(measured("b", not_measured="no answer"))
    figures_file.write(file, figures)

    found = figures_file.read(file, FACTS, small=False)

    assert found == figures
    assert found.of(3, "a") is not None
    assert (found.of(3, "b"), found.why_not(3, "b")) == (None, "no answer")


@pytest.mark.parametrize("text", ["", "[]", '{"steps": 3}'])
def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path, text: str) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(text)

    with pytest.raises(Unusable, match="--output"):
        figures_file.read(file, FACTS, small=False)


def test_figures_of_different_amounts_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    figures_file.write(file, Figures(facts=FACTS, small=True))

    with pytest.raises(Unusable, match="another machine, torch or amount"):
        figures_file.read(file, FACTS, small=False)
