# SPDX-License-Identifier: Apache-2.0
"""`slurm-health docs`: the pages of the documentation, where there is only the package."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

from slurm_health.cli.terminal import print_result
from slurm_health.records.errors import ExitCode
from slurm_health.system import templates


@click.command(short_help="Print a page of the documentation.")
@click.argument("page", required=False)
def docs(page: str | None) -> int:
    """Print a page of the documentation; without PAGE, list the pages."""
    pages = _pages()
    if page is None:
        print_result(_list_text(pages))
        return int(ExitCode.HEALTHY)
    path = pages.get(page) or pages.get(Path(page).stem)
    if path is None:
        near = difflib.get_close_matches(page, pages, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "slurm-health docs lists them."
        raise click.UsageError(f"No page {page!r}. {hint}")
    print_result(path.read_text(encoding="utf-8"))
    return int(ExitCode.HEALTHY)


def _pages() -> dict[str, Path]:
    """Return every page by its name: the tutorial first, then the guides."""
    root = templates.shipped("docs")
    order = {"tutorial.md": 0, "howto": 1, "admin": 2}
    paths = sorted(
        root.rglob("*.md"), key=lambda path: (order.get(path.relative_to(root).parts[0], 3), path)
    )
    return {path.stem: path for path in paths}


def _list_text(pages: dict[str, Path]) -> str:
    width = max(map(len, pages))
    lines = [f"  {name:<{width}}  {_title(path)}\n" for name, path in pages.items()]
    return "".join(["Pages, for slurm-health docs PAGE:\n", *lines])


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").rstrip()
