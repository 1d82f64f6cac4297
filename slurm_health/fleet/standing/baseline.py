# SPDX-License-Identifier: Apache-2.0
"""What healthy devices of one model reach on this cluster, as limits for its next checks. Pure.

The limits of `preflight.expectations` must fit every site, so they are wide. A fleet's own median
is narrower, and is taken only where it comes from enough devices and nodes. They are told as tables
for the site's file. A journal is its user's word: each user has one voice on a device, and one on
what devices reach.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, median_low

import msgspec

from slurm_health.fleet.standing.observation import Observation
from slurm_health.preflight.expectations import Expectation, expectation_of
from slurm_health.records.verdict import Level

# Four full nodes of eight could all be of one bad rack. Chosen, not measured.
LEAST_DEVICES = 32
LEAST_NODES = 8
# Healthy devices of one model differ by a few percent; a fifth is beyond all of them.
FRACTION = 0.8
MATMUL, COPY = "matmul GFLOP/s", "memory_copy GB/s"
_SHOWN = {MATMUL: (1e-3, "TFLOP/s"), COPY: (1.0, "GB/s")}


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What the devices of one model do: of each its median, of these the median and the least.

    `typical` is no more than the median of what each user's checks found, of two the lower: or one
    user, with journals of devices that never were, could have all others held to be slow.
    """

    metric: str
    devices: int
    nodes: int
    users: int
    typical: float
    least: float

    @property
    def enough(self) -> bool:
        """Tell whether this may become a limit."""
        return self.devices >= LEAST_DEVICES and self.nodes >= LEAST_NODES


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one model: `FRACTION` of each figure; None: nothing is known of it."""

    model: str
    bf16_tflop_per_s: float | None
    memory_gb_per_s: float | None
    basis: str


class _Found(msgspec.Struct):
    """Every value of each device, by user, and the nodes that they were measured on."""

    values: dict[tuple[str, str], dict[int, list[float]]] = msgspec.field(default_factory=dict)
    nodes: set[str] = msgspec.field(default_factory=set)


def baselines(seen: Iterable[tuple[int, Observation]]) -> dict[str, dict[str, Baseline]]:
    """Return what healthy devices did, by model and metric; of each check is known whose it was."""
    found: dict[str, dict[str, _Found]] = {}
    for uid, check in seen:
        if not check.model or check.level is not Level.HEALTHY:
            continue
        apart = {each.metric for each in check.figures if each.part}
        for figure in check.figures:
            if figure.metric not in {MATMUL, COPY} or (not figure.part and figure.metric in apart):
                continue
            of_model = found.setdefault(check.model, {}).setdefault(figure.metric, _Found())
            # A device may move to another node; one without a name of its own is the node's.
            owner = "" if figure.part.startswith("GPU-") else check.node
            of_device = of_model.values.setdefault((owner, figure.part), {})
            of_device.setdefault(uid, []).append(figure.value)
            of_model.nodes.add(check.node)
    return {
        model: {metric: _baseline(metric, each) for metric, each in metrics.items()}
        for model, metrics in found.items()
    }


def _baseline(metric: str, found: _Found) -> Baseline:
    of_devices: list[float] = []
    of_users: dict[int, list[float]] = {}
    for by_user in found.values.values():
        said = {uid: median(values) for uid, values in by_user.items()}
        of_devices.append(median_low(said.values()))
        for uid, value in said.items():
            of_users.setdefault(uid, []).append(value)
    users_say = median_low([median(values) for values in of_users.values()])
    return Baseline(
        metric=metric,
        devices=len(of_devices),
        nodes=len(found.nodes),
        users=len(of_users),
        typical=min(median(of_devices), users_say),
        least=min(of_devices),
    )


def limits(
    model: str, found: Mapping[str, Baseline], known: Expectation | None, *, period: str
) -> ModelLimits | None:
    """Return the limits of a model; None where too little is known to set any.

    Where there is too little for one figure, and where the fleet is slower than the table allows,
    as a fleet that is throttled, the table's own limit stays.

    Args:
        model: of the devices.
        found: what they did, by metric.
        known: what the table expects of the model.
        period: when that was, for a person.
    """
    usable = {metric: each for metric, each in found.items() if each.enough}
    if not usable:
        return None
    most = max(usable.values(), key=lambda each: each.devices)
    matmul, copy = usable.get(MATMUL), usable.get(COPY)
    return ModelLimits(
        model=model,
        bf16_tflop_per_s=_stricter(
            matmul.typical / 1e3 if matmul else None,
            known.bf16_tflop_per_s if known else None,
            known,
        ),
        memory_gb_per_s=_stricter(
            copy.typical if copy else None, known.memory_gb_per_s if known else None, known
        ),
        basis=f"the median of {most.devices} devices on {most.nodes} nodes, {period}",
    )


def _stricter(typical: float | None, peak: float | None, known: Expectation | None) -> float | None:
    """Return the figure of which `FRACTION` is the larger limit: the fleet's, or the table's."""
    table = peak * known.healthy_fraction / FRACTION if peak and known else None
    there = [each for each in (typical, table) if each is not None]
    return float(f"{max(there):.4g}") if there else None


def toml(
    found: Mapping[str, Mapping[str, Baseline]], known: Mapping[str, Expectation], *, period: str
) -> str:
    """Return a table for each model; as a comment only, where too few of it were checked."""
    if not found:
        return f"# no accelerator was found healthy in the {period}\n"
    tables = [
        _table(model, each, limits(model, each, expectation_of(model, known), period=period))
        for model, each in sorted(found.items())
    ]
    return "\n".join(tables)


def _table(model: str, found: Mapping[str, Baseline], limits: ModelLimits | None) -> str:
    told = [f"# {_described(each)}" for _, each in sorted(found.items())]
    if limits is None:
        needed = f"{LEAST_DEVICES} on {LEAST_NODES} nodes are needed"
        return "\n".join([f"# {model}: too few devices for a limit: {needed}", *told, ""])
    settings: Sequence[tuple[str, object]] = (
        ("bf16_tflop_per_s", limits.bf16_tflop_per_s),
        ("memory_gb_per_s", limits.memory_gb_per_s),
        ("healthy_fraction", FRACTION),
        ("basis", limits.basis),
    )
    lines = [f"{key} = {_toml(value)}" for key, value in settings if value is not None]
    return "\n".join([f"[expectations.{_toml(model)}]", *told, *lines, ""])


def _toml(value: object) -> str:
    # JSON spells a letter beyond 16 bits as two, which TOML refuses, and with it the whole file.
    return json.dumps(value, ensure_ascii=False)


def _described(found: Baseline) -> str:
    scale, unit = _SHOWN[found.metric]
    name = found.metric.split()[0]
    whose = "one user alone" if found.users == 1 else f"{found.users} users"
    return (
        f"{name}: {found.devices} devices on {found.nodes} nodes, checked by {whose},"
        f" median {found.typical * scale:.4g} {unit}, lowest {found.least * scale:.4g}"
    )
