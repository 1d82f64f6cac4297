# SPDX-License-Identifier: Apache-2.0
"""Drains that a real Slurm sets by itself: explained, and lifted if their cause is gone."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.hooks_support import HookedSite, hooked_site
from tests.lab.layout import CHECKOUT

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]  # some kinds take two minutes
HANGING = CHECKOUT / "tests/lab/failing_filesystem.py"
JOB = 4711


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["prolog", "spool", "rebooted", "gres"], id="quick"),
        pytest.param(["fuse", "frozen", "epilog"], marks=pytest.mark.slow, id="unkillable"),
        pytest.param(["stepd", "silent"], marks=pytest.mark.slow, id="minutes"),
    ],
)
def test_a_drain_is_explained_and_its_node_returns_two_checks_after_its_cause_is_gone(
    names: list[str],
) -> None:
    words = [sys.executable, "-m", "benchmarks.slurm_drains", "kinds", "host", "--only", *names]
    done = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HookedSite]:
    extra = "ProctrackType=proctrack/pgid\n"
    with hooked_site(tmp_path_factory.mktemp("hooks"), 2, extra) as found:
        found.configure()
        yield found


def test_the_owner_of_a_job_that_cost_two_nodes_is_sent_one_message(site: HookedSite) -> None:
    home = site.lab.paths.home("alice")
    config = home / ".config/slurm-health.toml"
    write_as_alice = f"mkdir -p {config.parent}; echo 'notify = \"cat >>$HOME/got\"' >{config}"
    site.lab.run(["sh", "-c", write_as_alice], user="alice", node="n1")
    for node in site.lab.nodes:
        site.health_check(node)
        drain_as_slurmstepd_does(site, node)
    for node in site.lab.nodes * 2:
        shell(site, node, f"touch -d '-2 min' {site.shared}/slurm.json; true")
        site.health_check(node)
    site.lab.wait_until(lambda: (home / "got").exists(), bool, "the message", 60.0)

    (line,) = (home / "got").read_text().splitlines()
    message = json.loads(line)
    assert (message["kind"], message["job"]) == ("nodes", str(JOB))
    assert f"job {JOB} left 2 nodes unusable (n[1-2])" in message["text"]
    listed = ("nodes", "--config", str(site.installed / "etc/config.toml"))
    assert "alice" in site.health(*listed, user="root").stdout


def shell(site: HookedSite, node: str, text: str) -> str:
    return site.on(node, "sh", "-c", text)


def drain_as_slurmstepd_does(site: HookedSite, node: str) -> None:
    """Leave a process of a job on a filesystem that hangs, run UnkillableStepProgram, and drain."""
    serve = f"setsid nohup {sys.executable} {HANGING} /tmp/hang hang >/tmp/hang.log 2>&1 &"
    shell(site, node, f"mkdir -p /tmp/hang; {serve} until grep -q . /tmp/hang.log; do :; done")
    leave = f"env SLURM_JOB_ID={JOB} setsid setpriv --reuid=4242 cat /tmp/hang/name"
    shell(site, node, f"{leave} >/dev/null 2>&1 & sleep 0.3; pkill -KILL -P $! ; true")
    shell(site, node, "pkill -KILL -f '^cat /tmp/hang/name'; true")
    program = str(site.installed / "unkillable")
    site.on(node, "env", f"SLURM_JOB_ID={JOB}", "SLURM_STEP_ID=0", program)
    drain = ["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=Kill task failed"]
    site.lab.run(drain)
