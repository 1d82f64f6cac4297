# SPDX-License-Identifier: Apache-2.0
"""Gives click's commands the options of `preflight.options`, which other doors read too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from slurm_health.preflight.option_kinds import Value, ValueKind
from slurm_health.preflight.options import Door, SharedOption, options_of

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


def shared_options(door: Door, *names: str) -> Callable[[_F], _F]:
    """Give a command what can be given at a door: the named options, or all of them.

    What is not given has its default; None where that is known elsewhere, False for a flag.
    """
    found = options_of(door)

    def add(command: _F) -> _F:
        for name in reversed(names or list(found)):
            command = _option(found[name])(command)
        return command

    return add


def _option(option: SharedOption) -> Callable[[_F], _F]:
    text = option.described
    if option.acting:
        text = f"With --act: {text[0].lower()}{text[1:]}"
    if not option.kind.metavar:
        return click.option(f"--{option.name}", is_flag=True, help=text)
    return click.option(
        f"--{option.name}",
        type=str,
        metavar=option.kind.metavar,
        default=option.default,
        callback=_reading(option.kind),
        help=text,
    )


def _reading(
    kind: ValueKind,
) -> Callable[[click.Context, click.Parameter, str | None], Value | None]:
    def read(ctx: click.Context, param: click.Parameter, text: str | None) -> Value | None:
        try:
            return None if text is None else kind.read(text)
        except ValueError as err:
            raise click.BadParameter(str(err), ctx=ctx, param=param) from None

    return read


def as_settings(kind: Callable[..., _T]) -> Callable[[Callable[[_T], int]], Callable[..., int]]:
    """Have a command take all of its options and arguments as the fields of one value."""

    def gather(command: Callable[[_T], int]) -> Callable[..., int]:
        @functools.wraps(command)
        def gathered(**given: Any) -> int:
            return command(kind(**given))

        return gathered

    return gather
