# SPDX-License-Identifier: Apache-2.0
"""What a site's monitoring reads: lines for the machine's log, and metrics for Prometheus.

The log is never waited for: what it does not take is lost. Metrics are in the text format, as
node_exporter's textfile collector reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from math import isinf, isnan

import msgspec

from slurm_health.records.text import one_line

LOG_SOCKET = "/dev/log"
_DAEMON = 3 << 3
_SEVERITY = {"error": 3, "warning": 4, "info": 6}
_MOST_BYTES = 2000


def send_line(level: str, line: str, *, to: str = LOG_SOCKET) -> None:
    """Write one line to the machine's log; `level` is error, warning or info.

    One that is longer than 2,000 bytes is cut.
    """
    import socket  # not free, and a node that is well has nothing to say

    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.setblocking(False)
        data = f"<{_DAEMON | _SEVERITY[level]}>{line}".encode(errors="replace")
        log.sendto(data[:_MOST_BYTES], to)


class MetricSample(msgspec.Struct, frozen=True):
    """One value of a metric, and what tells it from the others."""

    value: float
    labels: Mapping[str, str] = {}


class Gauge(msgspec.Struct, frozen=True, kw_only=True):
    """A metric that can rise and fall. A name ends with its unit."""

    name: str
    help: str
    samples: Sequence[MetricSample]


def one_of(chosen: str, among: Sequence[str], label: str, **labels: str) -> list[MetricSample]:
    """Return a state as Prometheus counts it best: 1 for the one it is in, 0 for each other."""
    return [MetricSample(float(each == chosen), {**labels, label: each}) for each in among]


def prometheus_text(gauges: Sequence[Gauge]) -> str:
    """Return metrics as text; one without a sample is left out."""
    lines = []
    for gauge in gauges:
        if gauge.samples:
            lines += [f"# HELP {gauge.name} {gauge.help}", f"# TYPE {gauge.name} gauge"]
            lines += [_line(gauge.name, sample) for sample in gauge.samples]
    return "".join(f"{line}\n" for line in lines)


def _line(name: str, sample: MetricSample) -> str:
    labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in sample.labels.items())
    return (
        f"{name}{{{labels}}} {_number(sample.value)}"
        if labels
        else f"{name} {_number(sample.value)}"
    )


def _escaped(value: str) -> str:
    shown = one_line(value).encode(errors="replace").decode()
    return shown.replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    if isnan(value):
        return "NaN"
    if isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.15g}"
