# SPDX-License-Identifier: Apache-2.0
"""What is done when workers have failed, decided from what they wrote at last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_health.records.records import VerdictReached
from slurm_health.records.script_records import (
    Diagnosed,
    FailurePlanned,
    TrainingEvent,
    TrainingPlanned,
    WorkersEnded,
)
from slurm_health.system import journal
from slurm_health.torchrun.arguments import Arguments
from slurm_health.torchrun.place import TaskPlace
from slurm_health.torchrun.process import TorchrunEnd
from slurm_health.torchrun.restarts import Failure, decide, for_restart
from tests.support.ended_jobs import hang_at
from tests.support.journals import run_started
from tests.support.rows import rows

KILLED = """\
E1122 10:00:00.0 12 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 7) of binary: py
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_10:00:00
  host      : an-address
  rank      : {rank} (local_rank: 0)
  exitcode  : -9 (pid: 7)  (SIGKILL)
"""
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

STARTED = run_started(["n1", "n2", "n3"], job_id=7)


def hang(cause: str, *ranks: int) -> TrainingEvent:
    return hang_at(cause, "it hangs", ranks, [f"n{rank + 1}" for rank in ranks])


PLACE = TaskPlace(nodes=("n1", "n2", "n3"), node="n1", start="7.0.1", job_id=7)


def failure(root: Path, **differing: Any) -> Failure:
    """The first restart of a training that goes on with two nodes."""
    own = {"journal": str(root)} | differing.pop("own", {})
    given = {"max_restarts": str(differing.pop("most", 2))}
    arguments = Arguments(options=[], program=["train.py"], given=given, own=own)
    hang = differing.pop("hang", None)
    ended = TorchrunEnd(code=1, output="", ran_s=0.0, ended_s=0.0, hang=hang)
    known = {"directory": None, "restart": 1, "least": 2, "ended": ended}
    return Failure(place=PLACE, arguments=arguments, **{**known, **differing})


def decided(
    root: Path, texts: Sequence[str], *, silent: int = 0, **differing: Any
) -> TrainingPlanned:
    """Return what is decided when those from n1 on have written these texts, and no dump."""
    reports = [
        WorkersEnded(node=f"n{number}", exit_code=1, output=text.format(rank=number - 1))
        for number, text in enumerate(texts, 1)
    ]
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(root / "flight_")}
    return decide(failure(root, **differing), reports, silent, environ)


NO_STORE = "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: it has failed\n"
SILENT, ENDS = ("", "", ""), {"monitor": "stop"}
STOPPED, UNPLACED = hang("rank-stopped", 1), hang("no-progress")
ALL, FIRST_TWO, LAST_TWO = ("n1", "n2", "n3"), ("n1", "n2"), ("n2", "n3")
KILLS = "rank 1 on n2 was killed by SIGKILL"
FEW = "1 of 3 nodes do not answer any more, and --nnodes asks for at least 3"


@pytest.mark.parametrize(
    ("texts", "options", "expected", "nodes", "text"),
    [
        ((RAISED,) * 3, {}, "stop", ALL, "the training ends: KeyError: "),
        ((BROKE, KILLED, BROKE), {}, "check", ALL, KILLS),
        # Once again, and then not unchecked.
        ((BROKE,) * 3, {}, "restart", ALL, ""),
        ((BROKE,) * 3, {"restart": 2}, "check", ALL, ""),
        ((BROKE, BROKE), {"silent": 1}, "check", FIRST_TWO, ""),
        ((BROKE, BROKE), {"silent": 1, "least": 3}, "stop", FIRST_TWO, FEW),
        # A program complains of its GPU: the check decides.
        ((BROKE, ECC, BROKE), {}, "check", ALL, ""),
        # Slurm lost a node, be it the first.
        ((BROKE, LOST.replace("NODE", "n2"), BROKE), {}, "check", ("n1", "n3"), ""),
        ((LOST.replace("NODE", "n1"), BROKE, BROKE), {}, "check", LAST_TWO, ""),
        ((BROKE, KILLED, BROKE), {"restart": 3}, "stop", ALL, "again 2 times (--max-restarts)"),
        ((BROKE, KILLED, BROKE), {"most": 0}, "stop", ALL, "post-mortem: why train.py failed"),
        # A torchrun that loses the store of one that has ended is no cause.
        ((KILLED, NO_STORE, NO_STORE), {}, "check", ALL, "rank 0 on n1 was killed by SIGKILL"),
        (SILENT, {"hang": STOPPED}, "check", ALL, "the training hung: it hangs; checking n[1-3]"),
        (SILENT, {"hang": UNPLACED}, "check", ALL, ""),
        (SILENT, {"hang": UNPLACED, "hangs_before": (UNPLACED,)}, "stop", ALL, ""),
        (SILENT, {"hang": hang("data-loader-stuck", 1)}, "stop", ALL, ""),
        (SILENT, {"hang": STOPPED, "own": ENDS}, "stop", ALL, "it hangs (--monitor=stop)"),
        (SILENT, {"hang": STOPPED, "own": ENDS, "most": 0}, "stop", ALL, "it hangs (--monitor=st"),
    ],
)
def test_what_workers_wrote_at_last_decides_what_follows(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    texts: tuple[str, ...],
    options: dict[str, Any],
    expected: str,
    nodes: tuple[str, ...],
    text: str,
) -> None:
    planned = decided(tmp_path, texts, **options)
    assert (planned.plan, tuple(planned.nodes)) == (expected, nodes)
    said = capsys.readouterr().err
    assert text in said
    told = expected == "stop" and (options.get("most") != 0 or "hang" in options)
    assert ("the training ends" in said) == told


def test_what_was_found_and_decided_is_recorded(tmp_path: Path) -> None:
    journal.create(tmp_path, [journal.MASTER])
    decided(tmp_path, (BROKE, KILLED, BROKE), directory=tmp_path)
    (cause,) = [entry.record for entry in journal.read_all(tmp_path, journal.POST_MORTEM)]
    (planned,) = [entry.record for entry in journal.read_all(tmp_path, journal.RESTART)]
    assert isinstance(cause, Diagnosed)
    assert (cause.cause, cause.nodes) == ("killed", ["n2"])
    assert isinstance(planned, FailurePlanned)
    assert (planned.plan, planned.restart, planned.max_restarts) == ("check", 1, 2)
    assert "SIGKILL" in planned.reason


@rows
def test_the_check_that_was_asked_for_precedes_a_restart_where_it_takes_no_minutes(
    tmp_path: Path, own: dict[str, str | int | bool], took_s: float | None, check: str
) -> None:
    arguments = Arguments(options=[], program=["train.py"], given={}, own=own)
    if took_s is not None:
        journal.create(tmp_path, [journal.MASTER])
        journal.Writer(tmp_path, journal.MASTER, lambda: 1.0).append(STARTED)
        verdict = VerdictReached(nodes=[])
        journal.Writer(tmp_path, journal.MASTER, lambda: 1.0 + took_s).append(verdict)

    assert for_restart(arguments, tmp_path).check == check
