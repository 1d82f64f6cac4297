# SPDX-License-Identifier: Apache-2.0
"""A device that fails when it is opened, as far as one can be had: at the border to torch."""

import pytest
import torch

from slurm_health.preflight.probes.context import Unusable
from slurm_health.preflight.probes.torch_device import claim
from tests.support.rows import rows


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


@rows
def test_a_device_that_fails_is_told_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
    count: int,
    says: str,
    starts: str,
    given: str,
    words: str,
) -> None:
    Driver(monkeypatch, count=count, says=says, starts=starts)

    with pytest.raises(
        Unusable if fails else SystemExit, match=words.format(torch.__version__.replace("+", r"\+"))
    ):
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
