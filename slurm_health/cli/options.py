# SPDX-License-Identifier: Apache-2.0
"""Options and values that several commands share."""

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
        raise click.BadParameter(f"{text!r} is no age; write 12h, 90d or 4w")
    return int(match[1]) * _UNIT_S[match[2]]


def json_option(command: _F) -> _F:
    """Add `--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def config_option(command: _F) -> _F:
    """Add `--config`, which names the site's config file."""
    return click.option(
        "--config",
        metavar="FILE",
        help="The config file. [default: SLURM_HEALTH_CONFIG, else /etc/slurm-health/config.toml]",
    )(command)
