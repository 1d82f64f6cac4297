# SPDX-License-Identifier: Apache-2.0
"""Every promise of SECURITY.md has a test that attacks it, and this table says which."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
_SECTIONS = ("What the hooks promise about it:", "## Not in scope")

# What a sentence of SECURITY.md begins with -> the tests that attack what it promises.
PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "A job that is [checked by default]": {
        "e2e/test_lab_by_default.py": (
            "test_a_check_by_default_runs_as_the_user_of_the_job",
            "test_a_broken_installation_costs_no_job",
        ),
    },
    "They never execute what a user wrote": {
        "node/hooks/test_hostile_journals.py": (
            "test_nothing_that_a_user_writes_is_executed",
            "test_a_hostile_journal_accuses_nobody",
        ),
    },
    "The journal is read by a child": {
        "node/hooks/test_hostile_journals.py": (
            "test_root_is_given_up_before_anything_is_opened",
            "test_the_reader_cannot_become_root_again",
            "test_a_journal_of_deep_nesting_does_no_harm",
        ),
    },
    "Whoever reads or writes a journal": {
        "system/test_private_files.py": (
            "test_what_others_can_change_is_not_used",
            "test_the_word_of_a_device_or_a_pipe_is_not_waited_for",
            "test_a_file_of_any_size_is_not_read_into_memory",
        ),
    },
    "So a directory of mode 1777": {
        "system/test_private_files.py": ("test_whoever_owns_a_link_in_the_way_is_named",),
        "cli/test_clean.py": ("test_what_another_user_has_put_in_the_way_blocks_no_clean",),
    },
    "What another user lays there in the way": {
        "system/journal/test_directories.py": (
            "test_a_job_whose_name_another_user_has_taken_is_checked_beside_it",
            "test_what_another_can_lay_there_that_is_mine_costs_no_check",
            "test_who_lays_something_there_in_the_last_moment_costs_no_check",
            "test_what_comes_and_goes_beside_a_taken_name_hides_no_journal",
            "test_an_array_task_whose_name_is_taken_has_a_log_line_and_its_check",
            "test_what_stands_beside_a_taken_name_is_found_by_who_reads_and_removes",
        ),
    },
    "What users lay there keeps none of root's": {
        "system/test_proc_mounts.py": (
            "test_what_a_user_mounts_over_a_journal_costs_no_command_and_no_check",
        ),
        "fleet/history/test_refresh_of_others.py": (
            "test_what_cannot_be_a_clusters_name_is_passed_over",
            "test_what_another_users_journal_takes_of_memory_is_limited",
            "test_of_a_job_with_any_number_of_runs_the_last_ones_are_read",
            "test_no_file_of_another_user_is_looked_at_in_roots_own_process",
        ),
        "fleet/history/test_server.py": (
            "test_no_name_and_no_number_of_runs_of_a_user_ends_the_index",
        ),
        "fleet/history/test_hostile_journals.py": ("test_figures_beyond_all_measure_are_left_out",),
        "cli/test_clean.py": (
            "test_what_cannot_be_a_clusters_name_is_passed_over",
            "test_a_tree_deeper_than_any_path_goes_and_so_do_the_others",
        ),
        "report/test_find.py": ("test_the_name_of_a_task_that_another_has_laid_leads_nowhere",),
        "report/test_read.py": (
            "test_of_another_users_journal_root_is_told_the_same_and_reads_nothing_itself",
            "test_what_another_users_journal_takes_of_memory_is_limited",
        ),
        "report/test_latest.py": ("test_no_journal_of_another_user_is_read_in_roots_own_process",),
    },
    "Nobody's journal goes because": {
        "cli/test_clean.py": ("test_a_file_of_thousands_of_names_removes_no_journal_of_others",),
        "fleet/retention/test_rules.py": ("test_who_fills_the_root_removes_no_journal_of_others",),
    },
    "The ids that `/etc/subuid` gives": {
        "fleet/history/test_hostile_journals.py": ("test_who_has_many_ids_is_one_user",),
        "fleet/retention/test_rules.py": ("test_who_has_many_ids_has_one_share",),
    },
    "Nothing that a user does makes them block": {
        "node/hooks/test_hung_filesystem.py": (
            "test_what_a_user_mounts_over_three_users_journals_keeps_no_other_from_being_read",
            "test_what_a_user_mounts_over_a_job_keeps_root_from_no_other_job",
        ),
        "node/hooks/test_epilog.py": ("test_a_state_directory_without_room_ends_no_epilog",),
    },
    "If that child cannot be killed": {
        "node/hooks/test_hung_filesystem.py": (
            "test_a_dead_filesystem_costs_its_time_limit_and_its_child_is_left_behind",
        ),
    },
    "Text from a user is stripped": {
        "node/hooks/test_hostile_journals.py": ("test_a_users_text_reaches_log_and_note_tamed",),
    },
    "A user can accuse only a node": {
        "node/hooks/test_epilog.py": (
            "test_no_number_of_jobs_of_one_user_drains_a_good_node",
            "test_one_job_marks_once_however_often_it_starts",
        ),
        "node/hooks/test_hostile_journals.py": (
            "test_no_mutation_of_a_journal_accuses_what_it_should_not",
        ),
    },
    "The breaker limits how many": {
        "node/rules/test_rules.py": ("test_no_sequence_of_drains_gets_past_the_breaker",),
        "node/hooks/test_prolog.py": (
            "test_a_job_that_breaks_nodes_costs_two_and_no_more",
            "test_a_user_whose_jobs_break_nodes_is_capped_within_the_hour",
        ),
    },
    "A user's word makes root test": {
        "node/hooks/test_epilog.py": (
            "test_one_users_accusations_have_a_node_tested_so_often_and_no_more",
            "test_tests_run_one_at_a_time",
        ),
    },
    "A drain is lifted by passes": {
        "node/hooks/test_kernel_log_retest.py": (
            "test_an_hour_and_a_day_without_repair_return_nothing",
            "test_a_log_that_has_lost_the_message_is_no_pass",
        ),
        "node/hooks/test_healthcheck.py": ("test_a_note_that_anybody_touched_is_anothers",),
    },
    "Who accuses which node": {
        "node/hooks/test_nodes_as_operator.py": ("test_who_accuses_which_node_is_for_root",),
        "node/hooks/test_epilog.py": ("test_whose_jobs_had_a_node_tested_is_for_root_to_read",),
    },
    "What one user's journals say": {
        "fleet/history/test_hostile_journals.py": (
            "test_nodes_that_slurm_does_not_know_are_left_out",
            "test_one_users_word_makes_no_lemon_where_another_was_long_ago",
            "test_one_users_word_keeps_no_node_from_the_sweep",
        ),
        "fleet/standing/test_baseline.py": (
            "test_no_number_of_devices_of_one_user_raises_what_is_expected_of_all",
        ),
    },
    "A configuration that anyone": {
        "node/test_site_settings.py": (
            "test_a_file_that_others_can_write_is_refused",
            "test_a_file_in_a_directory_that_others_can_write_is_refused",
            "test_a_directory_of_roots_that_others_can_write_is_refused_and_a_link_of_roots_is_not",
        ),
    },
    "If in doubt, a hook drains nothing": {
        "node/hooks/test_prolog.py": (
            "test_a_controller_in_trouble_drains_nobody_and_the_job_starts",
            "test_a_ledger_that_cannot_be_used_drains_nobody",
        ),
    },
    "Who has not proven the secret": {
        "torchrun/channel/test_node_zero.py": (
            "test_a_stranger_is_sent_away_and_nothing_is_written",
            "test_many_strangers_keep_no_node_out",
            "test_what_a_node_may_not_write_is_not_written",
        ),
    },
    "The monitor of a job believes": {
        "training/monitor/test_nccl_ras.py": (
            "test_another_user_who_listens_on_the_port_is_not_believed",
        ),
    },
    "Anything by which an ordinary user": {
        "node/hooks/test_hostile_journals.py": ("test_root_is_given_up_before_anything_is_opened",),
        "node/hooks/test_healthcheck.py": ("test_a_note_that_anybody_touched_is_anothers",),
        "cli/test_clean.py": ("test_no_link_is_followed_out_of_a_journal",),
    },
    "Anything by which one user's job": {
        "system/test_private_files.py": (
            "test_what_belongs_to_another_is_not_used_and_the_owner_is_named",
            "test_every_level_is_its_owners_alone_whatever_the_umask",
        ),
    },
    "Anything by which a process without the secret": {
        "torchrun/channel/test_node_zero.py": (
            "test_who_does_not_know_the_secret_does_not_come_in",
        ),
        "torchrun/channel/test_other_node.py": ("test_who_poses_as_node_0_is_not_believed",),
        "torchrun/test_unshared_check.py": (
            "test_a_secret_that_others_may_read_or_change_is_refused",
        ),
    },
    "Text of one user that is executed": {
        "report/test_export.py": (
            "test_nothing_in_a_report_acts_on_a_terminal",
            "test_no_cell_has_a_formula_or_a_control_character",
        ),
        "report/test_find.py": ("test_a_directory_that_is_no_clusters_name_is_not_looked_into",),
    },
}
# What says how things are, or where to read on, and promises nothing.
STATEMENTS = (
    "See [the policy]",
    "Outside Slurm, node 0 of a",
    "Without a secret whoever reaches that port",
    "Inside Slurm, the workers of a check meet",
    "Whoever can connect to the nodes",
    "What was spoilt so drains no node by itself",
    "Keep others off",
    "## In scope",
)


def sentences() -> list[str]:
    """Return the sentences from the hooks' promises to what is not in scope."""
    text = (REPOSITORY / "SECURITY.md").read_text()
    begin, end = (text.index(each) for each in _SECTIONS)
    parts = re.split(r"\n\n|\n(?=- )", text[begin + len(_SECTIONS[0]) : end])
    found = [
        sentence
        for part in parts
        for sentence in re.split(r"(?<=\.) (?=[A-Z])", " ".join(part.split()).removeprefix("- "))
    ]
    return [each for each in found if each]


def names_in(path: str) -> set[str]:
    """Return the names of the functions in a file of tests."""
    tree = ast.parse((REPOSITORY / "tests" / path).read_text())
    return {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


def test_every_promise_has_a_test_that_attacks_it() -> None:
    told = (*PROMISES, *STATEMENTS)
    untested = [each for each in sentences() if not each.startswith(told)]
    assert untested == [], "SECURITY.md says what no test attacks"


def test_every_line_of_the_table_is_of_a_promise_that_is_there() -> None:
    there = sentences()
    gone = [each for each in (*PROMISES, *STATEMENTS) if not any(s.startswith(each) for s in there)]
    assert gone == []


@pytest.mark.parametrize("path", sorted({path for tests in PROMISES.values() for path in tests}))
def test_every_test_of_the_table_is_there(path: str) -> None:
    named = {name for tests in PROMISES.values() for name in tests.get(path, ())}
    assert named - names_in(path) == set()
