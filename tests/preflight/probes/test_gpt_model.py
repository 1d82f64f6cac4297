# SPDX-License-Identifier: Apache-2.0
"""The table of models is true of the model that torch really builds."""

from __future__ import annotations

import pytest
import torch

from slurm_health.preflight.probes.gpt import Gpt
from slurm_health.preflight.probes.sizes import CPU, TABLE, GptModel

pytestmark = pytest.mark.torch
MODELS = [*(model for _, model in TABLE), CPU]


@pytest.mark.parametrize("model", MODELS, ids=[f"{m.layers}x{m.hidden}" for m in MODELS])
def test_a_row_has_as_many_parameters_as_the_model_torch_builds(model: GptModel) -> None:
    with torch.device("meta"):
        built = Gpt(model)

    assert sum(each.numel() for each in built.parameters()) == model.parameters
    assert model.hidden % model.heads == 0
