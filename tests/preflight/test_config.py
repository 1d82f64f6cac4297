# SPDX-License-Identifier: Apache-2.0

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_health.preflight.config import (
    JOURNAL_VARIABLE,
    SITE_FILE_VARIABLE,
    expectations,
    journal_root,
    localize,
    standings,
    storage_paths,
)
from slurm_health.preflight.expectations import expectation_of
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.records.errors import ConfigError, ExitCode
from tests.support.rows import rows


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose site has no configuration."""
    return {"HOME": "/home/ml", SITE_FILE_VARIABLE: str(tmp_path / "config.toml")}


def write_site(environ: dict[str, str], text: str) -> None:
    Path(environ[SITE_FILE_VARIABLE]).write_text(text)


@pytest.mark.parametrize(
    ("site", "variable", "option", "directory"),
    [
        ("", "", None, Path("/home/ml/.slurm-health/journal")),
        ('journal = "/site"', "", None, Path("/site")),
        ('journal = "~/checks"', "", None, Path("/home/ml/checks")),
        ('journal = "/site"', "/variable", None, Path("/variable")),
        ('journal = "/site"', "/variable", "/option", Path("/option")),
        ("", "", "here", Path.cwd() / "here"),
    ],
)
def test_the_option_wins_over_the_variable_over_the_site_over_the_users_home(
    environ: dict[str, str], site: str, variable: str, option: str | None, directory: Path
) -> None:
    write_site(environ, site)
    environ[JOURNAL_VARIABLE] = variable

    assert journal_root(option, environ) == directory


def test_where_home_is_not_set_the_passwd_entry_says_it_or_the_option_is_named(
    environ: dict[str, str],
) -> None:
    del environ["HOME"]
    entry = Path(pwd.getpwuid(os.getuid()).pw_dir)

    assert journal_root(None, environ) == entry / ".slurm-health" / "journal"
    with pytest.raises(ConfigError, match="--journal DIR") as caught:
        journal_root(None, environ, home_in_passwd=lambda: "")
    assert caught.value.exit_code == ExitCode.USAGE
    write_site(environ, 'journal = "~/checks"')
    assert journal_root(None, environ) == entry / "checks"


READERS: dict[str, Callable[[dict[str, str]], object]] = {
    "journal": lambda environ: journal_root(None, environ),
    "localize": localize,
    "paths": lambda environ: storage_paths(JobSpec(), environ),
    "standings": standings,
}


@rows
def test_a_sites_mistake_is_named_with_its_file(
    environ: dict[str, str], reader: str, text: str, said: str
) -> None:
    before, many, what = text.partition("MANY")
    written = (before + 5000 * what if many else text).encode()
    path = Path(environ[SITE_FILE_VARIABLE])
    path.write_bytes(b"\xff\xfe" if text == "NO UTF-8" else written)

    with pytest.raises(ConfigError) as caught:
        READERS[reader](environ)

    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


def test_a_sites_choices_stand_in_one_file_beside_those_of_its_hooks(
    environ: dict[str, str],
) -> None:
    assert (localize(environ), standings(environ)) == ({}, None)
    write_site(
        environ,
        'journal = "/site"\nstandings = "/shared/standings.json"\n[hooks]\ndrain = false\n'
        '[expectations."NVIDIA H200"]\nhealthy_fraction = 0.6\n'
        "[localize]\nnetwork_floor = 0.3\n[localize.expected_ms]\nmatmul = 3.1\n",
    )

    found = expectation_of("NVIDIA H200", expectations(environ))
    assert found is not None
    assert found.healthy_fraction == 0.6
    assert localize(environ) == {"network_floor": 0.3, "expected_ms": {"matmul": 3.1}}
    assert standings(environ) == Path("/shared/standings.json")
    assert journal_root(None, environ) == Path("/site")


def test_the_paths_of_job_and_site_are_tested_and_no_local_directory_of_its_own_accord(
    environ: dict[str, str],
) -> None:
    write_site(environ, 'paths = ["/scratch/", "~/data"]')
    chosen = storage_paths(JobSpec(paths="/ckpt,/data"), environ)
    assert chosen.split(",")[:4] == ["/ckpt", "/data", "/scratch", "/home/ml/data"]
    assert storage_paths(JobSpec(paths="/ckpt", check="quick"), environ) == ""
    write_site(environ, "")
    environ["SLURM_SUBMIT_DIR"] = "/proc/1"
    assert storage_paths(JobSpec(check="storage"), environ) == "/proc/1"
