# SPDX-License-Identifier: Apache-2.0
"""The cluster that a storm passes over: its slurm.conf, its jobs, its nodes."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from benchmarks.storms.plan import BACKUP, RACK, Place, Storm, rack_of
from benchmarks.storms.runners import install
from slurm_health.node.draining.shared_state import LEDGER
from slurm_health.node.rules.breaker import DrainLedger
from slurm_health.records.decoding import from_json
from tests.lab import Lab
from tests.lab.layout import USERS
from tests.lab.processes import on_node
from tests.lab.records import parse_record

# How long a requeued job waits; Slurm's default is 120 s.
CRED_EXPIRE_S = 60
# Two processors have the time for one health check a second, not for more beside prologs. Where
# other work ran, 20 nodes every 20 s were too much: no check ended within its limit any more.
_INTERVAL_S = 60
_STORAGE_MB = 64
_LOOK_S = 0.05
_CONF = """\
{hooks}
HealthCheckInterval={interval_s}
HealthCheckNodeState=ANY,CYCLE
PrologFlags=Alloc,DeferBatch
SchedulerParameters=nohold_on_prolog_fail,batch_sched_delay=1,sched_min_interval=100000
AuthInfo=cred_expire={cred_expire_s}
MessageTimeout=60
SlurmctldTimeout=10
MinJobAge=7200
MaxJobCount=50000
TreeWidth=50
{more}
"""
_KEYS = {"prolog": "Prolog", "epilog": "Epilog", "healthcheck": "HealthCheckProgram"}
_POWER = """\
SuspendProgram={place}/suspend
ResumeProgram={place}/resume
SuspendTimeout=10
ResumeTimeout=120
SuspendRate=0
ResumeRate=0
"""
_WRITES_NODES = """\
#!/bin/sh
PATH=/usr/bin:/bin
scontrol show hostnames "$1" >>{place}/power/{word}
"""
# Each job says that it began and ended, in a file that all nodes share.
_JOB = """\
#!/bin/sh
echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} begin" >>~/storm
sleep %d
echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} end" >>~/storm
"""


class Cluster:
    """A running lab with one runner's hooks."""

    def __init__(self, lab: Lab, place: Path, shared: Path, storm: Storm) -> None:
        self.lab = lab
        self.shared = shared
        self.storm = storm
        self.submitted: set[int] = set()
        self._place = place
        self._submitter = ThreadPoolExecutor(1)
        self._turns = itertools.cycle([[*USERS], [*reversed(USERS)]])
        self._submission: Future[None] | None = None

    # --- nodes -------------------------------------------------------------------------------

    def touch(self, node: str, path: str) -> None:
        """Make a file below a node's /tmp."""
        (self.lab.paths.tmp(node) / Path(path).name).touch()

    def remove(self, node: str, path: str) -> None:
        """Remove it."""
        (self.lab.paths.tmp(node) / Path(path).name).unlink(missing_ok=True)

    def said(self, node: str, path: str) -> str:
        """Return what stands in a file below a node's /tmp."""
        with suppress(OSError):
            return (self.lab.paths.tmp(node) / Path(path).name).read_text(errors="replace")
        return ""

    # --- jobs --------------------------------------------------------------------------------

    def submit(self, count: int, *, nodes: int = 1, work_s: int = 2) -> None:
        """Have so many jobs submitted beside all else, unless slurmctld is busy with the last."""
        if self._submission is None or self._submission.done():
            self._submission = self._submitter.submit(self._submit, count, nodes, work_s)

    def await_submissions(self) -> None:
        """Wait until what was begun is submitted, or refused."""
        if self._submission is not None:
            self._submission.result()

    def _submit(self, count: int, nodes: int, work_s: int) -> None:
        for user, many in zip(next(self._turns), ((count + 1) // 2, count // 2), strict=True):
            if many:
                each = f"sbatch --parsable --requeue -n{nodes} -N{nodes} -o/dev/null job"
                script = f"cat >job; i=0; while [ $i -lt {many} ]; do {each}; i=$((i+1)); done"
                said = self.lab.run(
                    ["sh", "-c", script],
                    user=user,
                    cwd=self.lab.home(user),
                    stdin=(_JOB % work_s).encode(),
                    deadline_s=600,
                    check=False,
                )
                self.submitted |= {int(word) for word in said.stdout.split() if word.isdigit()}

    def requeue_running(self) -> None:
        """Requeue all jobs that run; squeue would ask for partitions, which is a hook's to do."""
        shown = self.lab.ask("scontrol", "show", "jobs", "-o", check=False, deadline_s=120).stdout
        jobs = [parse_record(line) for line in shown.splitlines()]
        running = [each["JobId"] for each in jobs if each.get("JobState") == "RUNNING"]
        if running:
            self.lab.run(["scontrol", "requeue", ",".join(running)], check=False, deadline_s=300)

    def written(self) -> str:
        """Return what jobs have written."""
        paths = [self.lab.home(user) / "storm" for user in USERS]
        return "".join(path.read_text() for path in paths if path.exists())

    # --- the controller ----------------------------------------------------------------------

    def signal_slurmctld(self, number: signal.Signals) -> None:
        """Send a signal to the first slurmctld."""
        for pid in self.lab.slurmctld_pids():
            os.kill(pid, number)

    def start_backup(self) -> None:
        """Start the second slurmctld, with a directory of its own for its pid file."""
        script = "mount -t tmpfs none /run/slurm && exec slurmctld"
        self.lab.run(["sh", "-c", script], node=BACKUP, cwd="/")

    # --- storage -----------------------------------------------------------------------------

    def signal_storage(self, number: signal.Signals) -> None:
        """Send a signal to the server of the network filesystem."""
        for process in on_node(self.lab.pid()):
            if process.name.startswith("glusterfsd") or any(
                "server.vol" in a for a in process.argv
            ):
                os.kill(process.pid, number)

    def fill_storage(self) -> None:
        """Leave no room on the network filesystem."""
        script = f"dd if=/dev/zero of={self.shared}/filler bs=64k || true"
        self.lab.run(["sh", "-c", script], deadline_s=120, check=False)

    def empty_storage(self) -> None:
        """Make room again."""
        self.lab.run(["rm", "-f", f"{self.shared}/filler"], deadline_s=120)

    def ledger(self) -> DrainLedger | None:
        """Return the breaker's ledger; None where there is none to read."""
        text: bytes | None = None
        if self.storm.place is Place.STORAGE:
            found = self.lab.run(["cat", f"{self.shared}/{LEDGER}"], check=False)
            text = found.stdout.encode() if found.returncode == 0 else None
        else:
            with suppress(OSError):
                text = (self.shared / LEDGER).read_bytes()
        try:
            return None if text is None else from_json(text, DrainLedger)
        except msgspec.DecodeError:
            return None

    # --- power -------------------------------------------------------------------------------

    def follow_power(self, done: threading.Event) -> None:
        """Do what suspend and resume programs of a cloud do, until told to stop."""
        seen = {"suspend": 0, "resume": 0}
        while not done.wait(_LOOK_S):
            for word in seen:
                path = self._place / "power" / word
                nodes = path.read_text().split() if path.exists() else []
                for node in nodes[seen[word] :]:
                    if word == "suspend":
                        self.lab.fault.kill_slurmd(node)
                    else:
                        self.lab.run(["slurmd", "-b", "-N", node], node=node, cwd="/")
                seen[word] = len(nodes)


class LedgerWatch:
    """When the breaker tripped, seen from outside as soon as it stands in the ledger."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.trip_took_s: dict[str, float] = {}

    def __enter__(self) -> LedgerWatch:
        if self._cluster.storm.place is not Place.STORAGE:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_LOOK_S):
            ledger = self._cluster.ledger()
            for name, trip in (ledger.trips if ledger else {}).items():
                self.trip_took_s.setdefault(name, time.time() - trip.time_s)


@contextmanager
def cluster_for(
    storm: Storm, runner: str, nodes: int, place: Path, *, nhc: Path | None, release: Path | None
) -> Iterator[Cluster]:
    """Start a cluster for one storm, in an empty directory of its own."""
    place.chmod(0o755)
    if nhc is not None:
        shutil.copytree(nhc, place / "nhc")
    name = f"storm{os.getpid()}"
    on_network = storm.place is Place.STORAGE
    shared = Path(f"/var/lib/slurm-health-lab/{name}/shared/ours") if on_network else place / "ours"
    hooks = install(runner, place, shared)
    names = tuple(f"n{number + 1}" for number in range(nodes))
    conf = _CONF.format(
        hooks="\n".join(f"{_KEYS[hook]}={path}" for hook, path in hooks.items()),
        interval_s=max(_INTERVAL_S, nodes),
        cred_expire_s=CRED_EXPIRE_S,
        more=_more(storm, names, place),
    )
    with Lab.start(
        nodes=nodes,
        name=name,
        slurm_conf_extra=conf,
        release=release,
        topology_conf=_racks(names) if storm.place is Place.RACKS else "",
        network_filesystem_mb=_STORAGE_MB if on_network else 0,
        visible=[place],
        deadline_s=120 + nodes,
    ) as lab:
        lab.run(["install", "-d", "-m", "0755", str(shared)])
        cluster = Cluster(lab, place, shared, storm)
        if storm.place is Place.BACKUP:
            cluster.start_backup()
        yield cluster


def _more(storm: Storm, nodes: Sequence[str], place: Path) -> str:
    if storm.place is Place.BACKUP:
        return f"SlurmctldHost={BACKUP}(10.77.1.{1 + nodes.index(BACKUP)})"
    if storm.place is Place.POWER:
        (place / "power").mkdir()
        shutil.chown(place / "power", "slurm", "slurm")
        for word in ("suspend", "resume"):
            (place / word).write_text(_WRITES_NODES.format(place=place, word=word))
            (place / word).chmod(0o755)
        return _POWER.format(place=place)
    return ""


def _racks(nodes: Sequence[str]) -> str:
    count = -(-len(nodes) // RACK)
    lines = [f"SwitchName=rack{n} Nodes={','.join(rack_of(nodes, n))}" for n in range(count)]
    lines.append(f"SwitchName=top Switches={','.join(f'rack{n}' for n in range(count))}")
    return "\n".join(lines) + "\n"
