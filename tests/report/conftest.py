# SPDX-License-Identifier: Apache-2.0
"""Reports tell times as the clock on the wall shows them: here it shows UTC."""

import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def clock_on_the_wall(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as here:
        here.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()
