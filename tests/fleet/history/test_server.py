# SPDX-License-Identifier: Apache-2.0
"""An index on a real PostgreSQL and a real MariaDB server answers as one in a file does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.fleet.history.read import MOST_RUNS
from slurm_health.system import journal
from tests.cli.test_history import LONG_AGO, write_lemon
from tests.support import database_servers
from tests.support.command_line import Done, finish, slurm_health, start
from tests.support.database_servers import Started
from tests.support.journals import write_healthy_run

SERVERS = {"postgresql": database_servers.postgresql, "mariadb": database_servers.mariadb}
PASSWORD = "correct-horse"


@pytest.fixture(scope="module", params=SERVERS)
def running(request: pytest.FixtureRequest) -> Iterator[Started]:
    """A server with three accounts: one that may do everything, one that may read, one nothing."""
    with SERVERS[request.param]() as server:
        if server.kind == "postgresql":
            server.execute(
                "CREATE ROLE writer LOGIN", "CREATE ROLE reader LOGIN", "CREATE ROLE nothing LOGIN",
                f"CREATE ROLE secretive LOGIN PASSWORD '{PASSWORD}'",
            )  # fmt: skip
        else:
            for user in ("writer", "reader", "nothing"):
                server.execute(f"CREATE USER {user}@localhost")
            server.execute(f"CREATE USER secretive@localhost IDENTIFIED BY '{PASSWORD}'")
        yield server


@pytest.fixture
def server(running: Started) -> Started:
    """The server with an empty database `health`."""
    running.execute("DROP DATABASE IF EXISTS health", "CREATE DATABASE health")
    if running.kind == "postgresql":
        running.execute("GRANT CREATE ON SCHEMA public TO writer", database="health")
        running.execute(
            "ALTER DEFAULT PRIVILEGES FOR ROLE writer GRANT SELECT ON TABLES TO reader",
            database="health",
        )
    else:
        running.execute(
            "GRANT ALL ON health.* TO writer@localhost",
            "GRANT SELECT ON health.* TO reader@localhost, nothing@localhost, secretive@localhost",
        )
    return running


def called(tmp_path: Path, url: str, *words: str, home: Path | None = None) -> Done:
    environ = {
        "SLURM_HEALTH_JOURNAL": str(tmp_path / "journal"),
        "SLURM_HEALTH_INDEX": url,
        "HOME": str(home or tmp_path),
        "PGPASSWORD": "",
    }
    return slurm_health(*words, environ=environ)


@pytest.mark.heavy
def test_it_says_what_a_file_says(server: Started, tmp_path: Path) -> None:
    write_lemon(tmp_path / "journal")

    for words in (["lemons", LONG_AGO, "--json"], ["history", "n[1-3]", LONG_AGO, "--json"]):
        on_server = called(tmp_path, server.url("writer"), *words)
        in_file = called(tmp_path, str(tmp_path / "index"), *words)
        assert (on_server.code, on_server.stderr) == (in_file.code, ""), on_server
        assert json.loads(on_server.stdout) == json.loads(in_file.stdout)


def test_no_name_and_no_number_of_runs_of_a_user_ends_the_index(
    server: Started, tmp_path: Path
) -> None:
    root = tmp_path / "journal"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    beside = write_healthy_run(root, job=14, nodes=("n1", "n2")).directory.parent
    beside.rename(beside.with_name("1234567890.0123456789abcdef"))
    for number in range(MOST_RUNS):
        run = root / "lab" / "13" / f"{10**8 + number}-{10**8 + number}"
        run.mkdir(mode=0o700, parents=True)
        for writer in (journal.MASTER, journal.SUPERVISOR, journal.POST_MORTEM):
            journal.path_of(run, writer).touch(mode=0o600)

    done = called(tmp_path, server.url("writer"), "history", "n1", LONG_AGO, "--json")

    assert done.code == 0, done
    (node,) = json.loads(done.stdout)["nodes"]
    assert sorted(each["job"] for each in node["checks"]) == ["12", "1234567890.0123456789abcdef"]


def test_who_may_only_read_is_answered_and_indexes_nothing(server: Started, tmp_path: Path) -> None:
    write_healthy_run(tmp_path / "journal", job=12, nodes=("n1", "n2"))
    called(tmp_path, server.url("writer"), "lemons")
    write_healthy_run(tmp_path / "journal", job=13, nodes=("n1", "n3"))

    read = called(tmp_path, server.url("reader"), "history", "n1", "--json")
    assert (read.code, read.stderr) == (0, "")
    assert [each["job"] for each in json.loads(read.stdout)["nodes"][0]["checks"]] == ["12"]


def test_a_job_that_is_gone_leaves_it_and_the_jobs_of_another_root_stay(
    server: Started, tmp_path: Path
) -> None:
    for name, node in (("a", "n1"), ("b", "n2")):
        write_healthy_run(tmp_path / name / "journal", job=12, cluster=name, nodes=(node, "n3"))
        called(tmp_path / name, server.url("writer"), "lemons")
    (tmp_path / "a" / "journal").rename(tmp_path / "a" / "moved")

    assert called(tmp_path / "a", server.url("writer"), "history", "n1").code == 2
    assert called(tmp_path / "a", server.url("writer"), "history", "n2").code == 0


def test_processes_that_index_at_once_keep_every_job_once(server: Started, tmp_path: Path) -> None:
    for job in range(40):
        write_healthy_run(tmp_path / "journal", job=100 + job, nodes=("n1", "n2"))
    words = ("history", "n1", "--json", f"--journal={tmp_path / 'journal'}")

    processes = [start(*words, f"--index={server.url('writer')}") for _ in range(4)]
    ends = [finish(each) for each in processes]

    assert [(each.code, each.stderr) for each in ends] == [(0, "")] * 4
    counts = [len(json.loads(each.stdout)["nodes"][0]["checks"]) for each in ends]
    assert counts == [40] * 4


@pytest.mark.parametrize(
    "harm",
    [
        "DROP TABLE slurm_health_seen",
        "UPDATE slurm_health_index SET version = 0",
        "DROP TABLE slurm_health_index",
    ],
)
def test_tables_that_are_harmed_are_made_anew(server: Started, tmp_path: Path, harm: str) -> None:
    write_healthy_run(tmp_path / "journal", job=12, nodes=("n1", "n2"))
    called(tmp_path, server.url("writer"), "lemons")
    server.execute(harm, database="health")

    done = called(tmp_path, server.url("writer"), "history", "n1", "--json")
    assert done.code == 0, done
    assert len(json.loads(done.stdout)["nodes"][0]["checks"]) == 1


def test_an_index_that_another_keeps_locked_is_said_to_be_busy(
    server: Started, tmp_path: Path
) -> None:
    write_healthy_run(tmp_path / "journal", job=12, nodes=("n1", "n2"))
    called(tmp_path, server.url("writer"), "lemons")
    write_healthy_run(tmp_path / "journal", job=13, nodes=("n1", "n2"))
    with server.holding("UPDATE slurm_health_index SET version = version", database="health"):
        answered = called(tmp_path, server.url("writer"), "history", "n1", "--json")
        refused = called(tmp_path, server.url("writer"), "lemons", "--rebuild")

    assert "another process works on the index" in one_line(answered)
    assert [each["job"] for each in json.loads(answered.stdout)["nodes"][0]["checks"]] == ["12"]
    assert refused.code == 4
    assert "try again when that has ended" in one_line(refused)


def test_tables_of_a_newer_version_are_left_alone(server: Started, tmp_path: Path) -> None:
    called(tmp_path, server.url("writer"), "lemons")
    server.execute("UPDATE slurm_health_index SET version = 999", database="health")

    done = called(tmp_path, server.url("writer"), "lemons", "--rebuild")
    assert done.code == 4
    assert "made by a newer slurm-health; upgrade this one" in one_line(done)


@pytest.mark.parametrize(
    ("user", "password", "said"),
    [
        ("nothing", "", "let this account create tables in the database health"),
        ("secretive", "not-this-one", "give the account's password"),
        ("secretive", "", "give the account's password"),
        ("nobody-at-all", "", "nobody-at-all"),
    ],
)
def test_an_account_that_may_not_is_one_line_without_its_password(
    server: Started, tmp_path: Path, user: str, password: str, said: str
) -> None:
    done = called(tmp_path, server.url(user, password), "lemons")

    assert done.code == 4
    assert said in one_line(done)
    assert "not-this-one" not in done.stderr


def test_a_password_comes_from_the_file_of_the_servers_own_tools(
    server: Started, tmp_path: Path
) -> None:
    for name, text in {
        ".pgpass": f"*:*:*:secretive:{PASSWORD}\n",
        ".my.cnf": f"[client]\npassword={PASSWORD}\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    called(tmp_path / "other", server.url("writer"), "lemons")

    done = called(tmp_path, server.url("secretive"), "lemons")
    # It is let in, and PostgreSQL tells it that it may not read the tables.
    assert "password" not in done.stderr


def test_a_database_that_is_not_there_is_one_line(server: Started, tmp_path: Path) -> None:
    done = called(tmp_path, server.url("writer", database="elsewhere"), "lemons")

    assert done.code == 4
    assert "elsewhere" in one_line(done)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hidden@/health?host={}/nothing",
        "mariadb://u:hidden@/health?unix_socket={}/nothing",
        "postgresql://u:hidden@127.0.0.1:9/health",
        "mariadb://u:hidden@127.0.0.1:9/health",
    ],
)
def test_a_server_that_is_down_is_one_line_without_the_password(tmp_path: Path, url: str) -> None:
    done = called(tmp_path, url.format(tmp_path), "lemons")

    assert done.code == 4
    assert one_line(done).endswith("name another index with --index or SLURM_HEALTH_INDEX")
    assert "hidden" not in done.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("oracle://u:hidden@h/d", "no database is known as oracle://"),
        ("postgresql://u:hidden/x@h/d", "in a password, write @ as %40"),
        ("postgresql://u:hidden@h", "must name one database"),
        ("mariadb://u:hidden@h/d?sslmode=x", "unknown option 'sslmode'"),
    ],
)
def test_a_url_that_names_no_server_is_a_mistake_of_one_line(
    tmp_path: Path, url: str, said: str
) -> None:
    done = called(tmp_path, url, "lemons")

    assert done.code == 2
    assert said in one_line(done)
    assert "hidden" not in done.stderr


@pytest.mark.parametrize("kind", ["psycopg", "pymysql"])
def test_a_driver_that_is_missing_is_named_with_its_extra(tmp_path: Path, kind: str) -> None:
    (tmp_path / f"{kind}.py").write_text("raise ImportError('not here', name=__name__)\n")
    scheme = {"psycopg": "postgresql", "pymysql": "mariadb"}[kind]
    environ = {"PYTHONPATH": str(tmp_path), "SLURM_HEALTH_JOURNAL": str(tmp_path / "journal")}

    done = slurm_health("lemons", f"--index={scheme}://u:hidden@h/d", environ=environ)

    assert done.code == 4
    assert one_line(done).endswith(f"needs {kind}, which is not installed:"
                                   " pip install 'slurm-health[database]'")  # fmt: skip
    assert "hidden" not in done.stderr


def one_line(done: Done) -> str:
    (line,) = done.stderr.splitlines()
    return line
