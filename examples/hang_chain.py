# SPDX-License-Identifier: Apache-2.0
"""A diagnostician of others: which rank holds a training up, step by step.

    no-progress -- KernelHang ---- kernels-hang -- ChipHang     with stacks of kernels
                `- ChipHang ------ chips-hang, host-hangs       without them, or behind that

    chips-hang  -- SendReceive --- half-a-transfer ------ Culprit -- rank-holds-up
                `- Collective ---- collective-not-entered -- Culprit
    host-hangs  -- Host ---------- outside-collectives ---- Culprit

Stacks of kernels come from a collector of yours that is called `KernelStacks` and returns, for each
rank, the kernel that runs on its device. All else is what the monitor collects.
"""

from __future__ import annotations

from typing import Any

from slurm_health.training.diagnosis.collected import FlightRecord
from slurm_health.training.diagnosis.seen import Doing, RankSeen, place_of
from slurm_health.training.plugins import (
    DiagnosisAction,
    DiagnosisObservation,
    Diagnostician,
    EventAction,
    Inference,
    InferenceChain,
    InferenceOperator,
    NoAction,
    Sureness,
)

NO_PROGRESS, KERNELS, CHIPS, HOST = "no-progress", "kernels-hang", "chips-hang", "host-hangs"
TRANSFER, NOT_ENTERED, OUTSIDE = (
    "half-a-transfer",
    "collective-not-entered",
    "outside-collectives",
)
HOLDS_UP = "rank-holds-up"


class HangOperator(InferenceOperator):
    """What the steps of this chain have in common: they lead on from inferences of some names."""

    behind: tuple[str, ...] = ()

    def is_compatible(self, inference: Inference) -> bool:
        """Its name decides."""
        return inference.name in self.behind

    def ranks(self) -> list[RankSeen]:
        """Return the ranks, as the monitor saw them."""
        return list(self._data_manager.latest("Standstill").ranks)

    def flights(self) -> list[FlightRecord]:
        """Return what ranks have recorded of their collectives, sends and receives."""
        records = self._data_manager.latest("FlightRecords")
        return list(records.records) if records else []

    def kernels(self) -> dict[str, str]:
        """Return the kernel on the device of each rank, nothing where no collector looks."""
        found: dict[str, str] = self._data_manager.latest("KernelStacks") or {}
        return found


class KernelHang(HangOperator):
    """Every rank's device is in a kernel (XPUTimerHangChecker)."""

    behind = (NO_PROGRESS,)

    def infer(self, _: list[Inference]) -> list[Inference]:
        """Without stacks of kernels the chain begins at the chips' metrics."""
        kernels = self.kernels()
        if not kernels or not all(kernels.values()):
            return []
        lines = tuple(f"rank {rank} is in {kernel}" for rank, kernel in kernels.items())
        return [Inference(name=KERNELS, description="all devices are in kernels", evidence=lines)]


class ChipHang(HangOperator):
    """Chips are in use and do next to nothing, as those that wait for peers (AntMonitor)."""

    behind = (NO_PROGRESS, KERNELS)

    def is_compatible(self, inference: Inference) -> bool:
        """It comes behind the stacks of kernels where there are any."""
        return inference.name in self.behind and not (
            inference.name == NO_PROGRESS and all(self.kernels().values()) and self.kernels()
        )

    def infer(self, _: list[Inference]) -> list[Inference]:
        """A chip that waits shows that the hang is between chips; else it is their hosts'."""
        waits = [each.rank for each in self.ranks() if each.gpu_waits]
        if not waits:
            return [Inference(name=HOST, description="no chip waits: their hosts do not feed them")]
        lines = tuple(f"the chip of rank {rank} is in use and draws no power" for rank in waits)
        return [Inference(name=CHIPS, description="chips wait for each other", evidence=lines)]


class SendReceive(HangOperator):
    """A rank sends or receives, and its peer does not do the other half (SendRecvHangChecker)."""

    behind = (CHIPS,)

    def infer(self, _: list[Inference]) -> list[Inference]:
        """Name the peers that left a record, and no transfer that fits in it."""
        open_ = {
            (each.rank, transfer.peer, transfer.sends)
            for each in self.flights()
            for transfer in each.transfers
        }
        recorded = {each.rank for each in self.flights()}
        halves = sorted(
            (rank, peer, sends)
            for rank, peer, sends in open_
            if peer in recorded and (peer, rank, not sends) not in open_
        )
        # Who waits in a transfer of its own holds nobody up: the one at the end of the line does.
        waits = {rank for rank, _, _ in open_}
        halves = [half for half in halves if half[1] not in waits] or halves
        lines = tuple(
            f"rank {rank} {'sends to' if sends else 'receives from'} rank {peer}, which does not"
            f" {'receive' if sends else 'send'}"
            for rank, peer, sends in halves
        )
        return found(TRANSFER, "a transfer has one half", {peer for _, peer, _ in halves}, lines)


class Collective(HangOperator):
    """Ranks have entered a collective that a rank of their group has not (XCCLHangChecker)."""

    behind = (CHIPS,)

    def infer(self, _: list[Inference]) -> list[Inference]:
        """Compare how far the ranks came in each group."""
        entered: dict[str, dict[int, int]] = {}
        for each in self.flights():
            for group, reached in each.reached.items():
                entered.setdefault(group, {})[each.rank] = reached.entered
        missing, lines = set(), []
        for group, by_rank in entered.items():
            last = max(by_rank.values())
            for rank, number in by_rank.items():
                if number < last:
                    missing.add(rank)
                    lines.append(f"group {group}: rank {rank} is at {number}, others at {last}")
        return found(NOT_ENTERED, "a collective lacks ranks", missing, tuple(lines))


class Host(HangOperator):
    """A rank is in code of its own, at its data or at a checkpoint, by its stack."""

    behind = (HOST,)

    def infer(self, _: list[Inference]) -> list[Inference]:
        """Name the ranks outside collectives, if others are inside."""
        places = {each.rank: place_of(each.stack) for each in self.ranks()}
        inside = {rank for rank, place in places.items() if place.doing is Doing.COLLECTIVE}
        known = {rank for rank, place in places.items() if place.doing is not Doing.NOT_KNOWN}
        outside = known - inside if inside else set()
        lines = tuple(f"rank {rank}: {places[rank].doing.value}" for rank in sorted(outside))
        return found(OUTSIDE, "ranks are outside collectives", outside, lines)


class Culprit(HangOperator):
    """Which rank it is, and where that runs."""

    behind = (TRANSFER, NOT_ENTERED, OUTSIDE)

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Name ranks with their nodes: where it happens, which accuses nobody."""
        before = inferences[0]
        numbers = {int(each) for each in before.configs["ranks"].split(",")}
        held = [each for each in self.ranks() if each.rank in numbers]
        who = ", ".join(f"rank {each.rank} on {each.node}" for each in held)
        return [
            Inference(
                name=HOLDS_UP,
                description=f"{who} holds the others up: {before.description}",
                sureness=Sureness.LIKELY,
                nodes=tuple(dict.fromkeys(each.node for each in held)),
                ranks=tuple(each.rank for each in held),
                evidence=before.evidence,
            )
        ]


OPERATORS = (KernelHang, ChipHang, SendReceive, Collective, Host, Culprit)


class HangDiagnostician(Diagnostician):
    """Reports which rank holds a training up."""

    def observe(self, **kwargs: Any) -> DiagnosisObservation | None:
        """Return that there is no progress, once it takes longer than a pause would."""
        seen = kwargs["data_manager"].latest("Standstill")
        if seen is None or seen.stalled_s < seen.allowance_s:
            return None
        return DiagnosisObservation(NO_PROGRESS, {"stalled_s": f"{seen.stalled_s:.0f}"})

    def resolve(self, problem: DiagnosisObservation, **kwargs: Any) -> DiagnosisAction:
        """Walk from the standstill to a rank."""
        chain = InferenceChain([each(kwargs["data_manager"]) for each in OPERATORS])
        symptom = Inference(
            name=NO_PROGRESS, description=f"no step for {problem.details['stalled_s']} s"
        )
        end = chain.walk(symptom).conclusion
        if end.name != HOLDS_UP:
            return NoAction()
        return EventAction(reason=end.description, nodes=end.nodes, evidence=end.evidence)


def found(name: str, what: str, ranks: set[int], lines: tuple[str, ...]) -> list[Inference]:
    """Return an inference that tells the next operator of ranks, none where there are none."""
    if not ranks:
        return []
    told = {"ranks": ",".join(map(str, sorted(ranks)))}
    return [Inference(name=name, description=what, evidence=lines, configs=told)]
