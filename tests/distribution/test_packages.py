# SPDX-License-Identifier: Apache-2.0
"""What a package says of itself."""

from __future__ import annotations

from distribution.packages import maintainer


def test_a_deb_names_whoever_builds_it_as_its_maintainer() -> None:
    built = {"DEBFULLNAME": "The HPC team", "DEBEMAIL": "hpc@example.org"}

    assert maintainer(built) == "The HPC team <hpc@example.org>"
    assert maintainer({}) == "whoever built it <root@localhost>"
