# SPDX-License-Identifier: Apache-2.0
"""Nodes that Slurm drains by itself, for each of its reasons: explained, and returned if safe."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.hooks_support import HookedSite, hooked_site
from tests.support.sites import write_site

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]
HANGING = Path(__file__).parents[1] / "support/hanging_filesystem.py"
DEADLINE_S = 120.0
FREEZER = "/sys/fs/cgroup/freezer"
JOB = 4711
# Of slurm.conf: everything that takes minutes by itself is shorter, and nodes are not overridden.
# pgid, unlike linuxproc, counts a process whose parent has ended; Slurm 26.05 drains for no other.
SLURM_CONF = """\
UnkillableStepProgram={directory}/unkillable
UnkillableStepTimeout=10
ProctrackType=proctrack/pgid
KillWait=2
SlurmdTimeout=20
ReturnToService=0
SlurmdParameters=shutdown_on_reboot
GresTypes=gpu
NodeName=DEFAULT Gres=gpu:2
Prolog={directory}/site-prolog
Epilog={directory}/site-epilog
"""
DEVICES = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
SCRIPT = """\
#!/bin/sh
[ -e /tmp/fail-{name} ] && {{ echo "site {name}: giving up"; exit 7; }}
exec {directory}/{name}
"""


@contextmanager
def cluster(nodes: int, directory: Path) -> Iterator[HookedSite]:
    """Start a lab with the hooks, scripts that can fail, and limits of seconds."""
    for script in ("prolog", "epilog"):
        path = directory / f"site-{script}"
        path.write_text(SCRIPT.format(name=script, directory=directory))
        path.chmod(0o755)
    conf = SLURM_CONF.format(directory=directory)
    with hooked_site(directory, nodes, conf, gres_conf=DEVICES) as site:
        site.configure()
        path = site.installed / "etc/config.toml"
        text = path.read_text().replace("[recovery]\n", '[recovery]\nslurm_drains = "lift"\n')
        write_site(site.installed / "etc", text)
        yield site


# --- how a drain comes and goes ------------------------------------------------------------------


class Kind(NamedTuple):
    """A drain of Slurm's: how it comes and goes, the words that explain it, and its return."""

    provoke: Callable[[HookedSite, str], int]
    end: Callable[[HookedSite, str], None]
    words: tuple[str, ...]
    state: str = "DRAIN"
    returns: bool = True


def hang(site: HookedSite, node: str) -> None:
    """Mount the filesystem that never answers."""
    start = f"setsid nohup {HANGING} /tmp/hang >/tmp/hang.log 2>&1 & echo $! >/tmp/hang.pid"
    site.on(node, "sh", "-c", start)
    until(site, lambda: "mounted" in site.on(node, "cat", "/tmp/hang.log"), "the mount")


def end_hang(site: HookedSite, node: str) -> None:
    """Break its connection off, and unmount it."""
    site.on(node, "sh", "-c", "kill $(cat /tmp/hang.pid); sleep 0.2; umount -l /tmp/hang")


def until(site: HookedSite, holds: Callable[[], object], what: str) -> None:
    site.lab.wait_until(holds, bool, what, DEADLINE_S)


def started(site: HookedSite, node: str, command: str) -> int:
    """Start a job that runs this command as a step; return its id when it runs."""
    job = site.lab.sbatch(
        f"#!/bin/sh\ntouch /tmp/begun.$SLURM_JOB_ID\nsrun {command}\n", f"-w{node}"
    )
    begun = site.lab.paths.tmp(node) / f"begun.{job}"
    until(site, begun.exists, f"job {job}")
    time.sleep(1)  # srun has started the step
    return job


def cancelled(site: HookedSite, node: str, job: int, state: str = "DRAIN") -> int:
    site.lab.run(["scancel", str(job)])
    site.lab.wait_node(node, state, DEADLINE_S)
    return job


def unkillable(site: HookedSite, node: str) -> int:
    """A process that looks up a name on the filesystem that never answers."""
    hang(site, node)
    return cancelled(site, node, started(site, node, "sh -c 'cat /tmp/hang/name; true'"))


def frozen(site: HookedSite, node: str) -> int:
    """A process in a frozen cgroup, where SIGKILL does not reach it."""
    job = started(site, node, "sh -c 'sleep 1000; true'")
    test = f"grep -qz SLURM_JOB_ID={job}$ /proc/$p/environ && echo $p"
    look = f"for p in $(pgrep -x sleep); do {test}; done; true"
    until(site, lambda: site.on(site.lab.nodes[0], "sh", "-c", look), "the step")
    pid = site.on(site.lab.nodes[0], "sh", "-c", look).split()[0]
    group = f"{FREEZER}/slurm-health-{job}"
    freeze = f"mkdir {group}; echo {pid} >{group}/cgroup.procs; echo FROZEN >{group}/freezer.state"
    site.on(node, "sh", "-c", f"echo {group} >/tmp/frozen; {freeze}")
    return cancelled(site, node, job)


def thaw(site: HookedSite, node: str) -> None:
    """Let it go on, and so end."""
    words = (
        "g=$(cat /tmp/frozen); echo THAWED >$g/freezer.state; until rmdir $g; do sleep 0.1; done"
    )
    site.on(node, "sh", "-c", words)


def failing(name: str, words: str) -> Kind:
    """A site's prolog or epilog that fails."""

    def provoke(site: HookedSite, node: str) -> int:
        site.on(node, "touch", f"/tmp/fail-{name}")
        return drained_by_a_job(site, node, "#!/bin/sh\ntrue\n")

    def repair(site: HookedSite, node: str) -> None:
        site.on(node, "rm", "-f", f"/tmp/fail-{name}")

    return Kind(provoke, repair, (words, "giving up"), returns=False)


def drained_by_a_job(site: HookedSite, node: str, script: str) -> int:
    job = site.lab.sbatch(script, f"-w{node}")
    site.lab.wait_node(node, "DRAIN", DEADLINE_S)
    site.lab.run(["scancel", str(job)], check=False)
    return job


def full_spool(site: HookedSite, node: str) -> int:
    """No room where slurmd keeps scripts."""
    spool = site.lab.paths.spool(node)
    site.on(node, "mount", "-t", "tmpfs", "-o", "size=16k", "none", str(spool))
    site.on(node, "sh", "-c", f"head -c 16384 /dev/zero >{spool}/fill; true")
    return drained_by_a_job(site, node, "#!/bin/sh\n" + "# padding\n" * 3000)


def empty_spool(site: HookedSite, node: str) -> None:
    """Give it room."""
    site.on(node, "umount", "-l", str(site.lab.paths.spool(node)))


def rebooted(site: HookedSite, node: str) -> int:
    """slurmd with another boot time."""
    site.lab.fault.kill_slurmd(node)
    site.lab.run(["slurmd", "-b", "-N", node], node=node, cwd="/", deadline_s=60)
    site.lab.wait_node(node, "DOWN", DEADLINE_S)
    return 0


def fewer(site: HookedSite, node: str) -> int:
    """The node registers with less than slurm.conf says."""
    gres(site, node, 1)
    site.lab.wait_node(node, "DRAIN", DEADLINE_S)
    return 0


def gres(site: HookedSite, node: str, count: int) -> None:
    second = ",".join(name for name in site.lab.nodes if name != node or count > 1)
    text = f"Name=gpu File=/dev/null\nNodeName={second} Name=gpu File=/dev/zero\n"
    site.on(node, "sh", "-c", f"printf '{text}' >/etc/slurm/gres.conf")
    site.lab.fault.kill_slurmd(node)
    site.lab.fault.start_slurmd(node)


def enough(site: HookedSite, node: str) -> None:
    """It registers with all of it."""
    gres(site, node, 2)
    until(site, lambda: "INVAL" not in site.lab.node_state(node)["State"], "a good registration")


def stuck_stepd(site: HookedSite, node: str) -> int:
    """slurmstepd is stopped as its job ends: the job stays in COMPLETING."""
    job = started(site, node, "sleep 1000")
    site.on(node, "sh", "-c", f"pkill -STOP -f '^slurmstepd: .{job}[.]'; true")
    return cancelled(site, node, job, "COMPLETING")


def go_on(site: HookedSite, node: str) -> None:
    """Let it go on."""
    site.on(node, "sh", "-c", "pkill -CONT slurmstepd; true")


def silent(site: HookedSite, node: str) -> int:
    """slurmctld has no contact to slurmd."""
    site.lab.fault.stop_slurmd(node)
    site.lab.wait_node(node, "DOWN", DEADLINE_S)
    return 0


def answering(site: HookedSite, node: str) -> None:
    """slurmd answers again; before that it runs no health check."""
    site.lab.fault.start_slurmd(node)
    until(site, lambda: site.lab.node_state(node)["State"] == "DOWN", f"{node} to answer")
    look_is_due(site, node)
    site.health_check(node)
    listed = f'"node":"{node}"'
    until(site, lambda: listed in site.on(node, "cat", f"{site.shared}/slurm.json"), node)


KILL_FAILED = "Kill task failed, job {job} of alice"
COMPLETING = "job {job} of alice ended"
KINDS = {
    "fuse": Kind(unkillable, end_hang, (KILL_FAILED, "cat(", "fuse", "/tmp/hang")),
    "frozen": Kind(frozen, thaw, (KILL_FAILED, "sleep(", "frozen")),
    "prolog": failing("prolog", "Prolog error"),
    "epilog": failing("epilog", "Epilog error"),
    "spool": Kind(full_spool, empty_spool, ("SlurmdSpoolDir is full", "left")),
    "rebooted": Kind(rebooted, lambda *_: None, ("unexpectedly rebooted",), state="DOWN"),
    "gres": Kind(fewer, enough, ("gres/gpu count reported lower", "(1 < 2)", "gres.conf")),
    "stepd": Kind(
        *(stuck_stepd, go_on, (COMPLETING, "COMPLETING", "slurmstepd(", "stopped")),
        state="COMPLETING",
        returns=False,
    ),
    "silent": Kind(silent, answering, ("Not responding",), state="DOWN"),
}


# --- what is said of it, and whether its node returns ---------------------------------------------


def explained(site: HookedSite, node: str) -> tuple[str, bool]:
    """Return what `nodes` says of a node, and whether it needs an administrator."""
    config = str(site.installed / "etc/config.toml")
    shown = site.health("nodes", "--json", "--config", config, user="root")
    groups: list[dict[str, Any]] = json.loads(shown.stdout)["by_slurm"]
    own: list[dict[str, Any]] = [g for g in groups if node in {d["node"] for d in g["drains"]}]
    needs = any(bool(group["needs_administrator"]) for group in own)
    return "; ".join(group["text"] for group in own), needs


def look_is_due(site: HookedSite, node: str) -> None:
    """Make the list of drains a minute old."""
    site.on(node, "sh", "-c", f"touch -d '-2 min' {site.shared}/slurm.json; true")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["prolog", "spool", "rebooted", "gres"], id="quick"),
        pytest.param(["fuse", "frozen", "epilog"], marks=pytest.mark.slow, id="unkillable"),
        pytest.param(["stepd", "silent"], marks=pytest.mark.slow, id="minutes"),
    ],
)
def test_a_drain_is_explained_and_its_node_returns_two_checks_after_its_cause_is_gone(
    names: list[str], tmp_path: Path
) -> None:
    with cluster(len(names), tmp_path) as site:
        for node, name in zip(site.lab.nodes, names, strict=True):
            assert_explained_and_returned(site, node, name)


def assert_explained_and_returned(site: HookedSite, node: str, name: str) -> None:
    kind = KINDS[name]
    site.health_check(node)
    job = kind.provoke(site, node)
    if kind.state == "COMPLETING":
        time.sleep(125)  # such a job is explained after two minutes
    words = [word.format(job=job) for word in kind.words]
    text, needs = "", False
    for _ in range(3):  # learnt from the list, which a look at all nodes makes
        if name != "silent":
            look_is_due(site, node)
            site.health_check(node)
        time.sleep(2)
        text, needs = explained(site, node)
        if all(word in text for word in words):
            break
    assert all(word in text for word in words), (name, text)
    assert needs == (not kind.returns or name == "gres"), (name, text)
    kind.end(site, node)
    if kind.returns:
        until(site, lambda: "COMPLETING" not in site.lab.node_state(node)["State"], "its job")
        for _ in range(2):
            site.health_check(node)
        state = site.lab.node_state(node)["State"]
        assert "DRAIN" not in state, (name, site.hook_log(node)[-2000:])
        assert "DOWN" not in state, (name, site.hook_log(node)[-2000:])


def test_the_owner_of_a_job_that_cost_two_nodes_is_sent_one_message(tmp_path: Path) -> None:
    with cluster(2, tmp_path) as site:
        home = site.lab.paths.home("alice")
        config = home / ".config/slurm-health.toml"
        write_as_alice = f"mkdir -p {config.parent}; echo 'notify = \"cat >>$HOME/got\"' >{config}"
        site.lab.run(["sh", "-c", write_as_alice], user="alice", node="n1")
        for node in site.lab.nodes:
            site.health_check(node)
            # A process of a job is left; slurmstepd runs UnkillableStepProgram, and drains as root.
            hang(site, node)
            leave = f"env SLURM_JOB_ID={JOB} setsid setpriv --reuid=4242 cat /tmp/hang/name"
            kill = "sleep 0.3; pkill -KILL -P $! ; pkill -KILL -f '^cat /tmp/hang/name'; true"
            site.on(node, "sh", "-c", f"{leave} >/dev/null 2>&1 & {kill}")
            program = [f"SLURM_JOB_ID={JOB}", "SLURM_STEP_ID=0", f"{site.installed}/unkillable"]
            site.on(node, "env", *program)
            reason = "Reason=Kill task failed"
            site.lab.run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", reason])
        for node in site.lab.nodes * 2:
            look_is_due(site, node)
            site.health_check(node)
        site.lab.wait_until(lambda: (home / "got").exists(), bool, "the message", 60.0)

        (line,) = (home / "got").read_text().splitlines()
        message = json.loads(line)
        assert (message["kind"], message["job"]) == ("nodes", str(JOB))
        assert f"job {JOB} left 2 nodes unusable (n[1-2])" in message["text"]
        shown, _ = explained(site, "n1")
        assert "alice" in shown
