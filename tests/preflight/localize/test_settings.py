# SPDX-License-Identifier: Apache-2.0
"""What users may set, as text and as numbers, and what wrong values answer."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slurm_health.preflight.localize.settings import (
    USUAL,
    DeviceKind,
    LocalizeSettings,
    settings_from,
)
from slurm_health.records.errors import LocalizeError
from tests.cases import cases


@cases("preflight/settings.toml")
def test_settings_that_no_run_can_honour_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(LocalizeError):
        LocalizeSettings(**settings)


@pytest.mark.parametrize("kind", list(DeviceKind))
def test_the_floors_are_those_of_the_device_unless_they_are_chosen(kind: DeviceKind) -> None:
    usual = settings_from({}, kind=kind)
    chosen = settings_from({"network_floor": 0.2}, kind=kind)

    known = USUAL[kind]
    assert (usual.network_floor, usual.compute_floor) == (known.network_floor, known.compute_floor)
    assert (chosen.network_floor, chosen.compute_floor) == (0.2, known.compute_floor)
    assert usual.noise == chosen.noise == known.noise


@cases("preflight/settings.toml")
def test_a_wrong_choice_is_refused_by_name_with_what_is_allowed(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*{re.escape(allowed)}") as refused:
        settings_from({name: value}, kind=DeviceKind.CPU)
    assert repr(value) in str(refused.value) or name == "floor"
