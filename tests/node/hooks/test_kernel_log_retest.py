# SPDX-License-Identifier: Apache-2.0
"""What the kernel said of a fault repairs nothing by growing old; a reboot or a person does."""

import msgspec
import pytest

from slurm_health.node import state
from tests.node.hooks.test_healthcheck import pass_after_pass
from tests.support.hooked_node import Node
from tests.support.hooked_slurm import HookedSlurm
from tests.support.sites import tree

_XID = "NVRM: Xid (PCI:0000:3b:00): 48, pid=77, DBE"
_MCE = "mce: [Hardware Error]: Machine check events logged: Uncorrected error"
_CHECKS = "[checks.xid]\n[checks.kernel-log]\n"


class Clock:
    """The machine's clock and the kernel's, which go together unless somebody sets the first."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.boot = "b-1"
        self.uptime_s = 10_000.0
        self.messages: list[tuple[float, str]] = [(0.0, "Linux version 6.8")]
        self.first = 0
        self.go(0)

    def go(self, seconds: float) -> None:
        """Let time pass."""
        self.node.now_s += seconds
        self.uptime_s += seconds
        self.write()

    def say(self, text: str) -> None:
        """Let the kernel say something."""
        self.messages.append((self.uptime_s, text))
        self.write()

    def reboot(self) -> None:
        """Start the machine anew, with a log that has nothing of before."""
        self.boot, self.uptime_s = "b-2", 50.0
        self.messages = [(0.0, "Linux version 6.8")]
        self.write()

    def write(self) -> None:
        """Lay down what the kernel's files say now."""
        lines = [
            f"3,{self.first + number},{int(when_s * 1e6)},-;{text}\n"
            for number, (when_s, text) in enumerate(self.messages)
        ]
        files = {
            "/proc/uptime": f"{self.uptime_s:.2f} 9.00\n",
            "/proc/sys/kernel/random/boot_id": f"{self.boot}\n",
            "/dev/kmsg": "".join(lines),
        }
        tree(self.node.machine, files)


@pytest.fixture
def clock(node: Node) -> Clock:
    """A node that watches the kernel's log."""
    node.more = _CHECKS
    return Clock(node)


def drained_for(clock: Clock, text: str) -> Node:
    """Have the node drained for a message of the kernel."""
    clock.say(text)
    clock.go(10)
    assert clock.node.healthcheck()
    assert clock.node.state == "IDLE+DRAIN"
    return clock.node


def check_often(clock: Clock, hours: float) -> None:
    """Let many health checks pass, over so long."""
    for _ in range(8):
        clock.go(hours * 3600 / 8)
        clock.node.healthcheck()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("later_s", "reaches_back_s"),
    [
        (0, None),
        (-30 * 86400, None),
        (4000, 60),
        (0, 5),
    ],  # not even if the log reaches back to the drain
)
def test_age_a_clock_set_back_and_a_log_that_lost_the_message_return_nothing(
    clock: Clock, later_s: float, reaches_back_s: float | None
) -> None:
    node = drained_for(clock, _XID)
    if reaches_back_s is None:
        node.now_s += later_s
    else:
        clock.go(later_s)
        clock.messages = [(clock.uptime_s - reaches_back_s, "a.out[77]: segfault at 0")] * 9
        clock.first = 4711
    check_often(clock, 27)
    assert node.state == "IDLE+DRAIN"
    assert reaches_back_s is None or "does not reach back to the drain" in node.said


@pytest.mark.heavy
@pytest.mark.parametrize(("text", "again"), [(_XID, False), (_MCE, False), (_XID, True)])
def test_three_passes_after_a_reboot_return_it(clock: Clock, text: str, again: bool) -> None:
    node = drained_for(clock, text)
    clock.go(600)
    clock.reboot()
    if again:
        clock.say(text)
    check_often(clock, 0.5)
    assert node.state == ("IDLE+DRAIN" if again else "IDLE")
    assert bool(node.reason) is again


@pytest.mark.parametrize("hook", ["prolog", "healthcheck"])
def test_messages_before_a_return_do_not_count(clock: Clock, slurm: HookedSlurm, hook: str) -> None:
    node = drained_for(clock, _XID)
    clock.go(60)
    slurm.set({"n3": ("IDLE", "")})
    assert not getattr(node, hook)()
    assert node.state == "IDLE"
    clock.go(60)
    assert not node.healthcheck()
    assert node.state == "IDLE"
    clock.say(_XID)
    clock.go(60)
    assert node.prolog()
    assert node.state == "IDLE+DRAIN"


# --- tests before a release -----------------------------------------------------------------------


# What a prolog knows of its job, and a health check does not.
_OF_JOBS = """\
[checks.counts]
check = "command"
argv = ["sh", "-c", 'test -z "${%s:-}" || { echo 7 GPUs, Slurm counts on 8; exit 77; }']
contexts = ["prolog"]
time_limit_s = 30
"""


def test_a_fault_against_what_slurm_expects_is_tested_against_the_same(node: Node) -> None:
    node.more = _OF_JOBS % "SLURM_JOB_GPUS"
    assert node.prolog(SLURM_JOB_GPUS="0,1,2,3,4,5,6,7")
    pass_after_pass(node, 9)
    assert node.state == "IDLE+DRAIN"
    assert "7 GPUs, Slurm counts on 8" in node.said


@pytest.mark.parametrize(("shown", "runs"), [("MIXED+DRAIN", False), ("IDLE+DRAIN", True)])
def test_an_exclusive_test_runs_on_an_idle_node_only(
    drained: Node, slurm: HookedSlurm, shown: str, runs: bool
) -> None:
    # A test that would disturb other jobs leaves a trace where it runs.
    argv = f'["touch", "{drained.directory}/ran"]'
    alone = "check='command'\nexclusive=true\ncontexts=['retest']"
    drained.more = f"[checks.burn]\n{alone}\nargv={argv}\n"
    kept = drained.record
    state.save(drained.site.state, drained=msgspec.structs.replace(kept, retest=("burn",)))
    slurm.set({"n3": (shown, drained.reason)})
    pass_after_pass(drained, 1)
    assert (drained.directory / "ran").exists() is runs
    assert ("it needs an idle node, and this one is MIXED+DRAIN" in drained.said) is not runs


def test_two_exclusive_tests_do_not_run_side_by_side(drained: Node, slurm: HookedSlurm) -> None:
    busy, met = drained.directory / "busy", drained.directory / "met"
    text = f"mkdir {busy} || touch {met}; sleep 0.3; rmdir {busy}; echo >>{drained.directory}/ran"
    for name in ("burn", "bench"):
        drained.more += f"[checks.{name}]\ncheck='command'\nexclusive=true\n"
        drained.more += f"contexts=['retest']\nargv=['sh', '-c', '{text}']\n"
    kept = drained.record
    again = msgspec.structs.replace(kept, retest=("burn", "bench"))
    state.save(drained.site.state, drained=again)
    slurm.set({"n3": ("IDLE+DRAIN", drained.reason)})
    pass_after_pass(drained, 1)
    assert (drained.directory / "ran").read_text() == "\n\n"
    assert not met.exists()
