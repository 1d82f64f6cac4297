# SPDX-License-Identifier: Apache-2.0
"""Real lines of the kernel's log are known, and no user can make one by the names they choose."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.kernel_lines import (
    ANY_XID,
    BLOCK_IO_ERROR,
    FAULTS,
    HUNG_TASK,
    KINDS,
    MACHINE_CHECK,
    OUT_OF_MEMORY,
    SXID,
    WARNINGS,
    XID,
    XIDS,
    all_errors,
    explained,
    is_evidence,
    of_xid,
)
from tests.support.rows import rows


def section(name: str) -> list[str]:
    """Return the lines of a section of the file beside this one."""
    text = Path(__file__).with_name("kernel_lines.txt").read_text()
    lines = text.partition(f"\n== {name}\n")[2].partition("\n\n")[0].splitlines()
    return [line for line in lines if not line.startswith("# ")]


BROKEN, WORTH_A_LOOK, CORRECTED = section("broken"), section("worth a look"), section("corrected")
FORMS = section("forms")
OF_DEVICES = {
    XID: "NVRM: Xid (PCI:0000:3b:00): 79, pid=77, name=python, GPU has fallen off the bus.",
    SXID: "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28 LTSSM Fault Up",
    BLOCK_IO_ERROR: "blk_update_request: I/O error, dev sda, sector 123 op 0x0:(READ) flags 0x0",
}
COMM_BYTES = 15  # TASK_COMM_LEN of Linux, less the NUL
ALL = (*FAULTS, *WARNINGS, *OF_DEVICES, MACHINE_CHECK)


def matching(line: str, patterns: tuple[str, ...] = ALL) -> list[str]:
    """Return the patterns that a line matches."""
    return [each for each in patterns if re.search(each, line)]


def as_in_kmsg(text: str) -> str:
    """Return bytes of a name as /dev/kmsg shows them, one record a line."""
    return "".join(
        chr(each) if 32 <= each < 127 and each != 92 else f"\\x{each:02x}"
        for each in text.encode(errors="replace")
    )


def named(text: str, most_bytes: int | None = None) -> str:
    """Return what the kernel shows of a name: no slash, and of a process no more than 15 bytes."""
    return as_in_kmsg(text.replace("/", ".").replace("\0", ".")[:most_bytes])


def in_two(line: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a process and of a file that together hold a line that counts.

    The device's name is short, so that as much as possible is in the first part; the second begins
    behind the first, or with a later word.
    """
    line = re.sub(r"nvme0n1p2|dm-\d|cciss!c0d0p1|sd[ab]\d?|PCI:[\w:.]+|[\da-f:.]{12}", "x", line)
    words = [found.start() for found in re.finditer(r"\S+", line)]
    for end in range(1, COMM_BYTES + 1):
        for start in (end, *(each for each in words if each > end)):
            yield line[:end], line[start:]


def filled(form: str, comm: str, file: str) -> str:
    """Return a line of the kernel with the names of a user."""
    comm = named(comm, COMM_BYTES)
    return form.format(comm=comm, file=named(file), name=re.sub(r"[\s:]", ".", comm))


@pytest.mark.parametrize("line", BROKEN)
def test_a_line_that_tells_of_broken_hardware_is_a_fault(line: str) -> None:
    assert matching(line, FAULTS)


@pytest.mark.parametrize("line", WORTH_A_LOOK)
def test_a_line_that_a_program_may_cause_is_a_warning_and_no_fault(line: str) -> None:
    assert matching(line, WARNINGS)
    assert not matching(line, FAULTS)


@pytest.mark.parametrize("line", CORRECTED)
def test_an_error_that_the_hardware_has_corrected_is_neither(line: str) -> None:
    assert not matching(line)


@pytest.mark.parametrize(("pattern", "line"), OF_DEVICES.items())
def test_a_line_of_a_driver_is_known(pattern: str, line: str) -> None:
    assert set(matching(line)) == {pattern}


@pytest.mark.parametrize("form", FORMS)
def test_no_line_that_counts_can_be_put_together_from_names_of_a_user(form: str) -> None:
    believed = [*BROKEN, *WORTH_A_LOOK, *OF_DEVICES.values()]
    lines = {filled(form, *names) for line in believed for names in in_two(line)}

    assert [line for line in lines if matching(line)] == []


@pytest.mark.parametrize("form", FORMS)
@given(comm=st.text(max_size=15), file=st.text(max_size=60))
def test_no_name_that_a_user_chooses_makes_a_line_count(form: str, comm: str, file: str) -> None:
    assert matching(filled(form, comm, file)) == []


@given(comm=st.text(max_size=15))
def test_a_name_behind_the_kernels_words_adds_nothing(comm: str) -> None:
    comm = named(comm, COMM_BYTES)
    hung = f"INFO: task {comm}:77 blocked for more than 120 seconds."
    killed = f"Memory cgroup out of memory: Killed process 77 ({comm}) total-vm:1kB"

    xid = f"NVRM: Xid (PCI:0000:3b:00): 13, pid=77, name={comm}, Graphics SM Exception"

    assert set(matching(hung)) <= {HUNG_TASK}
    assert matching(killed) == [OUT_OF_MEMORY]
    assert matching(xid) == [XID]


@rows
def test_a_line_that_begins_with_a_process_is_no_evidence_whatever_matches_it(line: str) -> None:
    assert not is_evidence(line)


@pytest.mark.parametrize("line", [*BROKEN, *WORTH_A_LOOK, *OF_DEVICES.values()])
def test_no_line_of_the_kernels_own_is_taken_for_one_of_a_process(line: str) -> None:
    assert is_evidence(line)


def test_every_pattern_begins_at_the_beginning_of_the_line() -> None:
    alternatives = [part for each in (*ALL, ANY_XID) for part in re.split(r"\|(?=\^)", each)]
    assert [each for each in alternatives if not each.startswith("^")] == []


# --- what the table of errors explains ------------------------------------------------------------


@rows
def test_a_number_or_a_line_is_explained(words: str, status: Status | None, helps: str) -> None:
    error = explained(words)
    assert (error.status if error else None) is status
    assert error is None or error.helps.startswith(helps)


def test_each_row_of_the_table_is_found_by_its_name() -> None:
    rows = list(all_errors())

    assert [explained(row.name) for row in rows] == rows
    assert len({row.name for row in rows}) == len(rows)


def test_the_table_says_what_the_checks_judge() -> None:
    told = {row.name: row.status for row in all_errors()}

    assert {f"Xid {number}": of_xid(number).status for number in XIDS}.items() <= told.items()
    for kind in KINDS:
        assert kind.pattern in (FAULTS if told[kind.error.name] is Status.NODE_FAULT else WARNINGS)
