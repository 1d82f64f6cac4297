# SPDX-License-Identifier: Apache-2.0
"""The sampler as the agent runs it, against a stub of NVML that is found as the real one is."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from slurm_health.agent.gpu_monitor import command
from slurm_health.core.gpu_load import (
    HARDWARE_THERMAL,
    DeviceSample,
    NotSampled,
    decode,
    summarise,
    words,
)
from tests.checks.test_gpu import build_stub

DEADLINE_S = 60


class Sampler:
    """A running sampler and the stub's GPUs."""

    def __init__(self, library: Path, state: Path) -> None:
        self._state = state
        self._environ = {
            **os.environ,
            "LD_LIBRARY_PATH": str(library.parent),
            "STUB_NVML": str(state),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def play(self, *lines: str) -> None:
        """Change what the GPUs say from now on, at once."""
        fresh = self._state.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in lines))
        fresh.replace(self._state)

    def start(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            argv or command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environ,
        )

    @property
    def output(self) -> IO[bytes]:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout

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

    def close_input(self) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.output.close()
            self.close_input()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None or importlib.util.find_spec("pynvml") is None:
        pytest.skip("needs gcc and nvidia-ml-py")
    return build_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def sampler(library: Path, tmp_path: Path) -> Iterator[Sampler]:
    running = Sampler(library, tmp_path / "state")
    yield running
    running.end()


def test_each_gpu_is_sampled_again_and_again(sampler: Sampler) -> None:
    sampler.play("count=2", "reasons=4", "1.clock=1410", "1.temperature=89", "remapped=2")
    sampler.start()

    samples = [sampler.sample() for _ in range(6)]

    assert [each.index for each in samples] == [0, 1] * 3
    assert samples[4].at_s > samples[0].at_s
    assert samples[1] == DeviceSample(
        at_s=samples[1].at_s,
        index=1,
        uuid="GPU-1",
        bus="00000000:02:00.0",
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
    sampler.play("count=1", *(f"{key}=-1" for key in ("clock", "temperature", "milliwatts")))
    sampler.start()

    silent = sampler.sample()

    assert (silent.clock_mhz, silent.temperature_c, silent.power_w) == (None, None, None)
    assert silent.retired_pages is None


def test_a_gpu_that_gets_hot_is_named_with_what_it_did(sampler: Sampler) -> None:
    sampler.play("count=1", "reasons=0", "retired=1")
    sampler.start()
    samples = [sampler.sample() for _ in range(2)]
    sampler.play("count=1", "reasons=0x48", "clock=1410", "temperature=89", "retired=2")
    samples += sampler.sample_until(clock_mhz=1410, retired_pages=2)
    samples += sampler.sample_until(reasons=HARDWARE_THERMAL | 0x8)
    samples += [sampler.sample() for _ in range(2)]

    (burn,) = summarise(samples)

    assert words(burn) == [
        "GPU 0 (GPU-0): hardware thermal slowdown during the burn, clock 1,980 -> 1,410 MHz, 89 C",
        "GPU 0 (GPU-0): 1 memory page retired during the burn",
    ]


def test_a_gpu_that_is_lost_is_told_and_the_others_are_sampled_on(sampler: Sampler) -> None:
    sampler.play("count=2")
    sampler.start()
    sampler.sample()
    sampler.play("count=2", "0.error=15")
    samples = sampler.sample_until(index=0, lost="GPU is lost")

    assert sampler.sample().clock_mhz == 1980
    assert "lost during the burn" in words(summarise(samples)[0])[0]


def test_a_gpu_without_a_handle_is_told(sampler: Sampler) -> None:
    sampler.play("count=1", "0.handle=999")
    sampler.start()

    assert sampler.sample().lost == "NVML gives no handle to it"


def test_it_ends_with_0_when_its_input_is_closed(sampler: Sampler) -> None:
    sampler.play("count=1")
    sampler.start()
    sampler.sample()
    sampler.close_input()

    assert sampler.wait() == 0


def test_it_ends_with_0_when_it_is_told_to(sampler: Sampler) -> None:
    sampler.play("count=1")
    sampler.start()
    sampler.sample()
    assert sampler.process is not None
    sampler.process.send_signal(signal.SIGTERM)

    assert sampler.wait() == 0


def test_it_ends_with_0_when_nobody_reads_any_more(sampler: Sampler) -> None:
    sampler.play("count=1")
    sampler.start()
    sampler.sample()
    sampler.output.close()

    assert sampler.wait() == 0


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("init=9", "the NVIDIA driver is not loaded"),
        ("init=18", "the NVIDIA driver and its library are of different versions"),
        ("init=999", "NVML does not start"),
        ("count=0", "NVML sees no GPU here"),
    ],
)
def test_where_it_cannot_sample_its_only_line_says_why(
    sampler: Sampler, line: str, why: str
) -> None:
    sampler.play(line)
    sampler.start()

    only = decode(sampler.output.read())
    assert isinstance(only, NotSampled)
    assert why in only.not_sampled
    assert sampler.wait() == 0


def test_without_the_binding_it_says_what_to_install(sampler: Sampler) -> None:
    code = (
        "import sys; sys.modules['pynvml'] = None\n"
        "from slurm_health.agent.gpu_monitor import main; sys.exit(main())"
    )
    sampler.start(sys.executable, "-c", code)

    assert decode(sampler.output.read()) == NotSampled(
        not_sampled="nvidia-ml-py is not installed (the extra gpu)"
    )
    assert sampler.wait() == 0


def test_it_loads_neither_torch_nor_the_command_line() -> None:
    code = "import sys, slurm_health.agent.gpu_monitor; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()

    assert not {"torch", "numpy", "click", "pynvml"} & set(loaded)
