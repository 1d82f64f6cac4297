# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: option, then environment, then the site's file, then the default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_health import journal
from slurm_health.core.expectations import Expectation, expectations_from
from slurm_health.errors import ConfigError
from slurm_health.site_file import SITE_FILE, read

SITE_FILE_VARIABLE = "SLURM_HEALTH_CONFIG"
JOURNAL_VARIABLE = "SLURM_HEALTH_JOURNAL"


def journal_root(option: str | None, environ: Mapping[str, str]) -> Path:
    """Return the directory of all journals, as an absolute path.

    A site's `journal` may begin with `~`, which stands for each user's home.

    Raises:
        ConfigError: the site's file cannot be used, or there is no home to fall back on.
    """
    chosen = option or environ.get(JOURNAL_VARIABLE) or _site(environ).get("journal")
    home = environ.get("HOME")
    if chosen is None and not home:
        raise ConfigError("HOME", "journal", "no home directory; name one with --journal DIR")
    path = Path(chosen) if chosen else journal.default_root(Path(str(home)))
    if path.parts[:1] == ("~",) and home:
        path = Path(home).joinpath(*path.parts[1:])
    return path.absolute()


def expectations(environ: Mapping[str, str]) -> dict[str, Expectation]:
    """Return what a healthy device of each known model reaches, with the site's own figures.

    Raises:
        ConfigError: the site's file cannot be used.
    """
    return expectations_from(_site(environ).get("expectations", {}), str(site_file(environ)))


def site_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the site's file."""
    return Path(environ.get(SITE_FILE_VARIABLE) or SITE_FILE)


def _site(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what the site's file says, nothing where there is no file.

    Raises:
        ConfigError: the file cannot be read, or holds a key or a value it must not.
    """
    try:
        return read(site_file(environ), trusted=False).document
    except ConfigError as err:
        if isinstance(err.__cause__, FileNotFoundError):
            return {}
        raise
