# SPDX-License-Identifier: Apache-2.0
"""A cluster of the lab for the tests beside this file."""

from tests.e2e.conftest import module_site, site

__all__ = ["module_site", "site"]
