# SPDX-License-Identifier: Apache-2.0

from collections.abc import Mapping, Sequence

import pytest

from slurm_health.preflight.sbatch.arguments import parse
from slurm_health.preflight.sbatch.node_counts import (
    NodeCounts,
    node_counts,
    options_asked,
)
from slurm_health.records.errors import UsageError
from tests.support.rows import rows


def asked(
    *words: str,
    header: Sequence[bytes] = (),
    environ: Mapping[str, str] | None = None,
    help_text: str = "",
) -> dict[str, str]:
    line = parse([*words, "train.sh"], own={}, read_help=str)
    return options_asked(line, header, environ or {}, lambda: help_text)


@rows
def test_a_job_asks_for_its_nodes_and_spares_and_makes_do_with_the_lower_end_of_a_range(
    words: list[str], header: list[str], spares: int, counts: NodeCounts | None
) -> None:
    lines = [line.encode() for line in header]
    assert node_counts(asked(*words, header=lines), spares) == counts


PLUGIN = [
    b"#SBATCH --no-container-mount-home",
    b"#SBATCH --container-image a.sqsh --gpus=32",
    b"#SBATCH --nodes=4",
]


def test_lines_of_a_script_that_can_be_understood_are_read_together_as_sbatch_does() -> None:
    assert asked(header=[b"#SBATCH --nodes", b"#SBATCH 4"]) == {"nodes": "4"}


def test_options_of_a_plugin_in_the_script_are_looked_up_in_sbatchs_help_once() -> None:
    reads = []

    def read_help() -> str:
        reads.append(1)
        return "      --no-container-mount-home  [pyxis] ...\n      --container-image=IMAGE\n"

    line = parse(["train.sh"], own={}, read_help=read_help)
    found = options_asked(line, PLUGIN, {}, read_help)

    assert (found["gpus"], found["nodes"]) == ("32", "4")
    assert len(reads) == 1
    options_asked(line, [b"#SBATCH -N4 --container-image=a.sqsh"], {}, read_help)
    assert len(reads) == 1  # what the table knows, or has its value beside it, is not looked up


def test_a_total_of_tasks_is_shared_out_among_nodes_and_spares() -> None:
    counts = node_counts(asked("-N4", "-n8"), 1)
    assert counts is not None
    assert counts.options == ["--nodes=5", "--ntasks=10", "--ntasks-per-node=2"]


@pytest.mark.parametrize("total", ["--ntasks=9", "-n3", "--gpus=8", "--nodelist=n[1-5]", "-wn1"])
def test_spares_are_refused_beside_counts_that_would_no_longer_fit(total: str) -> None:
    with pytest.raises(UsageError, match=r"--spares: cannot be combined with --.*use --"):
        node_counts(asked("-N4", total), 1)


@pytest.mark.parametrize("words", [(), ("--nodes=4k",), ("--nodes=1,3",)])
def test_spares_need_a_number_of_nodes(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="needs the number of nodes"):
        node_counts(asked(*words), 1)


@rows
def test_variables_that_sbatch_reads_are_options_of_the_job(
    environ: Mapping[str, str], found: Mapping[str, str]
) -> None:
    assert asked(environ=environ) == found
    assert asked("--clusters=c", "--time=5", environ=environ) == {"clusters": "c", "time": "5"}
