# SPDX-License-Identifier: Apache-2.0
"""What doctor says of a slurm.conf and of shims, and how it is printed."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_health.cli.site_setup import doctor
from slurm_health.node.doctor import slurm_conf
from slurm_health.node.doctor.advice import DoctorReport, change, fine, look
from tests.node.doctor.test_machine import by_level
from tests.support.hooked_slurm import HookedSlurm
from tests.support.rows import rows
from tests.support.sites import load_site, write_site
from tests.support.supervised import write_executable

DATA = Path(__file__).parents[2] / "data" / "doctor"
GOOD = (DATA / "slurm.conf").read_text()
SHIM = (DATA / "shim.sh").read_text()


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    """A shim, and an interpreter that finds its modules in one directory."""
    package = tmp_path / "opt/lib/slurm_health"
    package.mkdir(parents=True)
    (package / "node").mkdir()
    (package / "node/hooks.py").write_text("")
    python = write_executable(tmp_path / "opt/python", f"#!/bin/sh\necho {tmp_path}/opt/lib\n")
    config = write_site(tmp_path / "etc", "[checks.memory]\n")
    slurm = HookedSlurm(tmp_path / "slurm").bin
    text = SHIM.format(python=python, config=config, slurm=slurm)
    return write_executable(tmp_path / "hook", text)


def levels(text: str) -> dict[str, list[str]]:
    return by_level(slurm_conf.advise(slurm_conf.read_config(text), None))


@rows
def test_what_should_be_changed_is_said(
    hook: Path, before: str, after: str, level: str, said: str
) -> None:
    (hook.parent / "README").write_text("")  # a stray file beside scripts
    before, after = (text.replace("HOOK", str(hook)) for text in (before, after))
    after = after.replace("DIR", str(hook.parent))
    good = GOOD.format(hook=hook)
    assert before in good
    assert any(said in text for text in levels(good.replace(before, after))[level])


@rows
def test_a_shim_that_can_check_nothing_is_found(hook: Path, line: str, said: str) -> None:
    """Such a shim lets every job start, so nothing else would tell."""
    hook.write_text(f"{hook.read_text()}{line}\n")
    assert any(said in text for text in levels(GOOD.format(hook=hook))["change"])


def test_a_shim_that_reads_another_config_file_is_reported(hook: Path, tmp_path: Path) -> None:
    site = load_site(tmp_path / "other", "[checks.memory]\n")
    advice = slurm_conf.advise(slurm_conf.read_config(GOOD.format(hook=hook)), site)
    assert any(f"follows {tmp_path}/etc/config.toml" in text for text in by_level(advice)["look"])


def test_advice_fits_a_terminal_and_ends_with_a_count() -> None:
    text = DoctorReport(
        advice=(fine("all well"), look("a " * 60, "b " * 60), change("/a/path/" * 14, "mend it"))
    ).text(80)
    lines = text.splitlines()
    assert [line for line in lines if len(line) > 80 and "/a/path" not in line] == []
    assert lines[0].startswith("change  ")
    assert lines[1].lstrip().startswith("/a/path") or "/a/path" in lines[0]
    assert "        do: mend it" in lines
    assert lines[-1] == "1 to change, 1 to look at, 1 fine"


def test_doctor_names_an_unusable_file_and_goes_on(tmp_path: Path) -> None:
    path = write_site(tmp_path / "etc", "[hook]\n")
    words = ["--config", str(path), "--json"]
    result = CliRunner().invoke(doctor, words, standalone_mode=False)
    assert result.return_value == 1
    report = json.loads(result.output)
    assert report["counts"]["change"] >= 1
    assert any("did you mean hooks?" in each["text"] for each in report["advice"])


# --- what root runs and others can change is found ------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["hook", "opt", "opt/python", "opt/lib", "opt/lib/slurm_health/node/hooks.py", "slurm/bin"],
)
def test_what_others_could_change_is_found(hook: Path, tmp_path: Path, path: str) -> None:
    loose = tmp_path / path
    loose.chmod(0o775)
    (told,) = levels(GOOD.format(hook=hook))["change"]
    assert "root runs" in told
    assert str(loose) in told
    loose.chmod(0o755)
    if os.getuid() == 0:
        os.chown(loose, 1000, 1000)
        assert str(loose) in levels(GOOD.format(hook=hook))["change"][0]


def test_an_interpreter_that_others_can_change_is_not_run(hook: Path, tmp_path: Path) -> None:
    python = tmp_path / "opt/python"
    (tmp_path / "opt").chmod(0o1777)  # a directory like /tmp is as good as its entries
    found = levels(GOOD.format(hook=hook))
    assert found["change"] == found["look"] == []

    without = 'case "$*" in *import*slurm_health*) exit 1 ;; esac'
    write_executable(python, f"#!/bin/sh\n{without}\necho {tmp_path}/opt/lib\n")
    (told,) = levels(GOOD.format(hook=hook))["change"]
    assert f"python={python} has no slurm_health: it checks nothing" in told

    # Doctor runs as root too.
    write_executable(python, f"#!/bin/sh\ntouch {tmp_path}/ran\n").chmod(0o777)
    assert any(str(python) in told for told in levels(GOOD.format(hook=hook))["change"])
    assert not (tmp_path / "ran").exists()


def test_where_a_link_leads_counts_too(hook: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    target = (tmp_path / "opt/python").rename(tmp_path / "open/python")
    (tmp_path / "opt/python").symlink_to(target)
    (tmp_path / "open").chmod(0o777)
    (told,) = levels(GOOD.format(hook=hook))["change"]
    assert f"can change {tmp_path}/open" in told
