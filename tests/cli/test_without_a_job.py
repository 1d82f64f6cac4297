# SPDX-License-Identifier: Apache-2.0
"""Commands that need no job: explain, plan and templates."""

import ast
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_health.cli.plan import plan
from slurm_health.records.errors import UsageError
from slurm_health.system import templates
from slurm_health.system.templates import TemplateKind
from tests.support.command_line import one_line, slurm_health
from tests.support.rows import rows


def test_an_xid_is_told_in_a_few_lines_and_to_programs_in_json() -> None:
    done = slurm_health("explain", "sxid", "22003")  # which need no quotes
    one = json.loads(slurm_health("explain", "--json", "31").stdout)

    assert done.stdout.splitlines()[0].startswith("SXid 22003: always fatal")
    assert "the node is drained" in done.stdout
    assert (one["name"], one["status"], one["whose"]) == ("Xid 31", "pass", "program")
    assert len(json.loads(slurm_health("explain", "--json").stdout)) > 50


def test_all_that_is_known_is_a_table() -> None:
    lines = slurm_health("explain").stdout.splitlines()

    assert lines[0].split() == ["NAME", "FINDING", "WHOSE", "WHAT"]
    assert any(line.split()[:2] == ["soft-lockup", "warning"] for line in lines)


@pytest.mark.parametrize("words", [["9999"], ["all is well\x1b[31m"], [""]])
def test_what_no_check_knows_is_a_sentence_and_how_to_ask(words: list[str]) -> None:
    done = slurm_health("explain", *words)

    assert done.code == 2, done
    assert "not known to the checks" in done.stderr
    assert "\x1b" not in done.stderr


def test_which_of_two_files_failed_first_is_not_claimed(tmp_path: Path) -> None:
    for name, error in (("out-0", "KeyError: 'lr'"), ("out-1", "ValueError: bad label 17")):
        text = f'Traceback (most recent call last):\n  File "train.py", line 9, in main\n{error}\n'
        (tmp_path / name).write_text(text)
    both = slurm_health("explain", str(tmp_path)).stdout
    one = slurm_health("explain", str(tmp_path / "out-0")).stdout

    assert "a process failed: KeyError: 'lr'; 1 other failed too; which was first" in both
    assert "a process failed first: KeyError: 'lr'\n" in one


def test_a_fault_of_an_unnamed_node_is_no_decision(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("*** JOB 12 ON n1 CANCELLED AT 10:00:00 DUE TO NODE FAILURE")
    assert slurm_health("explain", str(tmp_path)).code == 3


# --- plan -----------------------------------------------------------------------------------------


def call(*arguments: str) -> Result:
    return CliRunner().invoke(plan, arguments)


def output(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_faults_are_found_and_explained_and_without_any_one_round_is_enough() -> None:
    text = output("n[1-8]", "--bad", "n3,n7:slow=1.3")
    assert "n3 faulty: no allgather with n" in text
    assert "n7 slow: allgather slow with n" in text
    assert "healthy: n[1-2,4-6,8] (6 nodes)" in text
    shared = output("n[1-16]", "--bad", "n[2-3]:compute=2,n5:flaky=1")
    assert [line.split()[:2] for line in shared.splitlines() if " (probability" in line] == [
        ["n5", "faulty:"],
        ["n2", "slow:"],
        ["n3", "slow:"],
    ]
    assert "verdict after 1 round:" in output("n[1-8]")


def test_the_same_seed_is_the_same_run() -> None:
    first, again = (output("n[1-6]", "--bad", "n3:flaky=0.5", "--seed", "3") for _ in range(2))
    assert first == again
    assert first != output("n[1-6]", "--bad", "n3:flaky=0.5", "--seed", "4")


@rows
def test_what_cannot_be_served_is_said(arguments: list[str], problem: str) -> None:
    result = call(*arguments)
    assert isinstance(result.exception, UsageError)
    assert problem in str(result.exception)


# --- templates ------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
OURS = Path(sys.executable).with_name("slurm-health")
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
    runs = {"prolog": f"\npython={sys.executable}\n", "sbatch": f"\ncommand={OURS}\n"}
    assert runs.get(name, "") in done.stdout
    if name == "sweep":
        without = slurm_health("templates", name, environ={"PATH": "/usr/bin:/bin"}).stderr
        assert f"export PATH={OURS.parent}:$PATH" in without


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
    for name, template in templates.every().items():
        begins = re.escape(template.purpose.split()[0])
        assert re.search(rf"^  {name} .*{begins}", listed, re.MULTILINE)
