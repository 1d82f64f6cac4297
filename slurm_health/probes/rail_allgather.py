# SPDX-License-Identifier: Apache-2.0
"""How fast two nodes exchange data between their devices of one rank, all ranks at once."""

from slurm_health.probes.collectives import measure_allgather as measure

__all__ = ["measure"]
