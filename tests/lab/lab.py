# SPDX-License-Identifier: Apache-2.0
"""A disposable real Slurm cluster on one machine."""

import os
import re
import select
import signal
import subprocess
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.played_gpu.description import Device

from . import cgroups, directory, processes, requirements, starting
from .errors import DeadlinePassed, JobEnded, LabError, LabStartFailed
from .faults import Faults
from .inside import Inside
from .layout import BASE, GPU, LabSpec, read_spec
from .records import parse_record

_STOP_DEADLINE_S = 60
_PREFERRED = 100  # times the CPU time of what else the machine runs

FINAL_STATES = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    ]
)


class Lab(Inside):
    """A running lab. Get one from `Lab.start` or `Lab.attach`; as a context it ends by itself."""

    def __init__(self, spec: LabSpec, keeper: "subprocess.Popen[bytes] | None") -> None:
        super().__init__(spec)
        self.fault = Faults(self)
        self._keeper = keeper

    # -- life ---------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        nodes: int = 6,
        name: str | None = None,
        slurm_conf_extra: str = "",
        release: Path | None = None,
        *,
        cpus: int = 2,
        memory_mb: int = 2000,
        topology_conf: str = "",
        gres_conf: str = "",
        gpus: int = 0,
        gpu: Device = GPU,
        accounting: bool = False,
        network_filesystem_mb: int = 0,
        visible: Sequence[Path] = (),
        detached: bool = False,
        deadline_s: float = 60,
    ) -> Self:
        """Start a lab and wait until Slurm calls every node idle.

        Args:
            nodes: how many: n1, n2, ...
            name: default: a new one.
            slurm_conf_extra: lines that replace or extend the lab's slurm.conf.
            release: root directory of another Slurm release (`python -m tests.lab make-root`);
                default: what the environment's LAB_RELEASE names, else the machine's own Slurm.
            cpus: CPUs of each node, whatever the machine has.
            memory_mb: RealMemory of each node, likewise.
            topology_conf: text of a topology.conf, for topology/tree; default: no topology.
            gres_conf: text of a gres.conf; the nodes' Gres is for `slurm_conf_extra` to say.
            gpus: played GPUs of each node, as tests/played_gpu has them.
            gpu: what each of them is.
            accounting: with slurmdbd; the cluster is in it, and neither accounts nor users are.
            network_filesystem_mb: how much fits on a network filesystem that every node mounts at
                `paths.shared`; 0: there is none.
            visible: paths that jobs must reach although others may not enter them outside, or
                although they lie below /tmp.
            detached: let the lab live on when this process ends.
            deadline_s: for the whole start.
        """
        if release is None and os.environ.get("LAB_RELEASE"):
            release = Path(os.environ["LAB_RELEASE"])
        requirements.require(
            release, accounting=accounting, network_filesystem=bool(network_filesystem_mb)
        )
        spec = LabSpec(
            name=name or starting.new_name(),
            nodes=tuple(f"n{i + 1}" for i in range(nodes)),
            cpus=cpus,
            memory_mb=memory_mb,
            slurm_conf_extra=slurm_conf_extra,
            topology_conf=topology_conf,
            gres_conf=gres_conf,
            gpus=gpus,
            gpu=gpu,
            accounting=accounting,
            network_filesystem_mb=network_filesystem_mb,
            release=None if release is None else str(release.resolve()),
            visible=tuple(str(path.resolve()) for path in visible),
        )
        keeper = starting.start_keeper(spec, detached=detached, deadline_s=deadline_s)
        try:
            lab = cls(spec, keeper)
            lab.wait_nodes(deadline_s=deadline_s)
        except BaseException as err:
            logs = starting.log_tails(spec)
            starting.abandon(spec, keeper)
            if isinstance(err, LabError):
                raise LabStartFailed(str(err), logs) from err
            raise
        return lab

    @classmethod
    def attach(cls, name: str) -> Self:
        root = BASE / name
        if not directory.is_alive(root) or not (root / "state.json").exists():
            running = " ".join(directory.living()) or "none"
            raise LabError(f"no lab named {name!r} is running (running: {running})")
        return cls(read_spec(root), keeper=None)

    def stop(self) -> None:
        """End every process of the lab and remove all it left; harmless when it is gone."""
        if self._keeper is not None:
            starting.abandon(self.spec, self._keeper)
            return
        try:
            keeper = os.pidfd_open(self._pids["keeper"])
            if directory.is_alive(self.paths.root):
                signal.pidfd_send_signal(keeper, signal.SIGTERM)
            select.select([keeper], [], [], _STOP_DEADLINE_S)
            os.close(keeper)
        except ProcessLookupError:
            pass
        if not directory.await_end(self.paths.root, _STOP_DEADLINE_S):
            raise LabError(f"lab {self.spec.name!r} does not end (keeper {self._pids['keeper']})")
        directory.sweep_if_dead(self.paths.root)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -- Slurm --------------------------------------------------------------------------------

    def node_state(self, node: str) -> dict[str, str]:
        """`scontrol show node` as field → value; "State" as Slurm prints it, e.g. IDLE+DRAIN."""
        self.pid(node)
        return parse_record(self.ask("scontrol", "show", "node", "-o", node).stdout.strip())

    def node_states(self) -> dict[str, dict[str, str]]:
        """The same for every node of the lab, and for none that is only in its slurm.conf."""
        lines = self.ask("scontrol", "show", "nodes", "-o").stdout.splitlines()
        records = [parse_record(line) for line in lines if line.startswith("NodeName=")]
        return {each["NodeName"]: each for each in records if each["NodeName"] in self.nodes}

    def job(self, job_id: int | str) -> dict[str, str]:
        return parse_record(self.ask("scontrol", "show", "job", "-o", str(job_id)).stdout.strip())

    def sbatch(self, script: str, *options: str, user: str = "alice") -> int:
        """Submit a batch script, given as text; the job's id."""
        argv = ["sbatch", "--parsable", *options]
        return int(self.run(argv, user=user, stdin=script.encode()).stdout.split(";")[0])

    def job_output(self, job_id: int | str) -> str:
        path = self.job(job_id).get("StdOut")
        return Path(path).read_text(errors="replace") if path and Path(path).exists() else ""

    def wait_job(
        self,
        job_id: int | str,
        states: Collection[str] = frozenset({"COMPLETED"}),
        deadline_s: float = 60,
    ) -> dict[str, str]:
        """Wait until the job is in one of these states; `JobEnded` where it ends otherwise."""

        def look() -> dict[str, str]:
            job = self.job(job_id)
            state = job["JobState"]
            if state in FINAL_STATES and state not in states:
                said = {key: job.get(key) for key in ("JobState", "Reason", "ExitCode")}
                output = self.job_output(job_id)[-2000:]
                raise JobEnded(f"job {job_id}: {said}, wanted {sorted(states)}; output:\n{output}")
            return job

        try:
            return self.wait_until(
                look,
                lambda job: job["JobState"] in states,
                f"job {job_id} being {' or '.join(sorted(states))}",
                deadline_s,
            )
        except DeadlinePassed as late:
            said = f"{late.seen}\nits output:\n{self.job_output(job_id)[-2000:]}"
            logs = f"\nlogs:\n{self._log_of(job_id)}"
            raise DeadlinePassed(late.what, late.deadline_s, said + logs) from None

    def _log_of(self, job_id: int | str) -> str:
        """What slurmctld and the nodes logged of the job, and of what went wrong beside it."""
        told = re.compile(rf"\b[Jj]ob(?:I[dD])?[ =]?{job_id}\b|error:|drain|[Rr]equeue")
        found: list[str] = []
        for daemon in ("slurmctld", *self.nodes):
            path = self.paths.log / f"{daemon}.log"
            text = path.read_text(errors="replace") if path.exists() else ""
            lines = [line for line in text.splitlines() if told.search(line)]
            found += [f"{daemon}: {line}" for line in lines[-20:]]
        return "\n".join(found)

    def wait_nodes(self, state: str = "IDLE", deadline_s: float = 60) -> None:
        self.wait_until(
            self._seen_states,
            lambda states: set(states.values()) == {state} and len(states) == len(self.nodes),
            f"all nodes {state}",
            deadline_s,
        )

    def wait_node(self, node: str, state: str, deadline_s: float = 60) -> dict[str, str]:
        """Wait until a node's state has this word in it (DRAIN in IDLE+DRAIN); the node."""
        return self.wait_until(
            lambda: self.node_state(node),
            lambda record: state in record["State"].rstrip("*").split("+"),
            f"{node} {state}",
            deadline_s,
        )

    def _seen_states(self) -> dict[str, str]:
        if not self.ping():  # not yet, or no longer: scontrol would retry for long
            return {}
        return {name: record["State"] for name, record in self.node_states().items()}

    def ping(self) -> bool:
        return self.ask("scontrol", "ping", check=False).returncode == 0

    def cancel_all(self, deadline_s: float = 60) -> None:
        """Cancel every job and wait until none is left, not even completing."""

        def look() -> str:
            # Again each time: a job in the middle of being requeued is pending a moment later.
            self.ask("sh", "-c", "squeue -ho %A | sort -u | xargs -r scancel --quiet")
            return self.ask("squeue", "-ho", "%i %T").stdout

        self.wait_until(look, lambda seen: not seen.strip(), "no jobs", deadline_s)

    def resume_all(self, deadline_s: float = 60) -> None:
        """Clear every fault, start dead daemons, and return every node to service."""
        if not self.slurmctld_pids():
            self.start_slurmctld(deadline_s)
        self.fault.clear_all()
        wanting = [
            name
            for name, record in self.node_states().items()
            if {"DRAIN", "DOWN", "FAIL"} & set(record["State"].rstrip("*").split("+"))
        ]
        if wanting:
            self.run(
                ["scontrol", "update", f"NodeName={','.join(wanting)}", "State=RESUME"], check=False
            )
        self.wait_until(
            self._seen_states,
            lambda states: (
                len(states) == len(self.nodes)
                and set(states.values()) <= {"IDLE", "MIXED", "ALLOCATED", "COMPLETING"}
            ),
            "all nodes in service",
            deadline_s,
        )

    def prefer(self, *, usual: bool = False) -> None:
        """Have its nodes' processes run before all others of the machine, or as `usual` again.

        For tests of speeds: what else the machine does then slows no node more than others.
        """
        if self.cpu_controller is None:
            raise LabError("this machine offers no cpu cgroup that the lab may use")
        cgroups.set_weight(self.cpu_controller, self.spec.name, 1 if usual else _PREFERRED)

    def reset(self, deadline_s: float = 60) -> None:
        self.resume_all(deadline_s)
        self.cancel_all(deadline_s)
        self.wait_nodes(deadline_s=deadline_s)

    # -- slurmctld ----------------------------------------------------------------------------

    def slurmctld_pids(self) -> tuple[int, ...]:
        found = processes.on_node(self.pid())
        return tuple(process.pid for process in found if process.name == "slurmctld")

    def kill_slurmctld(self) -> None:
        self._end_slurmctld(signal.SIGKILL)

    def start_slurmctld(self, deadline_s: float = 60) -> None:
        self.run(["slurmctld"], cwd="/", deadline_s=deadline_s)
        self.wait_until(self.ping, bool, "slurmctld answering", deadline_s)

    def restart_slurmctld(self, deadline_s: float = 60) -> None:
        self._end_slurmctld(signal.SIGTERM)
        self.start_slurmctld(deadline_s)

    def _end_slurmctld(self, signum: int) -> None:
        for pid in self.slurmctld_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        self.wait_until(self.slurmctld_pids, lambda pids: not pids, "slurmctld ended", 30)
