# SPDX-License-Identifier: Apache-2.0
"""The two examples of the design: a node that fails, and a hang that is located step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.failure_node import ChipErrors, FailureNodeDiagnostician
from examples.hang_chain import OPERATORS, HangDiagnostician
from slurm_health.training.diagnosis.collected import (
    FlightRecord,
    FlightRecords,
    NodesTold,
    NodeTold,
)
from slurm_health.training.diagnosis.flight_data import Reached, Transfer
from slurm_health.training.diagnosis.rank_failures import RankFailure
from slurm_health.training.diagnosis.seen import RankSeen, Standstill
from slurm_health.training.diagnosis.training_log import TrainingLog
from slurm_health.training.plugins import (
    ActionKind,
    DataManager,
    DiagnosisAction,
    DiagnosisManager,
    EventAction,
    Inference,
    InferenceChain,
    NoAction,
)
from tests.support.standstills import IN_COLLECTIVE, IN_LOADER, rank, standstill
from tests.support.supervised import write_executable
from tests.training.plugins.test_data import Clock

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


# --- the node that fails ----------------------------------------------------------------------


def of_a_failure(error: str, *, node: NodeTold | None = None) -> DataManager:
    """Return logs, stacks and metrics after rank 1 on n1 has failed."""
    manager = DataManager(lambda: 1000.0)
    failure = RankFailure(rank=1, node="n1", error=error, line=f"rank 1: {error}")
    manager.store("TrainingLog", TrainingLog(failures=(failure,)))
    manager.store("NodesTold", NodesTold(nodes=(node or NodeTold(node="n1"), NodeTold(node="n2"))))
    return manager


def about(manager: DataManager) -> DiagnosisAction:
    action = FailureNodeDiagnostician().diagnose(data_manager=manager)
    assert action.failed == ""
    return action


def test_a_machine_is_suspected_by_the_stack_of_a_rank_that_stays_in_the_driver() -> None:
    left = "rank 1 still runs, os_acquire_rwlock in nvidia"
    suspected = NodeTold(node="n1", left=(left,))
    confirmed = NodeTold(node="n1", left=(left,), lost_gpus=("GPU 0000:3b:00 is lost",))

    assert about(of_a_failure("", node=suspected)).kind is ActionKind.EVENT
    assert about(of_a_failure("", node=confirmed)).kind is ActionKind.LEAVE_NODE


@pytest.mark.parametrize(("node", "kind"), [("n1", "leave-node"), ("n2", "event")])
def test_errors_of_chips_count_for_the_node_that_they_were_collected_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, kind: str
) -> None:
    write_executable(tmp_path / "nvidia-smi", "#!/bin/sh\necho 3B:00.0, 2\necho 5E:00.0, 0\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    clock = Clock()
    chips = ChipErrors()
    chips.environ = {"SLURMD_NODENAME": node}
    data = of_a_failure(ECC)
    manager = DiagnosisManager(data, clock)
    manager.register_collector(chips, every_s=60.0)
    manager.register_diagnostician("failure-node", FailureNodeDiagnostician(), every_s=60.0)
    action = manager.look()["failure-node"]

    assert manager.failed == {}
    assert action.kind.value == kind
    assert ("GPU 3B:00.0: 2 uncorrected errors" in action.evidence) is (node == "n1")


# --- the hang ---------------------------------------------------------------------------------


def of_a_hang(
    seen: Standstill, *flights: FlightRecord, kernels: dict[str, str] | None = None
) -> DataManager:
    manager = DataManager(lambda: 1000.0)
    manager.store("Standstill", seen)
    manager.store("FlightRecords", FlightRecords(records=flights))
    if kernels is not None:
        manager.store("KernelStacks", kernels)
    return manager


def steps(manager: DataManager) -> list[str]:
    chain = InferenceChain([each(manager) for each in OPERATORS])
    walk = chain.walk(Inference(name="no-progress", description="no step"))
    assert walk.failed == ()
    return [step.operator for step in walk.way_to(walk.conclusion)]


def waiting(number: int) -> RankSeen:
    return rank(number, IN_COLLECTIVE, gpu_share=1.0, gpu_waits=True)


def at(number: int, entered: int) -> FlightRecord:
    return FlightRecord(rank=number, reached={"0": Reached(entered=entered, over=entered - 1)})


IN_KERNELS = {"0": "ncclDevKernel_AllReduce", "1": "ncclDevKernel_AllReduce", "2": "gemm"}


def test_kernels_then_chips_then_a_collective_lead_to_the_rank_that_has_not_entered() -> None:
    seen = standstill(waiting(0), waiting(1), rank(2))
    manager = of_a_hang(seen, at(0, 8), at(1, 8), at(2, 7), kernels=IN_KERNELS)
    action = HangDiagnostician().diagnose(data_manager=manager)

    assert steps(manager) == ["KernelHang", "ChipHang", "Collective", "Culprit"]
    assert isinstance(action, EventAction)
    assert action.reason == "rank 2 on n3 holds the others up: a collective lacks ranks"
    assert action.evidence == ("group 0: rank 2 is at 7, others at 8",)


def test_without_stacks_of_kernels_the_chain_begins_at_the_chips() -> None:
    manager = of_a_hang(standstill(waiting(0), rank(1)), at(0, 8), at(1, 7))

    assert steps(manager) == ["ChipHang", "Collective", "Culprit"]


def test_a_send_without_its_receive_leads_to_the_rank_at_the_end_of_the_line() -> None:
    flights = [
        FlightRecord(rank=0, transfers=(Transfer(peer=1, sends=False),)),
        FlightRecord(rank=1, transfers=(Transfer(peer=2, sends=False),)),
        FlightRecord(rank=2),
    ]
    manager = of_a_hang(standstill(waiting(0), waiting(1), rank(2)), *flights)
    action = HangDiagnostician().diagnose(data_manager=manager)

    assert steps(manager) == ["ChipHang", "SendReceive", "Culprit"]
    assert action.reason == "rank 2 on n3 holds the others up: a transfer has one half"
    assert action.evidence == ("rank 1 receives from rank 2, which does not send",)


def test_a_transfer_with_both_halves_leads_nowhere() -> None:
    flights = [
        FlightRecord(rank=0, transfers=(Transfer(peer=1, sends=True),)),
        FlightRecord(rank=1, transfers=(Transfer(peer=0, sends=False),)),
    ]
    manager = of_a_hang(standstill(waiting(0), waiting(1)), *flights)

    assert HangDiagnostician().diagnose(data_manager=manager) == NoAction()


def test_where_no_chip_waits_the_host_leads_to_the_rank_at_its_data() -> None:
    manager = of_a_hang(standstill(rank(0), rank(1, IN_LOADER)))
    action = HangDiagnostician().diagnose(data_manager=manager)

    assert steps(manager) == ["ChipHang", "Host", "Culprit"]
    assert action.evidence == ("rank 1: waits for its data loader",)


def test_a_pause_that_is_usual_is_no_hang() -> None:
    manager = of_a_hang(standstill(waiting(0), rank(1), stalled_s=20.0), at(0, 8), at(1, 7))

    assert HangDiagnostician().diagnose(data_manager=manager) == NoAction()
