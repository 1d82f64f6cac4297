# SPDX-License-Identifier: Apache-2.0
"""Few lines of the kernel's log hold what tells most, however much is said of one thing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.training.monitor.node_state import most_telling

LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=x, GPU has fallen off the bus."
LINK = "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT  {word} XC0 i0 Link 01 (0x0)"
SWITCH = "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, {word}, Link 28 LTSSM Fault Up"
READ_ONLY = "EXT4-fs (sda1): Remounting filesystem read-only"
KILLED = "Out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:1kB"
EXCEPTION = "NVRM: Xid (PCI:0000:86:00): 13, pid=77, name=python, Graphics SM Exception"
DISK = "I/O error, dev sda, sector 8"
ALL = [LOST, READ_ONLY, KILLED, EXCEPTION, DISK, LINK.format(word="Fatal"), "of no kind"]


@pytest.mark.parametrize(
    ("rare", "many"),
    [
        (LOST, EXCEPTION),
        (LOST, LOST.replace("3b", "86")),
        (READ_ONLY, DISK),
        (KILLED, LOST),
        (KILLED, DISK),
        (LINK.format(word="Fatal"), LINK.format(word="Nonfatal")),
        (SWITCH.format(word="Fatal"), SWITCH.format(word="Non-fatal")),
        ("NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.", LOST),
        ("NVRM: The NVIDIA GPU 0000:18:00.0", "NVRM: The NVIDIA GPU 0000:29:00.0"),
    ],
)
def test_a_line_of_its_kind_stays_beside_many_of_another(rare: str, many: str) -> None:
    assert most_telling([rare, *[many] * 200], 40) == (rare, *[many] * 39)
    assert most_telling([*[many] * 200, rare], 40) == (*[many] * 39, rare)


def test_faults_come_first_where_there_is_no_room_for_every_kind() -> None:
    assert most_telling([READ_ONLY, LOST, DISK, KILLED, EXCEPTION], 2) == (READ_ONLY, LOST)
    assert most_telling([READ_ONLY, LOST, DISK, KILLED], 3) == (READ_ONLY, LOST, KILLED)


@given(lines=st.lists(st.sampled_from(ALL) | st.text()), most=st.integers(0, 20))
def test_lines_keep_their_order_and_as_many_as_there_is_room_for(
    lines: list[str], most: int
) -> None:
    kept = most_telling(lines, most)
    rest = iter(lines)

    assert len(kept) == min(most, len(lines))
    assert all(line in rest for line in kept)
