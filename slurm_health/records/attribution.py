# SPDX-License-Identifier: Apache-2.0
"""Whose doing a failure is, and how sure that is: words that diagnosis and acting share."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Attribution(StrEnum):
    """Whose doing a failure is, and so what helps."""

    NODE = "node fault"  # another node helps
    TRANSIENT = "transient"  # the same again helps
    USER = "user error"  # only a change of the script, its data or its options helps
    OUTSIDE = "ended from outside"  # somebody or a limit ended the job
    UNDECIDED = "undecided"


class Sureness(IntEnum):
    """How sure an inference is. No figure: nobody has counted how often each is right."""

    POSSIBLE = 1
    LIKELY = 2
    CERTAIN = 3
