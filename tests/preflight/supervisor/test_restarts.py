# SPDX-License-Identifier: Apache-2.0
"""A script that has failed is started again as it is answered, on the nodes that are kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.preflight.supervisor.kept_spares import cpus_of, resized_environ
from slurm_health.records.script_records import ScriptEnded, ScriptStarted
from slurm_health.system import journal
from tests.support.rows import rows
from tests.support.supervised import Bench

FAILS_TWICE = """#!/bin/bash
echo "start $SLURM_HEALTH_RESTART_COUNT on $SLURM_JOB_NODELIST"
[ "$SLURM_HEALTH_RESTART_COUNT" -ge 2 ] || exit 7
"""
AGAIN = {"disposition": "proceed", "reason": "it was nobody's fault"}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    bench.answer("proceed", directory=str(run))
    yield bench
    bench.clean_up()


def slurm(bench: Bench) -> dict[str, str]:
    nodes = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1", "SLURM_NNODES": "3"}
    return {**bench.environ(), **nodes}


def test_a_script_that_fails_is_started_again_until_it_ends_well(bench: Bench) -> None:
    bench.after_failure(AGAIN, {**AGAIN, "nodes": ["n1", "n3"]})
    job = bench.supervised(FAILS_TWICE, options=["--max-restarts", "3"], environ=slurm(bench))

    code, out, err = bench.finish(job)

    assert code == 0, err
    assert out == b"start 0 on n[1-3]\nstart 1 on n[1-3]\nstart 2 on n[1,3]\n"
    assert b"starting train.sh again (restart 1 of 3): it was nobody's fault" in err
    records = [entry.record for entry in journal.read_all(bench.directory / "run", "supervisor")]
    assert [(r.restart, r.nodes) for r in records if isinstance(r, ScriptStarted)] == [
        (0, []),
        (1, []),
        (2, ["n1", "n3"]),
    ]
    assert [r.exit_code for r in records if isinstance(r, ScriptEnded)] == [7, 7, 0]
    told = bench.told_after_failure()
    assert [each["restart"] for each in told] == [1, 2]
    assert (told[0]["batch_node"], told[0]["max_restarts"]) == ("n1", 3)


def test_restarts_that_are_used_up_leave_the_code_of_the_script(bench: Bench) -> None:
    bench.after_failure(AGAIN)

    code, _, err = bench.finish(bench.supervised(FAILS_TWICE, options=["--max-restarts", "1"]))

    assert code == 7
    assert b"train.sh is not started again: it has been once (--max-restarts)" in err


@pytest.mark.parametrize("answer", ["stop", "nothing"])
def test_a_failure_that_is_not_to_be_repeated_ends_the_job_as_the_script_ended(
    bench: Bench, answer: str
) -> None:
    told = {"disposition": "stop", "reason": "a KeyError on all ranks"}
    bench.after_failure(told if answer == "stop" else {})
    job = bench.supervised("#!/bin/sh\nkill -ABRT $$\n", options=["--max-restarts", "3"])

    code, _, err = bench.finish(job)

    assert code == -signal.SIGABRT
    assert len(bench.told_after_failure()) == 1
    said = b"a KeyError on all ranks" if answer == "stop" else b"could not be decided"
    assert b"train.sh is not started again: " in err
    assert said in err


def test_a_script_that_was_told_to_end_is_not_started_again(bench: Bench) -> None:
    bench.after_failure(AGAIN)
    text = (
        "#!/bin/bash\ntrap 'exit 9' TERM\necho ready >>$LOG\nwhile :; do read -rt 1 <> <(:); done\n"
    )
    job = bench.supervised(text, options=["--max-restarts", "3"])
    bench.wait_for("ready")
    os.kill(job.pid, signal.SIGTERM)

    code, _, err = bench.finish(job)

    assert (code, bench.told_after_failure()) == (9, [])
    assert b"train.sh is not started again: the job was sent SIGTERM" in err


def test_a_cancellation_while_it_is_decided_ends_the_job_at_once(bench: Bench) -> None:
    after = bench.directory / "master-after"
    after.write_text("#!/bin/bash\necho deciding >>$LOG\nsleep 600\n")
    after.chmod(0o755)
    job = bench.supervised("#!/bin/sh\nexit 7\n", options=["--max-restarts", "3"])
    bench.wait_for("deciding")
    os.kill(job.pid, signal.SIGTERM)

    code, _, err = bench.finish(job)

    assert code == -signal.SIGTERM
    assert b"SIGTERM ended the check, so the script is not started again" in err


def test_a_job_that_is_moved_elsewhere_waits_for_its_end(bench: Bench) -> None:
    bench.after_failure({"disposition": "requeue", "reason": "n2 is broken"})
    options = ["--max-restarts", "1", "--requeue-wait-s", "0.2"]

    code, _, err = bench.finish(bench.supervised("#!/bin/sh\nexit 7\n", options=options))

    assert code == 1
    assert b"Slurm has not requeued the job within 0.2 s" in err


@rows
def test_a_spare_is_held_with_all_cpus_that_the_job_has_there(
    nodes: str, cpus: str, expected: dict[str, int]
) -> None:
    environ = {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_CPUS_PER_NODE": cpus}

    assert {node: cpus_of(node, environ) for node in expected} == expected


@rows
def test_counts_and_lists_are_those_of_the_nodes_that_are_kept(
    keep: str, environ: dict[str, str], left: dict[str, str]
) -> None:
    assert resized_environ(environ, keep.split(",")) == left
