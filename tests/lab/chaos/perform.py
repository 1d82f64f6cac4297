# SPDX-License-Identifier: Apache-2.0
"""Carries a plan out on a cluster: submits the job, and lets each trouble happen at its moment."""

import contextlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from slurm_health.records.nodeset import expand
from tests.e2e.hooks_support import FLAG, HIDDEN, HookedSite
from tests.lab import LabError, played_nodes, processes, watcher
from tests.lab.installed_site import ENDED, kinds, records_in

from .plan import ENDINGS, HELD, RUNNING, SUBMITTED, WHILE_IT_TRAINS, Deed, Plan, Trouble

# A job is settled once it has ended, or stood still for so long with nobody at work on it: held,
# or able to start, which takes a slurmctld that has just come back some seconds.
_HELD_S, _WAITING_S = 3.0, 15.0
_SETTLED_S = 300.0  # some ten on an idle machine; a node that is stuck costs a minute a round
# How long slurmctld or a slurmd is away, unless the journal goes on before.
_AWAY_S = 2.0
# Within the second in which an attempt ends, Slurm fails the next one.
_TYPING_S = 1.2
HELPER = "slurm-health-requeue-"
_SAVED = ("state", "job_state")
# The partition whose jobs go first, and what preempts: a job that takes one node whole.
URGENT = "urgent"
_TAKES_A_NODE = "#!/bin/sh\nexec sleep 1\n"
# Slurm looks every 30 s for jobs whose time is up. Rounds of a check that take so long let that
# happen within one.
_ROUND_S = 4
_TIMED_OUT_S = 45.0

# Nothing happens any more to a script that trains, if nothing has for so long.
_TRAINS_S = 20.0

# Each start says where it runs, which nodes its tasks have run on, and whether another start still
# runs there. Tasks train until there is a file `go`.
SCRIPT = """\
say() { echo "$1 ${SLURM_RESTART_COUNT:-0} $2" >> ~/ran; }
exec 8>>~/lock
flock -n 8 || say overlap batch
say start "$SLURM_JOB_NODELIST $SLURM_NNODES ${SLURM_HEALTH_RESTART_COUNT:-0}"
srun --kill-on-bad-exit=1 --ntasks=$SLURM_NNODES --ntasks-per-node=1 sh -c \\
    'exec 9>>~/lock-$SLURMD_NODENAME
    flock -n 9 || echo "overlap ${SLURM_RESTART_COUNT:-0} $SLURMD_NODENAME" >> ~/ran
    echo "task ${SLURM_RESTART_COUNT:-0} $SLURMD_NODENAME" >> ~/ran
    until [ -e ~/go ]; do sleep 0.2; done' 8>&- || exit 1
say end
"""


class Performance:
    """One run on a cluster that is healthy and empty."""

    def __init__(self, site: HookedSite, plan: Plan) -> None:
        self.plan = plan
        self.job_id = 0
        self.done: list[Trouble] = []
        self.job: dict[str, str] = {}
        self.unsettled = ""
        self._site = site
        self._lab = site.lab
        self.pending = list(plan.troubles)
        self._due_s: dict[Trouble, float] = {}
        self._seen: Counter[str] = Counter()
        self._seen_s = 0.0

    def play(self) -> None:
        """Set the stage, submit the job, and follow it until it is settled."""
        self._prepare()
        timed = ("--time=60",) if self.plan.is_timed_out else ()
        env = {"FAKE_WORKER_ROUND_S": str(_ROUND_S)} if self.plan.is_timed_out else {}
        self.job_id = played_nodes.submit(
            self._site, *timed, *self.plan.words, user=self.plan.user, script=SCRIPT, env=env
        )
        give_up_s = time.monotonic() + _SETTLED_S
        before, since_s = "", time.monotonic()
        while True:
            self._look()
            happened = self._let_happen()
            now, now_s = self._state(), time.monotonic()
            if now != before or happened:
                before, since_s = now, now_s
            self._let_end(now_s)
            if self._is_over() or self._is_still(now_s - since_s):
                self._bring_back()
                return
            if now_s > give_up_s:
                self.unsettled = f"{now}, for {now_s - since_s:.0f} s"
                self._bring_back()
                return

    def _let_end(self, now_s: float) -> None:
        """Let the script end, once nothing more is to happen while it trains."""
        events = self._events()
        if events != self._seen:
            self._seen, self._seen_s = events, now_s
        awaited = any(_happens_to_script(each) for each in self.pending)
        began = events["script_started"] > 0
        # Its time is up, and Slurm has not noticed yet.
        limited = any(each.deed is Deed.TIME_LIMIT for each in self.done)
        patience_s = _TIMED_OUT_S if limited else _TRAINS_S
        if not (awaited or limited) or (began and now_s - self._seen_s > patience_s):
            self._file("go").touch()

    def _bring_back(self) -> None:
        """Bring the nodes back that were lost, so that Slurm can end what runs there."""
        for each in self.done:
            if each.deed is Deed.LOSE_NODE:
                self._lab.fault.clear(each.node)

    def _file(self, name: str) -> Path:
        return self._lab.home(self.plan.user) / name

    def _prepare(self) -> None:
        site, plan = self._site, self.plan
        # The lab's nodes share one table of processes: what a job leaves on one of them, the epilog
        # of another would end.
        site.configure(share=0.5)
        played_nodes.play(site, plan.user, **dict(plan.played))
        for nodes, mark in ((plan.hidden, HIDDEN), (plan.flagged, FLAG)):
            for node in nodes:
                site.on(node, "touch", mark)
        for name in ("ran", "go"):
            self._file(name).unlink(missing_ok=True)

    # --- what is seen ----------------------------------------------------------------------------

    def _look(self) -> None:
        try:
            self.job = self._lab.job(self.job_id)
        except LabError:  # Slurm has forgotten the job with its last state, or is away
            if self._lab.ping():
                self.job = {}
        if self.job.get("Reason") == "BeginTime":  # a requeue that is not ours waits two minutes
            time.sleep(_TYPING_S)
            self._type("scontrol", "update", f"JobId={self.job_id}", "StartTime=now")

    def _state(self) -> str:
        fields = ("JobState", "Reason", "Restarts", "Comment")
        return " ".join(f"{name}={self.job.get(name, '')}" for name in fields)

    def _is_over(self) -> bool:
        return not self.job or self.job["JobState"] in ENDED

    def _is_still(self, for_s: float) -> bool:
        """Tell whether nothing more will come of a job that waits."""
        still_s = _HELD_S if self.job.get("Priority") == "0" else _WAITING_S
        if self.job.get("JobState") != "PENDING" or for_s < still_s:
            return False
        return not any(name.startswith(HELPER) for name in self._site.jobs())

    def _events(self) -> Counter[str]:
        seen = Counter({SUBMITTED: 1})
        for path in self._journals():
            seen += kinds(records_in(path))
        restarts = int(self.job.get("Restarts", 0))
        running = self.job.get("JobState") == "RUNNING"
        seen[RUNNING] = restarts + running
        seen[HELD] = restarts if self.job.get("Priority") == "0" else restarts - 1
        return seen

    def _journals(self) -> Iterator[Path]:
        job = self._site.run_directory(self.job_id, user=self.plan.user).parent
        for name in ("master", "supervisor"):
            yield from job.glob(f"*/{name}.jsonl")

    # --- what happens ----------------------------------------------------------------------------

    def _let_happen(self) -> bool:
        """Let happen what is due; tell whether anything did."""
        events = self._events()
        now_s = time.monotonic()
        for each in self.pending:
            if events[each.event] >= each.nth:
                self._due_s.setdefault(each, now_s + each.later_s)
        due = [each for each in self.pending if self._due_s.get(each, math.inf) <= now_s]
        happened = []
        for each in due:
            what = self._on_a_training_node(each) if each.deed in WHILE_IT_TRAINS else each
            if self._happens(what):
                self.done.append(what)
                happened.append(each)
        self.pending = [each for each in self.pending if each not in happened]
        return bool(happened)

    def _on_a_training_node(self, trouble: Trouble) -> Trouble:
        """Let it happen to another node if the job has come to run without the planned one.

        Never to its first: without the batch script there is nothing left to see.
        """
        training = [node for node in self._lab.nodes if self._trains(node)]
        others = [node for node in training if node != self.job.get("BatchHost")]
        if trouble.node in training or not others:
            return trouble
        return replace(trouble, node=others[-1])

    def _trains(self, node: str) -> bool:
        there = processes.on_node(self._lab.pid(node))
        return any(is_rank(list(process.argv)) for process in there)

    def _happens(self, trouble: Trouble) -> bool:
        """Let it happen; tell whether it did: whoever is not there yet cannot be killed."""
        match trouble.deed:
            case Deed.CANCEL:
                return self._type("scancel", str(self.job_id))
            case Deed.REQUEUE | Deed.HOLD | Deed.RELEASE:
                return self._type("scontrol", str(trouble.deed), str(self.job_id))
            case Deed.HEALTH_CHECK:
                self._site.health_check(trouble.node)
                return True
            case Deed.TIME_LIMIT:
                return self._reach_time_limit()
            case Deed.PREEMPT:
                return self._preempt()
            case Deed.LOSE_NODE:
                return self._lose(trouble.node)
            case Deed.KILL_SLURMCTLD:
                return self._kill_slurmctld()
            case Deed.KILL_SLURMD if self.job.get("Reason") == "Prolog":
                return False  # Slurm would wait for that prolog for ever (22.05.8)
            case Deed.KILL_SLURMD:
                self._lab.fault.kill_slurmd(trouble.node)
                self._stay_away()
                self._lab.fault.start_slurmd(trouble.node)
                return True
            case _:
                return self._kill(_VICTIMS[trouble.deed], trouble.node)

    def _type(self, *argv: str) -> bool:
        self._lab.run(argv, user=self.plan.user, check=False)
        return True

    def _reach_time_limit(self) -> bool:
        if self.job.get("JobState") != "RUNNING":
            return False
        return self._type("scontrol", "update", f"JobId={self.job_id}", "EndTime=now")

    def _preempt(self) -> bool:
        """Let another user's job take one of the job's nodes; tell whether the job has any."""
        if self.job.get("JobState") != "RUNNING":
            return False
        node = expand(self.job["NodeList"])[-1]
        wanted = (f"--partition={URGENT}", f"--nodelist={node}", "--exclusive")
        self._lab.sbatch(_TAKES_A_NODE, *wanted, user="bob")
        return True

    def _kill_slurmctld(self) -> bool:
        """Kill slurmctld once it has saved the job and its start: it forgets what it has not saved.

        A start that it has forgotten it repeats, beside the first one, and drains the node.
        """
        saved = self._lab.paths.root.joinpath(*_SAVED)
        script = self._lab.paths.root / "state" / f"hash.{self.job_id % 10}" / f"job.{self.job_id}"
        began_s = script.stat().st_mtime if script.exists() else 0.0
        if self.job.get("JobState") == "RUNNING":
            started_s = datetime.fromisoformat(self.job["StartTime"]).timestamp()
            began_s = max(began_s, started_s + 1.0)  # cut to a second
        self._lab.wait_until(lambda: saved.stat().st_mtime, lambda s: s > began_s, "a saved state")
        self._lab.kill_slurmctld()
        self._stay_away()
        self._lab.start_slurmctld()
        return True

    def _lose(self, node: str) -> bool:
        """Cut a node off on which the script trains; tell whether it does."""
        trains = self._trains(node)
        if trains:
            self._lab.fault.drop(node, everything=True)
        return trains

    def _stay_away(self) -> None:
        """Return once the journal goes on, or after a while."""
        known = self._events()
        end_s = time.monotonic() + _AWAY_S
        while self._events() == known and time.monotonic() < end_s:
            time.sleep(0.05)

    def _kill(self, is_victim: Callable[[list[str]], bool], node: str) -> bool:
        found = [
            process.pid
            for name in ([node] if node else self._lab.nodes)
            for process in processes.on_node(self._lab.pid(name))
            if is_victim(list(process.argv))
        ]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(found)


def _happens_to_script(trouble: Trouble) -> bool:
    ends_it = trouble.deed in ENDINGS and trouble.event == "script_started"
    return ends_it or trouble.deed in WHILE_IT_TRAINS


def is_rank(argv: list[str]) -> bool:
    return len(argv) > 2 and Path(argv[0]).name == "sh" and argv[1] == "-c" and "~/go" in argv[2]


_VICTIMS: dict[Deed, Callable[[list[str]], bool]] = {
    Deed.KILL_MASTER: lambda argv: "supervised-check" in argv,
    Deed.KILL_AGENT: watcher.is_agent,
    Deed.KILL_WORKER: watcher.is_worker,
    Deed.KILL_SRUN: lambda argv: argv[:1] == ["srun"] and "agent" in argv,
    Deed.KILL_SUPERVISOR: lambda argv: "supervise" in argv,
    Deed.KILL_RANK: is_rank,
    Deed.KILL_HELPER: lambda argv: "requeue-helper" in argv,
}
