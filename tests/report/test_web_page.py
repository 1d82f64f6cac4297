# SPDX-License-Identifier: Apache-2.0
"""The page: whole in one file, harmless whatever a journal holds, and as a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from slurm_health.records.verdict import Level, NodeVerdict, Outcome
from slurm_health.report.layout import Page
from slurm_health.report.read import load
from slurm_health.report.summary import summary_of
from slurm_health.report.text import job_text
from slurm_health.report.web_page import as_html, life_of
from tests.report.stories import STORIES
from tests.support.command_line import slurm_health
from tests.support.journals import RunJournal, write_healthy_run, write_requeued_job

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
# A browser takes three seconds of a processor, and many more beside other tests.
BROWSER_S = 280
pytestmark = pytest.mark.timeout(BROWSER_S + 20)
DARK, LIGHT = 0, 1
# Put into a copy of the page, whose policy forbids scripts: what the browser made of it.
ASK = """<script>addEventListener("load", () => {
const of = (query) => [...document.querySelectorAll(query)];
const style = getComputedStyle(document.body);
parent.document.title = JSON.stringify({
  width: innerWidth, needed: document.documentElement.scrollWidth,
  background: style.backgroundColor, colour: style.color,
  images: document.images.length, scripts: document.scripts.length,
  boxes: of(".summary").map(box => box.querySelector("dt").textContent.trim()),
  cells: of("svg.matrix rect").length,
  slow: of("svg.matrix rect.b4").length,
  unseen: of("svg.matrix rect.b4").filter(cell => cell.getBoundingClientRect().width < 5).length,
  wide: of("body > section > *, .summary").filter(
    part => part.getBoundingClientRect().right > innerWidth + 1).length,
  cut: of("figure, figure *").filter(part => part.scrollWidth > part.clientWidth + 1
    && getComputedStyle(part).overflowX === "auto" || part.localName !== "title"
    && part.getBoundingClientRect().right > innerWidth + 1).length,
  matrix: of("svg.matrix rect.frame").map(part => part.getBoundingClientRect().width),
  unmeasured: of("svg.matrix").map(matrix => {
    const frame = matrix.querySelector("rect.frame").getBoundingClientRect();
    const nodes = matrix.querySelectorAll("text").length / 2, cell = frame.width / nodes;
    const shown = [];
    for (let row = 0; row < nodes; row++) for (let column = 0; column < nodes; column++) {
      const at = [frame.left + (column + .5) * cell, frame.top + (row + .5) * cell];
      scrollTo(0, 0); scrollTo(0, Math.max(0, at[1] - 300));
      const part = document.elementsFromPoint(at[0], at[1] - scrollY).find(
        each => matrix.contains(each) && getComputedStyle(each).fill !== "none");
      shown.push(part.getAttribute("class")); }
    scrollTo(0, 0); return shown; })[0] || [],
  styled: of("svg.matrix rect.c").map(cell => getComputedStyle(cell).fill)[0] || ""});
});</script>"""


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


def colours(page: str, directory: Path, width: int = 900, height: int = 700) -> Counter[str]:
    """Return how many pixels of a screenshot of a page have which colour, `#b3261e`."""
    file, picture = directory / "shown.html", directory / "shown.png"
    file.write_text(page, encoding="utf-8")
    window = [f"--window-size={width},{height}", f"--screenshot={picture}"]
    browse(file, "--force-color-profile=srgb", *window)
    data = picture.read_bytes()
    chunks, at, channels = b"", 8, {2: 3, 6: 4}[data[25]]
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        chunks += data[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    raw, before = zlib.decompress(chunks), bytearray(width * channels)
    found: Counter[str] = Counter()
    for start in range(0, len(raw), width * channels + 1):
        how, line = raw[start], bytearray(raw[start + 1 : start + 1 + width * channels])
        for n in range(len(line)):  # the filters of PNG
            left = line[n - channels] if n >= channels else 0
            above, corner = before[n], before[n - channels] if n >= channels else 0
            near = sorted((left, above, corner), key=lambda v: abs(left + above - corner - v))[0]
            line[n] = line[n] + (0, left, above, (left + above) // 2, near)[how] & 255
        found.update(line[n : n + 3].hex() for n in range(0, len(line), channels))
        before = line
    return Counter({f"#{colour}": count for colour, count in found.items()})


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
    [("requeued", "ok"), ("hangs", "error"), ("failed", "error"), ("stopped", "undecided")],
)
def test_the_box_has_the_colour_of_the_outcome(tmp_path: Path, name: str, colour: str) -> None:
    now_s = STORIES[name](tmp_path)
    page = as_html(load(tmp_path, "12", now_s=now_s), made_at="now")

    assert f'<div class="summary {colour}">' in page


def test_the_picture_has_the_whole_life_of_a_job(tmp_path: Path) -> None:
    now_s = STORIES["hangs"](tmp_path / "hangs")
    hangs = load(tmp_path / "hangs", "12", now_s=now_s)
    write_requeued_job(tmp_path / "moved")
    moved = load(tmp_path / "moved", "12")

    of_hangs = [part.phase for part in life_of(hangs, summary_of(hangs))]
    of_moved = [part.phase for part in life_of(moved, summary_of(moved))]

    assert of_hangs == ["check", "training", "hang", "error"]
    assert of_moved == ["check", "queue", "check", "training", "ok"]


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


def test_the_page_is_printed(tmp_path: Path) -> None:
    write_healthy_run(tmp_path)

    done = slurm_health("report", "12", f"--journal={tmp_path}", "--html")

    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith("<!doctype html>")


@pytest.mark.heavy
@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_a_browser_shows_the_page_in_its_width_and_colours(
    tmp_path: Path, width: int, scheme: int
) -> None:
    write_requeued_job(tmp_path)

    found = shown(page_of(tmp_path), tmp_path, width=width, scheme=scheme)

    assert found["needed"] <= found["width"] == width
    assert found["wide"] == 0
    assert (lightness(found["background"]) > lightness(found["colour"])) == (scheme == LIGHT)
    assert found["boxes"] == ["finished"]
    assert found["styled"] != "rgb(0, 0, 0)"


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
@pytest.mark.parametrize("width", [500, 1900])
@pytest.mark.parametrize("count", [5, pytest.param(512, marks=pytest.mark.slow)])
def test_the_picture_is_not_cut_off(tmp_path: Path, width: int, count: int) -> None:
    write_requeued_job(tmp_path) if count == 5 else large(tmp_path, count)

    assert shown(page_of(tmp_path), tmp_path, width=width)["cut"] == 0


@pytest.mark.heavy
@needs_browser
@pytest.mark.parametrize(
    ("name", "box", "others"),
    [("requeued", "#1a6b37", {"#6fbf8b", "#d93a2b"}), ("hangs", "#b3261e", {"#6fbf8b", "#d93a2b"})],
)
def test_a_screenshot_has_the_box_of_its_outcome_and_the_parts_of_its_life(
    tmp_path: Path, name: str, box: str, others: set[str]
) -> None:
    now_s = STORIES[name](tmp_path)
    page = as_html(load(tmp_path, "12", now_s=now_s), made_at="now")

    found = colours(page, tmp_path)

    assert found[box] > 8 * 100  # the edge of the box, from top to bottom
    assert {colour for colour in others if found[colour] > 1000} == others


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
    assert (found["unseen"], found["wide"]) == (0, 0)
