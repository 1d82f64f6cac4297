# SPDX-License-Identifier: Apache-2.0
"""Which packages each kind of lab asks for; needs root and no Slurm."""

from pathlib import Path

import pytest

from .requirements import missing

BASE = ("slurmctld", "slurmd", "scontrol", "munged", "ip", "tc", "iptables")


@pytest.mark.root
@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ({}, ""),
        ({"accounting": True}, "mariadb-server-core slurmdbd"),
        ({"network_filesystem": True}, "glusterfs-client"),
    ],
    ids=["plain", "accounting", "network filesystem"],
)
def test_a_lab_asks_for_no_package_of_another_kind_of_lab(
    tmp_path: Path, kind: dict[str, bool], asked: str
) -> None:
    for name in BASE:
        (tmp_path / name).touch(mode=0o755)
    found = missing(**kind, path=str(tmp_path))
    assert (found or "").removesuffix(" (python -m tests.lab install)") == (
        f"missing packages: {asked}" if asked else ""
    )
