# SPDX-License-Identifier: Apache-2.0
"""A tiny data-parallel training with JAX: each process holds its part of the data."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize()  # from Slurm's variables
devices = Mesh(np.array(jax.devices()), ("data",))
spread, whole = (NamedSharding(devices, PartitionSpec(*axis)) for axis in (["data"], []))

mine = np.random.default_rng(jax.process_index()).standard_normal((32, 8)).astype(np.float32)
inputs = jax.make_array_from_process_local_data(spread, mine)
targets = jax.make_array_from_process_local_data(spread, mine.sum(1))


def loss(weights, inputs, targets):
    """Return the mean over the data of all processes, which they exchange for it."""
    return jnp.mean((inputs @ weights - targets) ** 2)


@jax.jit
def step(weights, inputs, targets):
    value, gradient = jax.value_and_grad(loss)(weights, inputs, targets)
    return weights - 0.1 * gradient, value


weights = jax.device_put(jnp.zeros(8), whole)
for _ in range(20):
    weights, value = step(weights, inputs, targets)
if jax.process_index() == 0:
    print(f"trained with {jax.process_count()} processes, loss {float(value):.4f}", flush=True)
jax.distributed.shutdown()
