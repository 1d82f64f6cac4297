# SPDX-License-Identifier: Apache-2.0

import json
from pathlib import Path

import pytest

from slurm_health.system import owner
from slurm_health.system.owner import CONFIG, MOST_PER_HOUR, Message, deliver
from slurm_health.system.slurm.client import Client
from tests.support.fake_slurm import FakeSlurm
from tests.support.rows import rows


class Home:
    """A user's home, with a command that keeps what it reads, and a cluster with a job."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "home"
        self.slurm = FakeSlurm(directory / "slurm")
        self.slurm.run_job(12, ["n1"])
        self.slurm.run_job("40_1", ["n1"])
        self.slurm.run_job("40_2", ["n1"])
        self.site = directory / "site.toml"
        self.config = self.path / CONFIG
        self.config.parent.mkdir(parents=True)
        self.config.write_text(f"notify = 'cat >>{self.path}/received'\n")
        self.config.chmod(0o600)

    def deliver(self, kind: str = "hang", job: str = "12", time_s: float = 1e9) -> str:
        message = Message(
            kind=kind,
            job=job,
            array=job.partition("_")[0] if "_" in job else "",
            time_s=time_s,
            subject="s",
            text="t",
        )
        client = Client(self.slurm.environ(), patience_s=0.0)
        return deliver(message, self.path, client, self.site)

    @property
    def received(self) -> list[tuple[str, str]]:
        try:
            lines = (self.path / "received").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(document["kind"], document["job"]) for document in map(json.loads, lines)]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_kind_of_event_of_a_job_is_delivered_once(home: Home) -> None:
    assert [home.deliver(), home.deliver("moved")] == ["", ""]
    assert "before" in home.deliver(time_s=1e9 + 86_400)
    assert [home.deliver("failed", task) == "" for task in ("40_1", "40_2")] == [True, False]
    assert home.received == [("hang", "12"), ("moved", "12"), ("failed", "40_1")]


def test_an_owner_gets_ten_messages_an_hour_and_more_in_the_next(home: Home) -> None:
    for number in range(MOST_PER_HOUR + 3):
        home.deliver("failed", str(number))

    assert len(home.received) == MOST_PER_HOUR
    assert home.deliver("failed", "99", time_s=1e9 + 3601) == ""


@rows
def test_a_file_that_cannot_be_used_says_why(home: Home, text: str, mode: int, why: str) -> None:
    home.config.write_text(text)
    home.config.chmod(mode)

    assert why in home.deliver()
    assert home.received == []


def test_the_owners_command_runs_before_slurm_is_asked_about_mail(home: Home) -> None:
    early = home.path / "asked-early"
    bin_directory = home.path / "bin"
    bin_directory.mkdir()
    (bin_directory / "scontrol").write_text(
        f"#!/bin/sh\n[ -e {home.path}/received ] || touch {early}\nexit 1\n"
    )
    (bin_directory / "scontrol").chmod(0o755)
    environ = home.slurm.environ()
    environ["PATH"] = f"{bin_directory}:{environ['PATH']}"
    message = Message(kind="hang", job="12", time_s=1e9, subject="s", text="t")

    assert deliver(message, home.path, Client(environ, patience_s=0.0), home.site) == ""
    assert home.received == [("hang", "12")]
    assert not early.exists()


def test_without_a_job_or_a_file_nothing_starts(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.config.unlink()
    assert home.deliver() == ""
    assert not (home.path / ".local").exists()

    monkeypatch.setenv("PATH", "")
    owner.tell("hang", "s", "t", {})
