# SPDX-License-Identifier: Apache-2.0
"""Gives a command all of its options and arguments as one value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def as_settings(kind: Callable[..., _T]) -> Callable[[Callable[[_T], int]], Callable[..., int]]:
    """Have a command take all of its options and arguments as the fields of one value."""

    def gather(command: Callable[[_T], int]) -> Callable[..., int]:
        @functools.wraps(command)
        def gathered(**given: Any) -> int:
            return command(kind(**given))

        return gathered

    return gather
