# SPDX-License-Identifier: Apache-2.0
"""What is done when workers have failed, decided from what they wrote at last."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from slurm_health.records.records import RunStarted, VerdictReached
from slurm_health.records.script_records import Diagnosed, EventKind, FailurePlanned, TrainingEvent
from slurm_health.system import journal
from slurm_health.torchrun.arguments import Arguments, NodeZeroAddress
from slurm_health.torchrun.place import TaskPlace
from slurm_health.torchrun.restarts import (
    Context,
    RestartDecision,
    RestartQuestion,
    WorkersEnd,
    decide,
)
from slurm_health.torchrun.step import directory_of

KILLED = (
    "E1122 10:00:00.0 12 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 7) of binary: py"
)
RAISED = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/home/a/train.py", line 35, in main
[rank{rank}]:     rate = config["lr"]
[rank{rank}]: KeyError: 'lr'
failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: py
"""
BROKE = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/home/a/train.py", line 40, in main
[rank{rank}]: RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.3]:25483
failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: py
"""
ECC = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/home/a/train.py", line 40, in main
[rank{rank}]: RuntimeError: CUDA error: uncorrectable ECC error encountered
failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: py
"""
LOST = BROKE + "srun: error: Node failure on NODE\n"

STARTED = RunStarted(
    run_id="7.0.1",
    job_id=7,
    attempt=0,
    cluster="",
    partition="",
    nodes=["n1", "n2", "n3"],
    master_node="n1",
    user="alice",
)


def hang(cause: str, *ranks: int) -> TrainingEvent:
    found = Diagnosed(
        cause=cause,
        description="it hangs",
        attribution="undecided",
        sureness="certain",
        ranks=list(ranks),
        nodes=[f"n{rank + 1}" for rank in ranks],
    )
    return TrainingEvent(
        event=EventKind.HANG,
        stalled_s=40.0,
        usual_s=25.0,
        step=7,
        nodes=found.nodes,
        ranks=found.ranks,
        diagnosed=found,
    )


def place(meeting: NodeZeroAddress | None = None) -> TaskPlace:
    return TaskPlace(nodes=("n1", "n2", "n3"), node="n1", start="7.0.1", job_id=7, meeting=meeting)


def question(
    root: Path,
    *texts: str,
    least: int = 2,
    restart: int = 1,
    silent: int = 0,
    meeting: NodeZeroAddress | None = None,
) -> RestartQuestion:
    """What the first node asks when those from n1 on have written these texts."""
    arguments = Arguments(options=[], program=["train.py"], given={}, own={"journal": str(root)})
    reports = [
        WorkersEnd(node=f"n{rank + 1}", rank=rank, processes=1, text=text.format(rank=rank))
        for rank, text in enumerate(texts)
    ]
    context = Context(place=place(meeting), arguments=arguments, python="python3", least=least)
    return RestartQuestion(
        context=context,
        reports=reports,
        silent=silent,
        restart=restart,
        max_restarts=2,
    )


def decided(root: Path, *texts: str, **options: int) -> RestartDecision:
    return answered(root, question(root, *texts, **options))  # type: ignore[arg-type]


def answered(root: Path, asked: RestartQuestion) -> RestartDecision:
    """Return what is decided where no rank has left a dump."""
    return decide(asked, 0.0, {"TORCH_FR_DUMP_TEMP_FILE": str(root / "flight_")})


ALL, FIRST_TWO = ["n1", "n2", "n3"], ["n1", "n2"]
KILLS = "rank 1 on n2 was killed by SIGKILL"
FEW = "1 of 3 nodes do not answer any more, and --nnodes asks for at least 3"


@pytest.mark.parametrize(
    ("texts", "options", "expected", "nodes", "text"),
    [
        ((RAISED,) * 3, {}, "stop", [], "the training ends: KeyError: "),
        ((BROKE, KILLED, BROKE), {}, "check", ALL, KILLS),
        # Once again, and then not unchecked.
        ((BROKE,) * 3, {}, "restart", [], ""),
        ((BROKE,) * 3, {"restart": 2}, "check", ALL, ""),
        ((BROKE, BROKE), {"silent": 1}, "check", FIRST_TWO, ""),
        ((BROKE, BROKE), {"silent": 1, "least": 3}, "stop", [], FEW),
        # A program complains of its GPU: the check decides.
        ((BROKE, ECC, BROKE), {}, "check", ALL, ""),
        # Slurm lost a node; without the first one nobody can meet.
        ((BROKE, LOST.replace("NODE", "n2"), BROKE), {}, "check", ["n1", "n3"], ""),
        ((LOST.replace("NODE", "n1"), BROKE, BROKE), {}, "stop", [], ""),
        (
            (BROKE, KILLED, BROKE),
            {"restart": 3},
            "stop",
            [],
            "started again 2 times (--max-restarts)",
        ),
    ],
)
def test_what_workers_wrote_at_last_decides_what_follows(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    texts: tuple[str, ...],
    options: dict[str, int],
    expected: str,
    nodes: list[str],
    text: str,
) -> None:
    decision = decided(tmp_path, *texts, **options)
    assert (decision.next, decision.nodes) == (expected, nodes)
    assert text in capsys.readouterr().err
    assert (decision.place is not None) == (expected == "check")


def test_a_check_before_a_restart_has_a_name_and_a_port_of_its_own(tmp_path: Path) -> None:
    meeting = NodeZeroAddress(host="10.0.0.1", port=29500)
    decision = answered(tmp_path, question(tmp_path, BROKE, KILLED, BROKE, meeting=meeting))
    assert decision.place is not None
    assert decision.place.start == "7.0.1.1"
    assert decision.place.meeting is not None
    assert decision.place.meeting.host == "10.0.0.1"
    assert decision.place.meeting.port != 29500


def test_what_was_found_and_decided_is_recorded(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, place())
    journal.create(directory, [journal.MASTER])
    decided(tmp_path, BROKE, KILLED, BROKE)
    (found,) = [each.record for each in journal.read_all(directory, journal.POST_MORTEM)]
    (planned,) = [each.record for each in journal.read_all(directory, journal.RESTART)]
    assert isinstance(found, Diagnosed)
    assert found.cause == "killed"
    assert isinstance(planned, FailurePlanned)
    assert (planned.plan, planned.restart, planned.max_restarts) == ("check", 1, 2)
    assert re.search("SIGKILL", planned.reason)


def test_workers_that_were_ended_because_one_is_stopped_are_started_again_after_a_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = msgspec.structs.replace(question(tmp_path, "", "", ""), hang=hang("rank-stopped", 1))
    decision = answered(tmp_path, asked)

    assert (decision.next, decision.nodes) == ("check", ["n1", "n2", "n3"])
    assert "the training hung: it hangs; checking n[1-3]" in capsys.readouterr().err


def test_a_hang_without_a_place_restarts_once_and_one_of_the_script_never(tmp_path: Path) -> None:
    unplaced = hang("no-progress")
    asked = msgspec.structs.replace(question(tmp_path, "", "", ""), hang=unplaced)
    again = msgspec.structs.replace(asked, hangs_before=(unplaced,))
    own = msgspec.structs.replace(asked, hang=hang("data-loader-stuck", 1))

    assert [answered(tmp_path, each).next for each in (asked, again, own)] == [
        "check",
        "stop",
        "stop",
    ]


def test_a_hang_that_is_to_be_stopped_ends_the_training_whatever_may_be_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = msgspec.structs.replace(question(tmp_path, "", "", ""), hang=hang("rank-stopped", 1))
    asked.context.arguments.own["monitor"] = "stop"

    for most in (0, 2):
        assert answered(tmp_path, msgspec.structs.replace(asked, max_restarts=most)).next == "stop"
        assert "the training ends: it hangs (--monitor=stop)" in capsys.readouterr().err


def test_where_no_restarts_were_asked_for_only_the_post_mortem_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = msgspec.structs.replace(question(tmp_path, BROKE, KILLED, BROKE), max_restarts=0)

    assert answered(tmp_path, asked).next == "stop"
    said = capsys.readouterr().err
    assert "post-mortem: why train.py failed" in said
    assert "rank 1 on n2 was killed by SIGKILL" in said
    assert "the training ends" not in said


@pytest.mark.parametrize(
    ("own", "took_s", "checks"),
    [
        ({"straggler-detection": True}, 40.0, ["straggler-detection"]),
        (
            {"network-check": True, "straggler-detection": True},
            40.0,
            ["network-check", "straggler-detection"],
        ),
        ({"straggler-detection": True}, 400.0, ["network-check"]),
        ({"exclude-straggler": True}, 400.0, ["network-check"]),
        ({}, None, ["network-check"]),
    ],
)
def test_the_check_that_was_asked_for_precedes_a_restart_where_it_takes_no_minutes(
    tmp_path: Path, own: dict[str, str | int | bool], took_s: float | None, checks: list[str]
) -> None:
    asked = question(tmp_path, BROKE, KILLED, BROKE)
    arguments = msgspec.structs.replace(
        asked.context.arguments, own={**asked.context.arguments.own, **own}
    )
    asked = msgspec.structs.replace(
        asked, context=msgspec.structs.replace(asked.context, arguments=arguments)
    )
    if took_s is not None:
        directory = directory_of(tmp_path, place())
        journal.create(directory, [journal.MASTER])
        journal.Writer(directory, journal.MASTER, lambda: 1.0).append(STARTED)
        verdict = VerdictReached(nodes=[])
        journal.Writer(directory, journal.MASTER, lambda: 1.0 + took_s).append(verdict)

    assert list(answered(tmp_path, asked).checks) == checks
