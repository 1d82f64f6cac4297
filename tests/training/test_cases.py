# SPDX-License-Identifier: Apache-2.0
"""Failures as users report them in public threads, each with what is known to be true of it.

The truth was established by the people in the threads. A node that is named wrongly, or a job that
is started again in vain, is worse than an honest doubt: where the truth allows a doubt, the table
does too.
"""

import json
import os
from pathlib import Path

import msgspec
import pytest

from slurm_health.records.errors import UsageError
from slurm_health.training.monitor.explain import explain

CASES = Path(__file__).parents[1] / "data/cases"
NODES = ("n1", "n2", "n3", "n4")


class Truth(msgspec.Struct, forbid_unknown_fields=True):
    """What is right for a case: any of the causes and blames, exactly these nodes and ranks."""

    causes: set[str]
    blames: set[str]
    accused: list[str] = []
    ranks: list[int] | None = None
    never: list[str] = msgspec.field(default_factory=lambda: ["leave"])  # it would harm
    nodes: list[str] = []


TRUTHS = msgspec.toml.decode((CASES / "truths.toml").read_bytes(), type=dict[str, Truth])


@pytest.mark.parametrize("case", TRUTHS)
def test_a_reported_failure_is_explained_by_its_truth(case: str) -> None:
    truth = TRUTHS[case]

    _, found = explain([CASES / case], nodes=truth.nodes)

    assert found.cause in truth.causes, found
    assert found.blame in truth.blames, found
    assert found.accused == truth.accused, found
    assert truth.ranks is None or found.ranks == truth.ranks, found
    assert found.action not in truth.never, found


# A situation of a kind that public threads report is in words of our own: what the files of a job
# of n1 to n4 hold; the cause, whose it is, the nodes at fault, and what would follow.


class Right(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cause: str
    blame: str
    action: str
    accused: list[str] = []
    ranks: list[int] | None = None  # None: any


class Situation(msgspec.Struct, forbid_unknown_fields=True):
    right: Right
    files: list[str]


ROWS = {
    f"{path.stem}: {name}": situation
    for path in sorted((CASES.parent / "situations").glob("*.toml"))
    for name, situation in msgspec.toml.decode(path.read_bytes(), type=dict[str, Situation]).items()
}


@pytest.mark.parametrize("name", ROWS)
def test_a_situation_of_a_known_kind_is_explained(tmp_path: Path, name: str) -> None:
    for number, text in enumerate(ROWS[name].files):
        (tmp_path / f"file{number}").write_text(text)
    _, found = explain([tmp_path], nodes=NODES)
    right = ROWS[name].right
    ranks = None if right.ranks is None else found.ranks
    assert Right(found.cause, found.blame, found.action, found.accused, ranks) == right, found


TRACEBACK = (
    'Traceback (most recent call last):\n  File "/home/a/train.py", line 9, in main\n    f()\n'
)


def kernel_of(directory: Path, node: str, *numbers: int) -> None:
    texts = {48: "DBE (double bit error)", 79: "GPU has fallen off the bus.", 155: "NVLINK: SW"}
    lines = (
        f"Nov  2 10:00:00 {node} kernel: NVRM: Xid (PCI:0000:3b:00): {n}, pid=1, {texts[n]}\n"
        for n in numbers
    )
    (directory / f"kernel.{node}").write_text("".join(lines))


def test_of_nodes_that_report_alike_none_counts_beside_another_one(tmp_path: Path) -> None:
    for node in ("n1", "n2", "n3"):
        kernel_of(tmp_path, node, 155)
    domain = explain([tmp_path], nodes=NODES)[1]
    kernel_of(tmp_path, "n4", 79)
    one = explain([tmp_path], nodes=NODES)[1]

    assert (domain.cause, domain.blame, domain.accused) == ("gpu-broken", "undecided", [])
    assert "n[1-3] report such errors alike" in domain.says
    assert (one.blame, one.accused) == ("node", ["n4"])


def test_words_that_differ_only_by_a_name_keep_their_place(tmp_path: Path) -> None:
    output = tmp_path / "out"
    syntax = "SyntaxError: '(' was never closed"
    output.write_text(f'  File "/home/a/train.py", line 12\n    foo(\n       ^\n{syntax}\n')
    says = explain([output])[1].says
    output.write_text(
        "[c10d] The server socket has failed to listen on any local network address. port: 29500,"
        f" name: EADDRINUSE, message: address already in use\n{TRACEBACK}torch.distributed."
        "DistNetworkError: The server socket has failed to listen on any local network address."
        " port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    )

    assert says.endswith("SyntaxError: '(' was never closed (train.py:12)")
    assert explain([output])[1].says.startswith("port 29500, where the ranks were to meet")


def test_what_torchrun_records_of_an_exception_is_read(tmp_path: Path) -> None:
    stack = {"py_callstack": f"{TRACEBACK}KeyError: 'lr'\n", "timestamp": "1"}
    record = {"message": {"message": "KeyError: 'lr'", "extraInfo": stack}}
    (tmp_path / "error.json").write_text(json.dumps(record))

    assert explain([tmp_path])[1].says == "KeyError: 'lr' (a process, train.py:9)"


def test_a_file_that_is_no_text_is_named_and_passed_over_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "core").write_bytes(b"\x7fELF" + bytes(4096))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "out").write_text(f"{TRACEBACK}KeyError: 1\n")

    assert explain([tmp_path])[1].cause == "program-error"
    with pytest.raises(UsageError, match="is no text"):
        explain([tmp_path / "core"])
    for name in ("pipe", "missing.txt"):
        with pytest.raises(UsageError, match="cannot be read"):
            explain([tmp_path / name])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="nothing to read"):
        explain([tmp_path / "empty"])


def test_an_exit_code_that_nobody_gave_is_not_told(tmp_path: Path) -> None:
    output = tmp_path / "slurm-9.out"
    output.write_text("all is well so far\n")

    assert "exit code" not in explain([output])[1].says
    assert "exit code 7" in explain([output], exit_code=7)[1].says
