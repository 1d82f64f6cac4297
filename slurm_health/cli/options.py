# SPDX-License-Identifier: Apache-2.0
"""What several commands share: options, values, and how a subcommand is found."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])
_AGE = re.compile(r"([0-9]{1,6})\s*(h|d|w)", re.ASCII)
_UNIT_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def age(_ctx: click.Context, _param: click.Parameter, text: str) -> float:
    """Return the seconds that 12h, 90d or 4w stands for: a callback of an option.

    Raises:
        BadParameter: it is none of these.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not an age; write 12h, 90d or 4w")
    return int(match[1]) * _UNIT_S[match[2]]


def number_option(
    name: str,
    low: float,
    high: float,
    text: str,
    *,
    default: float | None = None,
    metavar: str = "N",
) -> Callable[[_F], _F]:
    """Return an option that takes a number from `low` to `high`, a whole one if those are."""
    whole = isinstance(low, int) and isinstance(high, int)
    kind = click.IntRange(int(low), int(high)) if whole else click.FloatRange(low, high)
    kind.name = f"{'whole ' if whole else ''}number from {low:g} to {high:g}"  # of messages
    shown = default is not None
    return click.option(
        *name.split(), metavar=metavar, type=kind, default=default, show_default=shown, help=text
    )


def json_option(command: _F) -> _F:
    """Add `--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def config_option(command: _F) -> _F:
    """Add `--config`, which names the site's config file."""
    return click.option(
        "--config",
        metavar="FILE",
        help="The config file [default: SLURM_HEALTH_CONFIG, else /etc/slurm-health/config.toml].",
    )(command)
