# SPDX-License-Identifier: Apache-2.0
"""7: whether the probe `values` finds one wrong bit of one entry of one product."""

from __future__ import annotations

import json

from benchmarks.gpu.child import Child, running
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.probe_spread import workers
from benchmarks.gpu.step import Amount, Figure, NotMeasured, Section, Step

_LIMIT_S = 120.0


def steps(amount: Amount) -> list[Step]:
    """Return the one step."""
    del amount
    does = "flip each bit of one entry, in a product and in a factor, and run the probe values"
    return [Step(name="each bit", does=does, takes_s=90.0, measure=_measured)]


SECTION = Section(number=7, title="one flipped bit", steps=steps)


def _measured(machine: Machine) -> list[Figure]:
    with workers(machine) as bench:
        options = json.dumps(bench.work.options())
    devices = 0 if machine.on_cpus else 1
    child = Child(machine, "flip", devices, options, environ=machine.environ)
    with running([child]):
        clean = child.event(_LIMIT_S)
        bits = int(clean["bits"])
        if not bits:
            raise NotMeasured("the probe values computed no product with torch.mm")
        found = [child.event(_LIMIT_S) for _ in range(2 * bits)]
    unflipped = Figure(
        name="no bit flipped",
        value=clean["said"] or "exact",
        wrong="called wrong on a healthy device" if clean["said"] else "",
    )
    missed = [each["bit"] for each in found if each["place"] == "result" and not each["said"]]
    in_factor = [each for each in found if each["place"] == "factor" and each["said"]]
    return [
        unflipped,
        Figure(
            name="bits of a result that are found",
            value=f"{bits - len(missed)} of {bits}",
            wrong=f"not found: {missed}" if missed else "",
        ),
        # What is lost by rounding the result is no error in it.
        Figure(name="bits of a factor that are found", value=f"{len(in_factor)} of {bits}"),
    ]
