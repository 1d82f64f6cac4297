# SPDX-License-Identifier: Apache-2.0
"""`slurm-health templates`: what a newcomer finds where there is only the package."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slurm_health.system import templates
from slurm_health.system.templates import TemplateKind
from tests.support.command_line import Done, one_line, slurm_health

ROOT = Path(__file__).parents[2]
NAMES = sorted(templates.every())
# Directories that only a checkout has.
FROM_THE_CHECKOUT = {"tests", "benchmarks", "examples"}


def copy(*words: object, code: int = 0) -> Done:
    done = slurm_health("templates", "copy", *map(str, words))
    assert done.code == code, done
    return done


@pytest.mark.parametrize("words", [[], ["list"]])
def test_the_list_names_every_template_and_what_it_is_for(words: list[str]) -> None:
    text = slurm_health("templates", *words).stdout
    for template in templates.every().values():
        assert re.search(rf"^  {template.name} ", text, re.MULTILINE)
        assert template.purpose.split()[0] in text
        assert template.purpose.endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shown_is_what_is_copied(name: str, tmp_path: Path) -> None:
    copy(name, tmp_path / "copied")
    assert (tmp_path / "copied").read_text() == slurm_health("templates", "show", name).stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_tells_its_place_and_what_comes_next(name: str, tmp_path: Path) -> None:
    template = templates.find(name)
    done = copy(name, f"{tmp_path}/new/directory/")
    path = tmp_path / "new" / "directory" / template.file_name
    assert done.stdout.startswith(f"wrote {path}\n")
    next_step = {
        TemplateKind.BATCH_SCRIPT: f"    sbatch {'-N ' if '-N ' in template.example else ''}",
        TemplateKind.WRAPPER: f"    export PATH={path.parent}:$PATH",
        TemplateKind.HOOK: f"={path}",
        TemplateKind.DASHBOARD: f"    {path}",
    }[template.kind]
    assert next_step in done.stdout
    assert os.access(path, os.X_OK) == (template.kind in {TemplateKind.WRAPPER, TemplateKind.HOOK})


def test_a_copy_runs_the_installation_that_made_it() -> None:
    assert f"\npython={sys.executable}\n" in slurm_health("templates", "show", "prolog").stdout
    command = Path(sys.executable).with_name("slurm-health")
    assert f"\ncommand={command}\n" in slurm_health("templates", "show", "sbatch").stdout


def test_what_is_there_is_replaced_only_on_demand(tmp_path: Path) -> None:
    mine = tmp_path / "sweep.sbatch"
    mine.write_text("mine\n")
    refused = copy("sweep", tmp_path, code=2)
    assert one_line(refused.stderr).endswith(f"{mine} is there already; --force replaces it")
    assert mine.read_text() == "mine\n"
    copy("sweep", tmp_path, "--force")
    assert mine.read_text() == (ROOT / "sbatch_templates" / "sweep.sbatch").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.sbatch"]


def test_slurms_own_sbatch_is_never_replaced(tmp_path: Path) -> None:
    shutil.copy("/bin/true", tmp_path / "sbatch")
    refused = copy("sbatch", tmp_path, "--force", code=2)
    assert "is a program, not a script" in one_line(refused.stderr)


def test_a_wrapper_that_is_found_already_needs_nothing_more(tmp_path: Path) -> None:
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = ("templates", "copy", "sbatch", str(tmp_path))
    done = slurm_health(*words, environ={"PATH": path})
    assert "It is the first sbatch on PATH" in done.stdout


def test_a_batch_script_says_where_slurm_health_is_if_path_does_not(tmp_path: Path) -> None:
    words = ("templates", "copy", "sweep", str(tmp_path))
    done = slurm_health(*words, environ={"PATH": "/usr/bin:/bin"})
    assert f"export PATH={Path(sys.executable).parent}:$PATH" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["copy", "sweeep", "."], "did you mean sweep?"),
        (["show", "nothing-like-it"], "there are: "),
        (["copy", "sweep", "/proc/nowhere/"], "cannot write /proc/nowhere/: "),
        (["copy"], "Missing argument 'NAME'"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_is_there(words: list[str], said: str) -> None:
    done = slurm_health("templates", *words)
    assert done.code == 2 or "cannot write" in said
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
