# SPDX-License-Identifier: Apache-2.0
"""What the user's script gets, and what becomes of its end, is what plain sbatch gives and makes.

Where it can be said so, the same script is run by both and what it saw is compared."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.lab import Lab
from tests.lab.inside import Result
from tests.lab.installed_site import COMMAND, DEADLINE_S, Site, levels
from tests.lab.played_nodes import FAKE_WORKER, play

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]

# Everything a process can be given, as JSON on standard output.
WORLD = """#!/usr/bin/python3 -I
import json, os, resource, sys
status = dict(l.split(":", 1) for l in open("/proc/self/status").read().splitlines())
limits = [n for n in dir(resource) if n.startswith("RLIMIT_")]
world = {
    "arguments": sys.argv[1:],
    "cwd": os.getcwd(),
    "stdin": sys.stdin.read(),
    "environ": dict(
        e.split("=", 1) for e in open("/proc/self/environ").read().split("\\0") if "=" in e
    ),
    "umask": status["Umask"].strip(),
    "signals": {k: status[k].strip() for k in ("SigBlk", "SigIgn")},
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in limits},
    "leads_its_group": os.getpgrp() == os.getpid(),
    "groups": [os.getuid(), os.getgid(), *os.getgroups()],
    "nice": os.nice(0),
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:-1],
}
print(json.dumps(world))
"""
# What differs between any two jobs.
OF_THE_JOB = {"SLURM_JOBID", "SLURM_JOB_ID", "SLURM_TASK_PID"}
OF_THE_JOB |= {"SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "SLURM_ARRAY_JOB_ID"}
ODD = {
    "PLAIN": "value with blanks",
    "EMPTY": "",
    "LINES": "one\ntwo",
    "with.dot": "no shell's name",
    "BASH_FUNC_greet%%": "() {  echo hello\n}",
    "SLURM_HEALTH_UNRELATED": "kept",
}
# What is measured does not matter here, so nothing is: see played_nodes.
OURS = [COMMAND, "sbatch", f"--python={FAKE_WORKER}"]


@pytest.fixture(autouse=True)
def _well(site: Site) -> None:
    play(site)


def run(site: Site, command: str, *words: str, **options: Any) -> Result:
    return site.lab.run([command, *words], user="alice", check=False, **options)


def submit_both(site: Site, *words: str, **options: Any) -> tuple[int, int]:
    """Submit the same with sbatch and with slurm-health sbatch; the two jobs."""
    plain = run(site, "sbatch", "--parsable", *words, **options)
    ours = run(site, *OURS, "--parsable", *words, **options)
    assert (plain.returncode, plain.stderr) == (ours.returncode, ours.stderr) == (0, "")
    return int(plain.stdout), int(ours.stdout)


def submit(site: Site, *words: str, **options: Any) -> int:
    """Submit with slurm-health sbatch alone; the job."""
    return int(run(site, *OURS, "--parsable", *words, **options).stdout)


def world(site: Site, job: int) -> dict[str, Any]:
    ended = site.ended(job)
    output = site.lab.job_output(job)
    assert ended["JobState"] == "COMPLETED", output
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.heavy
@pytest.mark.parametrize(
    "options",
    [
        ["--ntasks=2", "--cpus-per-task=1", "--comment=a b", "--export=ALL,MORE=x"],
        ["--export=NONE"],
    ],
    ids=lambda options: options[-1],
)
def test_a_script_finds_the_same_world_as_with_sbatch(site: Site, options: Sequence[str]) -> None:
    script = site.script("world.py", WORLD)
    elsewhere = site.directory("else where")
    given = ["--epochs", "2", "", "a b", "$HOME"]
    words = ["-N1", "-wn1", *options, f"--chdir={elsewhere}", script, *given]
    plain, ours = submit_both(site, *words, env=ODD)
    expected, actual = world(site, plain), world(site, ours)
    # What `--heartbeat=auto`, the default, adds to find PyTorch's optimizers.
    assert actual["environ"].pop("PYTHONPATH").endswith("slurm_health/training/in_ranks")
    assert (expected["arguments"], expected["cwd"]) == (given, elsewhere)
    for environ in (expected["environ"], actual["environ"]):
        for name in OF_THE_JOB:
            environ.pop(name, None)
    assert actual["environ"] == expected["environ"]
    assert actual == expected


def test_a_job_looks_to_slurm_as_with_sbatch(site: Site) -> None:
    # Its name, where it writes, what it asked for: all but when and where it ran.
    text = "#!/bin/bash\n#SBATCH --time=00:07:00 --comment=mine\n#SBATCH -N2\nexit 0\n"
    script = site.script("look.sh", text)
    words = ["--hold", "--output=%x-%j.out", "--error=%x.err", "--mem=50", script, "word"]
    shown = [site.lab.job(job) for job in submit_both(site, *words)]
    varying = {"JobId", "Priority", "SubmitTime", "EligibleTime", "AccrueTime", "LastSchedEval"}
    plain, ours = ({k: v for k, v in job.items() if k not in varying} for job in shown)
    for job, fields in zip(shown, (plain, ours), strict=True):
        assert fields.pop("StdOut").endswith(f"/look.sh-{job['JobId']}.out")
    # A script that is rendered has to be stored somewhere else.
    del plain["Command"], ours["Command"]
    assert plain == ours


@pytest.mark.parametrize("text", ["#!/no/such/interpreter\n", "#!/bin/bash\nkill -KILL $$\n"])
def test_a_script_that_cannot_run_or_dies_ends_as_with_sbatch(site: Site, text: str) -> None:
    plain, ours = (site.ended(job) for job in submit_both(site, "-N1", site.script("die.sh", text)))
    compared = ("JobState", "ExitCode", "Reason")
    assert [ours[key] for key in compared] == [plain[key] for key in compared]
    assert plain["ExitCode"] != "0:0"


@pytest.mark.heavy
def test_every_task_of_an_array_is_checked_and_reported_under_its_own_name(site: Site) -> None:
    text = "#!/bin/sh\necho task $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT\n"
    script = site.script("array.sh", text)
    number = submit(site, "-N1", "--array=1,3", "--output=task-%A-%a.out", script)
    for task in (1, 3):
        assert site.ended(f"{number}_{task}")["JobState"] == "COMPLETED"
        assert site.read(f"task-{number}-{task}.out").splitlines()[-1] == f"task {task} of 2"
        (attempt,) = site.report(f"{number}_{task}")["runs"]
        assert set(levels(attempt).values()) == {"healthy"}
        assert f"{number}_{task}" in site.table(f"{number}_{task}")


# --- signals -----------------------------------------------------------------------------------

COUNTING = """#!/bin/bash
trap 'echo usr1 >> counted' USR1
trap 'echo term >> counted; exit 9' TERM
echo ready >> counted
exec 3<> <(:)  # a read that only time or a signal ends, and no child that could be left
while :; do read -rt 0.2 -u 3; done
"""


def test_scancel_delivers_a_signal_to_the_script_exactly_once_and_ends_it_leaving_nothing(
    site: Site,
) -> None:
    job = str(submit(site, "-N1", site.script("counting.sh", COUNTING)))

    def await_lines(count: int) -> list[str]:
        def look() -> list[str]:
            return site.read("counted").splitlines()

        return site.lab.wait_until(look, lambda seen: len(seen) >= count, "a line", DEADLINE_S)

    await_lines(1)
    for count, to in enumerate(("--batch", "--full"), 2):
        site.lab.run(["scancel", "--signal=USR1", to, job], user="alice")
        await_lines(count)
    site.lab.run(["scancel", job], user="alice")
    assert site.ended(job)["JobState"] == "CANCELLED"
    site.assert_nothing_left()
    assert await_lines(4) == ["ready", "usr1", "usr1", "term"]


# --- one task of an array -------------------------------------------------------------------------


# As the supervisor ends steps before it starts a script again, and as the monitor cancels.
ACTS = """
import os, signal
from slurm_health.preflight.supervisor.script_process import end_steps
from slurm_health.records.script_records import Diagnosed, EventKind, TrainingEvent
from slurm_health.training.monitor.events import Events, acting

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
end_steps(dict(os.environb), mask=())
where = {"nodes": ["n1"], "ranks": [0], "attribution": "unknown", "description": "it is gone"}
found = Diagnosed(sureness="certain", cause="rank-gone", **where)
hang = TrainingEvent(event=EventKind.HANG, stalled_s=60, usual_s=30, step=1, diagnosed=found)
acting("stop", os.environ)(hang, Events(None, os.environ))
"""
TASK = f"""#!/bin/bash
cd
here=$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID
srun --overlap sleep 600 &
until [ -e go-$here ]; do sleep 0.1; done
{sys.executable} -c '{ACTS}' >said-$here 2>&1
wait
"""


@pytest.mark.parametrize("task", [0, 1])
def test_the_steps_and_the_job_of_one_task_are_ended_and_those_of_the_other_run_on(
    site: Site, task: int
) -> None:
    lab = site.lab
    # On one node, and with room for both.
    array = lab.sbatch(TASK, "-wn1", "--mem=100M", "--array=0-1", "--output=/dev/null")
    other = f"{array}_{1 - task}"
    lab.wait_until(lambda: [steps(lab, f"{array}_{each}") for each in (0, 1)], all, "a step", 60)

    lab.run(["sh", "-c", f"touch ~/go-{array}-{task}"], user="alice")
    lab.wait_job(f"{array}_{task}", {"CANCELLED"})

    said = lab.run(["sh", "-c", f"cat ~/said-{array}-{task}"], user="alice").stdout
    assert "the job is cancelled because it hangs (--monitor=stop)" in said
    assert "could not" not in said
    assert lab.job(other)["JobState"] == "RUNNING"
    assert steps(lab, other)
    lab.run(["scancel", str(array)], user="alice")


def steps(lab: Lab, task: str) -> list[str]:
    shown = lab.ask("squeue", "--noheader", "--steps", f"--jobs={task}", "--format=%i").stdout
    return [step for step in shown.split() if step.rpartition(".")[2].isdigit()]
