# SPDX-License-Identifier: Apache-2.0
"""What the site's file says to what runs as root: every table, checked to the last key."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slurm_health.node.checks.check import Check, Planned, UnknownCheck, find_check
from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.settings import (
    CONTEXTS,
    Accusations,
    Breaker,
    CommonKeys,
    Default,
    Hooks,
    Marks,
    Metrics,
    Notify,
    Recovery,
    Repair,
    Sweep,
    is_pattern,
)
from slurm_health.records.errors import ConfigError
from slurm_health.system import site_file
from slurm_health.system.private_files import publish
from slurm_health.system.site_file import SiteFile

_T = TypeVar("_T", bound=msgspec.Struct)
_FIELD = re.compile(r"\$\.(\w+)")
# What replaces a setting, by its table and name.
_REPLACEMENTS = {
    "hooks.end_leftovers": "Slurm ends what a job leaves: ProctrackType=proctrack/cgroup",
    "notify.targets": "set command or urls in [notify]",
    "repair.reload": "the step is reboot",
    "repair.deep_test": "set test in [repair]: it runs on the drained node, in place",
}


# In root's directory on each node: the config file as it was when it could last be used.
_LAST_GOOD = "config.toml"
_STATE = re.compile(rb"""^\s*state\s*=\s*["'](/[^"']+)["']""", re.MULTILINE)


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the file says. `journal` may begin with `~`; empty: each user's default.

    `trouble` says what is wrong with the file at `path`, if these are its last good settings.
    """

    path: str
    trouble: str = ""
    journal: str = ""
    hooks: Hooks = Hooks()
    breaker: Breaker = Breaker()
    recovery: Recovery = Recovery()
    marks: Marks = Marks()
    accusations: Accusations = Accusations()
    sweep: Sweep = Sweep()
    default: Default = Default()
    metrics: Metrics = Metrics()
    notify: Notify = Notify()
    repair: Repair = Repair()
    checks: tuple[Planned, ...] = ()

    @property
    def state(self) -> Path:
        """Root's own directory on this node."""
        return Path(self.hooks.state)

    @property
    def passes(self) -> Path:
        """Where this node's hooks say that it has passed."""
        return Path(self.hooks.passes)

    @property
    def longest_pass_min(self) -> float:
        """For how long a node that has passed is taken for well by anybody; 0: by nobody."""
        return max(self.hooks.passed_min, self.default.passed_min)

    @property
    def keeps_passes(self) -> bool:
        """Whether it is kept that a node has passed."""
        return self.longest_pass_min > 0

    def named(self, name: str) -> Planned | None:
        """Return the check of that name, None where the file no longer has it."""
        return next((each for each in self.checks if each.name == name), None)


def load(path: Path, refuse: Callable[[SiteFile], object] | None = None) -> Site:
    """Read the site's file as root, or whoever runs this, may follow it.

    Args:
        path: the file.
        refuse: reads the tables that are not for root; what it raises is raised.

    Raises:
        ConfigError: it cannot be read or trusted, or says something impossible.
    """
    file = site_file.read(path, trusted=True)
    if refuse is not None:
        refuse(file)
    hooks = _top(file, Hooks, "hooks")
    _refuse_loose(file, hooks.state)
    planned = (_planned(file, name) for name in file.table("checks"))
    return Site(
        path=str(path),
        journal=file.document.get("journal", ""),
        hooks=hooks,
        breaker=_top(file, Breaker, "breaker"),
        recovery=_top(file, Recovery, "recovery"),
        marks=_top(file, Marks, "marks"),
        accusations=_top(file, Accusations, "accusations"),
        sweep=_top(file, Sweep, "sweep"),
        default=_top(file, Default, "default"),
        metrics=_top(file, Metrics, "metrics"),
        notify=_top(file, Notify, "notify"),
        repair=_top(file, Repair, "repair"),
        checks=tuple(each for each in planned if each is not None),
    )


def load_for_hook(path: Path) -> Site:
    """Read the config file, or if that cannot be used, what this node kept of the last good one.

    One wrong line must not leave every node of a cluster unchecked.

    Raises:
        ConfigError: neither can be used.
    """
    try:
        return load(path)
    except ConfigError as err:
        kept = _last_good(path)
        if kept is None:
            raise
        return msgspec.structs.replace(kept, path=str(path), trouble=str(err))


def _last_good(path: Path) -> Site | None:
    """Return the settings that this node has kept, None if there are none that can be used.

    A file that was removed is no wrong file: nothing is to be checked then.
    """
    try:
        named = _STATE.search(path.read_bytes())
        state = os.fsdecode(named[1]) if named else Hooks().state
        return load(Path(state) / _LAST_GOOD)
    except (OSError, ConfigError):
        return None


def keep_last_good(site: Site) -> None:
    """Keep a copy of a config file that could be used; what cannot be kept is lost."""
    if site.trouble:
        return
    copy = site.state / _LAST_GOOD
    with contextlib.suppress(OSError):
        data = Path(site.path).read_bytes()
        if not copy.exists() or copy.read_bytes() != data:
            site.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            publish(copy, data, mode=0o600)


def _refuse_loose(file: SiteFile, state: str) -> None:
    """Refuse a directory of root's in which others could say what this node was drained for."""
    try:
        named, found = os.lstat(state), os.stat(state)  # noqa: PTH116 - both take a link apart
    except OSError:
        return  # nothing is there yet
    if named.st_uid not in {0, os.getuid()} or site_file.others_can_write(found):
        problem = f"{state} must be a directory that only root can write"
        raise file.error(("hooks",), "state", f"{problem}; fix: chown root, chmod go-w, or another")


def _top(file: SiteFile, kind: type[_T], name: str) -> _T:
    return _struct(file, kind, file.table(name), (name,))


def _planned(file: SiteFile, name: str) -> Planned | None:
    """Return a check as the site wants it run; None for one that it has disabled."""
    where, table = ("checks", name), file.table("checks", name)
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise file.error(("checks",), name, "the name of a check has letters, digits, - and _")
    kind = _kind(file, name, table)
    shared = CommonKeys.__struct_fields__
    valid = (*kind.__struct_fields__, *shared)
    common_keys = {key: value for key, value in table.items() if key in shared}
    own_keys = {key: value for key, value in table.items() if key not in shared}
    common = _struct(file, CommonKeys, common_keys, where)
    check = _struct(file, kind, own_keys, where, valid)
    contexts = kind.CONTEXTS if common.contexts is None else common.contexts
    _refuse_impossible(file, common, contexts, where)
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


def _refuse_impossible(
    file: SiteFile, common: CommonKeys, contexts: tuple[str, ...], where: tuple[str, ...]
) -> None:
    for context in contexts:
        if context not in CONTEXTS:
            raise file.error(where, "contexts", f"unknown context {context!r}", valid=CONTEXTS)
    for key, patterns in (("nodes", common.nodes), ("partitions", common.partitions)):
        for pattern in patterns:
            if not is_pattern(pattern):
                problem = f"invalid pattern {pattern!r}; e.g. gpu[01-16] or gpu*"
                raise file.error(where, key, problem)
    if common.severity in (Status.PASS, Status.INCONCLUSIVE):
        problem = f"cannot be {common.severity.value}"
        raise file.error(where, "severity", problem, valid=("warn", "user_fault", "node_fault"))


def _kind(file: SiteFile, name: str, table: dict[str, Any]) -> type[Check]:
    asked = table.get("check", name)
    if not isinstance(asked, str):
        raise file.error(("checks", name), "check", f"expected a name, found {asked!r}")
    try:
        return find_check(asked)
    except UnknownCheck as err:
        line = file.line(("checks", name), "check" if "check" in table else "")
        source = f"{file.path}:{line}"
        raise ConfigError(source, asked, "no such check", valid=err.known) from err
    except Exception as err:  # an entry point may hold anything
        problem = f"{asked} cannot be loaded: {type(err).__name__}: {err}"
        raise file.error(("checks", name), "check", problem) from err


def _struct(
    file: SiteFile,
    kind: type[_T],
    table: dict[str, Any],
    where: tuple[str, ...],
    valid: tuple[str, ...] = (),
) -> _T:
    for key in table:
        if key not in kind.__struct_fields__:
            valid = valid or kind.__struct_fields__
            instead = _REPLACEMENTS.get(".".join((*where, key)))
            if instead:
                raise file.error(where, key, f"unknown setting; {instead}")
            raise file.error(where, key, "unknown setting", valid=valid)
    try:
        return msgspec.convert(table, kind)
    except (msgspec.ValidationError, ValueError) as err:
        found = _FIELD.search(str(err))
        key = found.group(1) if found else ""
        problem = str(err).split(" - at `")[0]
        said = f"{problem}, found {table[key]!r}" if key in table else problem
        raise file.error(where, key, said) from err
