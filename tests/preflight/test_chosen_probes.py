# SPDX-License-Identifier: Apache-2.0

import sys
from pathlib import Path

import pytest

from slurm_health.preflight.chosen_probes import chosen_phases, spelled_out, what_to_check
from slurm_health.records.errors import ConfigError
from slurm_health.records.probe_catalog import Scope
from tests.support.rows import rows
from tests.support.supervised import write_executable


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of somebody else's that brings a probe, as pip would have installed it."""
    package = tmp_path / "site"
    metadata = package / "their_probes-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-probes\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[slurm_health.probes.rail]\nfabric = their_fabric_probe\n"
        "[slurm_health.probes.solo]\ngone = no_such_module_at_all\n"
    )
    probe = package / "their_fabric_probe.py"
    probe.write_text("raise AssertionError('loaded where torch may be missing')\n")
    monkeypatch.setattr(sys, "path", [str(package), *sys.path])
    return probe


def test_a_probe_of_another_package_is_found_and_not_loaded_and_one_without_a_module_is_named(
    installed: Path,
) -> None:
    (phase,) = chosen_phases("fabric")
    (probe,) = phase.probes

    assert (probe.name, probe.scope, probe.path) == ("fabric", Scope.RAIL, str(installed))
    with pytest.raises(ConfigError, match="gone: no_such_module_at_all is not a module"):
        chosen_phases("gone")


def test_a_program_is_a_probe_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = write_executable(tmp_path / "my check.sh", "#!/bin/sh\n")
    monkeypatch.chdir(tmp_path)

    (phase,) = chosen_phases("./my check.sh")

    assert [(probe.name, probe.path) for probe in phase.probes] == [("my check.sh", str(program))]
    assert spelled_out("quick, ./my check.sh", "--check") == f"quick,{program}"


@rows
def test_what_is_no_probe_is_named_with_the_nearest_that_is(value: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chosen_phases(value)

    assert message in str(refused.value)


def test_programs_that_are_called_like_another_probe_cannot_be_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    programs = [write_executable(tmp_path / name / "io.sh", "#!/bin/sh\n") for name in ("a", "b")]

    with pytest.raises(ConfigError, match=r"b/io\.sh: is named like the probe io\.sh"):
        chosen_phases(",".join(map(str, programs)))

    assert len(chosen_phases(f"{programs[0]},{programs[0]}")[0].probes) == 1
    with pytest.raises(ConfigError, match="is named like the probe matmul"):
        chosen_phases(str(write_executable(tmp_path / "matmul", "#!/bin/sh\n")))


@rows
def test_flags_stand_beside_what_is_named(settings: dict[str, object], checked: str) -> None:
    assert what_to_check(settings) == checked
