# SPDX-License-Identifier: Apache-2.0
"""What a site's slurm.conf may have: a tree of switches, mail, partitions that squeue hides."""

import json
import sys
from collections.abc import Iterator

import pytest

from slurm_health.records.nodeset import fold
from tests.lab import Lab
from tests.lab.installed_site import Site, eventually
from tests.lab.played_nodes import play, submit

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

SWITCHES = """\
SwitchName=leaf1 Nodes=n[1-2]
SwitchName=leaf2 Nodes=n[3-4]
SwitchName=spine Switches=leaf[1-2]
"""
CONF = "MailProg=/etc/slurm/mail\nPartitionName=hidden Nodes=ALL Hidden=YES"
# Slurm's own mail comes from slurmctld, as SlurmUser; ours from a node, as the owner.
MAIL = """#!/bin/sh
[ "$(id -un)" = alice ] || exit 0
{ echo "to $3: $2"; cat; } >>"$HOME/mail"
"""
FAILS = "python3 -c 'raise ValueError(\"bad label 17\")'"
# What users set so that they see of the queue what they want to see of it.
CHOSEN = {
    "SQUEUE_PARTITION": "main",
    "SQUEUE_STATES": "COMPLETED",
    "SQUEUE_USERS": "bob",
    "SQUEUE_NAMES": "none",
    "SQUEUE_FORMAT": "%j",
    "SCANCEL_INTERACTIVE": "1",
    "SCANCEL_STATE": "PENDING",
}
# Prints what Slurm answers, also of the job in its arguments.
ASKS = """
import json, os, sys
from slurm_health.system.slurm.client import Client
client, job, uid = Client(os.environ), sys.argv[1], os.getuid()
(state,) = (each.state for each in client.jobs_of(uid) if each.job == job)
print(json.dumps([sorted(client.unended(uid)), client.jobs_named("hidden", uid),
    client.steps_of(job), state, [*client.nodes(["n1", "n2"])]]))
"""
CANCELS = """
import os, sys
from slurm_health.system.slurm.client import Client
Client(os.environ).cancel(sys.argv[1])
"""


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    with Lab.start(nodes=4, topology_conf=SWITCHES, slurm_conf_extra=CONF) as lab:
        mail = lab.paths.etc / "slurm" / "mail"
        mail.write_text(MAIL)
        mail.chmod(0o755)
        yield Site(lab)


@pytest.mark.heavy
def test_the_leaves_of_the_nodes_are_known_and_rounds_go_inside_and_across_them(site: Site) -> None:
    play(site)
    job = submit(site, "-N4")
    assert site.ended(job)["JobState"] == "COMPLETED"
    (admitted,) = [r for r in site.records(job) if r["kind"] == "nodes_admitted"]
    assert admitted["leaves"] == {"leaf1": ["n1", "n2"], "leaf2": ["n3", "n4"]}
    rounds = [r["groups"] for r in site.records(job) if r["kind"] == "round_started"]
    leaf_of = {node: leaf for leaf, nodes in admitted["leaves"].items() for node in nodes}
    crossing = [[len({leaf_of[n] for n in group}) for group in groups] for groups in rounds]
    assert [2, 2] in crossing
    assert [1, 1] in crossing


def test_a_failure_is_mailed_once_to_the_owner_who_asked_for_mail_and_to_no_other(
    site: Site,
) -> None:
    play(site)
    asked = submit(site, "-N2", "--mail-type=FAIL", script=FAILS)
    silent = submit(site, "-N2", script=FAILS)
    for job in (asked, silent):
        assert site.ended(job)["JobState"] == "FAILED"
    eventually(site, lambda: "ValueError" in site.read("mail"), "the mail", 60)

    mail = site.read("mail")
    assert f"to alice: slurm-health: job {asked}: ValueError: bad label 17" in mail
    assert mail.count("slurm-health report") == 1


def test_what_is_asked_of_slurm_is_answered_in_full_whatever_it_shows_by_itself(
    site: Site,
) -> None:
    play(site)
    words = ("-wn1", "-phidden", "-Jhidden", "--no-requeue")
    running = submit(site, "-N1", *words, script="srun sleep 600")
    beside = ("-N4", "--exclusive", "-phidden", "-Jrival", "--wrap=true")
    rival = int(site.lab.run(["sbatch", "--parsable", *beside], user="alice").stdout)

    def answers(env: dict[str, str]) -> list[object]:
        argv = [sys.executable, "-c", ASKS, str(running)]
        return list(json.loads(site.lab.run(argv, user="alice", env=env).stdout))

    eventually(site, lambda: answers({})[2], "a step of the script")
    wanted = [[running, rival], [running], answers({})[2], "RUNNING", ["n1", "n2"]]
    site.lab.run(["scontrol", "update", "PartitionName=main", "Hidden=YES"])
    try:
        assert answers({}) == wanted
        assert answers(CHOSEN) == wanted
    finally:
        site.lab.run(["scontrol", "update", "PartitionName=main", "Hidden=NO"])
    # It cancels without a question.
    site.lab.run([sys.executable, "-c", CANCELS, str(running)], user="alice", env=CHOSEN)
    assert site.ended(running)["JobState"] == "CANCELLED"


def test_slurm_reads_the_names_of_eight_thousand_nodes_as_we_write_them(site: Site) -> None:
    names = [f"m{number:05d}" for number in range(1, 16_000, 2)]  # no two can be folded to a range
    assert site.lab.run(["scontrol", "show", "hostnames", fold(names)]).stdout.split() == names
