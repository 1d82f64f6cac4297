# SPDX-License-Identifier: Apache-2.0
"""docs/reference/device-calls.md knows every call of the device path; what it relies on holds."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device_calls import calls, calls_of_the_product
from tests.played_gpu.description import VARIABLE, Device, machine, write

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/device-calls.md").read_text()
FACTS_MODULE = "tests.support.device_call_facts"
FACTS = (ROOT / f"{FACTS_MODULE.replace('.', '/')}.py").read_text()
_ROW = re.compile(r"^\| `([^`]+)` \|.*\| ([^|]+) \|$", re.M)


def rows() -> dict[str, str]:
    """Each call of the page, and its test."""
    return {match[1]: match[2] for match in _ROW.finditer(PAGE)}


def facts() -> list[str]:
    return sorted(set(re.findall(r"\bfact (\w+)", PAGE)))


@pytest.mark.slow
def test_nothing_is_called_that_the_page_does_not_know() -> None:
    unknown = {call: where for call, where in calls_of_the_product().items() if call not in rows()}
    assert not unknown


@pytest.mark.slow
def test_every_row_of_the_page_is_called() -> None:
    assert set(rows()) <= set(calls_of_the_product())


@pytest.mark.parametrize("call", sorted(rows()))
def test_the_test_that_a_row_names_is_there(call: str) -> None:
    said = rows()[call]
    if said.startswith("fact "):
        assert f"def {said.removeprefix('fact ')}(" in FACTS
    else:
        file, _, test = said.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text() if test else (ROOT / file).exists()


def test_what_nccls_work_refuses_would_have_been_seen() -> None:
    source = (
        "import torch.distributed as dist\n"
        "def first(tensor):\n"
        "    work = dist.all_reduce(tensor, async_op=True)\n"
        "    while not work.is_completed():\n"
        "        pass\n"
        "    return work.is_success()\n"
    )
    assert calls(source) == {
        "torch.distributed.all_reduce",
        "Work.is_completed",
        "Work.is_success",
    }


@pytest.mark.parametrize(
    ("source", "call"),
    [
        (
            "from torch import distributed\ndistributed.batch_isend_irecv([])",
            "torch.distributed.batch_isend_irecv",
        ),
        ("import torch\ntorch.cuda.Event().query()", "Event.query"),
        ("import torch as t\ngetattr(t.cuda, 'memory_stats', None)", "torch.cuda.memory_stats"),
        ("import ctypes\nctypes.CDLL('libcuda.so.1')", "ctypes libcuda.so.1"),
        ("def ask(nvml):\n    nvml.nvmlDeviceReset(0)", "pynvml.nvmlDeviceReset"),
        ("import torch\ntorch.empty(4, pin_memory=True)", "Tensor.pin_memory"),
        ("PROGRAM = 'import torch; torch.cuda.ipc_collect()'", "torch.cuda.ipc_collect"),
    ],
)
def test_a_call_is_seen_however_it_is_written(source: str, call: str) -> None:
    assert call in calls(source)


@pytest.fixture(scope="module")
def held(played_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bool]]:
    """What each fact came to, on each rank that looked."""
    directory = tmp_path_factory.mktemp("facts")
    write(directory / "gpus", machine(2, Device(memory_bytes=2 << 30), seed=str(directory)))
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(directory),
        "PYTHONPATH": str(ROOT),
        VARIABLE: str(directory / "gpus"),
    }
    argv = [str(played_python), "-W", "ignore", "-m", FACTS_MODULE]
    runs = [
        subprocess.Popen([*argv, *words], env=environ, stdout=subprocess.PIPE, text=True)
        for words in (["alone"], ["group", "0", port], ["group", "1", port])
    ]
    found: dict[str, list[bool]] = {}
    for run in runs:
        for line in _lines(run):
            said = json.loads(line)
            found.setdefault(said["fact"], []).append(said["holds"])
    return found


def _lines(run: subprocess.Popen[str]) -> Iterator[str]:
    try:
        said, _ = run.communicate(timeout=300)
    finally:
        run.kill()
    yield from said.splitlines()


@pytest.mark.played_gpu
@pytest.mark.timeout(600)  # who comes first builds the libraries
@pytest.mark.parametrize("fact", facts())
def test_what_is_relied_on_holds(held: dict[str, list[bool]], fact: str) -> None:
    assert held.get(fact)
    assert all(held[fact])
