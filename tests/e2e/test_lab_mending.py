# SPDX-License-Identifier: Apache-2.0
"""A node that keeps failing walks through reset, reboot, quarantine and ticket on a real Slurm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.hooks_support import FLAG, HookedSite, hooked_site
from tests.lab.errors import DeadlinePassed
from tests.lab.installed_site import eventually
from tests.played_gpu import nvml_library

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(2400)]

NODE = "n2"
GO = "/tmp/go"
HAS_GPUS = not nvml_library.missing()
FIRST = "reset" if HAS_GPUS else "reload"
# What resets "mends" it; the deep test does as well, and waits for a word.
MEND = """\
[mend]
enabled = true
dry_run = false
steps = ["reset", "reload", "reboot", "deep_test", "ticket"]
reset = ["sh", "-c", "rm -f {flag}; echo $0 >/tmp/reset-gpus", "{{gpus}}"]
reload = ["sh", "-c", "rm -f {flag}"]
deep_test = ["sh", "-c", "until test -e {go}; do sleep 0.1; done; rm -f {flag}; echo tested"]
per_hour = 50
burn_in_h = {burn_in_h}
[mend.first]
flag = "{first}"
[notify]
cluster = "lab"
command = ["sh", "-c", "cat >>{told}"]
limit_s = 60
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HookedSite]:
    directory = tmp_path_factory.mktemp("hooks")
    with hooked_site(directory, nodes=4, gpus=2 if HAS_GPUS else 0) as found:
        yield found


def configured(site: HookedSite, *, first: str, burn_in_h: float = 0) -> str:
    """Return what a site that mends says, and have its test wait for a word."""
    told = site.installed / "told"
    return MEND.format(flag=FLAG, go=GO, first=first, told=told, burn_in_h=burn_in_h)


def told(site: HookedSite) -> list[dict[str, Any]]:
    path = site.installed / "told"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line]


def steps(site: HookedSite) -> list[tuple[str, str]]:
    path = site.installed / "shared/mending.json"
    found = json.loads(path.read_text()) if path.exists() else []
    return [(each["step"], each.get("outcome", "begun")) for each in found]


def state(site: HookedSite) -> str:
    return site.lab.node_state(NODE)["State"]


def check_until(site: HookedSite, what: str, *wanted: str) -> None:
    """Let the node run health checks, as slurmd does, until Slurm shows it so."""

    def look() -> bool:
        site.health_check(NODE)
        return state(site) in wanted

    eventually(site, look, what, 400)


def step_until(site: HookedSite, step: str, outcome: str) -> None:
    """Let the node run health checks until its last step has come so far."""

    def look() -> bool:
        site.health_check(NODE)
        return steps(site)[-1:] == [(step, outcome)]

    try:
        eventually(site, look, f"{step} {outcome}", 400)
    except DeadlinePassed as late:
        raise AssertionError(f"{steps(site)}\n{site.hook_log(NODE)[-4000:]}") from late


def broken(site: HookedSite) -> str:
    """Break the node, and return the note with which its health check has drained it."""
    site.on(NODE, "touch", FLAG)
    site.health_check(NODE)
    assert state(site) == "IDLE+DRAIN", site.hook_log(NODE)
    return site.lab.node_state(NODE)["Reason"].partition(" [")[0]


def reboot_as_asked(site: HookedSite, note: str) -> None:
    """Be the machine that RebootProgram reboots; Slurm keeps the node drained, with our note."""
    # slurmctld has it run when it next looks, which may be seconds after it was asked.
    eventually(site, lambda: "REBOOT_ISSUED" in state(site), "the reboot", 400)
    site.on(NODE, "rm", "-f", FLAG)
    site.lab.fault.kill_slurmd(NODE)
    site.lab.run(["slurmd", "-b", "-N", NODE], node=NODE, cwd="/")  # -b: it has been rebooted
    eventually(site, lambda: state(site) == "IDLE+DRAIN", "the node after its reboot", 400)
    assert site.lab.node_state(NODE)["Reason"].startswith(note)


def test_a_node_walks_through_every_step_and_back(site: HookedSite) -> None:
    text = configured(site, first=FIRST)
    site.configure(text, share=0.5)

    # Reset: it helps, and the node comes back by the usual rules.
    broken(site)
    step_until(site, FIRST, "done")
    if HAS_GPUS:
        assert len(site.on(NODE, "cat", "/tmp/reset-gpus").strip().split(",")) == 2
    check_until(site, "the node back after the reset", "IDLE")

    # It fails again within the day: what has helped once is not tried twice.
    note = broken(site)
    if FIRST == "reset":  # the driver is next, which helps too: then it fails once more
        step_until(site, "reload", "done")
        check_until(site, "the node back after the reload", "IDLE")
        note = broken(site)
    step_until(site, "reboot", "begun")
    reboot_as_asked(site, note)
    check_until(site, "the node back after the reboot", "IDLE")
    assert steps(site)[-1] == ("reboot", "done")

    # And again: quarantine. Jobs of users wait, root's test runs.
    broken(site)
    step_until(site, "deep_test", "begun")
    users = site.lab.sbatch("#!/bin/sh\nhostname\n", f"-w{NODE}")
    eventually(
        site,
        lambda: "slurm-health-deep-test" in site.on(NODE, "squeue", "-h", "-tR", "-o%j"),
        "the deep test",
        120,
    )
    site.health_check(NODE)
    assert "in quarantine: job" in site.hook_log(NODE)
    assert site.lab.job(users)["JobState"] == "PENDING"
    assert NODE not in site.out_of_pool()
    site.on(NODE, "touch", GO)

    step_until(site, "deep_test", "done")
    site.lab.wait_job(users, {"COMPLETED"}, deadline_s=400)
    assert "No reservations" in site.on(NODE, "scontrol", "show", "reservation")

    # Nothing is left but people.
    broken(site)
    step_until(site, "ticket", "done")
    eventually(site, lambda: "ticket" in [each["kind"] for each in told(site)], "the ticket", 400)
    (ticket,) = [each for each in told(site) if each["kind"] == "ticket"]
    evidence = "\n".join(ticket["evidence"])
    for step in (FIRST, "reboot", "deep_test"):
        assert f"{step} at " in evidence
    assert state(site) == "IDLE+DRAIN"
    kinds = {each["kind"] for each in told(site)}
    assert {"drained", "relapse", "released", "ticket"} <= kinds
