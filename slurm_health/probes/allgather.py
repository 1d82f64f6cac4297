# SPDX-License-Identifier: Apache-2.0
"""How fast all devices of two nodes exchange data."""

from slurm_health.probes.collectives import measure_allgather as measure

__all__ = ["measure"]
