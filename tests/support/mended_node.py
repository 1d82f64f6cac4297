# SPDX-License-Identifier: Apache-2.0
"""A node that its site mends: what was done to it, and what was said of that."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_health.node.draining import own_drain
from slurm_health.node.mending import ledger, quarantine
from slurm_health.node.notify import EventKind
from slurm_health.node.rules.mending import MendStep, Tried
from slurm_health.system.slurm.maintenance import Maintenance
from tests.support.fake_scontrol import FakeScontrol
from tests.support.hooked_node import Node
from tests.support.notified import into_file, received


def mended(node: Node, steps: str, more: str = "", first: str = "reload") -> None:
    """Have a site mend its nodes: what reloads the driver leaves a trace."""
    reload = f"reload = ['sh', '-c', 'echo reloaded >>{node.directory}/reloads']"
    node.more = (
        f"[mend]\nenabled = true\ndry_run = false\nsteps = [{steps}]\n{reload}\n{more}\n"
        f"[mend.first]\nscratch = '{first}'\n{into_file(node)}"
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
    return [(event.kind, event.text) for event in received(node)]


def rebooted(slurm: FakeScontrol) -> list[str]:
    return [call for call in slurm.calls() if call.startswith("reboot")]


def note(node: Node) -> str:
    return node.reason.partition(" : ")[0].partition(" [")[0]


def begun(step: MendStep = MendStep.RESET) -> Tried:
    return Tried(node="n3", step=step, time_s=1.0, drain="d", until_s=1801.0)


# --- quarantine, and administrators who are quicker -----------------------------------------------

_RESERVED = """\
case "$1 $2" in
"create reservation") touch $dir/reserved; exit ;;
"show reservation") [ ! -f $dir/reserved ] || echo "ReservationName=shealth-n3 Nodes=n3"; exit ;;
"delete ReservationName=shealth-n3") rm $dir/reserved; exit ;;
esac
"""
_LOOKED_AT = """\
if [ "$1 $2" = "show node" ]; then
    echo >>$dir/looks
    if [ $(wc -l <$dir/looks) -eq {look} ]; then {does}; fi
fi
"""
_SET = "sed 's|^NodeName=n3 .*|{line}|' $dir/nodes >$dir/acted; mv $dir/acted $dir/nodes"


def takes_reservations(slurm: FakeScontrol, more: str = "") -> None:
    """Let a node be reserved, and jobs be submitted and cancelled; `more` is shell, run first."""
    slurm.trouble(more + _RESERVED)
    for name, answer in (("sbatch", "echo 7"), ("scancel", ":")):
        program = slurm.bin / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >>{slurm.directory}/calls\n{answer}\n')
        program.chmod(0o755)


def put_into_quarantine(node: Node) -> None:
    """Do what a health check does when a deep test is next."""
    kept = own_drain.recall(node.site.state)
    assert kept is not None
    controller = Maintenance(node.environ(), patience_s=0.0)
    step = begun(MendStep.DEEP_TEST)
    quarantine.begin(node.site, kept, step, controller, environ=node.environ())


def at_look(look: int, state: str, reason: str = "") -> str:
    """Return shell with which somebody changes n3 before so manyeth look at a node."""
    said = f"Reason={reason} [root@2026-01-02T03:04:05]" if reason else ""
    line = f"NodeName=n3 State={state} Partitions=gpu {said}"
    return _LOOKED_AT.format(look=look, does=_SET.format(line=line))


def fails_at_look(look: int) -> str:
    """Return shell with which slurmctld does not answer one look at a node."""
    return _LOOKED_AT.format(look=look, does="echo Unable to contact slurm controller >&2; exit 1")


def is_reserved(slurm: FakeScontrol) -> bool:
    return (slurm.directory / "reserved").exists()


def told_of(slurm: FakeScontrol, word: str) -> list[str]:
    """Return what Slurm was told with this word in it, as `State=DRAIN`."""
    return [call for call in slurm.calls() if word in call.split()]
