# SPDX-License-Identifier: Apache-2.0
"""From what ranks really wrote to the cause; and no node is accused but by Slurm or its driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from slurm_health.records.script_records import Diagnosed
from slurm_health.training.diagnosis.collected import (
    NodeState,
    NodeStates,
    RankFailure,
    ScriptEnd,
    SlurmView,
    TrainingLog,
)
from slurm_health.training.diagnosis.failure import FailureDiagnostician
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.framework import DataManager

DATA = Path(__file__).parents[2] / "data" / "diagnosis"
END = ScriptEnd(exit_code=1, nodes=("n1", "n2", "n3"), script="train.sh")
TIMED_OUT = "RuntimeError: Timed out waiting 20000ms for recv operation to complete"


def diagnose(*data: msgspec.Struct, end: ScriptEnd = END) -> Diagnosed:
    action = FailureDiagnostician().diagnose(data_manager=DataManager([end, *data]))
    assert action.diagnosed is not None
    return action.diagnosed


def told(node: str, **told: Any) -> NodeStates:
    return NodeStates(nodes=(NodeState(node=node, **told),))


def of_text(text: str) -> Diagnosed:
    return diagnose(read_output([("out", text)]))


def failed(rank: int, error: str = "", node: str = "", **rest: int | bool | str) -> RankFailure:
    return msgspec.convert(
        {
            "rank": rank,
            "error": error,
            "node": node,
            "at": rank,
            "line": f"{rank}: {error}",
            **rest,
        },
        RankFailure,
    )


def test_a_broken_gpu_on_a_node_that_the_job_asks_for_by_name_is_to_leave_its_nodelist() -> None:
    view = SlurmView(required=("n2",))
    log = TrainingLog(failures=(failed(1, "RuntimeError: CUDA error: GPU is lost", "n2"),))
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus."
    by_output = diagnose(view, log)
    by_driver = diagnose(view, told("n2", kernel=(xid,)))

    assert by_output.nodes == by_driver.nodes == ["n2"]
    for found in (by_output, by_driver):
        assert "leave out n2 (sbatch --nodelist without n2)" in found.advice


def test_an_xid_on_one_of_the_nodes_is_the_cause_of_a_failure_that_all_ranks_met() -> None:
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus."
    log = TrainingLog(
        failures=tuple(failed(n, TIMED_OUT, f"n{n + 1}", consequence=True) for n in range(3))
    )
    nodes = NodeStates(
        nodes=(NodeState(node="n1"), NodeState(node="n3", kernel=(xid,))), silent=("n2",)
    )
    found = diagnose(nodes, log)

    assert (found.cause, found.accused, found.ranks) == ("gpu-broken", ["n3"], [2])
    silent, kernel = found.told
    assert silent == "n2 did not answer: no answer in time"
    assert kernel.startswith(f"n3: kernel: {xid} (that is: fallen off the bus")


def test_a_node_that_does_not_answer_is_named_and_not_accused() -> None:
    found = diagnose(
        NodeStates(nodes=(NodeState(node="n1"),), silent=("n2", "n3"), why_silent="why")
    )

    assert found.told == ["n[2-3] did not answer: why"]
    assert (found.nodes, found.accused) == ([], [])


def test_what_every_node_tells_of_its_state_is_left_out_and_what_some_tell_is_told_once() -> None:
    state = [("usb0 has no link", full) for full in ("/tmp is full", "/tmp is full", "ib0 is down")]
    nodes = [NodeState(node=f"n{n}", state=each) for n, each in enumerate(state, 1)]
    found = diagnose(NodeStates(nodes=tuple(nodes)))

    assert found.told == ["n[1-2]: /tmp is full", "n3: ib0 is down"]


def test_what_could_not_be_looked_at_on_nodes_is_among_what_was_not_collected() -> None:
    missing = {"kernel log": "/dev/kmsg: Operation not permitted"}
    nodes = tuple(NodeState(node=node, unavailable=missing) for node in ("n1", "n2"))
    found = diagnose(NodeStates(nodes=nodes))

    assert found.not_collected == ["kernel log: /dev/kmsg: Operation not permitted (n[1-2])"]


def test_what_to_do_after_a_kill_goes_by_what_is_there_to_ask() -> None:
    log = TrainingLog(failures=(failed(2, signal=9),))
    outside = msgspec.structs.replace(END, in_slurm=False)

    assert "sacct" in diagnose(log).advice
    advice = diagnose(log, end=outside).advice
    assert "sacct" not in advice
    assert "dmesg" in advice
    assert "memory.events" in advice


def test_what_a_program_says_of_its_gpu_accuses_its_node_only_where_the_kernel_agrees() -> None:
    error = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    kernel = "NVRM: Xid (PCI:0000:3b:00): 95, pid=77, name=python, Uncontained ECC error"
    log = TrainingLog(failures=(failed(0, error, "n2"),))
    alone = diagnose(log)
    confirmed = diagnose(log, NodeStates(nodes=(NodeState(node="n2", kernel=(kernel,)),)))
    everywhere = diagnose(TrainingLog(failures=(failed(0, error, "n2"), failed(1, error, "n3"))))

    assert (alone.cause, alone.nodes, alone.accused) == ("gpu-broken", ["n2"], [])
    assert confirmed.accused == ["n2"]
    assert everywhere.accused == []


def test_a_lost_node_that_the_job_asks_for_by_name_is_to_leave_its_nodelist() -> None:
    """Sbatch refuses a node that is both asked for and excluded."""
    view = SlurmView(node_states={"n1": "DOWN", "n2": "DOWN*", "n3": "MIXED"}, required=("n2",))

    assert "(sbatch --nodelist without n2 and --exclude=n1)" in diagnose(view).advice


def test_an_error_of_a_file_names_it_its_filesystem_and_on_how_many_nodes() -> None:
    stale = "OSError: [Errno 116] Stale file handle: '/ckpt/run/a.pt'"
    states = told("n1", mounts={"/ckpt": "nfs4, srv:/ckpt", "/": "nfs4, srv:/root"})
    one = diagnose(TrainingLog(failures=(failed(1, stale, "n2"),)), states)
    assert one.cause == "filesystem-failed"
    assert one.description.endswith(" (/ckpt/run/a.pt on nfs4, srv:/ckpt), on 1 of 3 nodes")

    ranks = [failed(number, stale, f"n{number + 1}") for number in range(3)]
    several = diagnose(TrainingLog(failures=tuple(ranks)), states)
    assert "(/ckpt/run/a.pt on nfs4, srv:/ckpt), on 3 of 3 nodes" in several.description

    full = "OSError: [Errno 28] No space left on device: '/tmp/a.pt'"
    unknown = diagnose(TrainingLog(failures=(failed(1, full, "n2"),)))
    assert "(/tmp/a.pt), on 1 of 3 nodes" in unknown.description
