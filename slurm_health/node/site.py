# SPDX-License-Identifier: Apache-2.0
"""The site's config file as root follows it: decoded once, checked to the last key."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slurm_health.node.checks.check import BUILT_IN, Check, Planned, check_type
from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.settings import CONTEXTS, CommonKeys, Hooks, Settings, is_pattern
from slurm_health.records.errors import ConfigError
from slurm_health.system import site_file
from slurm_health.system.private_files import publish
from slurm_health.system.site_file import SiteFile

_T = TypeVar("_T", bound=msgspec.Struct)
# In root's directory on each node: the config file as it was when it could last be used.
_LAST_GOOD = "config.toml"
_STATE = re.compile(rb"""^\s*state\s*=\s*["'](/[^"']+)["']""", re.MULTILINE)


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long hooks wait, in seconds. No settings: constants that a test may shorten."""

    # A Slurm command that has not answered after this is given up.
    slurm_s: float = 8.0
    # For the lock of the shared directory.
    lock_s: float = 5.0
    # Hooks that measure a fault at the same time ask Slurm spread over this long, by node name.
    spread_s: float = 3.0
    # A journal that takes longer to read accuses no node.
    journal_s: float = 20.0


class Site(Settings, frozen=True, kw_only=True):
    """The settings, with the checks as they are run.

    Args:
        path: of the file.
        planned: the checks.
        trouble: the problem of the file at `path`, if these are its last good settings.
        timing: how long hooks wait.
    """

    path: str = ""
    planned: tuple[Planned, ...] = ()
    trouble: str = ""
    timing: Timing = Timing()

    @property
    def state(self) -> Path:
        """Root's own directory on this node."""
        return Path(self.hooks.state)

    def named(self, name: str) -> Planned | None:
        """Return the check of that name, None if the file no longer has it."""
        return next((check for check in self.planned if check.name == name), None)


def load(path: Path, refuse: Callable[[SiteFile], object] | None = None) -> Site:
    """Read the config file, which only root, or the user who runs this, may be able to change.

    Args:
        path: the file.
        refuse: reads the tables that are not for root; its exceptions are passed on.

    Raises:
        ConfigError: it cannot be read or trusted, or a setting is invalid.
    """
    file = site_file.read(path, trusted=True)
    if refuse is not None:
        refuse(file)
    settings = _convert(file, file.document, Settings, ())
    state = settings.hooks.state
    with contextlib.suppress(OSError):  # nothing is there yet
        own, target = os.lstat(state), os.stat(state)  # noqa: PTH116 - a link and its target
        if own.st_uid not in {0, os.getuid()} or site_file.others_can_write(target):
            # Others could write there what this node was drained for.
            fix = "fix: chown root, chmod go-w, or another"
            problem = f"{state} must be a directory that only root can write; {fix}"
            raise file.error(("hooks",), "state", problem)
    planned = (_plan(file, name, table) for name, table in settings.checks.items())
    return Site(
        **{name: getattr(settings, name) for name in Settings.__struct_fields__},
        path=str(path),
        planned=tuple(check for check in planned if check is not None),
    )


def _convert(
    file: SiteFile,
    table: dict[str, Any],
    kind: type[_T],
    where: tuple[str, ...],
    more: tuple[str, ...] = (),
) -> _T:
    """Return a table as a struct; a mistake is named with its line and the nearest valid key."""
    try:
        return msgspec.convert(table, kind)
    except (msgspec.ValidationError, ValueError) as err:
        problem, _, path = str(err).partition(" - at `$")
        place = [*where, *re.findall(r"[\w-]+", path)]
        unknown = re.search(r"unknown field `(.*)`", problem)
        if unknown is None and place == [*where]:
            raise file.error(where, "", problem) from err
        if unknown is None:
            value: object = table
            for key in place[len(where) :]:
                value = value.get(key) if isinstance(value, dict) else None
            shown = "" if isinstance(value, dict) else f": {value!r}"
            raise file.error(tuple(place[:-1]), place[-1], problem + shown) from err
        inner = getattr(kind(), place[-1]) if place != list(where) else kind
        valid = (*inner.__struct_fields__, *more)
        raise file.error(tuple(place), unknown[1], "unknown setting", valid=valid) from err


def _plan(file: SiteFile, name: str, table: dict[str, Any]) -> Planned | None:
    """Return a check with its settings; None if it is disabled."""
    where = ("checks", name)
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise file.error(("checks",), name, "the name of a check has letters, digits, - and _")
    kind, shared = _kind(file, name, table), CommonKeys.__struct_fields__
    own = {key: value for key, value in table.items() if key not in shared}
    common = _convert(
        file, {key: table[key] for key in table.keys() & {*shared}}, CommonKeys, where
    )
    check = _convert(file, own, kind, where, shared)
    contexts = kind.CONTEXTS if common.contexts is None else common.contexts
    for context in contexts:
        if context not in CONTEXTS:
            raise file.error(where, "contexts", f"unknown context {context!r}", valid=CONTEXTS)
    for key, patterns in (("nodes", common.nodes), ("partitions", common.partitions)):
        for pattern in patterns:
            if not is_pattern(pattern):
                problem = f"invalid pattern {pattern!r}; e.g. gpu[01-16] or gpu*"
                raise file.error(where, key, problem)
    severities = (Status.WARN, Status.USER_FAULT, Status.NODE_FAULT)
    if common.severity not in (None, *severities):
        valid = tuple(status.value for status in severities)
        raise file.error(where, "severity", f"cannot be {common.severity.value}", valid=valid)
    if not common.enabled:
        return None
    return Planned(
        name=name,
        check=check,
        time_limit_s=common.time_limit_s,
        severity=common.severity or kind.SEVERITY,
        shadow=common.shadow,
        exclusive=kind.EXCLUSIVE if common.exclusive is None else common.exclusive,
        hang_is_fault=common.hang_is_fault,
        contexts=contexts,
        nodes=common.nodes,
        partitions=common.partitions,
        line=file.line(where),
    )


def _kind(file: SiteFile, name: str, table: dict[str, Any]) -> type[Check]:
    where, asked = ("checks", name), table.get("check", name)
    if not isinstance(asked, str):
        raise file.error(where, "check", f"expected a name, found {asked!r}")
    if asked not in BUILT_IN:
        source = f"{file.path}:{file.line(where, 'check' if 'check' in table else '')}"
        raise ConfigError(source, asked, "no such check", valid=tuple(BUILT_IN))
    return check_type(asked)


# --- the last good file --------------------------------------------------------------------------


def load_for_hook(path: Path) -> Site:
    """Read the config file; if it cannot be used, this node's copy of the last good one.

    One wrong line must not leave every node of a cluster unchecked. Without a file nothing is
    checked.

    Raises:
        ConfigError: neither can be used.
    """
    try:
        return load(path)
    except ConfigError as err:
        try:
            named = _STATE.search(path.read_bytes())
            state = os.fsdecode(named[1]) if named else Hooks().state
            kept = load(Path(state) / _LAST_GOOD)
        except (OSError, ConfigError):
            raise err from None
        return msgspec.structs.replace(kept, path=str(path), trouble=str(err))


def keep_last_good(site: Site) -> None:
    """Save a copy of a config file that can be used; a failure to save loses it."""
    if site.trouble:
        return
    copy = site.state / _LAST_GOOD
    with contextlib.suppress(OSError):
        data = Path(site.path).read_bytes()
        if not copy.exists() or copy.read_bytes() != data:
            site.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            publish(copy, data, mode=0o600)
