# SPDX-License-Identifier: Apache-2.0
"""`slurm-health baselines`: what healthy devices do here, as limits for the next checks."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from itertools import chain

import click

from slurm_health.cli.history import index_options, opened_index
from slurm_health.cli.terminal import print_result
from slurm_health.records.errors import ExitCode

_DAY_S = 86400.0


@click.command(short_help="Print limits for devices, from what healthy ones have reached.")
@index_options
def baselines(
    journal: str | None, cluster: str | None, days: float, index: str | None, rebuild: bool
) -> int:
    """Print what healthy devices of each model reached here, as tables for the site's file.

    A check compares nodes with each other, and with limits that must fit every site. Yours are
    narrower: 0.8 of the median of at least 32 devices on 8 nodes that checks found healthy. Nothing
    uses them until they are in /etc/slurm-health/config.toml.
    """
    from slurm_health.fleet.standing import baseline
    from slurm_health.fleet.standing.baseline import baselines as found_in
    from slurm_health.preflight.expectations import expectations_from

    now_s = time.time()
    with opened_index(journal, index, rebuild=rebuild) as opened:
        clusters = [each for each in opened.clusters() if cluster in {None, each}]
        since_s = now_s - days * _DAY_S
        seen = [opened.observations(each, since_s=since_s) for each in clusters]
        found = found_in(chain.from_iterable(seen))
    period = f"{days:g} days to {datetime.fromtimestamp(now_s, tz=UTC):%Y-%m-%d}"
    # What an earlier run has put into the site's file must not become its own reason.
    print_result(baseline.toml(found, expectations_from({}, "the table"), period=period))
    return int(ExitCode.HEALTHY)
