# SPDX-License-Identifier: Apache-2.0
"""One wrong bit in a product of the probe `values`: `flip DEVICES OPTIONS`.

OPTIONS are those of a round, as JSON.

Each bit of one entry is flipped in turn, once in the result of a product and once in a factor.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from benchmarks.gpu.on_device.events import Events
from slurm_health.preflight.probes import compute
from slurm_health.preflight.probes import torch_device as devices_of
from slurm_health.preflight.probes.context import NodeFault, ProbeContext

_INTEGERS = {2: torch.int16, 4: torch.int32}
_right = torch.mm


class WrongOnce:
    """Stands in for `torch.mm`; its first product has one wrong bit in `place`."""

    def __init__(self, place: str, bit: int) -> None:
        self._place = place
        self._bit = bit
        self.bits = 0  # of an entry, once there was one

    def __call__(self, left: torch.Tensor, right: torch.Tensor, **more: Any) -> torch.Tensor:
        """Multiply."""
        if self.bits:
            return _right(left, right, **more)
        self.bits = 8 * left.element_size()
        if self._place == "nowhere":
            return _right(left, right, **more)
        if self._place == "factor":
            # A sign of 0 is no error.
            column = int(left[0].nonzero()[0])
            self._flip(left, column)
            product = _right(left, right, **more)
            self._flip(left, column)
            return product
        product = _right(left, right, **more)
        self._flip(product, int(product[0].nonzero()[0]))
        return product

    def _flip(self, matrix: torch.Tensor, column: int) -> None:
        mask = 1 << self._bit if self._bit < self.bits - 1 else -(1 << self._bit)
        integers = matrix.view(_INTEGERS[matrix.element_size()])
        integers[0, column] ^= torch.full_like(integers[0, column], mask)


def main() -> None:
    """Say of each bit whether it was found; of the place "nowhere" too, where there is none."""
    expected = int(sys.argv[1])
    events = Events()
    context = ProbeContext(
        devices_of.claim(0, expected=expected, environ=os.environ),
        options=json.loads(sys.argv[2]),
    )
    bits = _try(context, events, "nowhere", 0)
    for place in ("result", "factor"):
        for bit in range(bits):
            _try(context, events, place, bit)


def _try(context: ProbeContext, events: Events, place: str, bit: int) -> int:
    """Say what the probe says with one wrong bit; return how many bits an entry has."""
    wrong = WrongOnce(place, bit)
    torch.mm = wrong  # type: ignore[assignment]
    said = ""
    try:
        compute.values(context)
    except NodeFault as err:
        said = str(err)
    finally:
        torch.mm = _right
    events.say(place=place, bit=bit, bits=wrong.bits, said=said)
    return wrong.bits


if __name__ == "__main__":
    main()
