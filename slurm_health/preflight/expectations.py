# SPDX-License-Identifier: Apache-2.0
"""The least that a healthy device of a known model does, for when all of them are slow. Pure.

Peers show which device is slower than the others, never that all are. These figures are for that
and for nothing finer: peers judge a device between them and its peers. A model that is not in the
table, such as a MIG slice, has no expectation.

Peaks are the dense bf16 rates and the memory bandwidths of the makers' data sheets: NVIDIA's for
H100, H200, GH200, HGX B200 and B300, GB200 and GB300 NVL72, A100, A30, A40, L40 and L40S; AMD's
for Instinct MI250X, MI300X, MI325X and MI355X. Stas Bekman collects most of them, beside the best
published rates, in the ML Engineering Open Book (accelerators, "MAMF").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

import msgspec

from slurm_health.records.errors import ConfigError
from slurm_health.records.probe_catalog import Metric

# The least share of its peak that a healthy device reaches, from the best published rates:
# A100 SXM 87 %, H100, H200 and GH200 80-84 %, B200, B300, GB200 73-79 %, each with the shape
# that suits it best. A plain square product, sustained, stays well below those.
_SXM4 = 0.70
_SXM5 = 0.55
# The Instinct MI300X's best is 51 %, after tuning. It also serves for models without a rate.
LEAST_KNOWN = 0.40
# The bus bandwidth of all-gathers between any of a node's devices. Nodes of eight reach 230 (A100),
# 361 (H200) and 680 GB/s (B200) by nccl-tests; two of the four on a board without NVLink switches
# have a third of their links between them. Over PCIe or shared memory they reach 10 to 45 GB/s.
# Estimates, not measured here:
_NVLINK3, _NVLINK4, _NVLINK5, _XGMI = 60.0, 100.0, 200.0, 30.0
# Of the rate of its ports a healthy pair of nodes has 0.8 to 0.95, and on a fabric with four times
# as many nodes as uplinks a quarter. Sockets over a node's Ethernet give its GPUs a few percent.
PORT_FRACTION = 0.15


class Expectation(msgspec.Struct, frozen=True):
    """Peaks of a device model, and the fraction of them that every healthy one reaches.

    `allgather_gb_per_s` is no peak, but the bus bandwidth that all-gathers between any two or more
    devices of every healthy node exceed. `port_fraction` is the fraction of its network ports' rate
    that every healthy node reaches between GPUs. 0: no expectation of that kind. A site's table
    `[expectations."MODEL"]` has the same fields.
    """

    model: str
    bf16_tflop_per_s: Annotated[float, msgspec.Meta(ge=0, le=100_000)] = 0.0
    memory_gb_per_s: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] = 0.0
    healthy_fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] = LEAST_KNOWN
    allgather_gb_per_s: Annotated[float, msgspec.Meta(ge=0, le=100_000)] = 0.0
    port_fraction: Annotated[float, msgspec.Meta(ge=0, le=1)] = PORT_FRACTION


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """The links of a node: the number of its devices, and the rates of its network ports.

    The ports are those that NCCL may use; none if they are unknown.
    """

    devices: int
    ports_gbit_per_s: Sequence[float] = ()


# The names are torch's. If a name stands for variants, the figures are the lower ones.
KNOWN = (
    Expectation("NVIDIA A100-SXM4-40GB", 312, 1555, _SXM4, _NVLINK3),
    Expectation("NVIDIA A100-SXM4-80GB", 312, 2039, _SXM4, _NVLINK3),
    Expectation("NVIDIA A100-PCIE-40GB", 312, 1555, _SXM5),
    Expectation("NVIDIA A100 80GB PCIe", 312, 1935, _SXM5),
    Expectation("NVIDIA A30", 165, 933),
    Expectation("NVIDIA A40", 149.7, 696),
    Expectation("NVIDIA L40", 181, 864),
    Expectation("NVIDIA L40S", 362, 864),
    Expectation("NVIDIA H100 80GB HBM3", 989, 3350, _SXM5, _NVLINK4),
    Expectation("NVIDIA H100 PCIe", 756, 2000),
    Expectation("NVIDIA H100 NVL", 835, 3900),
    Expectation("NVIDIA H200", 989, 4800, _SXM5, _NVLINK4),
    Expectation("NVIDIA GH200 480GB", 989, 4000, _SXM5),
    Expectation("NVIDIA GH200 144G HBM3e", 989, 4800, _SXM5),
    Expectation("NVIDIA B200", 2250, 7700, _SXM5, _NVLINK5),
    Expectation("NVIDIA B300 SXM6 AC", 2250, 7700, _SXM5, _NVLINK5),
    Expectation("NVIDIA GB200", 2500, 7700, _SXM5, _NVLINK5),
    Expectation("NVIDIA GB300", 2500, 7700, _SXM5, _NVLINK5),
    # torch shows each of its two dies as a device.
    Expectation("AMD Instinct MI250X", 191.5, 1638),
    Expectation("AMD Instinct MI300X", 1300, 5300, allgather_gb_per_s=_XGMI),
    Expectation("AMD Instinct MI325X", 1300, 6000, allgather_gb_per_s=_XGMI),
    Expectation("AMD Instinct MI355X", 2300, 8000, allgather_gb_per_s=_XGMI),
)


_FIGURES = frozenset({"bf16_tflop_per_s", "memory_gb_per_s", "allgather_gb_per_s"})


def expectation_of(model: str, known: Mapping[str, Expectation]) -> Expectation | None:
    """Return the expectation of a device, None if its model is unknown.

    Names are compared whole, but for case and spacing: a MIG slice has a longer one.
    """
    return known.get(_key(model))


def expectations_from(site: object, source: str) -> dict[str, Expectation]:
    """Return the expectations of all known models, with a site's changes and additions.

    Args:
        site: the table `expectations` of the config file.
        source: the name of that file in an error.

    Raises:
        ConfigError: the table has an unknown key or an impossible value.
    """
    known = {_key(expectation.model): expectation for expectation in KNOWN}
    if not isinstance(site, Mapping):
        raise ConfigError(source, "expectations", f"expected a table, found {site!r}")
    for model, table in site.items():
        if not isinstance(table, Mapping):
            problem = f'expected a table as [expectations."NVIDIA H200"], found {table!r}'
            raise ConfigError(source, f"expectations.{model}", problem)
        known[_key(model)] = _changed(str(model), table, source, known.get(_key(model)))
    return known


def largest_matmul_ms(expectation: Expectation, *, flop: float) -> float | None:
    """Return the longest time a healthy device takes for a dense bf16 product of `flop`.

    `LocalizeSettings.expected_ms` is exceeded only by its `expected_slack`: divide by that.
    """
    peak = expectation.bf16_tflop_per_s
    return flop / (peak * 1e9 * expectation.healthy_fraction) if peak else None


def largest_copy_ms(expectation: Expectation, *, moved_bytes: float) -> float | None:
    """Return the longest time a healthy device takes to move bytes within its memory.

    A copy of n bytes moves 2 n: it reads and it writes them.
    """
    peak = expectation.memory_gb_per_s
    return moved_bytes / (peak * 1e6 * expectation.healthy_fraction) if peak else None


# The work of one iteration of the probes on an accelerator; tests compare these with the probes.
MATMUL_FLOP = 2.0 * 8192**3
COPY_BYTES = 2 * (2 << 30)
ALLGATHER_BYTES_PER_RANK = 128 << 20


def expected_ms(
    models: Mapping[str, str],
    known: Mapping[str, Expectation],
    slack: float = 1.25,
    links: Mapping[str, Links] = MappingProxyType({}),
    reduced: Collection[str] = (),
) -> dict[str, float]:
    """Return the longest times of metrics on a healthy node, for `LocalizeSettings.expected_ms`.

    Args:
        models: the device model of each node of the run. If they differ, metrics of one node are
            named `matmul on MODEL`, as in `measurement.group_result`.
        known: the expectations by model.
        slack: the factor by which the Localizer lets a time exceed it.
        links: the links of each node. Pairs are expected to do what the worst node could; none is
            expected to do anything if the links of a node are unknown.
        reduced: probes that do too little work in this run for a peak.
    """
    largest_ms: dict[Metric, float | None] = {}
    several = len(set(models.values())) > 1
    for model in set(models.values()):
        expectation = expectation_of(model, known)
        if expectation is None:
            continue
        alike = [links[node].devices for node in links if models.get(node) == model]
        # More devices take longer: nodes of a run have equally many.
        devices = max(alike, default=1)
        times_ms = {
            "matmul": largest_matmul_ms(expectation, flop=MATMUL_FLOP),
            "memory_copy": largest_copy_ms(expectation, moved_bytes=COPY_BYTES),
            "node_allgather": _gathering_ms(expectation.allgather_gb_per_s, devices),
        }
        for probe, ms in times_ms.items():
            largest_ms[Metric(probe=probe, model=model if several else "")] = ms
    largest_ms |= _network_ms(
        [(links.get(node), expectation_of(model, known)) for node, model in models.items()]
    )
    return {
        str(metric): ms / slack
        for metric, ms in largest_ms.items()
        if ms is not None and metric.probe not in reduced
    }


def _network_ms(
    nodes: Sequence[tuple[Links | None, Expectation | None]],
) -> dict[Metric, float | None]:
    """Return the longest times of pairs of healthy nodes: over a rail, and between all devices.

    A rail may use one port, and all rails together no more than there are. All devices of a pair
    also exchange within their nodes.
    """
    rail, pair, devices = [], [], 1
    for links, expected in nodes:
        if links is None or expected is None or not expected.port_fraction:
            return {}
        rates = [rate / 8 for rate in links.ports_gbit_per_s]
        whole = expected.port_fraction * sum(rates)
        rail.append(expected.port_fraction * min([*rates, sum(rates) / links.devices]))
        pair.append(whole if links.devices == 1 else min(whole, expected.allgather_gb_per_s))
        devices = max(devices, links.devices)
    return {
        Metric(probe="rail_allgather"): _gathering_ms(min(rail, default=0.0), 2),
        Metric(probe="allgather"): _gathering_ms(min(pair, default=0.0), 2 * devices),
    }


def _gathering_ms(busbw_gb_per_s: float, ranks: int) -> float | None:
    """Return how long an all-gather takes at a bus bandwidth as nccl-tests defines it."""
    if not busbw_gb_per_s or ranks < 2:
        return None
    return ALLGATHER_BYTES_PER_RANK * (ranks - 1) / (busbw_gb_per_s * 1e6)


def _key(model: str) -> str:
    return " ".join(model.split()).casefold()


def _changed(
    model: str, table: Mapping[str, object], source: str, known: Expectation | None
) -> Expectation:
    """Return the expectation of a model with a site's figures."""
    where = f'{source}: expectations."{model}"'
    valid = Expectation.__struct_fields__[1:]
    for key, value in table.items():
        if key not in valid:
            raise ConfigError(where, key, "unknown setting", valid=valid)
        try:
            msgspec.convert({"model": model, key: value}, Expectation)
        except msgspec.ValidationError as err:
            problem = str(err).split(" - at `")[0]
            raise ConfigError(where, key, f"{problem}, found {value!r}") from err
    if known is None and not table.keys() & _FIGURES:
        raise ConfigError(
            source,
            model,
            "unknown device model: set bf16_tflop_per_s, memory_gb_per_s or"
            " allgather_gb_per_s, or name the model as torch.cuda.get_device_name() does",
            valid=[expectation.model for expectation in KNOWN],
        )
    base = msgspec.structs.asdict(known or Expectation(model))
    return msgspec.convert({**base, **table}, Expectation)
