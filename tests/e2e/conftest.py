# SPDX-License-Identifier: Apache-2.0
"""One cluster for the lab tests of a module; every test finds it healthy and empty."""

from collections.abc import Iterator

import pytest

from tests.lab import Lab
from tests.lab.installed_site import Site


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    with Lab.start(nodes=6) as lab:
        yield Site(lab)


@pytest.fixture
def site(module_site: Site) -> Iterator[Site]:
    """The module's cluster; afterwards every fault is cleared and every job cancelled and ended."""
    yield module_site
    module_site.lab.reset()
    module_site.end_leftovers()
