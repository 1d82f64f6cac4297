# SPDX-License-Identifier: Apache-2.0
"""What a process says to the benchmark: JSON lines, apart from what libraries print."""

from __future__ import annotations

import json
import os


class Events:
    """The only writer of what was standard output; the rest goes where errors go."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def say(self, **fields: object) -> None:
        """Say one thing."""
        self._out.write(json.dumps(fields) + "\n")
