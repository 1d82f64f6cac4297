# SPDX-License-Identifier: Apache-2.0
"""The dashboard against Grafana's own schema, as its publishers' package has it."""

import importlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from slurm_health.system import templates

PACKAGE = "grafana_foundation_sdk"


def test_grafana_knows_every_key_of_the_dashboard_and_keeps_its_value() -> None:
    pytest.importorskip(PACKAGE, reason="no schema here: pip install grafana-foundation-sdk")
    plugins, encoder, models = (
        importlib.import_module(f"{PACKAGE}.{name}")
        for name in ("cog.plugins", "cog.encoder", "models.dashboard")
    )
    plugins.register_default_plugins()
    ours = json.loads(templates.shipped("grafana").joinpath("slurm-health.json").read_text())

    read = models.Dashboard.from_json(ours)

    kept = json.loads(json.dumps(read, cls=encoder.JSONEncoder))
    assert list(lost(ours, kept)) == []
    kinds = {panel.type_val: type(panel.options).__module__ for panel in read.panels}
    # Options of a panel that the package does not know would be kept unread.
    assert kinds == {kind: f"{PACKAGE}.models.{kind}" for kind in ("stat", "table", "timeseries")}


def lost(ours: Any, kept: Any, where: str = "") -> Iterator[str]:
    """Name what is in one document and not, or not the same, in the other."""
    if isinstance(ours, dict) and isinstance(kept, dict):
        for key, value in ours.items():
            yield from lost(value, kept.get(key), f"{where}.{key}")
    elif isinstance(ours, list) and isinstance(kept, list) and len(ours) == len(kept):
        for number, (one, other) in enumerate(zip(ours, kept, strict=True)):
            yield from lost(one, other, f"{where}[{number}]")
    elif ours != kept:
        yield f"{where}: {ours!r}, kept as {kept!r}"
