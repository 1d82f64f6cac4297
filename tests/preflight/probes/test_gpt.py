# SPDX-License-Identifier: Apache-2.0
"""The GPT probes on CPUs: real torch, real processes, sockets on the loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slurm_health.preflight.probes import gpt
from slurm_health.preflight.probes.context import NotMeasured, ProbeContext
from slurm_health.preflight.probes.gpt import Gpt
from slurm_health.preflight.probes.own import Measure
from slurm_health.preflight.probes.sizes import CPU, TABLE, GptModel
from slurm_health.preflight.probes.torch_device import TorchDevice

DEADLINE_S = 300.0  # on a machine on which much else runs; alone it is seconds

pytestmark = [pytest.mark.torch, pytest.mark.timeout(2 * DEADLINE_S)]

OPTIONS = CPU.options()
DEVICE = TorchDevice(torch.device("cpu"))
MEMBER = """
import gc, json, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from slurm_health.preflight.probes import gpt
from slurm_health.preflight.probes.gpt import Gpt
from slurm_health.preflight.probes.sizes import CPU
from slurm_health.preflight.probes.torch_device import TorchDevice
from slurm_health.preflight.probes.torch_group import TorchGroup
from slurm_health.preflight.probes.context import ProbeContext

rank, path = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
device = TorchDevice(torch.device("cpu"))
command = {"options": {}, "local_size": 1, "timeout_s": 60.0}
group = TorchGroup(device, command, 0, lambda: None)
context = ProbeContext(device, rank=rank, world_size=2, options=CPU.options(), peers=group)
samples = gpt.measure(context)
dist.destroy_process_group()
left = [each for each in gc.get_objects() if type(each) is Gpt]
assert not left, "the model is still in memory"
print(json.dumps([{**sample._asdict(), "figures": dict(sample.figures)} for sample in samples]))
"""
# Limits its own address space, as a device with little memory does.
CRAMPED = """
import json, resource, sys
import torch
from slurm_health.preflight.probes import gpt
from slurm_health.preflight.probes.context import NotMeasured, ProbeContext
from slurm_health.preflight.probes.sizes import CPU
from slurm_health.preflight.probes.torch_device import TorchDevice

torch.set_num_threads(1)
options = CPU.options()
device = TorchDevice(torch.device("cpu"))
measure = {"gpt": gpt.measure, "gpt_fit": gpt.measure_fit}[sys.argv[1]]
measure(ProbeContext(device, options=options))  # everything is loaded
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[3]) << 20),) * 2)
options.update(json.loads(sys.argv[2]))
try:
    print(json.dumps(measure(ProbeContext(device, options=options))[0].figures))
except NotMeasured as err:
    print(json.dumps(str(err)))
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each of two processes that train together says."""
    store = tmp_path_factory.mktemp("pair") / "store"
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), str(store)],
            stdout=subprocess.PIPE,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [member.communicate(timeout=DEADLINE_S)[0] for member in members]
    finally:
        for member in members:
            member.kill()
            member.communicate()
    assert [member.returncode for member in members] == [0, 0]
    return [json.loads(text) for text in said]


@pytest.mark.heavy
def test_a_pair_measures_arithmetic_communication_and_both_overlapped_in_equally_many_steps(
    pair: list[list[dict[str, Any]]],
) -> None:
    for samples in pair:
        assert [(each["quantity"], each["shared"]) for each in samples] == [
            ("compute", False),
            ("light_compute", False),
            ("communication", True),
            ("step", True),
            ("light_step", True),
        ]
        assert all(ms > 0 for each in samples for ms in each["iteration_ms"])
    first, second = ([len(each["iteration_ms"]) for each in samples] for samples in pair)
    assert first == second
    assert min(first) >= 3


@pytest.mark.heavy
def test_work_and_bytes_are_those_of_the_model(pair: list[list[dict[str, Any]]]) -> None:
    found = {each["quantity"]: (each["flop"], each["total_bytes"]) for each in pair[0]}

    heavy, few = CPU.flop_per_step, CPU.light.flop_per_step
    assert found == {
        "compute": (heavy, 0),
        "light_compute": (few, 0),
        "communication": (0.0, 4 * CPU.parameters),
        "step": (heavy, 4 * CPU.parameters),
        "light_step": (few, 4 * CPU.parameters),
    }


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone(**options: int | float | str) -> ProbeContext:
    return ProbeContext(DEVICE, options={**OPTIONS, **options})


@pytest.mark.usefixtures("_one_thread")
def test_a_worker_without_a_group_measures_its_arithmetic_only() -> None:
    samples = gpt.measure(alone())

    assert [each.quantity for each in samples] == ["compute", "light_compute"]
    assert not any(each.shared for each in samples)


@pytest.mark.usefixtures("_one_thread")
def test_a_model_that_fits_keeps_its_batch_and_says_how_much_it_takes() -> None:
    (sample,) = gpt.measure_fit(alone())

    figures = sample.figures
    assert figures["micro_batch"] == CPU.batch
    assert 0 < int(figures["peak_bytes"]) < int(figures["total_bytes"])
    assert not sample.iteration_ms


@pytest.mark.parametrize("measure", [gpt.measure, gpt.measure_fit])
def test_a_round_that_names_no_model_measures_nothing(measure: Measure) -> None:
    with pytest.raises(NotMeasured, match="which GPT to train: no gpt_layers, gpt_hidden"):
        measure(ProbeContext(DEVICE))


def cramped(probe: str, *, spare_mib: int, **options: int) -> Any:
    arguments = [probe, json.dumps(options), str(spare_mib)]
    done = subprocess.run(
        [sys.executable, "-c", CRAMPED, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_batch_is_halved_until_it_fits_and_no_further() -> None:
    figures = cramped("gpt_fit", gpt_batch=1024, spare_mib=400)

    assert figures["micro_batch"] in (8, 16, 32, 64, 128, 256)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probe", "said"),
    [("gpt_fit", "does not fit cpu even with a batch of one"), ("gpt", "ran out of memory")],
)
def test_running_out_of_memory_is_not_measured_and_says_how_much_there_was(
    probe: str, said: str
) -> None:
    text = cramped(probe, gpt_hidden=1024, gpt_layers=8, spare_mib=100)

    assert said in text
    assert "GB" in text
    assert "allocate memory" in text


MODELS = [*(model for _, model in TABLE), CPU]


@pytest.mark.parametrize("model", MODELS, ids=[f"{m.layers}x{m.hidden}" for m in MODELS])
def test_a_row_has_as_many_parameters_as_the_model_torch_builds(model: GptModel) -> None:
    with torch.device("meta"):
        built = Gpt(model)

    assert sum(each.numel() for each in built.parameters()) == model.parameters
    assert model.hidden % model.heads == 0
