# SPDX-License-Identifier: Apache-2.0
"""Checks run at once, each in a child that can be killed; some share one."""

import json
import math
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slurm_health.node import site
from slurm_health.node.checks.check import Check, CheckContext, NotApplicable
from slurm_health.node.checks.external import Command
from slurm_health.node.checks.filesystem import Filesystem
from slurm_health.node.checks.gpu import Gpu
from slurm_health.node.checks.kernel_log import KernelLog, Xid
from slurm_health.node.checks.network import InfiniBand
from slurm_health.node.checks.tasks import Load
from slurm_health.node.checks.vendors import Dcgm
from slurm_health.node.hooks.init_config import common_nvlinks, draft
from slurm_health.node.rules.finding import Finding, Status, passed
from slurm_health.node.run import confirming, run_checks
from slurm_health.system.nvml import GpuDevice
from tests.node.checks.conftest import WELL, planned
from tests.support.hooked_node import Node
from tests.support.hooked_slurm import HookedSlurm
from tests.support.rows import rows
from tests.support.sites import tree, write_site

LOST = b"3,7,9990000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"


def test_of_checks_that_look_at_the_same_the_first_one_looks_for_all(tmp_path: Path) -> None:
    """A pipe gives what is in it to the first who reads."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "uptime").write_text("10000 9000\n")
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev" / "kmsg")
    log = os.open(tmp_path / "dev" / "kmsg", os.O_RDWR | os.O_NONBLOCK)
    os.write(log, LOST)
    # More of them than children, so that they would not meet in one by chance.
    light = [planned(Load(), f"load{number}") for number in range(5)]

    results = run_checks(
        [planned(Xid(), "xid"), *light, planned(KernelLog(fault=("^NVRM: Xid",)), "kernel")],
        CheckContext(root=tmp_path),
    )
    os.close(log)

    found = {each.name: each.finding.status for each in results}
    assert found["xid"] is found["kernel"] is Status.NODE_FAULT


def test_a_gpu_that_a_job_could_not_use_is_measured_again_by_what_looks_at_gpus() -> None:
    gpu: list[Check] = [Gpu(count=8), Xid(), Dcgm(), Command(argv=("/bin/true",))]
    names = ("gpu", "xid", "dcgm", "command", "load")
    every = zip([*gpu, Load()], names, strict=True)
    checks = [planned(check, name, contexts=("retest",)) for check, name in every]
    found = confirming(checks, "device", "n1")
    assert [each.check for each in found] == gpu


class Odd(Check, frozen=True, kw_only=True):
    """A check of another package, which may do anything."""

    def measure(self, machine: CheckContext) -> Finding:
        if machine.context == "epilog":
            raise NotApplicable("no tape robot here")
        if machine.context == "prolog":
            raise KeyError("tape")
        return passed("it runs", tapes=math.nan, robots=1)


def test_what_a_check_raises_or_measures_without_sense_does_no_harm() -> None:
    found = {
        context: run_checks([planned(Odd(), "odd")], CheckContext(context=context))[0].finding
        for context in ("epilog", "prolog", "healthcheck")
    }
    assert found["epilog"].status is Status.NOT_APPLICABLE
    assert found["prolog"].text == "could not be measured: 'tape'"
    assert found["healthcheck"].figures == {"robots": 1}


# --- what `init config` drafts --------------------------------------------------------------------


@rows
def test_ports_that_jobs_use_are_drafted_in_a_table_for_every_rate(
    tmp_path: Path, layers: tuple[str, str], tables: dict[str, str]
) -> None:
    base = "/sys/class/infiniband/mlx5_{}/ports/1/"
    files = {f"{base.format(n)}link_layer": f"{layer}\n" for n, layer in enumerate(layers)}
    files[f"{base.format(1)}rate"] = "100 Gb/sec (4X EDR)\n"
    text, _ = draft(tree(tmp_path / "machine", {**WELL, **files}), node="n1")

    planned = site.load(write_site(tmp_path / "etc", text)).planned

    checks = {each.name: each.check for each in planned if isinstance(each.check, InfiniBand)}
    assert checks == {
        name: InfiniBand(ports=(port,), min_rate_gbit_per_s=100 if "100" in name else 400)
        for name, port in tables.items()
    }


def test_a_mount_is_drafted_to_be_written_only_where_jobs_write(tmp_path: Path) -> None:
    points = {"/": "ext4", "/boot": "ext4", "/opt/local": "xfs", "/local": "xfs", "/home": "nfs4"}
    odd = ("/.snapshots", "/a-b", "/a/b", "/data@1", "/scratch/v1.2")
    lines = "".join(f"x {point} {kind} rw 0 0\n" for point, kind in points.items())
    lines += "x /ro xfs ro,noatime 0 0\nx /data nfs ro 0 0\nx /ckpt fuse.glusterfs rw 0 0\n"
    lines += "".join(f"x {point} btrfs rw 0 0\n" for point in odd)
    text, _ = draft(tree(tmp_path / "machine", {**WELL, "/proc/self/mounts": lines}), node="n1")
    loaded = site.load(write_site(tmp_path / "etc", text))

    # What every check tests, on all nodes; a mount over FUSE may be a user's.
    assert tomllib.loads(text)["paths"] == ["/ckpt", "/data", "/home"]
    found = [each.check for each in loaded.planned]
    drafted = {each.path: each.writable for each in found if isinstance(each, Filesystem)}
    written = dict.fromkeys(("/", "/local", *odd), True)
    assert drafted == {**dict.fromkeys(points, False), **written, "/ro": False, "/data": False}


@pytest.mark.parametrize(
    ("active", "drafted"), [((18, 18), 18), ((18, 17), None), ((None, None), None), ((), None)]
)
def test_nvlinks_are_drafted_where_all_gpus_have_as_many(
    active: tuple[int | None, ...], drafted: int | None
) -> None:
    devices = [GpuDevice(index=n, links_active=links) for n, links in enumerate(active)]

    assert common_nvlinks(devices) == drafted


# --- health.json ----------------------------------------------------------------------------------


NOBODY = 65534
# As docs/admin/install.md shows it.
READER = (
    "import json, sys, time\n"
    "health = json.load(open(sys.argv[1]))\n"
    "print(health['status'] if time.time() < health['valid_until'] else 'unknown')"
)


def health(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((node.site.state / "health.json").read_bytes())
    return found


@pytest.mark.root
def test_a_health_check_replaces_what_the_last_one_found(node: Node) -> None:
    node.healthcheck()
    assert health(node) == {
        "node": "n3",
        "status": "healthy",
        "faults": [],
        "checked_at": 1_000_000,
        "valid_until": 1_000_900,
    }
    node.now_s += 300
    node.break_it()
    node.healthcheck()
    found = health(node)
    assert (found["status"], found["faults"]) == ("faulty", ["scratch: /broken exists"])
    assert (found["checked_at"], found["valid_until"]) == (1_000_300, 1_001_200)


@pytest.mark.root
@rows
def test_what_could_not_be_measured_is_unknown(node: Node, check: str, status: str) -> None:
    node.more = f"[checks.more]\n{check}"
    node.healthcheck()
    assert (health(node)["status"], health(node)["faults"]) == (status, [])


@pytest.mark.root
@pytest.mark.parametrize("later_s", [0, 901])
def test_an_ordinary_user_reads_it_and_takes_an_expired_one_as_unknown(
    public_path: Path, slurm: HookedSlurm, shared: Path, later_s: int
) -> None:
    node = Node(public_path, "n3", slurm, shared)
    node.now_s = time.time() - later_s
    umask = os.umask(0o077)
    try:
        node.healthcheck()
    finally:
        os.umask(umask)
    node.directory.chmod(0o755)

    def as_nobody(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, user=NOBODY, capture_output=True, text=True, check=False)

    path = node.site.state / "health.json"
    assert path.stat().st_mode & 0o7777 == 0o644
    done = as_nobody(sys.executable, "-c", READER, str(path))
    assert done.stdout.strip() == ("unknown" if later_s else "healthy"), done.stderr
    # Nothing else there is open to others: who may open the lock could hold it.
    assert as_nobody("ls", str(node.site.state)).returncode != 0
    others = [each for each in node.site.state.rglob("*") if each != path]
    assert others
    assert [each for each in others if each.stat().st_mode & 0o077] == []


@pytest.mark.root
@pytest.mark.parametrize("is_broken", [False, True])
def test_what_cannot_be_written_changes_no_answer(node: Node, is_broken: bool) -> None:
    node.healthcheck()
    path = node.site.state / "health.json"
    path.unlink()
    (path / "in-the-way").mkdir(parents=True)
    if is_broken:
        node.break_it()
    assert node.healthcheck() is is_broken
    assert (path / "in-the-way").is_dir()
