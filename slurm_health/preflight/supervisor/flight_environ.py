# SPDX-License-Identifier: Apache-2.0
"""What has PyTorch record collectives, and leave the records where a post-mortem finds them."""

from __future__ import annotations

from collections.abc import Mapping

# As torch has it today and had it until 2.8: whoever sets one of the two has chosen.
_ENTRIES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ON_TIMEOUT = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)

_RENAMED, _MAJOR_AND_MINOR = (2, 9), 2
_MOST_ENTRIES = "2000"  # as torch since 2.9; before, none unless told
PREFIX = "flight-rank-"


def changes(environ: Mapping[str, str], directory: str, torch: str = "") -> dict[str, str]:
    """Return the variables to set for a script in this environment, none that it has already.

    The dumps go to `directory`, which must be one that all nodes share. Of each variable's names
    the one that this version of torch knows is set, because a newer one warns of the older name;
    all of them where the version is not known.
    """
    known = _named_in(torch)
    wanted = {
        _ENTRIES: _MOST_ENTRIES,
        _FILES: f"{directory}/{PREFIX}",
        _ON_TIMEOUT: "1",
    }
    return {
        name: value
        for names, value in wanted.items()
        if not any(each in environ for each in names)
        for name in (names[known] if len(names) > 1 else names)
    }


def _named_in(torch: str) -> slice:
    """Return which of two names a version of torch knows."""
    numbers = torch.split(".")[:2]
    if len(numbers) < _MAJOR_AND_MINOR or not all(number.isdecimal() for number in numbers):
        return slice(None)
    return slice(0, 1) if tuple(map(int, numbers)) >= _RENAMED else slice(1, 2)
