# SPDX-License-Identifier: Apache-2.0
"""The documentation names what exists: every link leads somewhere, every command is described."""

import ast
import configparser
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import slurm_health
from slurm_health.records.probe_catalog import BUILT_IN, SETS
from tests import command_reference, reference_pages, words
from tests.support.supervised import write_executable

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/lab/*.md")])
PACKAGE = Path(slurm_health.__file__).parent
NAME = "slurm_health"
MODULES = {
    ".".join([NAME, *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MOST_LINES = 600  # a longer module has a second topic
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
# A module in the list of a package's docstring.
LISTED = re.compile(r"^ {4}(\w+) {2,}\S", re.MULTILINE)
PACKAGES = [m for m, path in MODULES.items() if path.name == "__init__.py" and m != NAME]


# Options of other programs, of the lab and of benchmarks, that pages name.
FOREIGN = set((ROOT / "tests/data/foreign_options.txt").read_text().split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_its_section(page: Path) -> None:
    links = [
        (page.parent / link if link else page, to) for link, to in LINK.findall(page.read_text())
    ]
    assert [str(target) for target, _ in links if not target.exists()] == []
    assert [(str(target), to) for target, to in links if to and to not in sections(target)] == []


def test_no_module_has_more_than_600_lines() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}

    assert not {module: lines for module, lines in lengths.items() if lines > MOST_LINES}


def sections(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as repository hosts name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached = {ROOT / "README.md"}
    fresh = set(reached)
    while fresh:
        links = {(page.parent / link).resolve() for page in fresh for link in page_links(page)}
        fresh = links - reached
        reached |= fresh
    assert set(PAGES) - reached == set()


def page_links(page: Path) -> list[str]:
    return [link for link, _ in LINK.findall(page.read_text()) if link.endswith(".md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_ours_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`((?:slurm_health|tests|benchmarks)/[\w./-]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_recipe_is_named_on_the_page_of_launchers_and_no_other() -> None:
    page = (ROOT / "docs/howto/launchers.md").read_text()
    named = set(re.findall(r"`tests/recipes/jobs/([\w-]+)\.", page))
    scripts = {path.stem for path in (ROOT / "tests/recipes/jobs").glob("*.sh")}
    assert named == scripts - {"train-env"}


def test_the_picture_of_the_layers_is_what_import_linter_holds() -> None:
    picture = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]
    drawn = re.findall(r"^(\w+)\*? ", picture, re.MULTILINE)
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    layers = contracts["importlinter:contract:quarters"]["layers"].split()
    assert drawn == [layer for layer in layers if (PACKAGE / layer).is_dir()]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_sign_of_a_package_lists_the_modules_in_it(package: str) -> None:
    sign = ast.get_docstring(ast.parse(MODULES[package].read_text()), clean=False)
    modules = [
        module.removeprefix(f"{package}.")
        for module in MODULES
        if module.rpartition(".")[0] == package and not module.endswith("__main__")
    ]
    assert sign
    listed = LISTED.findall(sign)
    if listed or len(modules) > 3:
        assert sorted(listed) == sorted(modules)


def test_the_page_of_commands_is_what_they_say_with_help() -> None:
    # In a process of its own: click remembers the names of --help by how a command was called
    # first, and tests call some without the one above them.
    code = "from tests.command_reference import page; print(page())"
    page = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    # Words, not lines: releases of click break lines at different places.
    assert command_reference.PAGE.read_text().split() == page.split(), "make docs writes it anew"


@pytest.mark.heavy
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={tmp_path}"]
    # Without the variable its theme advertises a successor on standard error.
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=110
    )

    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    home = (tmp_path / "index.html").read_text()
    assert "One bad node" in home
    assert not re.search(r'(?:src|href)="https?://(?!squidfunk)', home)  # nothing from elsewhere


def test_the_reference_is_what_the_code_says() -> None:
    stale = [
        path.name for path, text in reference_pages.pages().items() if path.read_text() != text
    ]
    assert stale == [], "make docs writes them anew"


def test_every_page_that_the_code_names_exists() -> None:
    named = re.compile(r"(?:documentation[:,] |docs/)((?:[\w-]+/)*[\w-]+\.md)")
    places = ("slurm_health", "benchmarks", "distribution", "tests", "grafana")
    files = [
        path
        for place in places
        for path in (ROOT / place).rglob("*")
        if path.suffix in {".py", ".yml", ".json", ".md"}
        and not {"data", "replay"} & {*path.parts}  # pages of others
    ]
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in named.findall(path.read_text())
        if not (ROOT / "docs" / name).exists()
    }
    assert missing == set()


def test_every_option_and_variable_of_ours_that_a_page_names_is_one() -> None:
    known = set(re.findall(r"--([a-z][\w-]+)", (ROOT / "docs/reference/commands.md").read_text()))
    variables = {f"SLURM_HEALTH_{option.upper().replace('-', '_')}" for option in known}
    for path in PACKAGE.rglob("*.py"):
        variables |= set(re.findall(r"SLURM_HEALTH_[A-Z_]+", path.read_text()))
    for page in PAGES:
        text = page.read_text()
        named = set(re.findall(r"(?<!_)SLURM_HEALTH_[A-Z_]+[A-Z]", text))
        assert named <= variables, page
        if (ROOT / "docs") in page.parents:
            options = set(re.findall(r"(?<![\w-])--([a-z][\w-]+)", text))
            assert options <= known | FOREIGN, page


def test_every_probe_and_every_set_of_them_is_described() -> None:
    text = (ROOT / "docs/reference/probes.md").read_text()
    names = [*SETS, *(probe.name for probe in BUILT_IN)]
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_the_program_that_is_shown_as_a_probe_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs/reference/probes.md").read_text()
    script = textwrap.dedent(text[text.index("    #!/bin/sh") : text.index("**A Python file**")])
    script = script.replace("timeout 2", "timeout 50")  # a loaded disk is no mistake of the page
    program = write_executable(tmp_path / "scratch.sh", script.replace("/scratch", str(tmp_path)))

    assert subprocess.run([program], check=False, timeout=60).returncode == 0
    write_executable(program, script.replace("/scratch", "/nonexistent"))
    assert subprocess.run([program], check=False, timeout=60, capture_output=True).returncode == 77


@pytest.mark.parametrize("where", ["pages", "messages"])
def test_words_to_avoid_do_not_become_more(where: str) -> None:
    kept = words.kept()[where]
    more = {
        word: f"{count} instead of {kept[word]}: write {words.WORDS[word]}"
        for word, count in words.counts()[where].items()
        if count > kept[word]
    }
    assert more == {}
