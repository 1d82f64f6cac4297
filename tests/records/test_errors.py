# SPDX-License-Identifier: Apache-2.0
"""Every message is one useful line, and exit codes are those of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.records import errors
from slurm_health.records.errors import ConfigError, ExitCode, SlurmCommandError

SAMPLES = {
    "ConfigError": ConfigError("site.toml", "jornal", "unknown setting", valid=["journal"]),
    "AllocationError": errors.AllocationError("SLURM_JOB_ID", "not set"),
    "SlurmCommandMissing": errors.SlurmCommandMissing("srun"),
    "SlurmCommandError": SlurmCommandError(["scontrol", "ping"], 1, "no\n\n such\n"),
    "SlurmTimeoutError": errors.SlurmTimeoutError(["scontrol", "ping"], 30.0),
    "UnknownJob": errors.UnknownJob("12_3"),
    "JournalError": errors.JournalError(Path("/j"), "cannot be read"),
    "RecordTooNew": errors.RecordTooNew(Path("/j"), 2, 1),
    "JournalBusy": errors.JournalBusy(Path("/j")),
    "RunNotFound": errors.RunNotFound("12", Path("/j"), near=["11"]),
    "IndexUnusable": errors.IndexUnusable(Path("/i"), "is damaged"),
    "ChannelError": errors.ChannelError("10.0.0.1:29500", "node0 has ended"),
    "PackageMissing": errors.PackageMissing("--html", "jinja2", "html"),
    "NotWritten": errors.NotWritten(Path("/p"), OSError(13, "Permission denied")),
    "NoRoom": errors.NoRoom("train.sh", "No space left on device"),
}


@pytest.mark.parametrize("reason", ["it is pending", "it is pending."])
def test_what_slurm_says_of_a_job_without_a_journal_is_a_sentence_of_its_own(reason: str) -> None:
    message = str(errors.RunNotFound("12", Path("/j")).with_reason(reason))

    assert message.endswith("; it is pending. If its journal is elsewhere, give --journal DIR")


@pytest.mark.parametrize("name", SAMPLES)
def test_a_message_is_one_line_without_a_full_stop(name: str) -> None:
    message = str(SAMPLES[name])

    assert len(message.splitlines()) == 1
    assert not message.endswith(".")


def test_what_a_command_said_is_in_the_message() -> None:
    assert str(SAMPLES["SlurmCommandError"]) == "scontrol ping failed with code 1: no / such"
    silent = SlurmCommandError(["scontrol", "ping"], 1, "")
    assert str(silent).endswith("failed with code 1: (no output)")


def test_where_there_is_no_cluster_it_is_said_where_there_is_one() -> None:
    said = (
        "scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "scontrol: fatal: Could not establish a configuration source\n"
    )

    text = str(SlurmCommandError(["scontrol", "show", "nodes"], 1, said))

    assert text.endswith("no slurm.conf here; run this on a node of the cluster, or set SLURM_CONF")


def test_a_near_miss_is_suggested_and_otherwise_everything_valid_is_named() -> None:
    assert str(SAMPLES["ConfigError"]).endswith("did you mean journal?")
    far = ConfigError("site.toml", "zebra", "unknown setting", valid=["journal", "python"])
    assert str(far).endswith("valid: journal, python")


def test_exit_codes_are_those_of_the_documentation() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "HEALTHY": 0,
        "BAD_NODES": 1,
        "USAGE": 2,
        "INCONCLUSIVE": 3,
        "UNAVAILABLE": 4,
        "INTERNAL": 70,
    }


def test_a_command_that_names_thousands_of_nodes_is_not_shown_whole() -> None:
    nodes = "n[" + ",".join(str(number) for number in range(1, 9999, 2)) + "]"
    text = str(SlurmCommandError(["scontrol", "update", f"NodeName={nodes}"], 1, "no such node"))
    assert "NodeName=n[1,3,5" in text
    assert "no such node" in text
    assert len(text) < 400
