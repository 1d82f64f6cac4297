# SPDX-License-Identifier: Apache-2.0
"""The pages of a report, as they are to look: `python -m tests.golden`, and `--accept`.

Each is made from a journal of `tests.report.stories` and kept in tests/report/golden/. Without an
option the differences are shown; `--accept` writes what the code makes now.
"""

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

import msgspec

from slurm_health.report import export
from slurm_health.report.build import run_of
from slurm_health.report.export import LatestJob, as_json, job_document
from slurm_health.report.jobs import in_short, list_text
from slurm_health.report.layout import Page
from slurm_health.report.read import load, read_run
from slurm_health.report.story import Story
from slurm_health.report.text import check_text, job_text
from slurm_health.report.web_page import as_html
from tests.report.stories import STORIES

REPOSITORY = Path(__file__).parents[1]
GOLDEN = REPOSITORY / "tests" / "report" / "golden"
GUIDE = REPOSITORY / "docs" / "howto" / "read-a-report.md"
SCHEMA = REPOSITORY / "docs" / "reference" / "report.schema.json"
_EXAMPLE = re.compile(r"(?<=<!-- example: made by tests/golden.py -->\n).*?(?=<!--)", re.DOTALL)
TERMINAL = Page(width=80)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    stories = dict(_stories())
    for name, story in stories.items():
        yield f"{name}.txt", job_text(story, TERMINAL)
    for name in ("failed", "trouble", "requeued"):
        yield f"{name}-verbose.txt", job_text(stories[name], TERMINAL, verbose=True)
    for name in ("failed", "trouble"):
        yield f"{name}-60-columns.txt", job_text(stories[name], Page(width=60, unicode=False))
        coloured = job_text(stories[name], Page(width=80, colour=True))
        yield f"{name}-colours.txt", coloured.replace("\x1b", "ESC")
    yield "running-followed.txt", job_text(stories["running"], TERMINAL, followed=True)
    for name in ("requeued", "hangs", "hostile"):
        yield f"{name}.html", as_html(stories[name], made_at="2026-11-28 10:00 UTC")
    for name in ("requeued", "hangs"):
        yield f"{name}.json", as_json(job_document(stories[name]))
    waiting = LatestJob(job="14_[3-9]", name="pretrain-of-a-large-model", state="pending", found="")
    listed = [waiting, *(in_short(story) for story in stories.values())]
    yield "list.txt", list_text(listed, TERMINAL)
    yield "list-piped.txt", list_text(listed, Page())


def _stories() -> Iterator[tuple[str, Story]]:
    for name, write in STORIES.items():
        with tempfile.TemporaryDirectory() as directory:
            now_s = write(Path(directory))
            yield name, load(Path(directory), "12", now_s=now_s)


def checks() -> Iterator[tuple[str, str]]:
    """Yield what `slurm-health check` prints at the end of a check."""
    for name in ("requeued", "trouble", "damaged"):
        with tempfile.TemporaryDirectory() as directory:
            STORIES[name](Path(directory))
            run = run_of(read_run(Path(directory) / "lab" / "12" / "0"))
            yield f"{name}-check.txt", check_text(run, TERMINAL)


def files() -> dict[Path, str]:
    """Return what each file is to hold: the pages, and what the documentation shows of them."""
    made = dict(pages())
    found = {GOLDEN / name: f"{text}\n" for name, text in [*made.items(), *checks()]}
    example = f"```\n$ slurm-health report 12\n{made['moved.txt']}\n```\n"
    found[GUIDE] = _EXAMPLE.sub(lambda _: example, GUIDE.read_text(encoding="utf-8"))
    schema = msgspec.json.format(msgspec.json.encode(export.schema()), indent=2).decode()
    return {**found, SCHEMA: f"{schema}\n"}


def differences() -> Iterator[str]:
    """Yield the lines in which files are not as they are kept."""
    made = files()
    for path in sorted({*made, *GOLDEN.iterdir()}):
        kept = path.read_text(encoding="utf-8") if path.exists() else ""
        before, after = kept.splitlines(), made.get(path, "").splitlines()
        now = "what the code makes now"
        yield from unified_diff(before, after, path.name, now, lineterm="")


def accept() -> None:
    """Keep the files as the code makes them now."""
    made = files()
    for path in {*GOLDEN.iterdir()} - {*made}:
        path.unlink()
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--accept"]:
        accept()
        sys.exit(0)
    lines = list(differences())
    print(*lines, sep="\n")
    sys.exit(1 if lines else 0)
