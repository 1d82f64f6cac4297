# SPDX-License-Identifier: Apache-2.0
"""A device that fails when it is opened, as far as one can be had: at the border to torch."""

from __future__ import annotations

import pytest
import torch

from slurm_health.preflight.probes.context import Unusable
from slurm_health.preflight.probes.torch_device import claim
from tests.support.rows import rows

ECC = "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronous"
BUSY = "CUDA error: all CUDA-capable devices are busy or unavailable"
NO_IMAGE = "CUDA error: no kernel image is available for execution"


class Driver:
    """What torch's CUDA interface does here: how many devices it has, and what it says of them."""

    def __init__(
        self, patch: pytest.MonkeyPatch, *, count: int, says: str, starts: str, name: str = ""
    ) -> None:
        self._says, self._starts = says, starts
        patch.setattr(torch.cuda, "get_device_name", lambda _: name)
        patch.setattr(torch.version, "cuda", "12.6")
        patch.setattr(torch.cuda, "init", self._init)
        patch.setattr(torch.cuda, "device_count", lambda: count)
        patch.setattr(torch.cuda, "set_device", self._open)

    def _init(self) -> None:
        if self._starts:
            raise RuntimeError(self._starts)

    def _open(self, _device: int) -> None:
        if self._says:
            raise RuntimeError(self._says)


@pytest.mark.parametrize(
    ("error", "count", "says", "starts", "given", "words"),
    [
        (Unusable, 8, ECC, "", "8", "device 1: CUDA error: uncorrectable ECC error encountered"),
        (Unusable, 8, "", "CUDA unknown error", "8", "device 1: CUDA unknown error"),
        (Unusable, 7, "", "", "8", "Slurm gave the job 8 accelerators here, torch {} can use 7"),
        (
            Unusable,
            8,
            "CUDA error: invalid device ordinal",
            "",
            "8",
            "Slurm gave the job 8 .* can use 1",
        ),
        (
            Unusable,
            8,
            "",
            "No CUDA GPUs are available",
            "8",
            "Slurm gave the job 8 .* can use none",
        ),
        # What may be the job's doing is no failure of a device.
        (SystemExit, 4, "", "", "4", "8 accelerators were expected, but torch .* can use 4"),
        (SystemExit, 7, "", "", "", "8 accelerators were expected, but torch .* can use 7"),
        (SystemExit, 8, "CUDA out of memory. Tried to allocate 2 MiB", "", "8", "out of memory"),
        (SystemExit, 8, BUSY, "", "8", "busy"),
        (SystemExit, 8, "", "The NVIDIA driver on your system is too old", "8", "too old"),
        (SystemExit, 8, NO_IMAGE, "", "8", "no kernel image"),
    ],
)
def test_a_device_that_fails_is_told_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    count: int,
    says: str,
    starts: str,
    given: str,
    words: str,
) -> None:
    Driver(monkeypatch, count=count, says=says, starts=starts)

    with pytest.raises(error, match=words.format(torch.__version__.replace("+", r"\+"))):
        claim(1, expected=8, environ={"SLURM_GPUS_ON_NODE": given})


@rows
def test_parts_of_gpus_are_not_measured_as_if_they_were_gpus(
    monkeypatch: pytest.MonkeyPatch, name: str, environ: dict[str, str], devices: int
) -> None:
    Driver(monkeypatch, count=1, says="", starts="", name=name)

    with pytest.raises(SystemExit, match="parts of GPUs"):
        claim(devices - 1, expected=devices, environ=environ)


def test_a_torch_for_cpus_is_no_failure_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)

    with pytest.raises(SystemExit, match=r"torch .* was built for CPUs"):
        claim(1, expected=8, environ={"SLURM_GPUS_ON_NODE": "8"})
