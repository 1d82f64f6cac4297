# SPDX-License-Identifier: Apache-2.0
"""The health check: drains for a fault, and brings back only what is ours, untouched and well."""

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec
import pytest

from slurm_health.node import STATE_FILE, shared, state
from slurm_health.node.hooks import healthcheck, nodes
from slurm_health.node.notify import EventKind
from slurm_health.node.site import load_for_hook
from slurm_health.node.store import held
from slurm_health.records.errors import ConfigError
from slurm_health.system.killable import Answered, run_guarded
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Node as SlurmNode
from tests.node.checks.conftest import WELL
from tests.support.hooked_node import Node
from tests.support.hooked_slurm import HookedSlurm
from tests.support.notified import into_file, received
from tests.support.rows import rows


def pass_after_pass(node: Node, count: int, apart_s: float = 61.0) -> None:
    for _ in range(count):
        node.now_s += apart_s
        node.healthcheck()


def test_one_that_begins_while_another_is_at_work_ends_at_once_and_says_so(node: Node) -> None:
    """slurmd starts one at each interval, whether or not the last has ended."""
    node.break_it()
    node.site.state.mkdir(mode=0o700, parents=True)
    with (node.site.state / healthcheck.LOCK).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not node.healthcheck()
        assert "an earlier health check is still running" in node.said
        assert node.state == "IDLE"
    assert node.healthcheck()
    assert node.state == "IDLE+DRAIN"


def test_a_child_that_the_kernel_may_hold_does_not_hold_the_lock(node: Node) -> None:
    def open_files() -> bytes:
        lock = (node.site.state / healthcheck.LOCK).stat()
        for number in range(1024):
            with contextlib.suppress(OSError):
                if os.path.samestat(lock, os.fstat(number)):
                    return b"open"
        return b"closed"

    with held(node.site.state / healthcheck.LOCK) as free:
        assert free
        seen = run_guarded(None, "looks", open_files, 60)
    assert isinstance(seen, Answered)
    assert seen.data == b"closed"


def test_a_drained_node_comes_back_after_three_passes(drained: Node) -> None:
    drained.break_it()
    pass_after_pass(drained, 5)
    assert drained.state == "IDLE+DRAIN"
    assert "already out of the pool: IDLE+DRAIN: shealth: /broken exists" in drained.said
    drained.mend()
    pass_after_pass(drained, 2)
    assert drained.slurm.calls() == ["show node -o n3"] * 7  # is the drain still ours?
    pass_after_pass(drained, 1)
    assert (drained.state, drained.reason) == ("IDLE", "")
    assert "State=UNDRAIN" in " ".join(drained.slurm.calls())
    assert state.load_record(drained.site.state) is None


def test_passes_of_a_node_that_is_well_return_no_other_with_which_it_shares_its_state(
    drained: Node, tmp_path: Path, slurm: HookedSlurm, shared: Path
) -> None:
    other = Node(tmp_path, "n4", slurm, shared)
    (other.directory / "state").symlink_to(drained.site.state)

    pass_after_pass(other, 5)

    assert drained.state == "IDLE+DRAIN"
    assert "holds the drain of n3: every node needs its own directory" in other.said
    other.break_it()
    assert other.healthcheck()
    assert other.state == "IDLE+DRAIN"


@pytest.mark.heavy
@rows
def test_a_drained_node_that_is_well_stays_out(
    drained: Node, more: str, retest: tuple[str, ...], meminfo: str | None, record: str | None
) -> None:
    drained.more = more
    if retest:
        kept = msgspec.structs.replace(drained.record, retest=retest)
        state.save(drained.site.state, drained=kept)
    if meminfo is not None:
        (drained.machine / "proc/meminfo").write_text(meminfo)
    if record is not None:
        (drained.site.state / STATE_FILE).write_text(record)
    pass_after_pass(drained, 4)
    assert drained.state == "IDLE+DRAIN"


@pytest.mark.heavy
@rows
def test_a_node_with_another_note_or_that_something_else_holds_is_not_released(
    drained: Node, slurm: HookedSlurm, state: str, note: str | None
) -> None:
    note = drained.reason if note is None else note
    slurm.set({"n3": (state, note)})
    pass_after_pass(drained, 4)
    assert (drained.state, drained.reason) == (state, note)
    assert not any(call.startswith("update") for call in slurm.calls())


def test_a_release_is_noticed_without_a_check(drained: Node, slurm: HookedSlurm) -> None:
    kept = drained.record
    state.save(drained.site.state, drained=msgspec.structs.replace(kept, retest=("gone",)))
    metrics = drained.directory / "metrics"
    metrics.mkdir()
    drained.more = f'[metrics]\ndirectory = "{metrics}"\n'
    pass_after_pass(drained, 1)
    assert "slurm_health_drained 1\n" in (metrics / "slurm_health.prom").read_text()
    assert "an administrator has to release it once it is well: the config file" in drained.said

    slurm.set({"n3": ("IDLE", "")})
    pass_after_pass(drained, 1)

    assert "it was returned to the pool" in drained.said
    assert "the config file lacks" not in drained.said
    assert state.load_record(drained.site.state) is None
    assert "slurm_health_drained 0\n" in (metrics / "slurm_health.prom").read_text()
    pass_after_pass(drained, 1)
    assert drained.said == ""


def test_an_edited_note_is_anothers_everywhere(drained: Node, slurm: HookedSlurm) -> None:
    note = drained.reason.partition(" [")[0].replace("exists", "exists, keep it -- admin")
    slurm.set({"n3": ("IDLE+DRAIN", f"{note} [admin@2026-01-02T04:00:00]")})

    pass_after_pass(drained, 1)
    assert "another process changed the drain: IDLE+DRAIN: shealth: " in drained.said
    assert state.load_record(drained.site.state) is None

    known = shared.read_ledger(drained.site.breaker)
    (listed,) = nodes.drained(_nodes(drained), known, {}, 3)
    assert listed.edited
    assert listed.now == "note edited: only scontrol lifts it"
    controller = Client.for_hook(drained.environ(), limit_s=5)
    came = nodes.release(drained.site, ["n3"], controller, {})
    assert came == {
        "n3": "not released: its note was edited since, so the drain is another's:"
        " scontrol update NodeName=n3 State=RESUME"
    }
    assert drained.state == "IDLE+DRAIN"


@pytest.mark.heavy
@pytest.mark.parametrize("trouble", ["exit 1", "sleep 3600", "echo nonsense; exit 0"])
def test_a_controller_in_trouble_releases_nothing(
    drained: Node, slurm: HookedSlurm, trouble: str
) -> None:
    slurm.trouble(trouble)
    drained.hurry()
    pass_after_pass(drained, 3)
    drained.hurry(30)
    assert drained.state == "IDLE+DRAIN"
    slurm.trouble("")
    pass_after_pass(drained, 1)
    assert drained.state == "IDLE"


@rows
def test_a_note_that_looks_like_fields_misleads_nobody(node: Node, text: str) -> None:
    node.more = f"[checks.odd]\ncheck='command'\nargv=['sh', '-c', 'echo {text}; exit 77']\n"
    assert node.healthcheck()
    assert node.state == "IDLE+DRAIN"
    (found,) = [each for each in _nodes(node).values() if each.drained]
    assert found.name == "n3"
    assert found.partitions == ("gpu",)


def _nodes(node: Node) -> dict[str, SlurmNode]:
    return Client.for_hook(node.environ(), limit_s=5).nodes()


def test_a_clock_that_is_set_back_neither_holds_nor_frees(drained: Node) -> None:
    drained.now_s -= 500_000
    pass_after_pass(drained, 3)
    assert drained.state == "IDLE+DRAIN"
    pass_after_pass(drained, 1)
    assert drained.state == "IDLE"


def test_a_record_that_cannot_be_kept_stops_no_drain(node: Node, tmp_path: Path) -> None:
    node.break_it()
    (node.directory / "state").write_text("a file where a directory should be")
    assert node.healthcheck()
    assert node.state == "IDLE+DRAIN"
    assert "will not be released by itself" in node.said


def test_a_node_that_lost_its_record_says_who_has_to_release_it(drained: Node) -> None:
    """As one without a disk does at each boot."""
    (drained.site.state / STATE_FILE).unlink()
    pass_after_pass(drained, 5)

    listing = nodes.listing(drained.site, _nodes(drained), drained.now_s)

    assert drained.state == "IDLE+DRAIN"
    assert [row.now for row in listing.drained] == [
        "its record is lost: release it by hand, and keep hooks.state on a disk"
    ]


# --- a config file that cannot be used -----------------------------------------------------------


def test_a_wrong_config_file_leaves_the_last_good_settings_in_use(node: Node) -> None:
    node.healthcheck()
    path = Path(node.site.path)
    good = path.read_text()
    for bad in (good.replace("[checks.memory]", "[checks.memry]"), f"{good}\n[broken"):
        path.write_text(bad)
        site = load_for_hook(path)
        assert "config.toml" in site.trouble
        assert site.planned == node.site.planned

        node.break_it()
        hook = node.hook("healthcheck", node.environ(), site)
        assert healthcheck.run(hook)
        assert node.state == "IDLE+DRAIN"
        known = Client.for_hook(node.environ(), limit_s=30).nodes()
        listing = nodes.listing(node.site, known, node.now_s)
        assert "last good settings in use on n3: " in nodes.text(listing, node.now_s)
        assert listing.needs_administrator
        node.mend()
        node.slurm.set({"n3": ("IDLE", "")})

    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_for_hook(path)
    never = node.directory / "never" / "config.toml"
    never.parent.mkdir(parents=True)
    never.write_text(f"[hooks]\nstate = '{never.parent}/state'\n[broken")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_for_hook(never)


def test_a_wrong_config_file_is_reported_by_one_node_a_day(rack: list[Node]) -> None:
    for node, later_s in zip(rack[:3], (0, 60, 90_000), strict=True):
        node.more = into_file(node)
        node.healthcheck()
        path = Path(node.site.path)
        path.write_text(f"{path.read_text()}\n[broken")
        # All nodes have the same file, with the same error.
        site = msgspec.structs.replace(
            load_for_hook(path), timing=node.timing, trouble="config.toml:3: shaer: unknown"
        )
        node.now_s += later_s
        healthcheck.run(node.hook("healthcheck", node.environ(), site))

    sent = [[event.kind for event in received(node)] for node in rack[:3]]
    assert sent == [[EventKind.UNCHECKED], [], [EventKind.UNCHECKED]]


# --- what is listed of a node on its way back ----------------------------------------------------


@pytest.mark.parametrize(
    ("retest", "words"), [("gone", "the config file lacks gone"), ("slow", "slow may take 60 s")]
)
def test_a_node_that_no_health_check_can_return_is_listed_with_the_reason(
    drained: Node, slurm: HookedSlurm, retest: str, words: str
) -> None:
    drained.more = "[checks.slow]\ncheck = 'command'\nargv = ['true']\ntime_limit_s = 60\n"
    state.save(
        drained.site.state, drained=msgspec.structs.replace(drained.record, retest=(retest,))
    )
    pass_after_pass(drained, 1)
    known = Client.for_hook(drained.environ(), limit_s=30).nodes()
    listed = nodes.text(nodes.listing(drained.site, known, drained.now_s), drained.now_s)

    assert "an administrator has to release it" in listed
    assert words in listed
    assert words in drained.said


def test_a_drained_node_is_listed_with_its_passes(node: Node, slurm: HookedSlurm) -> None:
    def listed() -> str:
        known = Client.for_hook(node.environ(), limit_s=30).nodes()
        text = nodes.text(nodes.listing(node.site, known, node.now_s), node.now_s)
        return next(line for line in text.splitlines() if line.startswith("n3"))

    node.break_it()
    node.healthcheck()
    assert "/broken exists  still faulty" in listed()
    (node.machine / "proc/meminfo").write_text("MemTotal: 1 kB\nMemAvailable: 1 kB\n")
    node.now_s += 61
    node.healthcheck()
    assert "faulty: memory: " in listed()
    node.mend()
    (node.machine / "proc/meminfo").write_text(WELL["/proc/meminfo"])
    for passes in (1, 2):
        node.now_s += 61
        node.healthcheck()
        assert f"{passes} of 3 passes" in listed()

    for _ in range(3):
        slurm.set({"n3": ("IDLE", "")})
        node.now_s += 61
        node.healthcheck()
        node.break_it()
        node.healthcheck()
        node.mend()
    node.now_s += 61
    node.healthcheck()
    assert "an administrator has to release it" in listed()
