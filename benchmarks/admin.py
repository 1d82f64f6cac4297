# SPDX-License-Identifier: Apache-2.0
"""An administrator's hour: what goes wrong on nodes, and whether the hooks do what they should.

    python -m benchmarks.admin                 all scenarios, on a played Slurm and on the lab
    python -m benchmarks.admin --no-lab        those on a played Slurm only, in minutes
    python -m benchmarks.admin GPU diskless    those whose names contain one of these words

Each scenario is a set of tests; it holds if all of them pass. What has passed is kept in a file, by
commit, so that a run that was interrupted goes on where it stopped (`--again` begins anew).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
from tabulate import tabulate

_ROOT = Path(__file__).parents[1]
_RESULTS = Path(tempfile.gettempdir()) / "slurm-health-admin.json"
_HOOKS, _LAB = "tests/node/hooks/test_", "tests/e2e/test_lab_"
_DECIDE = "tests/preflight/decide/test_decide.py"
_CHECKS, _CLI = "tests/node/checks/test_", "tests/cli/test_hooks.py"


class Scenario(NamedTuple):
    """What goes wrong, what should come of it, and the tests that show it."""

    name: str
    expected: str
    tests: tuple[str, ...]


class Result(msgspec.Struct, frozen=True):
    """How the tests of a scenario ended, in pytest's words, and how long they took."""

    holds: bool
    summary: str
    seconds: float


SCENARIOS = (
    Scenario(
        "many nodes fail at once",
        "no more are drained than the breaker allows",
        (
            f"{_CLI}::test_a_tripped_breaker_is_loud_until_it_is_reset",
            "tests/node/test_store.py",
            "tests/node/rules/test_rules.py::test_no_sequence_of_drains_gets_past_the_breaker",
        ),
    ),
    Scenario(
        "the shared filesystem hangs",
        "one node is drained; of many two, and the server's problem is sent once",
        (
            f"{_HOOKS}draining.py::test_if_all_lose_it_two_are_drained_and_the_server_is_blamed",
            f"{_HOOKS}draining.py::test_the_last_of_several_drains_gives_way",
        ),
    ),
    Scenario(
        "a wrong line in the config file",
        "nodes follow the last good one, nodes exits with 1, one notification",
        (
            f"{_HOOKS}healthcheck.py::test_a_wrong_config_file_leaves_the_last_good_settings_in_use",
            f"{_HOOKS}healthcheck.py::test_a_wrong_config_file_is_reported_by_one_node_a_day",
        ),
    ),
    Scenario(
        "a bad link, accused by users' jobs",
        "the mark is listed; partners check it, and it is drained",
        (
            f"{_CLI}::test_a_marked_node_is_listed_with_who_accuses_it_and_when",
            f"{_LAB}sweep.py",
        ),
    ),
    Scenario(
        "three unrelated faults within an hour",
        "all are drained, the breaker does not trip",
        (
            f"{_HOOKS}draining.py::test_different_faults_are_drained_until_the_share_is_reached",
            f"{_HOOKS}draining.py::test_a_breaker_that_tripped_for_one_fault_lets_another_be_drained",
        ),
    ),
    Scenario(
        "a link that flaps for hours",
        "a fault",
        (
            f"{_CHECKS}machine.py::test_an_interface_that_flaps_for_hours_is_a_fault",
            f"{_CHECKS}machine.py::test_two_checks_of_one_port_both_find_it",
        ),
    ),
    Scenario(
        "a node that is drained again and again",
        "waits for an administrator, and nodes says so",
        (
            f"{_HOOKS}draining.py::test_a_fourth_drain_a_day_waits_for_a_person",
            f"{_HOOKS}healthcheck.py::test_a_drained_node_is_listed_with_its_passes",
        ),
    ),
    Scenario(
        "sbatch -w names a bad node",
        "the job runs, and says so",
        (f"{_DECIDE}::test_what_is_decided_is_said_with_its_reason",),
    ),
    Scenario(
        "a GPU is lost",
        "drained, and the reason begins with it",
        (
            f"{_CHECKS}machine.py::test_a_check_calls_what_it_finds_what_it_is",
            "tests/node/rules/test_rules.py::test_the_20_columns_of_sinfo_say_what_is_wrong",
            "tests/node/checks/test_gpu.py::test_a_gpu_is_judged_by_its_fault_and_no_other_is_named",
        ),
    ),
    Scenario(
        "a second fault on a drained node",
        "it stays drained, nodes shows the fault of now",
        (
            f"{_HOOKS}healthcheck.py::test_a_drained_node_that_is_well_stays_out",
            f"{_HOOKS}healthcheck.py::test_a_drained_node_is_listed_with_its_passes",
        ),
    ),
    Scenario(
        "a disk becomes read-only",
        "a fault; full is its user's",
        (f"{_CHECKS}filesystem.py", f"{_CHECKS}machine.py"),
    ),
    Scenario("a DIMM fails", "a fault while it is new", (f"{_CHECKS}vendors.py",)),
    Scenario(
        "a clock jumps",
        "nothing is released, drained or forgotten for it",
        (
            f"{_HOOKS}healthcheck.py::test_a_clock_that_is_set_back_neither_holds_nor_frees",
            f"{_HOOKS}draining.py::test_a_node_whose_clock_is_a_day_ahead_forgets_nothing",
            f"{_HOOKS}kernel_log_retest.py::test_age_a_clock_set_back_and_a_log_that_lost_the_message_return_nothing",
        ),
    ),
    Scenario(
        "a check hangs",
        "named, inconclusive; no second child after one that the kernel holds",
        (
            f"{_HOOKS}prolog.py::test_a_hung_check_drains_only_if_a_hang_is_a_fault",
            f"{_HOOKS}prolog.py::test_a_hung_check_among_those_that_share_a_child_is_named",
            f"{_HOOKS}hung_filesystem.py",
        ),
    ),
    Scenario(
        "python is missing, or slurm-health uninstalled under jobs",
        "every job starts, the log says why",
        ("tests/shell/test_shims.py",),
    ),
    Scenario(
        "slurmctld is silent",
        "nothing is drained or released; what it may do yet counts",
        (
            f"{_HOOKS}prolog.py::test_a_controller_in_trouble_drains_nobody",
            f"{_HOOKS}draining.py::test_drains_that_slurm_may_do_yet_count_against_the_share",
            f"{_LAB}hooks.py::test_with_slurmctld_slower_than_a_hook_waits_nothing_is_drained",
        ),
    ),
    Scenario(
        "others drain the node",
        "their drain and their reason stay",
        (
            f"{_HOOKS}prolog.py::test_only_a_node_in_the_pool_without_a_note_is_drained",
            f"{_HOOKS}draining.py::test_a_drain_by_an_administrator_just_before_ours_stays",
            f"{_LAB}hooks.py::test_a_node_in_the_hands_of_others_is_left_as_it_is",
        ),
    ),
    Scenario(
        "a reason is edited",
        "the drain is the editor's",
        (
            f"{_HOOKS}healthcheck.py::test_a_node_with_another_note_or_that_something_else_holds_is_not_released",
            f"{_HOOKS}healthcheck.py::test_an_edited_note_is_anothers_everywhere",
        ),
    ),
    Scenario(
        "a node is rebooted, and comes back or not",
        "returned after passes; one that is not back is listed, exit 1",
        (
            f"{_HOOKS}kernel_log_retest.py::test_three_passes_after_a_reboot_return_it",
            f"{_HOOKS}repair.py::test_a_node_that_a_step_keeps_busy_is_not_late",
            f"{_LAB}repair.py",
        ),
    ),
    Scenario(
        "a diskless node loses its record",
        "nodes says that an administrator has to release it",
        (f"{_HOOKS}healthcheck.py::test_a_node_that_lost_its_record_says_who_has_to_release_it",),
    ),
    Scenario(
        "a false accuser",
        "tests of root decide; no number of one user's jobs drains",
        (
            "tests/node/rules/test_rules.py::test_one_users_marks_alone_convict_nobody",
            f"{_HOOKS}hostile_journals.py",
            f"{_HOOKS}epilog.py::test_a_good_node_is_only_marked",
        ),
    ),
    Scenario(
        "hooks at once, and killed in between",
        "one drain, and the next hook finishes it",
        (
            f"{_HOOKS}draining.py::test_eight_prologs_at_once_drain_once",
            f"{_HOOKS}draining.py::test_a_killed_hook_is_finished_by_the_next",
            f"{_HOOKS}healthcheck.py::test_one_that_begins_while_another_is_at_work_ends_at_once_and_says_so",
        ),
    ),
    Scenario(
        "a full or damaged state",
        "no fault is hidden and no healthy node drained",
        (
            f"{_HOOKS}healthcheck.py::test_a_drained_node_that_is_well_stays_out",
            f"{_CLI}::test_a_damaged_ledger_is_told_and_a_reset_mends_it",
            f"{_HOOKS}healthcheck.py::test_a_record_that_cannot_be_kept_stops_no_drain",
        ),
    ),
    Scenario(
        "a node that should be left alone until Friday",
        "its checks drain it for nothing; names that Slurm has not are refused",
        (
            f"{_HOOKS}draining.py::test_a_node_that_an_administrator_ignores_is_not_drained_until_then",
            f"{_CLI}::test_a_node_that_slurm_does_not_know_cannot_be_ignored",
        ),
    ),
)


def main() -> int:
    """Run what is left, and print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.admin")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--no-lab", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--results", type=Path, default=_RESULTS)
    options = parser.parse_args()
    head = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(head, cwd=_ROOT, capture_output=True, text=True, check=True).stdout
    where = f"{commit.strip()}{' without the lab' if options.no_lab else ''}"
    results: dict[str, dict[str, Result]] = {}
    if options.results.exists() and not options.again:
        data = options.results.read_bytes()
        results = msgspec.json.decode(data, type=dict[str, dict[str, Result]])
    done = results.setdefault(where, {})
    chosen = [
        scenario
        for scenario in SCENARIOS
        if not options.words or any(word in scenario.name for word in options.words)
    ]
    for scenario in chosen:
        if scenario.name not in done or not done[scenario.name].holds:
            done[scenario.name] = run(scenario, with_lab=not options.no_lab)
            options.results.write_bytes(msgspec.json.encode(results))
    rows = [
        (
            scenario.name,
            "yes" if done[scenario.name].holds else "NO",
            scenario.expected,
            f"{done[scenario.name].seconds:.0f} s",
            done[scenario.name].summary,
        )
        for scenario in chosen
    ]
    print(tabulate(rows, headers=("what goes wrong", "holds", "expected", "took", "tests")))
    return int(not all(done[scenario.name].holds for scenario in chosen))


def run(scenario: Scenario, *, with_lab: bool) -> Result:
    """Run the tests of one scenario."""
    tests = [test for test in scenario.tests if with_lab or not test.startswith(_LAB)]
    if not tests:
        return Result(holds=True, summary="on the lab only", seconds=0.0)
    began_s = time.monotonic()
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    ended = subprocess.run(argv, cwd=_ROOT, capture_output=True, text=True, check=False)
    lines = ended.stdout.strip().splitlines() or ["no output"]
    print(f"{scenario.name}: {lines[-1]}", file=sys.stderr, flush=True)
    if ended.returncode:
        print(ended.stdout[-3000:], file=sys.stderr)
    return Result(ended.returncode == 0, lines[-1].strip("= "), time.monotonic() - began_s)


if __name__ == "__main__":
    sys.exit(main())
