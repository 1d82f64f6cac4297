# SPDX-License-Identifier: Apache-2.0
"""The nine sections, in their order."""

from __future__ import annotations

from benchmarks.gpu import (
    chosen_devices,
    first_use,
    flipped_bit,
    gpt_memory,
    group_cycles,
    memory_release,
    nccl_log,
    partner_death,
    probe_spread,
)

SECTIONS = (
    probe_spread.SECTION,
    partner_death.SECTION,
    group_cycles.SECTION,
    memory_release.SECTION,
    gpt_memory.SECTION,
    first_use.SECTION,
    flipped_bit.SECTION,
    chosen_devices.SECTION,
    nccl_log.SECTION,
)
