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


class Group(click.Group):
    """A command with subcommands, which names the nearest where there is none of a name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that a line begins with.

        Raises:
            UsageError: there is no such command.
        """
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            import difflib  # not free, and few names are mistaken

            near = difflib.get_close_matches(args[0], names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            ctx.fail(f"no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


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
    to_number, kind = (int, "a whole number") if whole else (float, "a number")

    def read(_ctx: click.Context, _param: click.Parameter, given: str | None) -> float | None:
        try:
            value = None if given is None else to_number(given)
        except ValueError:
            raise click.BadParameter(f"{given!r} is not {kind}") from None
        if value is not None and not low <= value <= high:
            raise click.BadParameter(f"{given} is not between {low} and {high}")
        return value

    shown = None if default is None else str(default)
    return click.option(
        *name.split(),
        metavar=metavar,
        callback=read,
        default=shown,
        show_default=shown is not None,
        help=text,
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
