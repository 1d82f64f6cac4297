# SPDX-License-Identifier: Apache-2.0
"""One probe on one device, as a worker runs it: `probe NAME DEVICE [KEY=NUMBER...]`.

It writes its samples, or what it raised, as JSON.
"""

import json
import sys

import torch

from slurm_health.preflight.probes.context import ProbeContext
from slurm_health.preflight.probes.own import measure_of
from slurm_health.preflight.probes.torch_device import TorchDevice

name, index, *options = sys.argv[1:]
torch.cuda.set_device(int(index))
numbers = dict(option.split("=") for option in options)
context = ProbeContext(
    TorchDevice(torch.device("cuda", int(index))),
    local_rank=int(index),
    local_size=torch.cuda.device_count(),
    options={key: int(value) for key, value in numbers.items()},
)
answer: dict[str, object]
try:
    measure = measure_of(name, "", torch=True)
    assert measure is not None
    samples = measure(context)
    said = [{**sample._asdict(), "figures": dict(sample.figures)} for sample in samples]
    answer = {"samples": said}
except Exception as err:
    answer = {"raised": type(err).__name__, "said": str(err)}
print(json.dumps(answer))
