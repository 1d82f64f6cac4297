# SPDX-License-Identifier: Apache-2.0
"""docs/reference/device-calls.md knows every call of the device path; what it relies on holds."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.played_gpu.description import VARIABLE, Device, machine, write
from tests.support.unshared import free_port

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/device-calls.md").read_text()
# Each call, and its test.
ROWS = dict(re.findall(r"(?m)^\| `([^`]+)` \|.*\| ([^|]+) \|$", PAGE))
FACTS_MODULE = "tests.played_gpu.programs.device_call_facts"
FACTS = sorted(set(re.findall(r"\bfact (\w+)", PAGE)))


def test_the_page_knows_what_the_product_calls_and_no_more() -> None:
    paths = (ROOT / "slurm_health").rglob("*.py")
    sources = [path for path in paths if "diagnosis" not in path.parts]
    code = re.sub("#.*", "", "\n".join(path.read_text() for path in sources))
    called = set(re.findall(r"\btorch\.(?:cuda|distributed|_[a-zA-Z])[\w.]*\w", code))
    called |= {f"torch.distributed.{name}" for name in re.findall(r"\bdist\.(\w[\w.]*\w)", code)}
    called |= {f"pynvml.{name}" for name in re.findall(r"\b((?:c_)?nvml[A-Z]\w+)", code)}

    unknown = {name for name in called if not any(row.startswith(name) for row in ROWS)}
    assert unknown <= {"pynvml.nvmlGpuFabricInfo_v2_t", "pynvml.nvmlProcessInfo_v2_t"}
    assert [row for row in ROWS if re.split("[ .]", row)[-1] not in code] == []


def test_the_tests_that_rows_name_are_there() -> None:
    named = [said.partition("::") for said in ROWS.values() if not said.startswith("fact ")]
    assert [file for file, _, _ in named if not (ROOT / file).exists()] == []
    missing = [test for file, _, test in named if f"def {test}" not in (ROOT / file).read_text()]
    assert missing == []


@pytest.fixture(scope="module")
def held(played_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bool]]:
    """What each fact came to, on each rank that looked."""
    directory = tmp_path_factory.mktemp("facts")
    write(directory / "gpus", machine(2, Device(memory_bytes=2 << 30), seed=str(directory)))
    port = str(free_port())
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(directory), "PYTHONPATH": str(ROOT)}
    environ[VARIABLE] = str(directory / "gpus")
    argv = [str(played_python), "-W", "ignore", "-m", FACTS_MODULE]
    runs = [
        subprocess.Popen([*argv, *words], env=environ, stdout=subprocess.PIPE, text=True)
        for words in (["alone"], ["group", "0", port], ["group", "1", port])
    ]
    results: dict[str, list[bool]] = {}
    for run in runs:
        try:
            lines, _ = run.communicate(timeout=300)
        finally:
            run.kill()
        for line in map(json.loads, lines.splitlines()):
            results.setdefault(line["fact"], []).append(line["holds"])
    return results


@pytest.mark.played_gpu
@pytest.mark.timeout(600)  # who comes first builds the libraries
def test_what_is_relied_on_holds(held: dict[str, list[bool]]) -> None:
    assert sorted(held) == FACTS
    assert [fact for fact in FACTS if not all(held[fact])] == []
