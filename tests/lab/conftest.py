# SPDX-License-Identifier: Apache-2.0
"""One lab for the tests of a module; every test finds it healthy and empty."""

from collections.abc import Iterator

import pytest

from . import Lab


@pytest.fixture(scope="module")
def module_lab() -> Iterator[Lab]:
    with Lab.start(nodes=3) as lab:
        yield lab


@pytest.fixture
def lab(module_lab: Lab) -> Iterator[Lab]:
    """The module's lab; afterwards every fault is cleared and every job cancelled."""
    yield module_lab
    module_lab.reset()
