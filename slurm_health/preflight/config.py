# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: option, then environment, then the site's file, then the default."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_health.preflight.expectations import Expectation, expectations_from
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.localize.settings import CHOICES, DeviceKind, settings_from
from slurm_health.records.errors import ConfigError
from slurm_health.records.probe_catalog import SETS, STORAGE
from slurm_health.system.proc import mount_of, mounted
from slurm_health.system.site_file import SITE_FILE, SiteFile, read

SITE_FILE_VARIABLE = "SLURM_HEALTH_CONFIG"
JOURNAL_VARIABLE = "SLURM_HEALTH_JOURNAL"


def _home_in_passwd() -> str:
    """Return the home that the passwd entry of this user names, empty where there is none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def default_root(home: Path) -> Path:
    """Return the default directory of journals."""
    return home / ".slurm-health" / "journal"


def journal_root(
    option: str | None,
    environ: Mapping[str, str],
    *,
    home_in_passwd: Callable[[], str] = _home_in_passwd,
) -> Path:
    """Return the directory of all journals, as an absolute path.

    A site's `journal` may begin with `~`, which stands for each user's home. Where HOME is not set,
    as in a job with `--export=NONE`, that is what the passwd entry names.

    Raises:
        ConfigError: the site's file cannot be used, or there is no home to fall back on.
    """
    chosen = option or environ.get(JOURNAL_VARIABLE) or _site(environ).document.get("journal")
    home = environ.get("HOME") or home_in_passwd()
    if chosen is None and not home:
        problem = (
            "not set, and no home in passwd for this user; name a directory with --journal DIR"
        )
        raise ConfigError("HOME", "journal", problem)
    path = Path(chosen) if chosen else default_root(Path(str(home)))
    if path.parts[:1] == ("~",) and home:
        path = Path(home).joinpath(*path.parts[1:])
    return path.absolute()


def storage_paths(spec: JobSpec, environ: Mapping[str, str]) -> str:
    """Return the paths that a check tests, separated by commas; touch none of them: it may hang.

    First what the job and the config file name. Then, on mounts with a server, the directories of
    the job's output, of its submission and of its script, and its user's home: one of each mount.
    None if the check leaves storage out.

    Raises:
        ConfigError: the config file cannot be used.
    """
    if not any(STORAGE in SETS.get(item.strip(), ()) for item in spec.check.split(",")):
        return ""
    home = environ.get("HOME") or _home_in_passwd()
    submitted = environ.get("SLURM_SUBMIT_DIR") or os.getcwd()  # noqa: PTH109 - text
    output = ""
    with contextlib.suppress(OSError):
        output = os.readlink("/proc/self/fd/2").rpartition("/")[0]  # noqa: PTH115 - text
    named = [*filter(None, spec.paths.split(",")), *_site(environ).document.get("paths", ())]
    chosen = [home + path[1:] if path.startswith("~") else path for path in named]
    mounts = mounted()
    for path in (output, submitted, str(Path(submitted, spec.script).parent), home):
        mount = mount_of(mounts, path)
        if mount.has_server and mount not in {mount_of(mounts, other) for other in chosen}:
            chosen.append(path)
    if not chosen and STORAGE in spec.check:
        chosen = [submitted]
    return ",".join(dict.fromkeys(path.rstrip("/") or "/" for path in chosen))


def standings(environ: Mapping[str, str]) -> Path | None:
    """Return the file in which the site publishes what its history says of nodes, if it does.

    Raises:
        ConfigError: the site's file cannot be used.
    """
    chosen = _site(environ).document.get("standings")
    return Path(chosen) if chosen else None


def expectations(environ: Mapping[str, str]) -> dict[str, Expectation]:
    """Return what a healthy device of each known model reaches, with the site's own figures.

    Raises:
        ConfigError: the site's file cannot be used.
    """
    tables = _site(environ).document.get("expectations", {})
    return expectations_from(tables, str(site_file(environ)))


def localize(environ: Mapping[str, str]) -> dict[str, object]:
    """Return what the site has chosen about localisation, by the names of its settings.

    Raises:
        ConfigError: the site's file cannot be used.
    """
    return localize_choices(_site(environ))


def localize_choices(file: SiteFile) -> dict[str, object]:
    """Return the table `[localize]` of the site's file, checked.

    Raises:
        ConfigError: it is no table, or holds a key or a value that it must not.
    """
    where, valid = ("localize",), CHOICES
    chosen = file.table(*where)
    for key, value in chosen.items():
        if key not in valid:
            raise file.error(where, key, "unknown setting", valid=valid)
        try:
            settings_from({key: value}, kind=DeviceKind.CPU)
        except ValueError as err:
            raise file.error(where, key, str(err).removeprefix(f"{key}: ")) from None
    return chosen


def refuse_unreadable(file: SiteFile) -> None:
    """Read the tables that users' checks read.

    Raises:
        ConfigError: one holds what they could not read.
    """
    localize_choices(file)
    for model, table in file.table("expectations").items():
        line = file.line(("expectations", re.sub(r"\s", "", model)))
        expectations_from({model: table}, f"{file.path}:{line}")


def site_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the site's file."""
    return Path(environ.get(SITE_FILE_VARIABLE) or SITE_FILE)


def _site(environ: Mapping[str, str]) -> SiteFile:
    """Return the site's file, an empty one where there is none.

    Raises:
        ConfigError: the file cannot be read, or holds a key or a value it must not.
    """
    try:
        return read(site_file(environ), trusted=False)
    except ConfigError as err:
        if isinstance(err.__cause__, FileNotFoundError):
            return SiteFile(site_file(environ), "")
        raise
