# SPDX-License-Identifier: Apache-2.0
"""A script that has failed is started again as it is answered, on the nodes that are kept."""

import os
import signal

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
STOP = {"disposition": "stop", "reason": "a KeyError on all ranks"}
ELSEWHERE = {"disposition": "requeue", "reason": "n2 is broken"}


def test_a_script_that_fails_is_started_again_until_it_ends_well(bench: Bench) -> None:
    run = bench.journal()
    bench.after_failure(AGAIN, {**AGAIN, "nodes": ["n1", "n3"]})
    nodes = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1", "SLURM_NNODES": "3"}
    environ = {**bench.environ(), **nodes}
    job = bench.supervised(FAILS_TWICE, options=["--max-restarts", "3"], environ=environ)

    code, out, err = bench.finish(job)

    assert code == 0, err
    assert out == b"start 0 on n[1-3]\nstart 1 on n[1-3]\nstart 2 on n[1,3]\n"
    assert b"starting train.sh again (restart 1 of 3): it was nobody's fault" in err
    records = [entry.record for entry in journal.read_all(run, "supervisor")]
    assert [(r.restart, r.nodes) for r in records if isinstance(r, ScriptStarted)] == [
        (0, []),
        (1, []),
        (2, ["n1", "n3"]),
    ]
    assert [r.exit_code for r in records if isinstance(r, ScriptEnded)] == [7, 7, 0]
    told = bench.told_after_failure()
    assert [each["restart"] for each in told] == [1, 2]
    assert (told[0]["batch_node"], told[0]["max_restarts"]) == ("n1", 3)


THREE = ["--max-restarts", "3"]
NOT_AGAIN = b"train.sh is not started again: "


@pytest.mark.parametrize(
    ("end", "answer", "options", "code", "said"),
    [
        ("exit 7", AGAIN, ["--max-restarts", "1"], 7, NOT_AGAIN + b"it has been once (--max-"),
        ("kill -ABRT $$", STOP, THREE, -signal.SIGABRT, NOT_AGAIN + b"a KeyError on all ranks"),
        ("kill -ABRT $$", {}, THREE, -signal.SIGABRT, b"could not be decided"),
        ("exit 7", ELSEWHERE, [*THREE, "--requeue-wait-s", "0.2"], 1, b"the job within 0.2 s"),
    ],
    ids=["restarts used up", "its own fault", "no answer", "moved elsewhere"],
)
def test_a_failure_that_is_not_to_be_repeated_ends_the_job(
    bench: Bench, end: str, answer: dict[str, str], options: list[str], code: int, said: bytes
) -> None:
    bench.journal()
    bench.after_failure(answer)

    ended, _, err = bench.finish(bench.supervised(f"#!/bin/sh\n{end}\n", options=options))

    assert ended == code
    assert len(bench.told_after_failure()) == 1
    assert said in err


def test_a_script_that_was_told_to_end_is_not_started_again(bench: Bench) -> None:
    bench.journal()
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
    bench.journal()
    after = bench.directory / "master-after"
    after.write_text("#!/bin/bash\necho deciding >>$LOG\nsleep 600\n")
    after.chmod(0o755)
    job = bench.supervised("#!/bin/sh\nexit 7\n", options=["--max-restarts", "3"])
    bench.wait_for("deciding")
    os.kill(job.pid, signal.SIGTERM)

    code, _, err = bench.finish(job)

    assert code == -signal.SIGTERM
    assert b"SIGTERM ended the check, so the script is not started again" in err


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
