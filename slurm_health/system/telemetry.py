# SPDX-License-Identifier: Apache-2.0
"""Output for a site's monitoring: lines for the machine's log, and metrics for Prometheus.

A line that the log does not accept at once is lost. Metrics are in the text format of
node_exporter's textfile collector.
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
    """Write one line, of at most 2,000 bytes, to the machine's log.

    `level` is error, warning or info.
    """
    import socket  # slow to load, and a healthy node logs nothing

    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.setblocking(False)
        data = f"<{_DAEMON | _SEVERITY[level]}>{line}".encode(errors="replace")
        log.sendto(data[:_MOST_BYTES], to)


class MetricSample(msgspec.Struct, frozen=True):
    """One value of a metric, with its labels."""

    value: float
    labels: Mapping[str, str] = {}


class Gauge(msgspec.Struct, frozen=True, kw_only=True):
    """A metric that can rise and fall. A name ends with its unit."""

    name: str
    help: str
    samples: Sequence[MetricSample]


def one_of(chosen: str, among: Sequence[str], label: str, **labels: str) -> list[MetricSample]:
    """Return a state as a sample per state: 1 for the present one, 0 for the others."""
    return [MetricSample(float(state == chosen), {**labels, label: state}) for state in among]


def prometheus_text(gauges: Sequence[Gauge]) -> str:
    """Return metrics as text; one without a sample is left out."""
    lines = []
    for gauge in gauges:
        if gauge.samples:
            lines += [f"# HELP {gauge.name} {gauge.help}", f"# TYPE {gauge.name} gauge"]
            lines += [_line(gauge.name, sample) for sample in gauge.samples]
    return "".join(f"{line}\n" for line in lines)


def _line(name: str, sample: MetricSample) -> str:
    labels = []
    for key, value in sample.labels.items():
        text = one_line(value).encode(errors="replace").decode()
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        labels.append(f'{key}="{escaped}"')
    if isnan(sample.value):
        number = "NaN"
    elif isinf(sample.value):
        number = "+Inf" if sample.value > 0 else "-Inf"
    else:
        number = f"{sample.value:.15g}"
    return f"{name}{{{','.join(labels)}}} {number}" if labels else f"{name} {number}"
