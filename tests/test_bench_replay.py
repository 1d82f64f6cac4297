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


MONITOR = "monitor/monitors/kernel/monitor_test.go"


@pytest.mark.parametrize(
    ("severity", "code", "row"), [("Fatal", 0, "1 0 0 0"), ("Warning", 1, "0 0 1 1")]
)
def test_a_line_that_is_a_fault_here_and_none_in_another_monitor_accuses_an_innocent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], severity: str, code: int, row: str
) -> None:
    test = tmp_path / MONITOR
    test.parent.mkdir(parents=True)
    line = "[  7.1] NVRM: Xid (PCI:0000:3f:00): 79, GPU has fallen off the bus."
    test.write_text(
        f'{{"{line}", "Lost", resource.ResourceTypeDmesg, "", monitor.Severity{severity}}},\n'
    )
    assert main([str(tmp_path)]) == code
    printed = capsys.readouterr().out
    (found,) = [each for each in printed.splitlines() if each.startswith("| eks-node")]
    assert [each.strip() for each in found.split("|")[3:7]] == row.split()


def test_a_warning_here_of_what_is_a_fault_there_is_undecided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "n/health-monitors/syslog-health-monitor/pkg"
    cases = {
        "xid/parser/csv_test.go": [
            'name: "a", message: "NVRM: Xid (PCI:0000:01:00): 74, NVLink: fatal error",',
            "expectedAction: pb.RecommendedAction_CONTACT_SUPPORT,",
            'name: "b", message: "NVRM: Xid (PCI:0000:01:00): 13, Graphics Exception",',
            "expectedAction: pb.RecommendedAction_NONE,",
        ],
        "sxid/sxid_handler_test.go": [
            'name: "c", line: "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 2 x",',
            "IsFatal: true,",
        ],
        "gpufallen/gpufallen_handler_test.go": [
            'name: "d", message: "NVRM: The NVIDIA GPU 0000:b3:00.0\\n" +',
            '  "NVRM: fallen off the bus and is not responding to commands.",',
            "expectEvent: true,",
        ],
    }
    for name, lines in cases.items():
        (package / name).parent.mkdir(parents=True)
        (package / name).write_text("\n".join(lines))

    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    (found,) = [each for each in printed.splitlines() if each.startswith("| NVSentinel")]
    assert [each.strip() for each in found.split("|")[2:7]] == ["4", "3", "1", "0", "0"]


@pytest.mark.parametrize(
    ("verdict", "code", "row"),
    [("SIZE_OR_SYNTAX_MISMATCH", 0, "1 1 0 0 0"), ("FULLY_MATCHED", 1, "1 0 0 1 1")],
)
def test_pairs_of_entries_are_read_from_the_test_that_compares_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verdict: str, code: int, row: str
) -> None:
    test = tmp_path / "t/test/distributed/flight_recorder/test_fr_analysis.py"
    test.parent.mkdir(parents=True)
    test.write_text(f"""
def test_match_one_event(self):
    a = entry("all_reduce", ("0", "default"), [[4]], [[4]], "scheduled", 1)
    b = entry("all_reduce", ("0", "default"), [[5]], [[5]], "scheduled", 1)
    self.assertEqual(match_one_event(a, b, m, "0").state, MatchState.{verdict})
""")
    assert main([str(tmp_path)]) == code
    printed = capsys.readouterr().out
    (found,) = [each for each in printed.splitlines() if each.startswith("| pytorch")]
    assert [each.strip() for each in found.split("|")[2:7]] == row.split()


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ("Remounting filesystem read-only", "1 0 0 0 0 1"),
        ("BTRFS error (device sda1): Remounting filesystem read-only", "1 1 0 0 0 0"),
        ("nvme nvme3: I/O tag 7 (1007) QID 3 timeout, aborting", "1 0 1 0 0 0"),
        ("a line that nothing here knows", "1 0 0 1 0 0"),
    ],
)
def test_a_line_that_a_tool_holds_a_node_unhealthy_for_is_right_as_a_fault_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, row: str
) -> None:
    disks = tmp_path / "gpud/components/disk"
    disks.mkdir(parents=True)
    (disks / "kmsg_matcher_test.go").write_text(f'line: "{line}", want: true,')
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    (found,) = [each for each in printed.splitlines() if each.startswith("| gpud")]
    assert [each.strip() for each in found.split("|")[2:8]] == row.split()


@pytest.mark.parametrize(
    ("line", "code", "row"),
    [
        ("mlx5_core ADDR ens1: Link down", 0, "2 2 0 0 0"),
        ("EXT4-fs error (device sda1): ext4_lookup:1: inode #2: bad", 1, "2 1 0 1 1"),
    ],
)
def test_a_line_that_is_a_fault_here_and_listed_as_harmless_accuses_an_innocent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, code: int, row: str
) -> None:
    checks = tmp_path / "c/health_checks"
    checks.mkdir(parents=True)
    (checks / "dmesg_whitelist.py").write_text(
        f'WHITELISTED_MESSAGES = ["{line}"]\nWHITELISTED_NVSWITCH_SXID_ERRORS = ["11012"]\n'
    )
    assert main([str(tmp_path)]) == code
    printed = capsys.readouterr().out
    (found,) = [each for each in printed.splitlines() if each.startswith("| cluster-health")]
    assert [each.strip() for each in found.split("|")[2:7]] == row.split()
