# SPDX-License-Identifier: Apache-2.0
"""The sampler as the agent runs it, against a played NVML that is found as the real one is."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.preflight.agent.gpu_monitor import command
from slurm_health.records.gpu_load import (
    HARDWARE_THERMAL,
    DeviceSample,
    NotSampled,
    decode,
    summarise,
    words,
)
from tests.played_gpu import nvml_library
from tests.played_gpu.description import VARIABLE, Fault, machine, with_faults, write
from tests.support.rows import rows

DEADLINE_S = 60


class Sampler:
    """A running sampler and its GPUs."""

    def __init__(self, library: Path, state: Path) -> None:
        self._state = state
        self._environ = {
            **os.environ,
            "LD_LIBRARY_PATH": str(library.parent),
            VARIABLE: str(state),
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def play(self, count: int, *faults: Fault, nvml_start: int = 0) -> None:
        """Change what the GPUs say from now on, at once."""
        played = with_faults(machine(count), *faults)
        write(self._state, dataclasses.replace(played, nvml_start=nvml_start))

    def start(self, *argv: str) -> None:
        process = subprocess.Popen(
            argv or command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environ,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self.input, self.output = process.stdin, process.stdout
        self.started.append(process)

    def sample(self) -> DeviceSample:
        said = decode(self.output.readline())
        assert isinstance(said, DeviceSample), said
        return said

    def sample_until(self, **wanted: object) -> list[DeviceSample]:
        """Return all samples up to the first that says what is wanted."""
        samples = [self.sample()]
        while any(getattr(samples[-1], name) != value for name, value in wanted.items()):
            samples.append(self.sample())
        return samples

    def wait(self) -> int:
        return self.started[0].wait(DEADLINE_S)

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            self.output.close()
            self.input.close()


def fault(device: int, kind: str, value: float = 1) -> Fault:
    return Fault(device=device, kind=kind, value=value)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_library.built(tmp_path_factory)


@pytest.fixture
def sampler(library: Path, tmp_path: Path) -> Iterator[Sampler]:
    running = Sampler(library, tmp_path / "state")
    yield running
    running.end()


def test_each_gpu_is_sampled_again_and_again(sampler: Sampler) -> None:
    sampler.play(
        2,
        fault(1, "clock_reasons", 4),
        fault(1, "clock_mhz", 1410),
        fault(1, "temperature_c", 89),
        fault(1, "power_w", 700),
        fault(1, "remapped_rows", 2),
    )
    sampler.start()

    samples = [sampler.sample() for _ in range(6)]

    assert [each.index for each in samples] == [0, 1] * 3
    assert samples[4].at_s > samples[0].at_s
    assert samples[1] == DeviceSample(
        at_s=samples[1].at_s,
        index=1,
        uuid=machine(2).devices[1].uuid,
        bus="00000000:21:00.0",
        clock_mhz=1410,
        reasons=4,
        temperature_c=89,
        power_w=700.0,
        uncorrected=0,
        remapped_rows=2,
        remap_pending=False,
        remap_failed=False,
    )


def test_what_a_gpu_does_not_tell_is_left_out(sampler: Sampler) -> None:
    sampler.play(1, *(fault(0, key, -1) for key in ("clock_mhz", "temperature_c", "power_w")))
    sampler.start()

    silent = sampler.sample()

    assert (silent.clock_mhz, silent.temperature_c, silent.power_w) == (None, None, None)
    assert silent.retired_pages is None


def test_a_gpu_that_gets_hot_is_named_with_what_it_did(sampler: Sampler) -> None:
    cool = (fault(0, "clock_reasons", 0), fault(0, "clock_mhz", 1980))
    sampler.play(1, *cool, fault(0, "retired_pages", 1))
    sampler.start()
    samples = [sampler.sample() for _ in range(2)]
    hot = (fault(0, "clock_reasons", 0x48), fault(0, "clock_mhz", 1410))
    sampler.play(1, *hot, fault(0, "temperature_c", 89), fault(0, "retired_pages", 2))
    samples += sampler.sample_until(clock_mhz=1410, retired_pages=2)
    samples += sampler.sample_until(reasons=HARDWARE_THERMAL | 0x8)
    samples += [sampler.sample() for _ in range(2)]

    (burn,) = summarise(samples)

    name = f"GPU 0 ({machine(1).devices[0].uuid})"
    assert words(burn) == [
        f"{name}: hardware thermal slowdown during the burn, clock 1,980 -> 1,410 MHz, 89 C",
        f"{name}: 1 memory page retired during the burn",
    ]


def test_a_gpu_that_is_lost_is_told_and_the_others_are_sampled_on(sampler: Sampler) -> None:
    sampler.play(2)
    sampler.start()
    sampler.sample()
    sampler.play(2, fault(0, "off_bus"))
    samples = sampler.sample_until(index=0, lost="GPU is lost")

    assert sampler.sample().clock_mhz == 345
    assert "lost during the burn" in words(summarise(samples)[0])[0]


def test_a_gpu_that_answers_with_errors_is_told_and_not_called_well(sampler: Sampler) -> None:
    sampler.play(2, fault(0, "nvml_error", 999))
    sampler.start()
    samples = [sampler.sample() for _ in range(4)]

    sick, well = summarise(samples)

    assert words(well) == []
    assert words(sick) == [
        "GPU 0: could not be asked during the burn: Unknown Error (10 of 11 questions)"
    ]


def test_a_gpu_of_another_job_is_left_out(sampler: Sampler) -> None:
    sampler.play(2, fault(0, "no_handle", 4))  # no permission
    sampler.start()

    assert [sampler.sample().index for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("how", ["input closed", "told to", "output closed"])
def test_it_ends_with_0_when_nobody_needs_it_any_more(sampler: Sampler, how: str) -> None:
    sampler.play(1)
    sampler.start()
    sampler.sample()
    if how == "input closed":
        sampler.input.close()
    elif how == "told to":
        sampler.started[0].send_signal(signal.SIGTERM)
    else:
        sampler.output.close()

    assert sampler.wait() == 0


@rows
def test_where_it_cannot_sample_its_only_line_says_why(
    sampler: Sampler, code: int, why: str
) -> None:
    sampler.play(1 if code else 0, nvml_start=code)
    sampler.start()

    only = decode(sampler.output.read())
    assert isinstance(only, NotSampled)
    assert why in only.not_sampled
    assert sampler.wait() == 0


def test_without_the_binding_it_says_what_to_install(sampler: Sampler) -> None:
    code = (
        "import sys; sys.modules['pynvml'] = None\n"
        "from slurm_health.preflight.agent.gpu_monitor import main; sys.exit(main())"
    )
    sampler.start(sys.executable, "-c", code)

    assert decode(sampler.output.read()) == NotSampled(
        not_sampled="nvidia-ml-py is not installed (the extra gpu)"
    )
    assert sampler.wait() == 0
