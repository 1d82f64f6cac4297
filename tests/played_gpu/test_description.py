# SPDX-License-Identifier: Apache-2.0
"""The file that describes played GPUs says what was meant, and refuses what none would play."""

import re
from pathlib import Path

import pytest

from tests.played_gpu.description import (
    FAULT_KINDS,
    MOST_DEVICES,
    Device,
    Fault,
    Machine,
    NotADescription,
    machine,
    read,
    strike,
    text,
    with_faults,
    write,
)

H100 = Device(
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=85899345920,
    processors=132,
    tflops=700.5,
    jitter=0.01,
)


def test_a_description_is_read_as_it_was_written(tmp_path: Path) -> None:
    played = with_faults(
        machine(4, H100, address="10.0.0.3", seed="n3"),
        Fault(device=2, kind="sticky_error", value=214, after=3),
        Fault(device=0, kind="memory_used", value=80e9),
        Fault(device=1, kind="slow", value=0.55),
    )
    write(tmp_path / "gpus", played)
    assert read(tmp_path / "gpus") == played


def test_devices_of_two_nodes_differ_and_are_the_same_each_time() -> None:
    uuids = [device.uuid for node in "ab" for device in machine(8, seed=node).devices]
    assert len(set(uuids)) == 16
    assert uuids[:8] == [device.uuid for device in machine(8, seed="a").devices]
    assert all(re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", u) for u in uuids)


def test_a_fault_that_strikes_again_replaces_the_first(tmp_path: Path) -> None:
    path = tmp_path / "gpus"
    write(path, machine(2))
    strike(path, Fault(device=1, kind="slow", value=0.5), Fault(device=0, kind="slow", value=0.7))
    strike(path, Fault(device=1, kind="slow", value=0.9))
    assert read(path).faults == (
        Fault(device=0, kind="slow", value=0.7),
        Fault(device=1, kind="slow", value=0.9),
    )


@pytest.mark.parametrize(
    "played",
    [
        with_faults(machine(2), Fault(device=2, kind="slow", value=0.5)),
        with_faults(machine(2), Fault(device=0, kind="no_such_fault")),
        machine(MOST_DEVICES + 1),
    ],
)
def test_what_none_would_play_is_refused(played: Machine) -> None:
    with pytest.raises(NotADescription):
        text(played)


def test_the_page_describes_every_fault() -> None:
    page = (Path(__file__).parent / "README.md").read_text()
    assert [kind for kind in FAULT_KINDS if f"| `{kind}` |" not in page] == []


def test_every_fault_is_struck_by_the_test_that_the_page_names_for_it() -> None:
    page = (Path(__file__).parent / "README.md").read_text()
    rows = re.findall(r"^\| `(tests/\S+\.py)`.*? \| (.*) \|$", page, re.M)
    shown = {(file, kind) for file, kinds in rows for kind in re.findall(r"`(\w+)`", kinds)}
    assert {kind for _, kind in shown} == {*FAULT_KINDS}
    texts = {file: with_its_rows(file) for file, _ in shown}
    assert [(file, kind) for file, kind in shown if f'"{kind}"' not in texts[file]] == []


def with_its_rows(file: str) -> str:
    """Return the text of a module of tests, and of the data files with its rows."""
    root, path = Path(__file__).parents[2], Path(file).relative_to("tests")
    text = (root / file).read_text()
    table = path.with_name(path.name.removeprefix("test_")).with_suffix(".toml")
    named = [f"tables/{table}"] * ("@rows" in text)
    named += ["broken-gpus.toml"] * ("broken-gpus" in text)
    return "".join([text, *((root / "tests/data" / name).read_text() for name in named)])
