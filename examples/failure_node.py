# SPDX-License-Identifier: Apache-2.0
"""A diagnostician of others: did a worker fail by itself, or is it its machine?

Most failures pass when the training is started again on the same machines; a machine that broke has
to be replaced. What ranks wrote and what they are in now raises the suspicion of a device. Only
metrics of the machine confirm it: without them nobody is accused.

    worker-failed -- FailureInLog ----- device-suspected -- FailureInMetrics -- machine
                  |                                                          `- device-not-seen
                  |- FailureInStacks -- device-suspected
                  `- FailureInLog ----- transient

docs/reference/plugins.md says how it is registered.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from slurm_health.training.plugins import (
    DataCollector,
    DiagnosisAction,
    DiagnosisObservation,
    Diagnostician,
    EventAction,
    Inference,
    InferenceChain,
    InferenceOperator,
    LeaveNode,
    NoAction,
    RestartRanks,
)
from slurm_health.training.plugins.data import DataManager

FAILED, SUSPECTED, MACHINE, NOT_SEEN, TRANSIENT = (
    "worker-failed",
    "device-suspected",
    "machine",
    "device-not-seen",
    "transient",
)
DEVICE_WORDS = ("uncorrectable ECC error", "unspecified launch failure", "CUDA error: unknown")
DRIVER_WORDS = ("nvidia", "uvm_")
PASSING_WORDS = ("Connection reset by peer", "Broken pipe", "Connection closed by peer")


class ChipErrors(DataCollector):
    """Uncorrected memory errors of this host's GPUs, since their driver was loaded."""

    def is_enabled(self) -> bool:
        """The driver's own program must be there."""
        return shutil.which("nvidia-smi") is not None

    def collect_data(self) -> dict[str, str | list[str]]:
        """Return the lines of the GPUs that have any, and the node that they are of."""
        query = "--query-gpu=pci.bus_id,ecc.errors.uncorrected.volatile.total"
        told = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            check=True,
            capture_output=True,
            text=True,
        )
        lines = [line.split(", ") for line in told.stdout.splitlines()]
        errors = [
            f"GPU {bus}: {n} uncorrected errors" for bus, n in lines if n.isdigit() and int(n)
        ]
        return {"node": self.environ.get("SLURMD_NODENAME", ""), "errors": errors}


class FailureInLog(InferenceOperator):
    """What the worker wrote last: a device, connections, or something else."""

    def is_compatible(self, inference: Inference) -> bool:
        """It leads on from a worker that failed."""
        return inference.name == FAILED

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Words alone suspect a device, and accuse no machine."""
        error, line = inferences[0].configs["error"], inferences[0].configs["line"]
        if any(word in error for word in DEVICE_WORDS):
            return [followed(inferences[0], SUSPECTED, line)]
        if any(word in error for word in PASSING_WORDS):
            return [followed(inferences[0], TRANSIENT, line)]
        return []


class FailureInStacks(InferenceOperator):
    """What is left of the worker on its node: a rank that does not come back from the driver."""

    def is_compatible(self, inference: Inference) -> bool:
        """It leads on from a worker that failed."""
        return inference.name == FAILED

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Look at the ranks that still run on that node."""
        told = told_by(self._data_manager, inferences[0].configs["node"])
        stuck = [line for line in told.left if any(word in line for word in DRIVER_WORDS)]
        return [followed(inferences[0], SUSPECTED, stuck[0])] if stuck else []


class FailureInMetrics(InferenceOperator):
    """What the machine's metrics say of the device that is suspected."""

    def is_compatible(self, inference: Inference) -> bool:
        """It leads on from the suspicion."""
        return inference.name == SUSPECTED

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """A GPU that is lost, or has errors that it could not correct, is the machine's."""
        suspected = inferences[0]
        node = suspected.configs["node"]
        metrics = [f"NVML: {each}" for each in told_by(self._data_manager, node).lost_gpus]
        chips = self._data_manager.latest("ChipErrors")
        if chips and chips["node"] == node:  # a collector looks at one node
            metrics += chips["errors"]
        return [followed(suspected, MACHINE if metrics else NOT_SEEN, *metrics)]


class FailureNodeDiagnostician(Diagnostician):
    """Starts the ranks again, or leaves the machine."""

    def observe(self, **kwargs: Any) -> DiagnosisObservation | None:
        """Return the first worker that failed by itself, if it is known on which node it ran."""
        log = kwargs["data_manager"].latest("TrainingLog")
        first = next(iter(log.of_their_own), None) if log else None
        if first is None or not first.node:
            return None
        details = {"node": first.node, "error": first.error, "line": first.line}
        return DiagnosisObservation(FAILED, details)

    def resolve(self, problem: DiagnosisObservation, **kwargs: Any) -> DiagnosisAction:
        """Return what the conclusion of the chain asks for."""
        data_manager = kwargs["data_manager"]
        operators = [
            each(data_manager) for each in (FailureInLog, FailureInStacks, FailureInMetrics)
        ]
        symptom = Inference(
            name=FAILED,
            description=f"a worker on {problem.details['node']} failed",
            configs=problem.details,
        )
        reached = InferenceChain(operators).infer([symptom])
        ends = {each.name: each for each in reached}
        node = problem.details["node"]
        if MACHINE in ends:
            evidence = ends[MACHINE].evidence
            return LeaveNode(reason=f"the machine {node} broke", nodes=(node,), evidence=evidence)
        if TRANSIENT in ends:
            return RestartRanks(reason="it is temporary", evidence=ends[TRANSIENT].evidence)
        if NOT_SEEN in ends:
            reason = f"a device of {node} is suspected, and nothing measured confirms it"
            return EventAction(reason=reason, evidence=ends[NOT_SEEN].evidence)
        return NoAction()


def followed(before: Inference, name: str, *evidence: str) -> Inference:
    """Return what follows an inference, with what the next ones need of it."""
    return Inference(
        name=name,
        description=name.replace("-", " "),
        evidence=(*before.evidence, *evidence),
        configs=before.configs,
    )


class _Nothing:
    left: tuple[str, ...] = ()
    lost_gpus: tuple[str, ...] = ()


def told_by(data_manager: DataManager, node: str) -> Any:
    """Return what a node told of itself."""
    told = data_manager.latest("NodesTold")
    return next((each for each in (told.nodes if told else ()) if each.node == node), _Nothing())
