# SPDX-License-Identifier: Apache-2.0
"""What a site has installed beside slurm-health is asked in a job that fails."""

from __future__ import annotations

import site as python_site
import sys
import venv
from pathlib import Path

import pytest

import slurm_health
from tests.lab.installed_site import Site
from tests.lab.played_nodes import FAKE_WORKER, play
from tests.training.test_framework import EXAMPLE, PAGE, points_of

pytestmark = [pytest.mark.lab, pytest.mark.timeout(200)]

PACKAGE = Path(slurm_health.__file__).parents[1]


def installed(site: Site) -> Path:
    """Install slurm-health and the page's example into an environment of alice's; its Python."""
    page = PAGE.read_text()
    shown = EXAMPLE.search(page)
    assert shown is not None
    home = Path(site.directory("own-env"))
    venv.create(home, with_pip=False)
    packages = next((home / "lib").glob("python*/site-packages"))
    beside = [*python_site.getsitepackages(), str(PACKAGE)]
    (packages / "beside.pth").write_text("".join(f"{each}\n" for each in beside))
    (packages / "hot_room.py").write_text(shown[1])
    metadata = packages / "hot_room-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hot-room\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(points_of(page))
    return home / "bin" / Path(sys.executable).name


@pytest.mark.heavy
def test_the_collector_and_the_operator_of_an_installed_package_are_in_the_post_mortem_of_a_job(
    site: Site,
) -> None:
    python = installed(site)
    sensor = Path(site.script("sensor", "45\n"))
    play(site)
    told = {"FAKE_WORKER_DIR": site.directory("played"), "ROOM_SENSOR": str(sensor)}
    words = ["--parsable", "-N2", f"--python={FAKE_WORKER}", "--output=out-%j.txt"]
    sbatch = [str(python), "-m", "slurm_health", "sbatch", *words, "--wrap=exit 3"]
    number = int(site.lab.run(sbatch, user="alice", env=told).stdout)

    assert site.ended(number)["ExitCode"] == "3:0"
    (run,) = site.report(number)["runs"]
    found = run["post_mortem"]
    assert (found["cause"], found["description"]) == ("hot-room", "the room is too hot")
    assert found["evidence"] == ["45 degrees"]
    assert "look at the cooling" in site.read(f"out-{number}.txt")
    site.assert_nothing_left()
