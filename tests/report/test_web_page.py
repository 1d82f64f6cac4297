# SPDX-License-Identifier: Apache-2.0
"""The page: whole in one file, harmless whatever a journal holds, and as a browser shows it."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from slurm_health.records.verdict import Level, NodeVerdict, Outcome
from slurm_health.report.layout import Page
from slurm_health.report.read import load
from slurm_health.report.text import job_text
from slurm_health.report.web_page import as_html
from tests.report.stories import STORIES
from tests.support.journals import RunJournal, write_healthy_run, write_requeued_job

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
# A browser takes three seconds of a processor, and many more beside other tests.
BROWSER_S = 280
pytestmark = pytest.mark.timeout(BROWSER_S + 20)
DARK, LIGHT = 0, 1
# Put into a copy of the page, whose policy forbids scripts: what the browser made of it.
ASK = (Path(__file__).parents[1] / "data" / "web_page" / "ask.html").read_text()


def page_of(root: Path, job: str = "12") -> str:
    return as_html(load(root, job), made_at="2026-11-22 12:00")


def browse(file: Path, *words: str) -> str:
    """Return what a browser without a window prints of a file."""
    assert BROWSER is not None
    usual = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    usual += ["--hide-scrollbars", f"--user-data-dir={file.parent / 'profile'}"]
    argv = [BROWSER, *usual, *words, file.as_uri()]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=BROWSER_S, check=True)
    return ran.stdout


def shown(page: str, directory: Path, *, width: int = 1280, scheme: int = LIGHT) -> dict[str, Any]:
    """Return what a browser without a network makes of a page."""
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy".*?>')
    file = directory / "asked.html"
    asked = escape(policy.sub("", page).replace("</body>", f"{ASK}</body>"))
    # No window of a browser is as narrow as a telephone; a frame can be.
    frame = f'<iframe width="{width}" height="1200" style="border: 0" srcdoc="{asked}"></iframe>'
    file.write_text(f"<!doctype html><meta charset=utf-8>{frame}", encoding="utf-8")
    done = browse(
        file,
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--window-size=1300,1300",
        f"--blink-settings=preferredColorScheme={scheme}",
        "--virtual-time-budget=5000",
        "--dump-dom",
    )
    found = re.search(r"<title>(.*?)</title>", done, re.DOTALL)
    assert found is not None
    answer: dict[str, Any] = json.loads(unescape(found[1]))
    return answer


def lightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def large(root: Path, count: int) -> None:
    """Write a check of many nodes in six rounds of pairs, in which one node is slow."""
    run = RunJournal(root, nodes=[f"gpu{number:04}" for number in range(1, count + 1)])
    run.start()
    for index in range(6):
        order = [run.nodes[(number * (2 * index + 1)) % count] for number in range(count)]
        pairs = [order[start : start + 2] for start in range(0, count, 2)]
        run.begin_round(index, pairs)
        for pair in pairs:
            run.measure(index, pair, allgather_gb_per_s=100.0 if "gpu0018" in pair else 330.0)
        run.end_round(index)
    slow = NodeVerdict(node="gpu0018", level=Level.SLOW, reason="slow", evidence=("round 0",))
    run.judge(slow)


@pytest.mark.parametrize("name", sorted(set(STORIES) - {"large"}))
def test_every_report_is_a_page_that_needs_nothing_else(tmp_path: Path, name: str) -> None:
    STORIES[name](tmp_path)

    page = page_of(tmp_path)

    assert page.startswith("<!doctype html>")
    assert re.findall(r"https?:|\bsrc=x>|\bhref=|url\(|@import|<script|<link|<img", page) == []
    assert page.count("</style>") == 1
    assert "default-src 'none'" in page


@pytest.mark.parametrize("name", ["requeued", "hangs", "failed", "trouble"])
def test_the_page_has_every_word_of_the_text(tmp_path: Path, name: str) -> None:
    now_s = STORIES[name](tmp_path)
    story = load(tmp_path, "12", now_s=now_s)
    page = unescape(re.sub(r"<[^>]*>", " ", as_html(story, made_at="now"))).lower()

    text = job_text(story, Page(), verbose=True).lower()

    assert {word for word in text.split() if word.rstrip(":") not in page} == set()


@pytest.mark.parametrize(
    ("name", "colour"),
    [("failed", "error"), ("stopped", "undecided")],  # others: golden/requeued.html, hangs.html
)
def test_the_box_has_the_colour_of_the_outcome(tmp_path: Path, name: str, colour: str) -> None:
    now_s = STORIES[name](tmp_path)
    page = as_html(load(tmp_path, "12", now_s=now_s), made_at="now")

    assert f'<div class="summary {colour}">' in page


def test_the_matrix_is_of_the_check_that_found_something(tmp_path: Path) -> None:
    _, last = write_requeued_job(tmp_path)
    for label in ("2", "3"):
        last = write_healthy_run(tmp_path, label=label, clock=last.clock)

    assert re.findall(r"last round, (attempt \d)", page_of(tmp_path)) == ["attempt 1"]


def test_a_check_of_512_nodes_is_a_page_below_2_mb(tmp_path: Path) -> None:
    large(tmp_path, 512)

    page = page_of(tmp_path)

    assert len(page.encode()) < 2_000_000
    assert page.count("gpu0018 and ") + page.count(" and gpu0018") >= 2


@pytest.mark.heavy
@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_a_browser_shows_a_page_in_its_width(tmp_path: Path, width: int, scheme: int) -> None:
    write_requeued_job(tmp_path)

    found = shown(page_of(tmp_path), tmp_path, width=width, scheme=scheme)

    assert found["needed"] <= found["width"] == width
    assert (found["wide"], found["cut"]) == (0, 0)
    assert (lightness(found["background"]) > lightness(found["colour"])) == (scheme == LIGHT)
    assert found["boxes"] == ["finished"]
    assert found["styled"] != "rgb(0, 0, 0)"
    if scheme == LIGHT:  # the edge of the box, and the parts of the job's life
        assert found["edges"] == ["rgb(26, 107, 55)"]
        assert {"rgb(111, 191, 139)", "rgb(106, 163, 220)"} <= {*found["life"]}


@needs_browser
def test_a_pair_that_was_not_measured_has_the_colour_of_the_legend(tmp_path: Path) -> None:
    run = RunJournal(tmp_path, nodes=["n1", "n2", "n3"])
    run.start()
    run.begin_round(0, [["n1", "n2"]])
    run.measure(0, ["n1", "n2"])
    run.end_round(0)
    run.begin_round(1, [["n1", "n3"]])
    run.measure(1, ["n1", "n3"], allgather_gb_per_s=None, outcome=Outcome.TIMED_OUT)
    run.end_round(1)
    run.judge()

    found = shown(page_of(tmp_path), tmp_path)

    # Of n2 and n3 nothing was tried; nobody is measured with itself.
    assert found["unmeasured"] == ["itself", "b0", "c", "b0", "itself", "a", "c", "a", "itself"]
    assert found["matrix"][0] >= 3 * 40


@needs_browser
def test_a_browser_runs_nothing_that_a_journal_holds(tmp_path: Path) -> None:
    STORIES["hostile"](tmp_path)

    found = shown(page_of(tmp_path), tmp_path)

    assert (found["images"], found["scripts"]) == (0, 1)  # the script is this test's


@pytest.mark.heavy
@needs_browser
def test_what_is_slow_can_be_seen_among_512_nodes(tmp_path: Path) -> None:
    large(tmp_path, 512)
    page = page_of(tmp_path)

    found = shown(page, tmp_path)

    assert found["cells"] > 2 * 1000
    assert found["slow"] == 2 * 6
    assert (found["unseen"], found["wide"], found["cut"]) == (0, 0, 0)
