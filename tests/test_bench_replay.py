# SPDX-License-Identifier: Apache-2.0
"""The table of recordings counts who is named, and fails where that is an innocent."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from benchmarks.replay.__main__ import main

DUMPS = "nvrx/tests/attribution/unit/fr_traces"


def dump(states: dict[int, str]) -> bytes:
    """Return what a rank of a group of three recorded of its collectives."""
    entries = [
        {
            "record_id": number,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [[3]],
            "state": state,
            "retired": False,
            "is_p2p": False,
        }
        for number, state in states.items()
    ]
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}
    return pickle.dumps({"entries": entries, "pg_config": {"0": group}})


def recorded(directory: Path, truth: str) -> None:
    """Lay the dumps of a training in which rank 1 does not come to collective 5."""
    case = directory / DUMPS / "one"
    case.mkdir(parents=True)
    (case / "fault_injection.log").write_text(f"Fault ranks: {truth}\n")
    for rank in (0, 2):
        (case / f"_dump_{rank}").write_bytes(dump({4: "completed", 5: "scheduled"}))
    (case / "_dump_1").write_bytes(dump({4: "completed"}))


@pytest.mark.parametrize(("truth", "code", "row"), [("[1]", 0, "1 0 0 0"), ("[2]", 1, "0 0 1 1")])
def test_an_innocent_that_is_named_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], truth: str, code: int, row: str
) -> None:
    recorded(tmp_path, truth)
    assert main([str(tmp_path)]) == code
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("| nvidia")]
    assert [each.strip() for each in line.split("|")[3:7]] == row.split()


def test_logs_are_counted_by_what_their_class_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs" / "corpus"
    logs.mkdir(parents=True)
    labels = []
    for mode, text, status in (
        ("div_zero", "ZeroDivisionError: division by zero", 1),
        ("segfault", "nothing is said", 1),
        ("permission", "KeyError: 'lr'", 1),
    ):
        (logs / f"{mode}.log").write_text(text)
        path = f"corpus/{mode}.log"
        labels.append({"id": mode, "mode": mode, "log_path": path, "true_exit_code": status})
    (logs / "labels.jsonl").write_text("\n".join(map(json.dumps, labels)))
    assert main([str(tmp_path), "--missed"]) == 0
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("| gpualert")]
    assert [each.strip() for each in line.split("|")[3:7]] == ["1", "1", "1", "0"]
    assert "gpualert-eval: permission: program-error" in printed


def test_a_kernel_line_that_is_a_warning_there_and_a_fault_here_accuses_an_innocent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xids = tmp_path / "gpud/components/accelerator/nvidia/xid"
    disks = tmp_path / "gpud/components/disk"
    xids.mkdir(parents=True)
    disks.mkdir()
    case = '{"%s", "[1.5] NVRM: Xid (PCI:0000:04:00): %d, text", apiv1.EventType%s},\n'
    (xids / "a_test.go").write_text(case % ("a", 79, "Fatal") + case % ("b", 48, "Warning"))
    (disks / "kmsg_matcher_test.go").write_text('line: "kernel: nothing", want: false,')
    assert main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("| gpud")]
    assert [each.strip() for each in line.split("|")[2:7]] == ["3", "2", "0", "1", "1"]


def test_where_no_recording_is_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"nvidia-resiliency-ext: no tests/attribution/unit/fr_traces below {tmp_path}" in (
        capsys.readouterr().err
    )
