# SPDX-License-Identifier: Apache-2.0
"""What depends on accounting, on a cluster with slurmdbd: an administrator's rights, and sacct."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.lab.installed_site import DEADLINE_S, Site, acts, eventually
from tests.lab.played_nodes import FAULTY, play, submit

pytestmark = [
    pytest.mark.lab(accounting=True),
    pytest.mark.slow,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]

BAD = "n3"
# A job that is ended has as long to say what ended it, also on a machine that is busy.
KILL_WAIT = "KillWait=120"


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """A cluster whose users have accounts; bob is an administrator, alice is an operator."""
    with Lab.start(nodes=6, accounting=True, slurm_conf_extra=KILL_WAIT) as lab:
        found = Site(lab)
        for words in (
            ("account", "lab"),
            ("user", "alice", "account=lab", "adminlevel=Operator"),
            ("user", "bob", "account=lab", "adminlevel=Admin"),
        ):
            lab.run(["sacctmgr", "--immediate", "add", *words])
        yield found


@pytest.mark.parametrize("user", ["bob", "alice"])
def test_a_job_moves_and_leaves_the_drain_to_the_epilog(site: Site, user: str) -> None:
    """An administrator may drain, and cannot write where root counts; an operator may not."""
    before = site.controller_log().count("Security violation")
    play(site, user, **{BAD: FAULTY})
    job = submit(site, "-N4", user=user)
    assert site.ended(job)["JobState"] == "COMPLETED"
    assert site.lab.job(job)["ExcNodeList"] == BAD, site.table(job, user)
    assert site.drained() == {}
    assert site.controller_log().count("Security violation") == before
    said = [each for each in acts(site.records(job, user=user)) if each[1] == "drain"]
    assert bool(said) == (user == "bob")


@pytest.mark.parametrize(("user", "gives_back"), [("bob", True), ("alice", False)])
def test_administrators_give_back_what_was_drained(site: Site, user: str, gives_back: bool) -> None:
    note = "Reason=shealth: no allgather check=network job=3 t=1763661234"
    site.lab.run(["scontrol", "update", f"NodeName={BAD}", "State=DRAIN", note])
    path = Path(site.directory("etc", user)) / "config.toml"
    path.write_text("")
    ran = site.health("nodes", "--config", str(path), "release", BAD, user=user)
    assert ran.stdout.startswith(f"{BAD}: released" if gives_back else f"{BAD}: not released"), ran
    assert bool(site.drained()) == (not gives_back)


@pytest.mark.parametrize(
    ("how", "cause"), [("scontrol requeue", "requeued"), ("scancel", "ended-from-outside")]
)
@pytest.mark.parametrize(
    ("by", "script"),
    [
        ("alice", "echo began; exec sleep 600"),
        ("root", "echo began; srun sleep 600"),
        # A shell may see what it waits for end, and go on before the signal comes to it.
        ("alice", "echo began; sleep 600; true"),
        ("root", "trap 'echo saved; exit 0' TERM; echo began; sleep 600 & wait"),
    ],
    ids=["killed", "srun", "goes on", "saves"],
)
def test_a_job_that_a_person_ends_is_told_as_that(
    site: Site, script: str, how: str, cause: str, by: str
) -> None:
    play(site)
    job = submit(site, "-N2", "--requeue", "--output=out-%j.txt", script=script)
    eventually(site, lambda: "began" in site.read(f"out-{job}.txt"), "the script", DEADLINE_S)
    site.lab.run([*how.split(), str(job)], user=by)
    found = site.wait_record(job, "diagnosed", writer="post-mortem")

    assert (found["cause"], found["attribution"]) == (cause, "ended from outside")
    assert not {"accused", "nodes", "told"} & found.keys()
    if cause == "requeued":  # Slurm says nowhere by whom
        assert "requeued (scontrol requeue)" in site.table(job)
        site.lab.run(["scancel", str(job)])
        return
    assert site.ended(job)["JobState"] == "CANCELLED"
    told = f"cancelled by {by}"
    eventually(site, lambda: told in site.table(job), "who cancelled it", DEADLINE_S)
    assert f"ENDED  the job was {told}" in site.table(job)
