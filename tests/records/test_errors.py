# SPDX-License-Identifier: Apache-2.0
"""Every message is one useful line."""

from pathlib import Path

import pytest

from slurm_health.records import errors
from slurm_health.records.errors import ConfigError, SlurmCommandError

SCONTROL = ["scontrol", "ping"]
NO_CLUSTER = (
    "scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
    "scontrol: fatal: Could not establish a configuration source\n"
)
NO_RUN = errors.RunNotFound("12", Path("/j"), near=["11"])


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (ConfigError("a.toml", "jornal", "unknown", valid=["journal"]), "did you mean journal?"),
        (ConfigError("a.toml", "zebra", "unknown", valid=["journal", "x"]), "valid: journal, x"),
        (SlurmCommandError(SCONTROL, 1, "no\n\n such\n"), "failed with code 1: no / such"),
        (SlurmCommandError(SCONTROL, 1, ""), "failed with code 1: (no output)"),
        (SlurmCommandError(SCONTROL, 1, NO_CLUSTER), "a node of the cluster, or set SLURM_CONF"),
        *(
            (
                NO_RUN.with_reason(f"it is pending{end}"),
                "; it is pending. If its journal is elsewhere, give --journal DIR",
            )
            for end in ("", ".")
        ),
        (errors.PackageMissing("--html", "jinja2", "html"), "html]'"),
        (errors.NotWritten(Path("/p"), OSError(13, "x")), "x; name a file in another directory"),
        (errors.ChannelError("10.0.0.1:29500", "node0 has ended"), "node0 has ended"),
    ],
)
def test_a_message_is_one_line_that_says_what_to_do(error: Exception, ends: str) -> None:
    assert str(error).endswith(ends)
    assert len(str(error).splitlines()) == 1


def test_a_command_that_names_thousands_of_nodes_is_not_shown_whole() -> None:
    nodes = "n[" + ",".join(str(number) for number in range(1, 9999, 2)) + "]"
    text = str(SlurmCommandError(["scontrol", "update", f"NodeName={nodes}"], 1, "no such node"))
    assert "NodeName=n[1,3,5" in text
    assert "no such node" in text
    assert len(text) < 400
