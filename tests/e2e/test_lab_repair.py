# SPDX-License-Identifier: Apache-2.0
"""A node that keeps failing is rebooted, tested and handed over, on a real Slurm."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.hooks_support import FLAG, HookedSite, hooked_site
from tests.lab.errors import DeadlinePassed
from tests.lab.installed_site import eventually

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(2400)]

NODE = "n2"
GO = "/tmp/go"
# The test waits for a word.
REPAIR = """\
[repair]
dry_run = false
steps = ["reboot", "administrator"]
test = ["sh", "-c", "until test -e {go}; do sleep 0.1; done; echo tested"]
[repair.first]
flag = "reboot"
[notify]
cluster = "lab"
command = ["sh", "-c", "cat >>{events}"]
limit_s = 60
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HookedSite]:
    directory = tmp_path_factory.mktemp("hooks")
    with hooked_site(directory, nodes=4) as found:
        yield found


def events(site: HookedSite) -> list[dict[str, Any]]:
    path = site.installed / "events"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line]


def calls(site: HookedSite) -> list[dict[str, Any]]:
    return [event for event in events(site) if event["kind"] == "administrator"]


def steps(site: HookedSite) -> list[tuple[str, str]]:
    files = (site.installed / "shared").glob("ledger.*")
    latest = max(files, key=lambda path: int(path.suffix[1:]), default=None)
    repairs = json.loads(latest.read_text()).get("repairs", []) if latest else []
    return [(each["step"], each.get("outcome", "begun")) for each in repairs]


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


def back_after_its_test(site: HookedSite) -> None:
    """Let the node pass its checks, then its test, which runs where it is drained."""
    step_until(site, "test", "begun")
    assert state(site) == "IDLE+DRAIN"
    site.on(NODE, "touch", GO)
    check_until(site, "the node back after its test", "IDLE")
    assert steps(site)[-1] == ("test", "done")
    site.on(NODE, "rm", GO)


def test_a_node_walks_through_every_step_and_back(site: HookedSite) -> None:
    site.configure(REPAIR.format(go=GO, events=site.installed / "events"), share=0.5)
    note = broken(site)
    step_until(site, "reboot", "begun")
    reboot_as_asked(site, note)
    back_after_its_test(site)
    assert ("reboot", "done") in steps(site)

    # What has helped once is not tried twice within the day: only an administrator is left.
    broken(site)
    step_until(site, "administrator", "done")
    eventually(site, lambda: calls(site), "the notification", 400)
    (call,) = calls(site)
    evidence = "\n".join(call["evidence"])
    for step in ("reboot", "test"):
        assert f"{step} at " in evidence
    assert state(site) == "IDLE+DRAIN"
    assert {"drained", "relapse", "released"} <= {event["kind"] for event in events(site)}
