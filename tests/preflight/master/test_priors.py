# SPDX-License-Identifier: Apache-2.0
"""The site's history as a check reads it: what cannot be used is said, and changes nothing."""

import os
from pathlib import Path

import pytest

from slurm_health.fleet.standing import Standing, published
from slurm_health.preflight.master.priors import of_site, prior_of_findings
from slurm_health.records import standings
from slurm_health.records.records import VerdictReached
from slurm_health.records.script_records import Diagnosed
from slurm_health.records.verdict import Level, NodeVerdict
from tests.support.rows import rows

NOW_S = 1_700_000_000.0


def write(path: Path, level: standings.Reliability = standings.Reliability.LEMON) -> Path:
    standing = Standing(
        node="n3",
        level=level,
        score=28.2,
        chance=0.001,
        jobs=12,
        spoiled=6,
        elsewhere_jobs=48,
        elsewhere_spoiled=0,
        signals={"slow": 6},
        reason="again and again",
    )
    path.write_bytes(published({"lab": [standing]}, now_s=NOW_S))
    path.chmod(0o644)
    return path


def known(path: Path | None, *nodes: str, now_s: float = NOW_S) -> dict[str, float]:
    return of_site(path, "lab", nodes or ("n1", "n2", "n3"), now_s=now_s)


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


@rows
def test_a_node_with_a_history_weighs_and_a_lemon_is_named(
    level: standings.Reliability,
    prior: float,
    said: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert known(write(tmp_path / "standings.json", level)) == {"n3": prior}
    assert caplog.messages == said


def test_nodes_without_a_history_and_sites_without_a_file_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert known(write(tmp_path / "standings.json"), "n1", "n2") == {}
    assert known(None) == {}
    assert caplog.messages == []


def others_can_write(path: Path) -> None:
    write(path).chmod(0o666)


def is_a_pipe(path: Path) -> None:
    os.mkfifo(path)


def is_damaged(path: Path) -> None:
    path.write_bytes(write(path).read_bytes()[:-20])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Path.absolute, "No such file or directory"),
        (Path.mkdir, "Is a directory"),
        (is_a_pipe, "it is not a plain file"),
        (others_can_write, "others than root and you can write it"),
        (is_damaged, "it is damaged"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_and_accuses_nobody(
    make: object, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "standings.json"
    assert callable(make)
    make(path)

    assert known(path) == {}
    (message,) = caplog.messages
    assert message.startswith(f"the history of nodes is not taken into account: {path}: ")
    assert said in message


def test_a_file_of_last_month_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert known(write(tmp_path / "standings.json"), now_s=NOW_S + 30 * 86400) == {}
    assert "written 30 days ago" in caplog.text


def verdict(**levels: Level) -> VerdictReached:
    return VerdictReached(
        nodes=[NodeVerdict(node=node, level=level) for node, level in levels.items()]
    )


def failed(*nodes: str, accused: tuple[str, ...] = ()) -> Diagnosed:
    return Diagnosed(
        cause="killed",
        description="a rank was killed",
        attribution="undecided",
        sureness="likely",
        nodes=list(nodes),
        accused=list(accused),
    )


def test_the_more_was_seen_of_a_node_the_more_it_is_suspected_until_it_is_healthy() -> None:
    bad = verdict(n1=Level.FAULTY, n2=Level.SLOW, n3=Level.INCONCLUSIVE, n4=Level.HEALTHY)

    prior = prior_of_findings([bad])
    accused = prior_of_findings([failed("n2", "n3", accused=("n3",))])

    assert list(prior) == ["n1", "n2", "n3"]
    assert 0.5 > prior["n1"] > prior["n2"] > prior["n3"] > 0.02
    assert accused["n3"] > accused["n2"]
    assert set(prior_of_findings([verdict(n2=Level.HEALTHY), failed("n2")])) == {"n2"}
    assert prior_of_findings([failed("n2"), verdict(n2=Level.HEALTHY)]) == {}
