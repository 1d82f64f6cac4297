# SPDX-License-Identifier: Apache-2.0
"""docs/reference/device-calls.md knows every call of the device path and names real tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/device-calls.md").read_text()
# Each call, and its test.
ROWS = dict(re.findall(r"(?m)^\| `([^`]+)` \|.*\| ([^|]+) \|$", PAGE))


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
    named = [said.partition("::") for said in ROWS.values()]
    assert [file for file, _, _ in named if not (ROOT / file).exists()] == []
    missing = [test for file, _, test in named if f"def {test}" not in (ROOT / file).read_text()]
    assert missing == []
