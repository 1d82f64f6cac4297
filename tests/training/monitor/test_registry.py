# SPDX-License-Identifier: Apache-2.0
"""Collectors, operators and diagnosticians of others are found, asked and named in a job."""

from __future__ import annotations

import io
import re
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

from examples import failure_node, hang_chain
from slurm_health.preflight.decide.after_failure import Next, ScriptFailure, plan
from slurm_health.records.script_records import Diagnosed, TrainingEvent
from slurm_health.training.diagnosis.collected import (
    FlightRecord,
    FlightRecords,
    NodesTold,
    NodeTold,
    ScriptEnd,
)
from slurm_health.training.diagnosis.flight_data import Reached
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.rank_failures import RankFailure
from slurm_health.training.diagnosis.training_log import TrainingLog
from slurm_health.training.monitor import post_mortem, registry
from slurm_health.training.monitor.collector import Enabled, EndedJob
from slurm_health.training.monitor.containment import contained
from slurm_health.training.monitor.findings import WatchFindings
from slurm_health.training.monitor.registry import Registered, registered
from tests.support.standstills import rank, standstill

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "plugins.md"
EXAMPLE = re.compile(r"<!-- example: run by .*? -->\n```python\n(.*?)```", re.S)
SHOWN_POINTS = re.compile(r"```toml\n(.*?)```", re.S)


class Told:
    """A collector that is built in, and knows."""

    def __init__(self, data: TrainingLog | NodesTold) -> None:
        self.name = type(data).__name__
        self.data = type(data)
        self._data = data

    def is_enabled(self, _: EndedJob) -> Enabled:
        return Enabled()

    def collect_data(self, _: EndedJob) -> TrainingLog | NodesTold:
        return self._data


def install(
    directory: Path, monkeypatch: pytest.MonkeyPatch, points: str, module: str = ""
) -> None:
    """Install a distribution with these entry points, and one module."""
    (directory / "plugs-1.dist-info").mkdir(parents=True)
    (directory / "plugs-1.dist-info" / "METADATA").write_text("Name: plugs\nVersion: 1\n")
    (directory / "plugs-1.dist-info" / "entry_points.txt").write_text(textwrap.dedent(points))
    (directory / "hot_room.py").write_text(module)
    monkeypatch.delitem(sys.modules, "hot_room", raising=False)
    monkeypatch.syspath_prepend(directory)


def points_of(page: str) -> str:
    """Return the entry points that a page shows, as an installed distribution has them."""
    shown = SHOWN_POINTS.search(page)
    assert shown is not None
    text = re.sub(r'\[project\.entry-points\."(.*?)"\]', r"[\1]", shown[1])
    return text.replace('"', "")


def install_from_page(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the module that the page shows; return the test that it shows beside it."""
    page = PAGE.read_text()
    module, tried = EXAMPLE.findall(page)
    install(directory, monkeypatch, points_of(page), module)
    return str(tried)


def held(directory: Path, environ: dict[str, str], *told: Told) -> tuple[Diagnosed, str]:
    """Hold a post-mortem of a failed script with what is installed."""
    used = registered()
    assert used.failed == {}
    others = [each for each in used.collectors if each not in registry.COLLECTORS]
    job = EndedJob(
        end=ScriptEnd(exit_code=1, nodes=("n1", "n2"), script="train.sh"),
        environ=environ,
        node="n1",
        directory=directory,
    )
    out = io.StringIO()
    found = post_mortem.hold(
        job,
        None,
        clock=lambda: 2e9,
        used=Registered((*told, *others), used.operators, {}),
        limit_s=60.0,
        apply=contained(limit_s=60.0, total_s=60.0),
        out=out,
    )
    assert found is not None
    return found, out.getvalue()


def planned(found: Diagnosed) -> Next:
    failure = ScriptFailure(diagnosed=found, batch_node="n2", nodes=("n1", "n2"))
    return plan(failure).next


# --- after a failure --------------------------------------------------------------------------


def test_the_collector_and_the_operator_that_the_page_shows_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_from_page(tmp_path, monkeypatch)
    sensor = tmp_path / "sensor"
    sensor.write_text("45.0\n")
    found, said = held(tmp_path, {"ROOM_SENSOR": str(sensor)})

    assert (found.cause, found.failed) == ("hot-room", [])
    assert "the room is too hot (transient, possible)" in said
    assert found.evidence == ["45 degrees"]


def test_what_the_page_tries_without_a_job_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = install_from_page(tmp_path, monkeypatch)
    (tmp_path / "test_hot_room.py").write_text(tried)
    runpy.run_path(str(tmp_path / "test_hot_room.py"))["test_a_hot_room_is_named"]()


def test_a_collector_that_is_not_enabled_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_from_page(tmp_path, monkeypatch)
    found, _ = held(tmp_path, {})

    assert found.cause == "script-failed"
    assert "RoomTemperature: it is not enabled here" in found.not_collected


SOME_COLLECTOR = """
import socket
from slurm_health.training.plugins import DataCollector

class Some(DataCollector):
    def is_enabled(self):
        return True

    def collect_data(self):
        {does}
"""


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("raise OSError('no sensor')", "collector Some: no sensor"),
        ("return socket", "collector Some: Encoding objects of type module"),
        ("return None", "Some: it found nothing"),
    ],
)
def test_a_collector_that_gives_nothing_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, said: str
) -> None:
    points = f"[{registry.COLLECTOR_POINTS}]\nsome = hot_room:Some\n"
    install(tmp_path, monkeypatch, points, SOME_COLLECTOR.format(does=does))
    found, _ = held(tmp_path, {})

    assert found.cause == "script-failed"
    assert [each for each in (*found.failed, *found.not_collected) if said in each]


FAILURE_NODE = f"""
    [{registry.DIAGNOSTICIAN_POINTS}]
    failure-node = examples.failure_node:FailureNodeDiagnostician
    """


def failed(error: str) -> Told:
    failure = RankFailure(rank=0, node="n1", error=error, line=f"rank 0: {error}")
    return Told(TrainingLog(failures=(failure,)))


@pytest.mark.parametrize(
    ("error", "lost", "accused", "next_"),
    [
        ("Connection reset by peer", (), [], Next.RESTART),
        ("CUDA error: unknown", ("GPU 3b:00 is lost",), ["n1"], Next.LEAVE),
        ("CUDA error: unknown", (), [], Next.CHECK),
        ("KeyError: 'lr'", (), [], Next.STOP),
    ],
    ids=["temporary", "machine", "not confirmed", "the user's"],
)
def test_what_a_diagnostician_asks_for_is_carried_out_like_a_finding_of_ours(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: str,
    lost: tuple[str, ...],
    accused: list[str],
    next_: Next,
) -> None:
    install(tmp_path, monkeypatch, FAILURE_NODE)
    nodes = NodesTold(nodes=(NodeTold(node="n1", lost_gpus=lost),))
    found, _ = held(tmp_path, {}, failed(error), Told(nodes))

    assert found.failed == []
    assert (found.accused, planned(found)) == (accused, next_)


BROKEN = """
from slurm_health.training.plugins import Diagnostician, LeaveNode, RestartRanks

class Broken(Diagnostician):
    def resolve(self, problem, **kwargs):
        return LeaveNode(nodes=("n1",))

class Stranger(Diagnostician):
    def resolve(self, problem, **kwargs):
        return LeaveNode(nodes=("elsewhere",), evidence=("it smokes",))
"""


def test_an_event_is_told_where_something_else_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, FAILURE_NODE)
    found, said = held(tmp_path, {}, failed("CUDA error: unknown"))
    line = (
        "FailureNodeDiagnostician asks for event: a device of n1 is suspected, and nothing measured"
        " confirms it"
    )

    assert found.cause == "rank-failed"
    assert line in found.told
    assert line in said


def test_a_diagnostician_that_fails_is_named_and_asks_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = f"[{registry.DIAGNOSTICIAN_POINTS}]\nbroken = hot_room:Broken\n"
    install(tmp_path, monkeypatch, points, BROKEN)
    found, _ = held(tmp_path, {})

    assert (found.cause, found.accused) == ("script-failed", [])
    assert "operator Broken:" in found.failed[0]
    assert "evidence against it" in found.failed[0]


def test_a_node_that_the_job_does_not_have_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = f"[{registry.DIAGNOSTICIAN_POINTS}]\nstranger = hot_room:Stranger\n"
    install(tmp_path, monkeypatch, points, BROKEN)

    assert held(tmp_path, {})[0].accused == []


# --- during a hang ----------------------------------------------------------------------------

KERNEL_STACKS = """
from slurm_health.training.plugins import DataCollector

class KernelStacks(DataCollector):
    def is_enabled(self):
        return self.environ.get("KERNELS") == "yes"

    def collect_data(self):
        return {"0": "ncclDevKernel_AllReduce", "1": "gemm"}
"""


@pytest.mark.parametrize("kernels", ["yes", "no"])
def test_a_collector_of_others_looks_at_a_hang_and_operators_of_others_locate_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    names = [each.__name__ for each in hang_chain.OPERATORS]
    operators = "\n".join(f"{name} = examples.hang_chain:{name}" for name in names)
    points = (
        f"[{registry.COLLECTOR_POINTS}]\nkernels = hot_room:KernelStacks\n"
        f"[{registry.OPERATOR_POINTS}]\n{operators}\n"
    )
    install(tmp_path, monkeypatch, points, KERNEL_STACKS)
    hangs: list[TrainingEvent] = []
    cause: Diagnosed | None = None
    environ = {"NCCL_RAS_ENABLE": "0", "KERNELS": kernels}
    seen = standstill(rank(0, (), gpu_share=1.0, gpu_waits=True), rank(1, ()))
    flights = tuple(
        FlightRecord(rank=number, reached={"0": Reached(entered=entered, over=6)})
        for number, entered in enumerate([8, 7])
    )
    for _ in range(40):  # operators of others have seconds, which a busy machine may not have
        findings = WatchFindings(None, environ, io.StringIO(), lambda hang, _: hangs.append(hang))
        findings.hang(seen, FlightRecords(records=flights))
        cause = hangs.pop().diagnosed
        assert cause is not None
        if not any("no time was left" in line or "not answer" in line for line in cause.failed):
            break

    assert cause is not None
    first = ["KernelHang: kernels-hang"] if kernels == "yes" else []
    assert cause.failed == []
    assert cause.cause == "rank-holds-up"
    assert (cause.ranks, cause.nodes, cause.accused) == ([1], ["n2"], [])
    assert cause.chain == [
        *first,
        "ChipHang: chips-hang",
        "Collective: collective-not-entered",
        "Culprit: rank-holds-up",
    ]


def test_operators_and_diagnosticians_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = (
        f"[{registry.OPERATOR_POINTS}]\na = examples.failure_node:FailureInLog\n"
        f"b = examples.failure_node:FailureInLog\n{FAILURE_NODE.replace('    ', '')}"
    )
    install(tmp_path, monkeypatch, points)
    used = registered()

    assert used.failed == {"b": "the name FailureInLog is taken"}
    named = [each.name for each in used.operators if each not in OPERATORS]
    assert named == ["FailureInLog", failure_node.FailureNodeDiagnostician.__name__]
