# SPDX-License-Identifier: Apache-2.0
"""Decode bytes from outside, in one place. Pure.

msgspec raises a RecursionError for data that is nested too deeply, which no reader expects: one
line of brackets would end it. Here it is a DecodeError, a ValueError like all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


def from_json(
    data: bytes | str,
    kind: type[T],
    *,
    dec_hook: Callable[[type, object], object] | None = None,
) -> T:
    """Return the value that JSON holds.

    Raises:
        msgspec.DecodeError: it holds none of this kind.
    """
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=dec_hook)
    except RecursionError as err:
        raise _nested() from err


def from_msgpack(data: bytes, kind: type[T]) -> T:
    """Return the value that MessagePack holds.

    Raises:
        msgspec.DecodeError: it holds none of this kind.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except RecursionError as err:
        raise _nested() from err


class JsonDecoder(Generic[T]):
    """Decodes many values of one kind. `kind` may also be a union of kinds."""

    def __init__(self, kind: object) -> None:
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)

    def decode(self, data: bytes | str) -> T:
        """Return the value that JSON holds.

        Raises:
            msgspec.DecodeError: it holds none of this kind.
        """
        try:
            return self._decoder.decode(data)
        except RecursionError as err:
            raise _nested() from err


def _nested() -> msgspec.DecodeError:
    return msgspec.DecodeError("nested too deeply")
