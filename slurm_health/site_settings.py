# SPDX-License-Identifier: Apache-2.0
"""The site's file: read, refused when others can write it, checked to the last key.

The same file tells every user's command where journals go (`slurm_health.config`); its tables
are the administrator's. A key that is unknown or impossible is an error that names its line.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slurm_health.checks import registry
from slurm_health.checks.check import Check, Planned
from slurm_health.core.expectations import expectations_from
from slurm_health.core.node.finding import Status
from slurm_health.core.node.node_pattern import is_pattern
from slurm_health.core.node.settings import (
    CONTEXTS,
    Accusations,
    Breaker,
    CommonKeys,
    Hooks,
    Marks,
    Recovery,
)
from slurm_health.errors import ConfigError

_T = TypeVar("_T", bound=msgspec.Struct)
TOP_KEYS = (
    "journal",
    "expectations",
    "localize",
    "hooks",
    "breaker",
    "recovery",
    "marks",
    "accusations",
    "checks",
)
_FIELD = re.compile(r"\$\.(\w+)")


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the file says. `journal` may begin with `~`; empty: each user's default."""

    path: str
    journal: str = ""
    hooks: Hooks = Hooks()
    breaker: Breaker = Breaker()
    recovery: Recovery = Recovery()
    marks: Marks = Marks()
    accusations: Accusations = Accusations()
    checks: tuple[Planned, ...] = ()

    @property
    def state(self) -> Path:
        """Root's own directory on this node."""
        return Path(self.hooks.state)

    def named(self, name: str) -> Planned | None:
        """Return the check of that name, None where the file no longer has it."""
        return next((each for each in self.checks if each.name == name), None)


def load(path: Path, *, owner: int = 0) -> Site:
    """Read the site's file.

    Args:
        path: of the file.
        owner: the user it must belong to. Others must not be able to write it: root acts on it.

    Raises:
        ConfigError: it cannot be read or trusted, or says something impossible.
    """
    text = _read_trusted(path, owner)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise ConfigError(str(path), "file", f"is not TOML: {err}") from err
    return _Reading(path, text).site(document)


def _read_trusted(path: Path, owner: int) -> str:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read()
    except OSError as err:
        raise ConfigError(str(path), "file", f"cannot be read: {err.strerror}") from err
    for place, status in ((path, found), (path.parent, path.parent.stat())):
        if status.st_uid not in {0, owner} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            problem = "can be written by others than root, so root does not follow it"
            raise ConfigError(str(path), str(place), f"{problem}; see: chown root, chmod go-w")
    try:
        return data.decode()
    except UnicodeDecodeError as err:
        raise ConfigError(str(path), "file", f"is not UTF-8: {err}") from err


class _Reading:
    """One pass over one file, which knows where each key stands."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()

    def site(self, document: Mapping[str, Any]) -> Site:
        for key in document:
            if key not in TOP_KEYS:
                raise self._error((), key, "unknown setting", valid=TOP_KEYS)
        journal = document.get("journal", "")
        if not isinstance(journal, str) or ("journal" in document and not journal):
            raise self._error((), "journal", f"expected a directory, found {journal!r}")
        self._check_users_tables(document)
        checks = self._table((), "checks", document)
        planned = tuple(
            each
            for name in checks
            if (each := self._planned(name, self._table(("checks",), name, checks))) is not None
        )
        return Site(
            path=str(self._path),
            journal=journal,
            hooks=self._top(Hooks, "hooks", document),
            breaker=self._top(Breaker, "breaker", document),
            recovery=self._top(Recovery, "recovery", document),
            marks=self._top(Marks, "marks", document),
            accusations=self._top(Accusations, "accusations", document),
            checks=planned,
        )

    def _check_users_tables(self, document: Mapping[str, Any]) -> None:
        """Refuse what users' checks could not read; the hooks themselves need none of it."""
        tables = self._table((), "expectations", document)
        for model, table in tables.items():
            line = self._line(("expectations", re.sub(r"\s", "", model)), None)
            expectations_from({model: table}, f"{self._path}:{line}")
        chosen = self._table((), "localize", document)
        if chosen:  # which loads what no hook needs
            from slurm_health.config import localize_choices
        for key, value in chosen.items():
            localize_choices({key: value}, f"{self._path}:{self._line(('localize',), key)}")

    def _top(self, kind: type[_T], name: str, document: Mapping[str, Any]) -> _T:
        return self._struct(kind, self._table((), name, document), (name,))

    def _planned(self, name: str, table: Mapping[str, Any]) -> Planned | None:
        where = ("checks", name)
        if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
            raise self._error(("checks",), name, "a check's name has letters, digits, - and _")
        shared = set(CommonKeys.__struct_fields__)
        own = {key: value for key, value in table.items() if key not in shared}
        kind = self._kind(name, table)
        for key in own:
            if key not in kind.__struct_fields__:
                valid = (*kind.__struct_fields__, *CommonKeys.__struct_fields__)
                raise self._error(where, key, "unknown setting", valid=valid)
        common = self._struct(
            CommonKeys, {key: value for key, value in table.items() if key in shared}, where
        )
        check = self._struct(kind, own, where)
        contexts = kind.CONTEXTS if common.contexts is None else common.contexts
        self._check_common(common, contexts, where)
        if not common.enabled:
            return None
        return Planned(
            name=name,
            check=check,
            time_limit_s=common.time_limit_s,
            severity=common.severity or kind.SEVERITY,
            shadow=common.shadow,
            contexts=contexts,
            nodes=common.nodes,
            partitions=common.partitions,
            line=self._line(where, None),
        )

    def _check_common(
        self, common: CommonKeys, contexts: tuple[str, ...], where: tuple[str, ...]
    ) -> None:
        for context in contexts:
            if context not in CONTEXTS:
                problem = f"unknown context {context!r}"
                raise self._error(where, "contexts", problem, valid=CONTEXTS)
        for key, patterns in (("nodes", common.nodes), ("partitions", common.partitions)):
            for pattern in patterns:
                if not is_pattern(pattern):
                    problem = f"{pattern!r} is no pattern, as gpu[01-16] or gpu* are"
                    raise self._error(where, key, problem)
        if common.severity in (Status.PASS, Status.INCONCLUSIVE):
            valid = ("warn", "user_fault", "node_fault")
            raise self._error(where, "severity", f"cannot be {common.severity.value}", valid=valid)

    def _kind(self, name: str, table: Mapping[str, Any]) -> type[Check]:
        asked = table.get("check", name)
        if not isinstance(asked, str):
            raise self._error(("checks", name), "check", f"expected a name, found {asked!r}")
        try:
            return registry.find(asked)
        except registry.UnknownCheck as err:
            key = "check" if "check" in table else None
            line = self._line(("checks", name), key)
            raise ConfigError(
                f"{self._path}:{line}", asked, "no such check", valid=err.known
            ) from err
        except Exception as err:  # an entry point may hold anything
            problem = f"{asked} cannot be loaded: {type(err).__name__}: {err}"
            raise self._error(("checks", name), "check", problem) from err

    def _table(
        self, where: tuple[str, ...], key: str, document: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        table = document.get(key, {})
        if not isinstance(table, dict):
            raise self._error(where, key, f"expected a table, found {table!r}")
        return table

    def _struct(self, kind: type[_T], table: Mapping[str, Any], where: tuple[str, ...]) -> _T:
        for key in table:
            if key not in kind.__struct_fields__:
                raise self._error(where, key, "unknown setting", valid=kind.__struct_fields__)
        try:
            return msgspec.convert(table, kind)
        except (msgspec.ValidationError, ValueError) as err:
            found = _FIELD.search(str(err))
            key = found.group(1) if found else ""
            problem = str(err).split(" - at `")[0]
            said = f"{problem}, found {table[key]!r}" if key in table else problem
            raise self._error(where, key, said) from err

    def _error(
        self, where: tuple[str, ...], key: str, problem: str, *, valid: tuple[str, ...] = ()
    ) -> ConfigError:
        line = self._line(where, key or None)
        return ConfigError(f"{self._path}:{line}", key or ".".join(where), problem, valid=valid)

    def _line(self, where: tuple[str, ...], key: str | None) -> int:
        """Return where a key, or a table's header, stands; the nearest thing that can be found."""
        header = ".".join(where)
        table, header_line = "", 1
        for number, line in enumerate(self._lines, 1):
            if found := re.match(r"\s*\[\s*([^]]+?)\s*\]", line):
                table = re.sub(r"[\"'\s]", "", found.group(1))
                if table == header:
                    header_line = number
                    if key is None:
                        return number
                if key is not None and table == ".".join((*where, key)):
                    return number
            elif (
                table == header
                and key
                and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line)
            ):
                return number
        return header_line
