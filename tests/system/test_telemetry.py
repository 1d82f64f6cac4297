# SPDX-License-Identifier: Apache-2.0

import re

from hypothesis import given
from hypothesis import strategies as st

from slurm_health.system.telemetry import Gauge, MetricSample, prometheus_text

LINE = re.compile(r'[a-z_]+(\{[a-z]+="(?:[^"\\\n]|\\["\\])*"\})? \S+')


def test_a_metric_has_its_help_its_type_and_its_values() -> None:
    gauge = Gauge(name="heat_celsius", help="How hot.", samples=[MetricSample(1.5, {"gpu": "0"})])

    none = Gauge(name="none", help="Nothing.", samples=[])
    assert prometheus_text([none, gauge]) == (
        '# HELP heat_celsius How hot.\n# TYPE heat_celsius gauge\nheat_celsius{gpu="0"} 1.5\n'
    )


@given(st.text(), st.floats())
def test_no_name_that_somebody_chose_breaks_a_line(name: str, value: float) -> None:
    told = prometheus_text(
        [Gauge(name="metric", help="Help.", samples=[MetricSample(value, {"name": name})])]
    )

    assert told.count("\n") == 3
    assert LINE.fullmatch(told.splitlines()[2])
