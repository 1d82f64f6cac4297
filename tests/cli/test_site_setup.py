# SPDX-License-Identifier: Apache-2.0
"""What `init config` drafts for a node, and the shims that `init hooks` installs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_health.cli import site_setup
from slurm_health.node import site
from slurm_health.node.checks.filesystem import Filesystem
from slurm_health.node.doctor.slurm_conf import read_shim
from slurm_health.node.hooks.init_config import draft
from tests.node.checks.conftest import WELL
from tests.support.sites import tree, write_site

pytestmark = pytest.mark.usefixtures("on_n3")


def test_a_draft_of_a_well_node_can_be_used_and_drains_nobody(tmp_path: Path) -> None:
    context = tree(tmp_path / "machine", {**WELL, "/sys/class/net/eth0/device/x": ""})
    text, _ = draft(context, node="n1", shared="/shared/health")
    read = site.load(write_site(tmp_path / "etc", text))
    assert read.breaker.directory == "/shared/health"
    assert not read.hooks.drain
    assert all(each.shadow for each in read.planned if each.severity.value == "node_fault")
    names = {each.name for each in read.planned}
    assert {"memory", "edac", "filesystem-root", "ethernet-eth0", "infiniband", "cpus"} <= names


def test_network_mounts_are_drafted_as_paths_and_checks(tmp_path: Path) -> None:
    nfs = "srv:/home /home nfs4 rw 0 0\nsrv:/data /data nfs ro 0 0\n"
    mounts = f"/dev/sda1 / ext4 rw 0 0\n{nfs}srv:v /ckpt fuse.glusterfs rw 0 0\n"
    text, _ = draft(tree(tmp_path / "machine", {**WELL, "/proc/self/mounts": mounts}), node="n1")
    drafted = site.load(write_site(tmp_path / "etc", text))
    assert drafted.paths == ("/ckpt", "/data", "/home")
    checks = [one.check for one in drafted.planned if isinstance(one.check, Filesystem)]
    # A mount over FUSE may be a user's.
    writable = {check.path: check.writable for check in checks}
    assert writable == {"/": True, "/data": False, "/home": False}


def test_a_drafted_node_passes_its_own_draft(tmp_path: Path) -> None:
    from slurm_health.node.checks.check import CheckContext
    from slurm_health.node.rules.finding import node_faults
    from slurm_health.node.run import run_checks

    text, _ = draft(CheckContext(), node="here", shared="")
    read = site.load(write_site(tmp_path / "etc", text.replace("shadow = true", "")))
    assert node_faults(run_checks(read.planned, CheckContext())) == []


def test_a_busy_node_is_told_that_its_speed_was_left_out(tmp_path: Path) -> None:
    """It is in the file and on standard error, because the file is usually sent elsewhere."""
    processors = sorted(os.sched_getaffinity(0))
    argv = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(argv) for _ in range(4 * len(processors))]
    try:
        ran = CliRunner().invoke(site_setup.init_config, [], standalone_mode=False)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert "[checks.cpu-speed]" not in ran.stdout
    assert "cpu-speed, tested when a user's job" in ran.stderr
    assert "run init config again while nothing else runs" in ran.stderr
    assert "# cpu-speed, tested when" in ran.stdout


def test_scripts_elsewhere_read_the_config_file_beside_them(tmp_path: Path) -> None:
    said = CliRunner().invoke(site_setup.init_hooks, [str(tmp_path)], standalone_mode=False).stderr
    assert f"the hooks read {tmp_path}/config.toml, which is not there" in said
    assert said.count("config.toml, which") == 1
    (tmp_path / "config.toml").touch()
    assert CliRunner().invoke(site_setup.init_hooks, [str(tmp_path)]).stderr == ""
    (tmp_path / "file").touch()
    words = [str(tmp_path / "file")]
    refused = CliRunner().invoke(site_setup.init_hooks, words, standalone_mode=False)
    assert "cannot write" in str(refused.exception)


def installed(directory: Path) -> dict[str, str]:
    """Install the shims; return what slurm.conf is to name."""
    words = [str(directory)]
    ran = CliRunner().invoke(site_setup.init_hooks, words, standalone_mode=False)
    assert ran.return_value == 0, ran
    return dict(line.split("=") for line in ran.stdout.splitlines())


def test_installed_shims_run_this_installation(tmp_path: Path) -> None:
    named = installed(tmp_path)
    assert set(named) == {"Prolog", "Epilog", "HealthCheckProgram", "UnkillableStepProgram"}
    for path in named.values():
        shim = read_shim(Path(path))
        assert shim is not None
        assert (shim.python, shim.config) == (sys.executable, str(tmp_path / "config.toml"))
        assert os.access(path, os.X_OK)


def test_installing_again_keeps_what_the_site_has_set_but_the_interpreter(tmp_path: Path) -> None:
    prolog = Path(installed(tmp_path)["Prolog"])
    text = prolog.read_text()
    prolog.write_text(
        text.replace("limit=120", "limit=90").replace(sys.executable, "/old/python")
        + "echo of an older release\n"
    )
    installed(tmp_path)
    assert "limit=120" in text
    assert prolog.read_text() == text.replace("limit=120", "limit=90")


def test_installing_over_a_file_in_another_encoding_keeps_its_bytes(tmp_path: Path) -> None:
    prolog = Path(installed(tmp_path)["Prolog"])
    prolog.write_bytes(b"#!/bin/sh\n# gepr\xfcft\nconfig=/etc/gepr\xfcft.toml\nlimit=90\n")
    installed(tmp_path)
    text = prolog.read_bytes()
    assert b"\nconfig='/etc/gepr\xfcft.toml'\n" in text
    assert b"\nlimit=90\n" in text
    assert prolog.stat().st_mode & 0o777 == 0o755
    assert [each.name for each in prolog.parent.glob(".*")] == []
