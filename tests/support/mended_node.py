# SPDX-License-Identifier: Apache-2.0
"""A node that its site mends: what was done to it, and what was said of that."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_health.node import event_queue
from slurm_health.node.mending import ledger
from slurm_health.node.rules.mending import MendStep, Tried
from slurm_health.node.rules.notices import EventKind
from tests.support.fake_scontrol import FakeScontrol
from tests.support.hooked_node import Node

NOTIFY = "[notify.targets.ops]\ncommand = ['/bin/cat']\n"


def mended(node: Node, steps: str, more: str = "", first: str = "reload") -> None:
    """Have a site mend its nodes: what reloads the driver leaves a trace."""
    reload = f"reload = ['sh', '-c', 'echo reloaded >>{node.directory}/reloads']"
    node.more = (
        f"[mend]\nenabled = true\ndry_run = false\nsteps = [{steps}]\n{reload}\n{more}\n"
        f"[mend.first]\nscratch = '{first}'\n{NOTIFY}"
    )


def again(node: Node, seconds: float = 300) -> str:
    node.now_s += seconds
    node.healthcheck()
    return node.said


def steps(node: Node) -> list[tuple[str, str]]:
    return [(each.step.value, each.outcome.value) for each in ledger.look(node.site)]


def until(condition: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + 55
    while not condition():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.05)


def faulty(node: Node) -> None:
    node.break_it()
    assert node.healthcheck()
    assert node.state == "IDLE+DRAIN"


def events(node: Node) -> list[tuple[EventKind, str]]:
    found = event_queue.read(node.site.state).values()
    return [(each.kind, each.text) for each in found if each is not None]


def rebooted(slurm: FakeScontrol) -> list[str]:
    return [call for call in slurm.calls() if call.startswith("reboot")]


def note(node: Node) -> str:
    return node.reason.partition(" : ")[0].partition(" [")[0]


def begun(step: MendStep = MendStep.RESET) -> Tried:
    return Tried(node="n3", step=step, time_s=1.0, drain="d", until_s=1801.0)
