# SPDX-License-Identifier: Apache-2.0
"""A node that its site repairs: what was done to it, and what was sent about that."""

import time
from collections.abc import Callable

from slurm_health.node import shared
from slurm_health.node.notify import EventKind
from tests.support.hooked_node import Node
from tests.support.hooked_slurm import HookedSlurm
from tests.support.notified import into_file, received


def repaired(node: Node, steps: str, more: str = "", first: str = "reboot") -> None:
    """Have a site repair its nodes; `first` is what the fault of `break_it` begins with."""
    node.more = (
        f"[repair]\ndry_run = false\nsteps = [{steps}]\n{more}\n"
        f"[repair.first]\nscratch = '{first}'\n{into_file(node)}"
    )


def again(node: Node, seconds: float = 300) -> str:
    node.now_s += seconds
    node.healthcheck()
    return node.said


def steps(node: Node) -> list[tuple[str, str]]:
    repairs = shared.read_ledger(node.site.breaker).repairs
    return [(attempt.step.value, attempt.outcome.value) for attempt in repairs]


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
    return [(event.kind, event.text) for event in received(node)]


def rebooted(slurm: HookedSlurm) -> list[str]:
    return [call for call in slurm.calls() if call.startswith("reboot")]


def note(node: Node) -> str:
    return node.reason.partition(" : ")[0].partition(" [")[0]


_LOOKED_AT = """\
if [ "$1 $2" = "show node" ]; then
    echo >>$dir/looks
    if [ $(wc -l <$dir/looks) -eq {look} ]; then {does}; fi
fi
"""


def at_look(look: int, state: str, reason: str = "") -> str:
    """Return shell with which somebody changes n3 before so manyeth look at a node."""
    return _LOOKED_AT.format(look=look, does=f"$dir/set n3 '{state}' '{reason}'")


def fails_at_look(look: int) -> str:
    """Return shell with which slurmctld does not answer one look at a node."""
    return _LOOKED_AT.format(look=look, does="echo Unable to contact slurm controller >&2; exit 1")
