# SPDX-License-Identifier: Apache-2.0
"""Drains of Slurm's own, provoked by real means: `python -m benchmarks.slurm_drains`.

    kinds [RELEASE]...       every kind on every release: explained, and returned if the rule allows
    loop --runs 200          causes that stay, come back, are edited, or have a second fault beside

`loop` appends to a file and goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.e2e.hooks_support import STATE, HookedSite, hooked_site
from tests.lab import LabError
from tests.support.sites import write_site

HANGING = Path(__file__).with_name("hanging_filesystem.py")
ROOTS = Path("/var/cache/slurm-health-lab")
_DEADLINE_S = 120.0
_FREEZER = "/sys/fs/cgroup/freezer"
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
_DEVICES = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
_SCRIPT = """\
#!/bin/sh
[ -e /tmp/fail-{name} ] && {{ echo "site {name}: giving up"; exit 7; }}
exec {directory}/{name}
"""


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
    _until(site, lambda: "mounted" in site.on(node, "cat", "/tmp/hang.log"), "the mount")


def end_hang(site: HookedSite, node: str) -> None:
    """Break its connection off, and unmount it."""
    site.on(node, "sh", "-c", "kill $(cat /tmp/hang.pid); sleep 0.2; umount -l /tmp/hang")


def _until(site: HookedSite, holds: Callable[[], object], what: str) -> None:
    site.lab.wait_until(holds, bool, what, _DEADLINE_S)


def started(site: HookedSite, node: str, command: str) -> int:
    """Start a job that runs this command as a step; return its id when it runs."""
    job = site.lab.sbatch(
        f"#!/bin/sh\ntouch /tmp/begun.$SLURM_JOB_ID\nsrun {command}\n", f"-w{node}"
    )
    begun = site.lab.paths.tmp(node) / f"begun.{job}"
    _until(site, begun.exists, f"job {job}")
    return job


def _cancelled(site: HookedSite, node: str, job: int, state: str = "DRAIN") -> int:
    time.sleep(1)  # srun has started the step
    site.lab.run(["scancel", str(job)])
    site.lab.wait_node(node, state, _DEADLINE_S)
    return job


def unkillable(site: HookedSite, node: str) -> int:
    """A process that looks up a name on the filesystem that never answers."""
    hang(site, node)
    return _cancelled(site, node, started(site, node, "sh -c 'cat /tmp/hang/name; true'"))


def unkillable_task(site: HookedSite, node: str) -> int:
    """The task itself: Slurm 26.05 waits for it without an end, and sets no drain."""
    hang(site, node)
    return _cancelled(site, node, started(site, node, "cat /tmp/hang/name"), "COMPLETING")


def pid_of(site: HookedSite, job: int, name: str) -> str:
    """Return the process of a job with this name, as the lab's processes see it."""
    test = f"grep -qz SLURM_JOB_ID={job}$ /proc/$p/environ && echo $p"
    look = f"for p in $(pgrep -x {name}); do {test}; done; true"
    return site.on(site.lab.nodes[0], "sh", "-c", look).split()[0]


def frozen(site: HookedSite, node: str) -> int:
    """A process in a frozen cgroup, where SIGKILL does not reach it."""
    job = started(site, node, "sh -c 'sleep 1000; true'")
    _until(site, lambda: site.on(node, "sh", "-c", "pgrep -x sleep; true"), "the step")
    time.sleep(1)
    pid = pid_of(site, job, "sleep")
    group = f"{_FREEZER}/slurm-health-{job}"
    freeze = f"mkdir {group}; echo {pid} >{group}/cgroup.procs; echo FROZEN >{group}/freezer.state"
    site.on(node, "sh", "-c", f"echo {group} >/tmp/frozen; {freeze}")
    return _cancelled(site, node, job)


def thaw(site: HookedSite, node: str) -> None:
    """Let it go on, and so end."""
    words = (
        "g=$(cat /tmp/frozen); echo THAWED >$g/freezer.state; until rmdir $g; do sleep 0.1; done"
    )
    site.on(node, "sh", "-c", words)


def failing(name: str) -> Callable[[HookedSite, str], int]:
    """Return what lets a site's prolog or epilog fail."""

    def provoke(site: HookedSite, node: str) -> int:
        site.on(node, "touch", f"/tmp/fail-{name}")
        job = site.lab.sbatch("#!/bin/sh\ntrue\n", f"-w{node}")
        site.lab.wait_node(node, "DRAIN", _DEADLINE_S)
        site.lab.run(["scancel", str(job)], check=False)
        return job

    return provoke


def repaired(name: str) -> Callable[[HookedSite, str], None]:
    """Return what lets it succeed."""

    def repair(site: HookedSite, node: str) -> None:
        site.on(node, "rm", "-f", f"/tmp/fail-{name}")

    return repair


def full_spool(site: HookedSite, node: str) -> int:
    """No room where slurmd keeps scripts."""
    spool = site.lab.paths.spool(node)
    site.on(node, "mount", "-t", "tmpfs", "-o", "size=16k", "none", str(spool))
    site.on(node, "sh", "-c", f"head -c 16384 /dev/zero >{spool}/fill; true")
    job = site.lab.sbatch("#!/bin/sh\n" + "# padding\n" * 3000, f"-w{node}")
    site.lab.wait_node(node, "DRAIN", _DEADLINE_S)
    site.lab.run(["scancel", str(job)], check=False)
    return job


def empty_spool(site: HookedSite, node: str) -> None:
    """Give it room."""
    site.on(node, "umount", "-l", str(site.lab.paths.spool(node)))


def rebooted(site: HookedSite, node: str) -> int:
    """A slurmd with another boot time."""
    site.lab.fault.kill_slurmd(node)
    time.sleep(2.0)  # slurmctld compares its boot with its last answer, in whole seconds
    site.lab.run(["slurmd", "-b", "-N", node], node=node, cwd="/", deadline_s=60)
    site.lab.wait_node(node, "DOWN", _DEADLINE_S)
    return 0


def fewer(site: HookedSite, node: str) -> int:
    """The node registers with less than slurm.conf says."""
    _gres(site, node, 1)
    site.lab.wait_node(node, "DRAIN", _DEADLINE_S)
    return 0


def _gres(site: HookedSite, node: str, count: int) -> None:
    second = ",".join(name for name in site.lab.nodes if name != node or count > 1)
    text = f"Name=gpu File=/dev/null\nNodeName={second} Name=gpu File=/dev/zero\n"
    site.on(node, "sh", "-c", f"printf '{text}' >/etc/slurm/gres.conf")
    site.lab.fault.kill_slurmd(node)
    site.lab.fault.start_slurmd(node)


def enough(site: HookedSite, node: str) -> None:
    """It registers with all of it."""
    _gres(site, node, 2)
    _until(site, lambda: "INVAL" not in site.lab.node_state(node)["State"], "a good registration")


def stuck_stepd(site: HookedSite, node: str) -> int:
    """A slurmstepd is stopped as its job ends: the job stays in COMPLETING."""
    job = started(site, node, "sleep 1000")
    time.sleep(1)
    stop = f"pkill -STOP -f '^slurmstepd: .{job}[.]'"
    site.on(node, "sh", "-c", f"{stop}; true")
    return _cancelled(site, node, job, "COMPLETING")


def go_on(site: HookedSite, node: str) -> None:
    """Let it go on."""
    site.on(node, "sh", "-c", "pkill -CONT slurmstepd; true")


def silent(site: HookedSite, node: str) -> int:
    """No contact of slurmctld to slurmd."""
    site.lab.fault.stop_slurmd(node)
    site.lab.wait_node(node, "DOWN", _DEADLINE_S)
    return 0


def answering(site: HookedSite, node: str) -> None:
    """The slurmd answers again."""
    site.lab.fault.start_slurmd(node)
    _until(site, lambda: site.lab.node_state(node)["State"] == "DOWN", f"{node} to answer")


KINDS = {
    "fuse": Kind(
        unkillable, end_hang, ("Kill task failed, job {job} of alice", "cat(", "fuse", "/tmp/hang")
    ),
    "frozen": Kind(frozen, thaw, ("Kill task failed, job {job} of alice", "sleep(", "frozen")),
    "prolog": Kind(
        failing("prolog"), repaired("prolog"), ("Prolog error", "giving up"), returns=False
    ),
    "epilog": Kind(
        failing("epilog"), repaired("epilog"), ("Epilog error", "giving up"), returns=False
    ),
    "spool": Kind(full_spool, empty_spool, ("SlurmdSpoolDir is full", "left")),
    "rebooted": Kind(rebooted, lambda *_: None, ("unexpectedly rebooted",), state="DOWN"),
    "gres": Kind(fewer, enough, ("gres/gpu count reported lower", "(1 < 2)", "gres.conf")),
    "stepd": Kind(
        stuck_stepd,
        go_on,
        ("job {job} of alice ended", "COMPLETING", "slurmstepd(", "stopped"),
        state="COMPLETING",
        returns=False,
    ),
    "task": Kind(
        unkillable_task,
        end_hang,
        ("job {job} of alice ended", "COMPLETING", "cat(", "fuse", "/tmp/hang"),
        state="COMPLETING",
        returns=False,
    ),
    "silent": Kind(silent, answering, ("Not responding",), state="DOWN"),
}


@contextmanager
def cluster(nodes: int, release: str = "", mode: str = "lift") -> Iterator[HookedSite]:
    """Start a lab with the hooks, scripts that can fail, and limits of seconds."""
    with tempfile.TemporaryDirectory(prefix="slurm-drains-", dir="/var/tmp") as name:
        directory = Path(name)
        if release:
            os.environ["LAB_RELEASE"] = str(ROOTS / release)
        else:
            os.environ.pop("LAB_RELEASE", None)
        for script in ("prolog", "epilog"):
            path = directory / f"site-{script}"
            path.write_text(_SCRIPT.format(name=script, directory=directory))
            path.chmod(0o755)
        conf = SLURM_CONF.format(directory=directory)
        with hooked_site(directory, nodes, conf, gres_conf=_DEVICES) as site:
            configure(site, mode)
            yield site


def configure(site: HookedSite, mode: str, more: str = "") -> None:
    """Write the config file: every health check counts as a pass, however near."""
    site.configure(more)
    path = site.installed / "etc/config.toml"
    text = path.read_text().replace("[recovery]\n", f'[recovery]\nslurm_drains = "{mode}"\n')
    write_site(site.installed / "etc", text)


def explained(site: HookedSite, node: str) -> tuple[str, bool]:
    """Return what `nodes` says of a node, and whether it needs an administrator."""
    config = str(site.installed / "etc/config.toml")
    shown = site.health("nodes", "--json", "--config", config, user="root")
    groups: list[dict[str, Any]] = json.loads(shown.stdout)["by_slurm"]
    own: list[dict[str, Any]] = [g for g in groups if node in {d["node"] for d in g["drains"]}]
    needs = any(bool(group["needs_administrator"]) for group in own)
    return "; ".join(group["text"] for group in own), needs


def kinds(releases: Sequence[str], names: Sequence[str]) -> int:
    """Provoke every kind on every release; print a table, and return how many failed."""
    failed = 0
    for release in releases:
        own = [name for name in names if name != "task" or release == "26.05"]
        with cluster(len(own), "" if release == "host" else release) as site:
            for node, name in zip(site.lab.nodes, own, strict=True):
                try:
                    failed += not _one(site, node, name, release)
                except LabError as err:  # the other kinds go on
                    print(f"{release:6} {name:9} {err}", flush=True)
                    failed += 1
    return failed


def _one(site: HookedSite, node: str, name: str, release: str) -> bool:
    kind, began_s = KINDS[name], time.monotonic()
    site.health_check(node)
    job = kind.provoke(site, node)
    text, needs = "", False
    if kind.state == "COMPLETING":
        time.sleep(125)  # such a job is told of after two minutes
    for _ in range(20):  # learnt from the list, which a look at all nodes makes
        if name != "silent":
            _look_is_due(site, node)
            site.health_check(node)
        time.sleep(2)
        text, needs = explained(site, node)
        if _is_told(kind, text, job):
            break
    told = _is_told(kind, text, job)
    right = needs == (not kind.returns or name == "gres")
    kind.end(site, node)
    back = "-"
    if kind.returns:
        _until(site, lambda: "COMPLETING" not in site.lab.node_state(node)["State"], "its job")
        if name == "silent":  # slurmd runs no health check before it answers
            _look_is_due(site, node)
            site.health_check(node)
            listed = f'"node":"{node}"'
            _until(site, lambda: listed in site.on(node, "cat", f"{site.shared}/slurm.json"), node)
        states = [site.lab.node_state(node)["State"]]
        while len(states) < 5 and ("DRAIN" in states[-1] or "DOWN" in states[-1]):
            site.health_check(node)
            states.append(site.lab.node_state(node)["State"])
        is_back = "DRAIN" not in states[-1] and "DOWN" not in states[-1]
        back = f"{len(states) - 1} checks" if is_back else f"NOT BACK: {' '.join(states)}"
    took_s = time.monotonic() - began_s
    print(
        f"{release:6} {name:9} told={told} administrator={needs} back={back}"
        f" {took_s:.0f} s: {text}",
        flush=True,
    )
    if not told or back not in ("-", "1 checks", "2 checks"):
        print(site.hook_log(node)[-2000:], flush=True)
    return told and right and back in ("-", "1 checks", "2 checks")


def _look_is_due(site: HookedSite, node: str) -> None:
    """Make the list of drains a minute old."""
    site.on(node, "sh", "-c", f"touch -d '-2 min' {site.shared}/slurm.json; true")


def _is_told(kind: Kind, text: str, job: int) -> bool:
    return all(word.format(job=job) in text for word in kind.words)


# --- no wrong return -----------------------------------------------------------------------------


def _drained(site: HookedSite, node: str, job: int) -> None:
    """Leave a process of a job on the filesystem that hangs, and drain the node as slurmstepd does.

    slurmstepd runs UnkillableStepProgram and then sends this update as root.
    """
    hang(site, node)
    _held(site, node, job)
    program = [f"SLURM_JOB_ID={job}", "SLURM_STEP_ID=0", str(site.installed / "unkillable")]
    site.on(node, "env", *program)
    _drain(site, node, "Kill task failed")


def _held(site: HookedSite, node: str, job: int) -> None:
    leave = f"env SLURM_JOB_ID={job} setsid setpriv --reuid=4242 cat /tmp/hang/name"
    site.on(node, "sh", "-c", f"{leave} >/dev/null 2>&1 & sleep 0.3; pkill -KILL -P $! ; true")
    site.on(node, "sh", "-c", "pkill -KILL -f '^cat /tmp/hang/name'; true")


def _drain(site: HookedSite, node: str, reason: str) -> None:
    site.lab.run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"])


def _checks(site: HookedSite, node: str, count: int) -> None:
    for _ in range(count):
        site.health_check(node)


def _stays(site: HookedSite, node: str, job: int) -> str:
    _checks(site, node, 4)
    return f"the cause of job {job} stays"


def _comes_back(site: HookedSite, node: str, job: int) -> str:
    end_hang(site, node)
    _checks(site, node, 1)  # one pass
    hang(site, node)
    if job % 2:
        _held(site, node, job)
    _checks(site, node, 3)
    return "the cause comes back after one pass"


def _is_edited(site: HookedSite, node: str, job: int) -> str:
    # The very same text is no edit: Slurm keeps its time then.
    words = ["Kill task failed.", "Kill task failed; DIMM", "wait for me", "Epilog error, see me"]
    _drain(site, node, words[job % len(words)])
    end_hang(site, node)
    _checks(site, node, 4)
    return f"an administrator wrote {words[job % len(words)]!r}"


def _second_fault(site: HookedSite, node: str, job: int) -> str:
    site.on(node, "touch", "/tmp/broken")
    end_hang(site, node)
    _checks(site, node, 4)
    return f"a check fails beside job {job}"


def _is_over(site: HookedSite, node: str, job: int) -> str:
    """The control: this one returns."""
    end_hang(site, node)
    _checks(site, node, 3)
    return f"the cause of job {job} is gone"


SCENES = (_stays, _comes_back, _is_edited, _second_fault)


def loop(runs: int, seed: int, path: Path) -> int:
    """Run scenes in which no node may return, and some that end well; return the wrong ends."""
    done = path.read_text().splitlines() if path.exists() else []
    with cluster(2) as site, path.open("a") as file, ThreadPoolExecutor(2) as pool:
        while len(done) < runs:
            jobs = [seed * 1_000_000 + len(done), seed * 1_000_000 + len(done) + 1]
            for line in pool.map(
                lambda of: _run(site, *of), zip(site.lab.nodes, jobs, strict=True)
            ):
                print(line, file=file, flush=True)
                done.append(line)
            _forget(site)
    results = [json.loads(line) for line in done]
    wrong = sum(result["wrong"] for result in results)
    of = sum(not result["control"] for result in results)
    controls = sum(result["control"] and not result["wrong"] for result in results)
    print(f"{wrong} wrong in {len(results)} runs: {of} must stay, {controls} came back")
    return int(wrong)


def _run(site: HookedSite, node: str, job: int) -> str:
    control = random.Random(job).random() < 0.1
    scene = _is_over if control else SCENES[(job // 2) % len(SCENES)]
    site.health_check(node)
    _drained(site, node, job)
    _checks(site, node, job % 3)
    what = scene(site, node, job)
    state = site.lab.node_state(node)["State"]
    undo = "kill $(cat /tmp/hang.pid) 2>/dev/null; umount -l /tmp/hang 2>/dev/null"
    site.on(node, "sh", "-c", f"{undo}; rm -rf /tmp/broken {STATE}; true")
    result = {"what": what, "state": state, "control": control}
    return json.dumps({**result, "wrong": ("DRAIN" not in state) != control})


def _forget(site: HookedSite) -> None:
    """Begin anew: more runs within the hour would be a wave."""
    site.on(site.lab.nodes[0], "sh", "-c", f"rm -rf {site.shared}/slurm*; true")
    for node in site.lab.nodes:
        site.lab.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slurm_drains",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    of_kinds = commands.add_parser("kinds")
    of_kinds.add_argument("releases", nargs="*", default=["host"])
    of_kinds.add_argument("--only", nargs="*", choices=KINDS, default=list(KINDS))
    of_loop = commands.add_parser("loop")
    of_loop.add_argument("--runs", type=int, default=200)
    of_loop.add_argument("--seed", type=int, default=1)
    of_loop.add_argument("--file", type=Path, default=Path("build/slurm-drains.jsonl"))
    asked = parser.parse_args(arguments)
    if asked.command == "kinds":
        return kinds(asked.releases, asked.only)
    asked.file.parent.mkdir(exist_ok=True)
    return loop(asked.runs, asked.seed, asked.file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
