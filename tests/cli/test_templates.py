# SPDX-License-Identifier: Apache-2.0
"""`slurm-health templates`: what a newcomer finds where there is only the package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slurm_health.system import templates
from slurm_health.system.templates import TemplateKind
from tests.support.command_line import one_line, slurm_health

ROOT = Path(__file__).parents[2]
NAMES = sorted(templates.every())
# Directories that only a checkout has.
FROM_THE_CHECKOUT = {"tests", "benchmarks", "examples"}


@pytest.mark.parametrize("name", NAMES)
def test_a_template_is_printed_with_what_to_do_with_it(name: str) -> None:
    template = templates.find(name)
    done = slurm_health("templates", name)
    shipped = (ROOT / template.source).read_text()
    assert done.code == 0
    assert len(done.stdout.splitlines()) == len(shipped.splitlines())
    what = {
        TemplateKind.BATCH_SCRIPT: f"sbatch {'-N ' if '-N ' in template.example else ''}",
        TemplateKind.WRAPPER: "save it as sbatch in a directory that is first on PATH",
        TemplateKind.HOOK: "name it in slurm.conf: ",
        TemplateKind.DASHBOARD: "upload it",
    }[template.kind]
    assert what in done.stderr
    listed = slurm_health("templates").stdout
    assert re.search(rf"^  {name} .*{re.escape(template.purpose.split()[0])}", listed, re.MULTILINE)
    assert template.purpose.endswith(".")


def test_what_is_printed_runs_the_installation_that_printed_it() -> None:
    assert f"\npython={sys.executable}\n" in slurm_health("templates", "prolog").stdout
    command = Path(sys.executable).with_name("slurm-health")
    assert f"\ncommand={command}\n" in slurm_health("templates", "sbatch").stdout
    without = slurm_health("templates", "sweep", environ={"PATH": "/usr/bin:/bin"})
    assert f"export PATH={command.parent}:$PATH" in without.stderr


@pytest.mark.parametrize(
    ("name", "said"), [("sweeep", "did you mean sweep?"), ("nothing-like-it", "there are: ")]
)
def test_a_mistake_is_one_line_that_says_what_is_there(name: str, said: str) -> None:
    done = slurm_health("templates", name)
    assert (done.code, done.stdout) == (2, "")
    assert said in one_line(done.stderr)


def test_messages_name_no_file_that_only_a_checkout_has() -> None:
    package = Path(templates.__file__).parents[1]
    said = {path: re.findall(r"docs/[\w/-]+\.md", messages(path)) for path in package.rglob("*.py")}
    assert {path: names for path, names in said.items() if names} == {}


def messages(path: Path) -> str:
    """Return all texts of a module but its docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [
        node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings
    ]
    return "\n".join(str(node.value) for node in texts)


def test_a_wheel_has_all_that_is_copied_and_read(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert not tops & FROM_THE_CHECKOUT
    package = installed / "slurm_health"
    for template in templates.every().values():
        assert (package / template.source).read_bytes() == (ROOT / template.source).read_bytes()
    source = ROOT / "slurm_health"
    beside = [*source.rglob("*.sbatch"), *source.rglob("*.lua")]
    assert len(beside) >= 5
    assert all((package / path.relative_to(source)).exists() for path in beside)
    assert (package / "grafana" / "slurm-health.json").exists()
    listed = slurm_health("templates", environ={"PYTHONPATH": str(installed)}).stdout
    assert listed == slurm_health("templates").stdout
