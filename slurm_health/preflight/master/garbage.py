# SPDX-License-Identifier: Apache-2.0
"""Python's search for garbage in cycles, which a master of many nodes cannot afford as it is.

What it reads and decides it keeps to the end, in millions of objects, none of which is part of a
cycle. Python looks through all that is new after every 700 of them and through all there is now and
then: half of the processor time of a check of 16,384 nodes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_NEW_OBJECTS = 5_000_000  # more than such a check makes, less than a machine has memory for


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Look for cyclic garbage so seldom that it costs nothing; never in what there is by then."""
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS)
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*before)
