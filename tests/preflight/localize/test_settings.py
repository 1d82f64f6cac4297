# SPDX-License-Identifier: Apache-2.0
"""What users may set, as text and as numbers, and what wrong values answer."""

import re
from typing import Any

import pytest

from slurm_health.preflight.localize.settings import DeviceKind, LocalizeSettings, settings_from
from slurm_health.records.errors import LocalizeError
from tests.support.rows import rows


@rows
def test_settings_that_no_run_can_honour_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(LocalizeError):
        LocalizeSettings(**settings)


@rows
def test_a_wrong_choice_is_refused_by_name_with_what_is_allowed(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*{re.escape(allowed)}") as refused:
        settings_from({name: value}, kind=DeviceKind.CPU)
    assert repr(value) in str(refused.value) or name == "floor"
