# SPDX-License-Identifier: Apache-2.0
"""What a check is made of: probes, and the phases that run them one after another.

A phase runs one list of probes round after round until its nodes are decided. Solo probes come
first and all nodes at once; then pairs with changing partners; then, where it is wanted, a
training step on the nodes that are still well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_health.records.probe_catalog import (
    BUILT_IN,
    GPT,
    LIGHT,
    LIGHT_SET,
    ON_ACCELERATORS,
    SETS,
    STORAGE,
    Probe,
    Scope,
)
from slurm_health.records.records import Figure, ProbeUsed


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Rounds of the same probes.

    `alone` is set where each node is a group of its own, `survivors_only` where only nodes take
    part that earlier phases found neither faulty nor slow. `workload` is what a group does
    together, in one word. `not_on_cpus` names probes that nodes without accelerators leave out.
    """

    name: str
    probes: tuple[Probe, ...]
    alone: bool = False
    survivors_only: bool = False
    workload: str = "allgather"
    least_rounds: int = 2
    most_rounds: int | None = None
    options: Mapping[str, Figure] = field(default_factory=dict)
    not_on_cpus: frozenset[str] = frozenset()

    def round_name(self, number: int) -> str:
        """Return a round's name for people. Only rounds of pairs have a number alone."""
        if self.alone:
            return f"{self.name} test again" if number else f"{self.name} test"
        return f"round {number}" if self.name == "pair" else f"{self.name} round {number}"

    def used(self, *, several_devices: bool, on_cpus: bool) -> list[ProbeUsed]:
        """Return the probes as a round's record names them, without those that do not apply.

        Args:
            several_devices: a node of the round has more than one device.
            on_cpus: no node of the round has accelerators, or they are none to its workers.
        """
        return [
            ProbeUsed(name=probe.name, scope=probe.scope.value, path=probe.path)
            for probe in self.probes
            if several_devices or probe.scope not in {Scope.NODE, Scope.RAIL}
            if not (on_cpus and probe.name in self.not_on_cpus)
        ]

    def extra_s(self) -> float:
        """Return how much longer a round takes than one of short probes."""
        names = {probe.name for probe in self.probes}
        burn_s = float(self.options.get("burn_s", 0.0)) if "matmul" in names else 0.0
        warm_up_s = _BURN_WARM_UP_S if burn_s > _BURN_WARM_UP_S else 0.0
        gpt_s = sum(_GPT_S for name in names if name in GPT)
        return burn_s + warm_up_s + gpt_s


# An accelerator is the job's alone. The cores and the memory of a CPU node may not be: what others
# do there shows in these, all the more when every node is at it at once, and is no fault of a node.
# Pairs multiply matrices again and again, which tells a passing disturbance from a slow node.
_SHARED_ON_CPUS = frozenset({"matmul", "memory_copy"})
# Light probes test what the memory of processors holds, and judge nobody by its speed.
_LIGHT_ANYWHERE = frozenset({"memory_pattern"})
# Seconds of sustained work on an accelerator. Longer finds what only shows when a device is hot.
_BURN_S, _LONG_BURN_S = 3.0, 8.0
_BURN_WARM_UP_S = 3.0
_GPT_S = 10.0  # an estimate: a GPT is built and trained


def phases(chosen: Sequence[str], own: Sequence[Probe] = ()) -> tuple[Phase, ...]:
    """Return the phases of a check.

    Args:
        chosen: names of sets of probes (`SETS`) and of probes, of `BUILT_IN` and `own`.
        own: probes that do not come with slurm-health.

    Raises:
        KeyError: a name is that of no set and no probe.
    """
    known = {probe.name: probe for probe in (*BUILT_IN, *own)}
    names = {name for item in chosen for name in SETS.get(item, (item,))} - {STORAGE}
    if "gpt" in names:
        names.add("gpt_fit")  # which says how large the model may be
    probes = sorted((known[name] for name in names), key=list(known.values()).index)
    measured = [probe for probe in probes if probe.name not in GPT]
    burn_s = _LONG_BURN_S if "thorough" in chosen else _BURN_S
    asked_for = {*chosen} - SETS.keys()
    shared = frozenset() if "thorough" in chosen else _SHARED_ON_CPUS
    not_on_cpus = (shared | ON_ACCELERATORS) - asked_for
    course = [
        *_solo(measured, burn_s, not_on_cpus),
        *_pair(measured, ON_ACCELERATORS - asked_for),
    ]
    if "gpt_fit" in names:
        course.append(
            Phase(
                name="size",
                probes=(known["gpt_fit"],),
                alone=True,
                survivors_only=True,
                least_rounds=1,
                most_rounds=1,
            )
        )
    if "gpt" in names:
        course.append(
            Phase(
                name="gpt",
                probes=(known["gpt"],),
                survivors_only=True,
                workload="training step",
                most_rounds=4,
            )
        )
    return tuple(course)


def light_phases(chosen: Sequence[Phase]) -> tuple[Phase, ...]:
    """Return the phases as light probes run them: without what needs torch.

    Where nothing of what was chosen is left, it is what light probes measure at all. A site's own
    probe may be of either kind, which shows when it is loaded.
    """
    kept = [
        replace(phase, probes=probes, not_on_cpus=phase.not_on_cpus - _LIGHT_ANYWHERE)
        for phase in chosen
        if (probes := tuple(probe for probe in phase.probes if probe.path or probe.name in LIGHT))
    ]
    return tuple(kept) or light_phases(phases([LIGHT_SET]))


def without_torch(why: str, chosen: Sequence[Phase], *, gpus: bool) -> str:
    """Say that light probes measured, why, and what they did not see.

    Args:
        why: they did.
        chosen: what was to be measured.
        gpus: a node that they measured has some.
    """
    if why == f"--check={STORAGE}":
        return f"only storage was tested ({why})"
    left_out = [
        probe.name
        for phase in chosen
        for probe in phase.probes
        if not probe.path and probe.name not in LIGHT
    ]
    also = f"; {', '.join(left_out)} left out" if left_out else ""
    tested = f"processors, memory and the network over TCP were tested, NCCL was not{also}"
    if gpus and why == f"--check={LIGHT_SET}":
        return f"GPUs not measured ({why}): {tested}"
    return f"{'GPUs not measured (no torch): ' if gpus else ''}light probes ({why}): {tested}"


def _solo(probes: Sequence[Probe], burn_s: float, not_on_cpus: frozenset[str]) -> Iterator[Phase]:
    """Yield the phase of what nodes do by themselves.

    Pairs multiply matrices too, in every round; only more than that is worth rounds of its own.
    """
    alone = [probe for probe in probes if probe.scope in {Scope.SOLO, Scope.NODE}]
    only_repeated = [probe.name for probe in alone] == ["matmul"] and len(alone) < len(probes)
    if alone and not only_repeated:
        yield Phase(
            name="solo",
            probes=tuple(alone),
            alone=True,
            least_rounds=1,
            most_rounds=3,
            options={"burn_s": burn_s},
            not_on_cpus=not_on_cpus,
        )


def _pair(probes: Sequence[Probe], not_on_cpus: frozenset[str]) -> Iterator[Phase]:
    """Yield the phase of pairs. It is short of work, so matrices are multiplied again."""
    paired = [probe for probe in probes if probe.scope in {Scope.RAIL, Scope.PAIR}]
    if paired:
        again = [probe for probe in probes if probe.name == "matmul"]
        yield Phase(name="pair", probes=(*again, *paired), not_on_cpus=not_on_cpus)
