# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check` as its users call it: codes, what the script sees, the bell, real faults.

A node that fails others is faulty, one that Slurm cannot reach is named, no other ever is.
"""

import json
import shlex
import sys

import pytest

from tests.lab import played_nodes
from tests.lab.installed_site import COMMAND, Report, Site, accused, levels, verdict_of

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),  # a check takes seconds, on a machine that is busy a minute
]


@pytest.mark.heavy
def test_a_bad_node_is_code_1_and_stays_the_users_to_deal_with(site: Site) -> None:
    site.lab.fault.drop("n3")
    site.forget_calls()
    result = site.check(["-N4"], "--json", user="root")
    assert result.returncode == 1, result
    assert levels(json.loads(result.stdout))["n3"] == "faulty"
    # Without --act it only looks, root or not.
    assert site.drained() == {}
    assert not {name for name in site.calls() if "UPDATE" in name or "REQUEUE" in name}


@pytest.mark.parametrize(("act", "code"), [(False, 3), (True, 0)])
def test_nodes_that_cannot_be_measured_are_code_3_and_with_act_the_script_may_go_on(
    site: Site, act: bool, code: int
) -> None:
    words = ("--act",) * act
    result = site.check(["-N1"], *words, "--json", "--python=/usr/bin/false")
    assert result.returncode == code, result
    run = json.loads(result.stdout)
    assert (levels(run), run["exit_code"]) == ({"n1": "inconclusive"}, 3)


# --- when a job's script begins -------------------------------------------------------------------


# Every node sees the processes of all.
LOOK = """\
#!/bin/bash
for each in /proc/[0-9]*; do
    words=$(tr '\\0' ' ' <$each/cmdline 2>/dev/null)
    case $words in
    *"slurm_health agent "* | *"/probes/worker.py "*) echo "ALIVE $words" ;;
    esac
done
echo "looked"
"""


@pytest.mark.heavy
@pytest.mark.parametrize("options", ["-N6", "-N4 --check=matmul"])
def test_no_process_of_a_check_is_alive_when_the_script_begins(site: Site, options: str) -> None:
    played_nodes.play(site)
    script = site.script("look.sh", LOOK)
    job = played_nodes.submit(site, *options.split(), script, script="")
    assert site.ended(job)["JobState"] == "COMPLETED"
    output = site.lab.job_output(job)
    assert "looked" in output
    assert "ALIVE" not in output
    for node in ("n1", "n2", "n3", "n4"):
        assert site.records(job, writer=node)[-1]["kind"] == "agent_ended"


# --- the bell between master and agents -----------------------------------------------------------


# An agent that rings when it has heard the master; what libraries print is no ring.
AGENT = """
import os, sys, time
from slurm_health.preflight.orders import Bell
bell = Bell(os.environ["SLURMD_NODENAME"])
sys.stdout.write("a library says hello, and no more")
sys.stdout.flush()
print()
print("slurm-health: news of n9", flush=True)
while not bell.rang():
    time.sleep(0.01)
bell.ring(0, b"{}\\n")
sys.stdin.read()
"""
MASTER = f"""
import os, sys, time
from slurm_health.records.nodeset import expand
from slurm_health.preflight.master.launcher import SlurmLauncher
nodes = expand(os.environ["SLURM_JOB_NODELIST"])
command = [sys.executable, "-c", {AGENT!r}]
launcher = SlurmLauncher(
    int(os.environ["SLURM_JOB_ID"]), lambda launch, node: command, os.environ, dict
)
launcher.start(0, nodes)
rung, give_up = set(), time.monotonic() + 60
while rung != set(nodes) and time.monotonic() < give_up:
    launcher.ring()
    rung |= {{news.node for news in launcher.wait(0.5, 0.0)}}
print(sorted(rung))
launcher.stop(0.0)
"""
# What a user may have set for srun calls of his own.
USERS = {
    "SLURM_UNBUFFEREDIO": "1",
    "SLURM_LABELIO": "1",
    "SLURM_STDINMODE": "none",
    "SLURM_STDOUTMODE": "/dev/null",
    "SLURM_STDERRMODE": "/dev/null",
    "SRUN_ERROR": "none",
    "SRUN_OUTPUT": "none",
    "SRUN_INPUT": "none",
}


@pytest.mark.parametrize("environ", [{}, USERS], ids=["plain", "with variables of the user"])
def test_master_and_agents_hear_each_other_through_srun(
    site: Site, environ: dict[str, str]
) -> None:
    exports = "".join(f"export {name}={value}\n" for name, value in environ.items())
    text = f"#!/bin/sh\n{exports}exec {sys.executable} -c {shlex.quote(MASTER)}\n"
    result = site.allocated(["-N3"], site.script("bell.sh", text))
    assert result.stdout == "['n1', 'n2', 'n3']\n", result


# In each a site's or a user's srun is between the master and Slurm's.
_CUT = {
    "it passes everything on": 'exec "$real" "$@"',
    "it eats both streams": 'exec "$real" "$@" </dev/null >/dev/null',
    "it eats what agents say": 'exec "$real" "$@" >/dev/null',
    "it tears what agents say": '"$real" "$@" | tr e "\\n"',
    "it prints much without an end": '{ head -c 300000 /dev/zero; exec "$real" "$@"; }',
}


@pytest.mark.parametrize("cut", _CUT.values(), ids=list(_CUT))
def test_a_check_whose_bell_is_broken_ends_as_any_other(site: Site, cut: str) -> None:
    played_nodes.play(site, n3="dies")
    site.directory("cut/bin")
    site.script("cut/bin/srun", f"#!/bin/sh\nreal=$(PATH=${{PATH#*:}} command -v srun)\n{cut}\n")
    here = shlex.quote(site.directory("cut/bin"))
    text = f"#!/bin/sh\nexport PATH={here}:$PATH\n{played_nodes.command(site)} --json\n"

    result = site.allocated(["-N4"], site.script("check.sh", text))

    assert result.returncode == 1, result
    healthy = dict.fromkeys(("n1", "n2", "n4"), "healthy")
    assert levels(json.loads(result.stdout)) == {**healthy, "n3": "faulty"}, result.stdout
    site.assert_nothing_left()


# --- light probes, and faults of the network ------------------------------------------------------


UNSEEN = "processors, memory and the network over TCP were tested, NCCL was not"
# Slurm or the node itself keeps it from being measured; whether that is its fault may be open.
NAMED = frozenset({"faulty", "inconclusive"})


def checked(site: Site, count: int, *allowed: str, check: str = "auto") -> tuple[str, Report]:
    """Check the first nodes; return the job and the report. None but the allowed are bad."""
    names = ",".join(site.lab.nodes[:count])
    noted = site.lab.home("alice") / "job"
    words = f"echo $SLURM_JOB_ID >{noted}; exec {COMMAND} check --json --check={check}"
    result = site.allocated([f"-N{count}", f"--nodelist={names}"], "sh", "-c", words)
    run: Report = json.loads(result.stdout)
    assert accused(run).keys() <= {*allowed}, run
    assert result.returncode == (
        1 if accused(run) else 3 if "inconclusive" in levels(run).values() else 0
    )
    return noted.read_text().strip(), run


@pytest.mark.slow
def test_of_three_nodes_the_one_whose_packets_are_dropped_is_known_without_a_deadline(
    site: Site,
) -> None:
    site.lab.fault.drop("n3")
    job, run = checked(site, 3, "n3")

    assert levels(run)["n3"] == "faulty"
    written = site.records(job)
    phases = [record["phase"] for record in written if record["kind"] == "round_started"]
    # Alone they need one round, and as pairs three: one for each pair.
    assert phases[:4] == ["solo", "pair", "pair", "pair"]
    stopped = [record for record in written if record["kind"] == "group_aborted"]
    assert [record for record in stopped if "no answer from" in record["reason"]]
    assert not [record for record in stopped if record.get("timed_out")]


@pytest.mark.slow
def test_nodes_on_which_slurm_cannot_start_a_step_are_named(site: Site) -> None:
    site.lab.fault.kill_slurmd("n3")
    site.lab.fault.drop("n5", everything=True)
    _, run = checked(site, 6, "n3", "n5")
    assert {levels(run)["n3"], levels(run)["n5"]} <= NAMED
    assert all(verdict_of(run, node)["reason"] for node in ("n3", "n5"))


def test_light_probes_accuse_no_well_node_and_the_report_says_what_was_not_seen(site: Site) -> None:
    job, run = checked(site, 4, check="light")

    assert run["unseen"] == f"light probes (--check=light): {UNSEEN}"
    for figure in ("allgather_gb_per_s", "matmul_gflop_per_s"):
        assert all(node["figures"][figure] for node in run["nodes"])
    # Data goes over the network of the job.
    ready = site.records(job, writer="n1")
    (said,) = (record for record in ready if record["kind"] == "workers_ready")
    assert said["backend"] == "tcp"
    exchanged = [record for record in ready if record.get("probe") == "allgather"]
    assert {record["figures"]["transport"] for record in exchanged} == {said["interface"]}


@pytest.mark.heavy
def test_by_light_probes_a_node_whose_packets_are_dropped_is_faulty(site: Site) -> None:
    site.lab.fault.drop("n3")
    _, run = checked(site, 4, "n3", check="light")

    assert (levels(run)["n3"], verdict_of(run, "n3")["component"]) == ("faulty", "network")
