# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: option, then environment, then the site's file, then the default."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_health import journal
from slurm_health.core.expectations import Expectation, expectations_from
from slurm_health.core.localize.settings import OPTIONS, Device, settings_from
from slurm_health.errors import ConfigError

SITE_FILE = Path("/etc/slurm-health/config.toml")
SITE_FILE_VARIABLE = "SLURM_HEALTH_CONFIG"
JOURNAL_VARIABLE = "SLURM_HEALTH_JOURNAL"
# The tables are the administrator's: read, and checked, by what runs as root.
ADMIN_TABLES = ("hooks", "breaker", "recovery", "marks", "accusations", "checks")
SITE_KEYS = ("journal", "expectations", "localize", *ADMIN_TABLES)


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


def localize(environ: Mapping[str, str]) -> dict[str, object]:
    """Return what the site has chosen about localisation, by the names of its settings.

    Raises:
        ConfigError: the site's file cannot be used.
    """
    return localize_choices(_site(environ).get("localize", {}), str(site_file(environ)))


def localize_choices(table: object, source: str) -> dict[str, object]:
    """Return the table `[localize]` of the file `source`, checked.

    Raises:
        ConfigError: it is no table, or holds a key or a value it must not.
    """
    if not isinstance(table, dict):
        raise ConfigError(source, "localize", f"expected a table, found {table!r}")
    valid = [option.name for option in OPTIONS]
    for key, value in table.items():
        if key not in valid:
            raise ConfigError(f"{source}: localize", key, "unknown setting", valid=valid)
        try:
            settings_from({key: value}, kind=Device.CPU)
        except ValueError as err:
            problem = str(err).removeprefix(f"{key}: ")
            raise ConfigError(f"{source}: localize", key, problem) from None
    return table


def site_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the site's file."""
    return Path(environ.get(SITE_FILE_VARIABLE) or SITE_FILE)


def _site(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what the site's file says to every user, nothing where there is no file.

    Raises:
        ConfigError: the file cannot be read, or holds a key or a value it must not.
    """
    path = site_file(environ)
    try:
        settings = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise ConfigError(str(path), "file", f"cannot be read: {err}") from err
    for key, value in settings.items():
        if key not in SITE_KEYS:
            raise ConfigError(str(path), key, "unknown setting", valid=SITE_KEYS)
        if key == "journal" and (not isinstance(value, str) or not value):
            raise ConfigError(str(path), key, f"expected a directory, found {value!r}")
    return {key: value for key, value in settings.items() if key not in ADMIN_TABLES}
