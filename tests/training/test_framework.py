# SPDX-License-Identifier: Apache-2.0
"""The classes of the diagnosis: chains, what a site adds to them, and what its faults cost."""

import io
import os
import re
import runpy
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_health.records.script_records import Diagnosed
from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.framework import (
    ASKS_FOR,
    Attribution,
    DataCollector,
    DataManager,
    Diagnostician,
    EventAction,
    Inference,
    InferenceChain,
    InferenceOperator,
    NoAction,
    Sureness,
    Walk,
)
from slurm_health.training.monitor import post_mortem
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.containment import Allowance
from slurm_health.training.monitor.registry import registered
from tests.support.rows import rows

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "plugins.md"
EXAMPLE = re.compile(r"<!-- example: run by .*? -->\n```python\n(.*?)```", re.S)
SHOWN_POINTS = re.compile(r"```toml\n(.*?)```", re.S)

# --- chains -----------------------------------------------------------------------------------


class Leads(InferenceOperator):
    """Leads from one inference to others."""

    def __init__(self, before: str, *after: Inference) -> None:
        super().__init__(DataManager())
        self.name = f"from-{before}"
        self._before = before
        self._after = after

    def is_compatible(self, inference: Inference) -> bool:
        return inference.name == self._before

    def infer(self, _: list[Inference]) -> list[Inference]:
        return list(self._after)


class Endless(InferenceOperator):
    """Leads from anything to something new."""

    def is_compatible(self, _: Inference) -> bool:
        return True

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        return [named(inferences[0].name + end) for end in "ab"]


def named(
    name: str,
    sureness: Sureness = Sureness.POSSIBLE,
    attribution: Attribution = Attribution.UNDECIDED,
) -> Inference:
    return Inference(name, attribution, name, sureness=sureness)


def walk(*operators: InferenceOperator) -> Walk:
    return InferenceChain(operators).walk(named("a"))


def test_causes_that_are_as_sure_and_blame_others_leave_it_undecided() -> None:
    ends = [
        named("theirs", Sureness.CERTAIN, Attribution.USER),
        named("its", Sureness.CERTAIN, Attribution.NODE),
    ]
    conclusion = walk(Leads("a", *ends)).conclusion

    assert (conclusion.blame, conclusion.accused) == (Attribution.UNDECIDED, ())
    assert "theirs (user error); or its (node fault)" in conclusion.description


def test_operators_that_lead_on_for_ever_or_in_a_circle_come_to_an_end() -> None:
    circle = walk(Leads("a", named("b")), Leads("b", named("a")))

    assert len(walk(Endless(DataManager())).steps) == 64
    assert circle.conclusion == named("b")


def test_inferences_in_words_of_a_site_are_told_apart_by_them() -> None:
    hang = Inference("training", "is", "hang")
    of_a_host = Inference("training", "is", "hang of a host")

    assert InferenceChain([Leads("training", of_a_host)]).infer([hang]) == [of_a_host]
    assert of_a_host.blame is Attribution.UNDECIDED


def test_what_diagnosticians_ask_for_hides_nothing_that_is_as_sure() -> None:
    asked = Inference("event", description="it is odd", configs={ASKS_FOR: "event"})

    assert walk(Leads("a", asked, named("b")), Leads("b", named("c"))).conclusion == named("c")
    assert walk(Leads("a", asked)).conclusion == asked


def test_a_diagnosis_that_fails_is_no_action_and_says_why() -> None:
    class Broken(Diagnostician):
        def observe(self, **_: object) -> None:
            raise OSError("no sensor")

    class Calm(Diagnostician):
        def observe(self, **_: object) -> None:
            return None

    assert Broken().diagnose() == NoAction(failed="OSError: no sensor")
    assert Calm().diagnose() == NoAction()
    assert Diagnostician().diagnose() == EventAction(reason="unknown")


# --- what a site adds -------------------------------------------------------------------------


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, points: str, module: str) -> None:
    """Install a distribution with these entry points, and one module."""
    (directory / "plugs-1.dist-info").mkdir(parents=True)
    (directory / "plugs-1.dist-info" / "METADATA").write_text("Name: plugs\nVersion: 1\n")
    (directory / "plugs-1.dist-info" / "entry_points.txt").write_text(textwrap.dedent(points))
    (directory / "hot_room.py").write_text(textwrap.dedent(module))
    monkeypatch.delitem(sys.modules, "hot_room", raising=False)
    monkeypatch.syspath_prepend(directory)


def points_of(page: str) -> str:
    """Return the entry points that a page shows, as an installed distribution has them."""
    shown = SHOWN_POINTS.search(page)
    assert shown is not None
    return re.sub(r'\[project\.entry-points\."(.*?)"\]', r"[\1]", shown[1]).replace('"', "")


def install_from_page(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the module that the page shows; return the test that it shows beside it."""
    page = PAGE.read_text()
    module, tried = EXAMPLE.findall(page)
    install(directory, monkeypatch, points_of(page), module)
    return str(tried)


class Known(DataCollector):
    """Stands for the built-in collectors."""

    data = ScriptEnd

    def collect_data(self) -> ScriptEnd:
        return END


END = ScriptEnd(exit_code=1, nodes=("n1", "n2"), script="train.sh")


def held(
    directory: Path, environ: dict[str, str] | None = None, *, limit_s: float = 60.0
) -> tuple[Diagnosed, str]:
    """Hold a post-mortem of a failed script with what is installed."""
    job = EndedJob(end=END, environ=environ or {}, node="n1", directory=directory)
    out = io.StringIO()
    found = post_mortem.run_post_mortem(
        job,
        None,
        clock=lambda: 2e9,
        used=registered(lambda: Allowance(limit_s, 60.0)),
        collectors=[Known()],
        limit_s=limit_s,
        out=out,
    )
    assert found is not None
    return found, out.getvalue()


def test_the_collector_and_the_operator_that_the_page_shows_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_from_page(tmp_path, monkeypatch)
    sensor = tmp_path / "sensor"
    sensor.write_text("45.0\n")
    found, text = held(tmp_path, {"ROOM_SENSOR": str(sensor)})

    assert (found.cause, found.failed, found.evidence) == ("hot-room", [], ["45 degrees"])
    assert "the room is too hot (transient, possible)" in text


def test_what_the_page_tries_without_a_job_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = install_from_page(tmp_path, monkeypatch)
    (tmp_path / "test_hot_room.py").write_text(tried)
    runpy.run_path(str(tmp_path / "test_hot_room.py"))["test_a_hot_room_is_named"]()


SOME = """
import socket, time
from slurm_health.training.framework import *

class Some({base}):
    {method}
        {does}
"""
# By group: the class to derive from, and the method that does it.
METHODS = {
    "collectors": ("DataCollector", "def collect_data(self):"),
    "operators": (
        "InferenceOperator",
        "def is_compatible(self, inference): return True\n    def infer(self, inferences):",
    ),
    "diagnosticians": ("Diagnostician", "def resolve(self, problem, **kwargs):"),
}
Install = Callable[[str, str], None]


@pytest.fixture
def some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a module that has a class of a group."""

    def installed(group: str, module: str) -> None:
        points = f"[slurm_health.{group}]\nsome = hot_room:Some\n"
        install(tmp_path, monkeypatch, points, module)

    return installed


def some_that(group: str, does: str) -> str:
    base, method = METHODS[group]
    return SOME.format(base=base, method=method, does=does)


@rows
def test_what_a_site_adds_and_fails_is_named_and_decides_nothing(
    tmp_path: Path, some: Install, group: str, does: str, reported: str, limit_s: float
) -> None:
    some(group, some_that(group, does))
    found, _ = held(tmp_path, limit_s=limit_s)

    assert (found.cause, found.accused) == ("script-failed", [])
    assert [line for line in (*found.failed, *found.not_collected) if reported in line]


@rows
def test_an_action_that_a_site_asks_for_says_whose_failure_it_is(
    tmp_path: Path, some: Install, action: str, attribution: str, accused: list[str]
) -> None:
    some("diagnosticians", some_that("diagnosticians", f"return {action}"))
    found, _ = held(tmp_path)

    assert found.failed == []
    assert (found.attribution, found.accused) == (attribution, accused)


def test_a_directory_of_packages_that_hangs_costs_what_a_site_adds(
    tmp_path: Path, some: Install
) -> None:
    some("operators", SOME)
    (points,) = tmp_path.rglob("entry_points.txt")
    points.unlink()
    os.mkfifo(points)  # reading it never ends

    assert registered().failed == {"entry points": "cannot be listed: not within 3 s"}


@rows
def test_an_operator_that_cannot_be_loaded_is_named(
    some: Install, module: str, reported: str
) -> None:
    some("operators", module)
    used = registered()

    assert used.operators == ()
    assert reported in used.failed["some"]
