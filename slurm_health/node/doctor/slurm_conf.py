# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`: slurm.conf, and the scripts that it names.

Releases of Slurm are from its own CHANGELOG and slurm.conf(5).
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from slurm_health.node.doctor import ownership
from slurm_health.node.doctor.advice import Advice, change, fine, look
from slurm_health.node.site import Site
from slurm_health.records.errors import SlurmCommandError, SlurmError
from slurm_health.records.text import whole_number
from slurm_health.system import templates
from slurm_health.system.slurm import command
from slurm_health.system.slurm.parsing import parse_config
from slurm_health.system.templates import HOOKS_DIRECTORY, SHIMS, search_path

_CALL = "slurm_health.node.hooks"
_MOST_BYTES = 64 << 10
# `timeout -k 5` in the shims.
_KILL_AFTER_S = 5
# Limits of the shims as they are shipped. An epilog may test the node, with DCGM for minutes.
SHIM_LIMITS_S = {"Prolog": 120, "Epilog": 480}
# HealthCheckTimeout's default, which releases before 26.05 always keep to.
_HEALTH_CHECK_S = 60
# Slurm's own from 24.05 on: so many times MessageTimeout, and at least so long.
_MESSAGES, _UNKILLABLE_S = 5, 60
_NO_LIMIT = 65534  # as scontrol shows a time limit that is not set
_WITHOUT = {
    "Prolog": "nodes are not checked before a job",
    "Epilog": "accusations of nodes by users' jobs are not followed up",
    "HealthCheckProgram": "idle nodes are neither checked nor returned to service",
    "UnkillableStepProgram": "what kept a node that Slurm drains (Kill task failed) is lost",
}
_FAILS = "every job fails there, and Slurm drains its nodes"


class Shim(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of a shim that a site edits, and its search path."""

    path: str
    python: str
    config: str
    search_path: str
    limit_s: int


def read_config(text: str) -> dict[str, str]:
    """Return the fields of `scontrol show config`."""
    return parse_config(text)


def read_shim(path: Path) -> Shim | None:
    """Return the settings of a shim; None for any other script, or one that cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return None
    if _CALL not in text:
        return None
    values = templates.settings(text)
    return Shim(
        path=str(path),
        python=values.get("python", ""),
        config=values.get("config", ""),
        search_path=search_path(text),
        limit_s=whole_number(values.get("limit", "")) or 0,
    )


def scripts_of(key: str, config: Mapping[str, str]) -> dict[str, Shim | None]:
    """Return the scripts that slurm.conf names under a key, with the settings of our shims.

    23.02 and newer number several entries: Prolog[0]. slurmd expands patterns in the same way.
    """
    entries = [
        entry
        for name, value in config.items()
        if re.fullmatch(rf"{key}(\[\d+\])?", name) and value
        for entry in value.split(",")
    ]
    paths = [path for entry in entries for path in (sorted(glob.glob(entry)) or [entry])]  # noqa: PTH207
    return {path: read_shim(Path(path)) for path in paths}


def advise(config: Mapping[str, str], site: Site | None) -> list[Advice]:
    """Return advice on slurm.conf and the scripts that it names."""
    scripts = {key: scripts_of(key, config) for key in SHIMS}
    shims = {key: [shim for shim in paths.values() if shim] for key, paths in scripts.items()}
    every = {shim.path: shim for of_key in shims.values() for shim in of_key}
    paths = [path for of_key in scripts.values() for path in of_key]
    commands = [place for shim in every.values() for place in shim.search_path.split(":") if place]
    return [
        *(advice for key in SHIMS for advice in _scripts(key, scripts[key])),
        *ownership.advise(paths, commands, [shim.python for shim in every.values()]),
        *_prolog_flags(config),
        *_timeouts(config, shims),
        *_own_drains(config, shims),
        *_requeue(config),
        *_health_check(config, site, shims["HealthCheckProgram"]),
        *(advice for shim in every.values() for advice in _shim(shim, site)),
    ]


def _scripts(key: str, scripts: Mapping[str, Shim | None]) -> Iterator[Advice]:
    shim = f"{key}={HOOKS_DIRECTORY}/{SHIMS[key]}"
    if not scripts:
        yield look(f"{key} is not set: {_WITHOUT[key]}", f"slurm-health init hooks, then {shim}")
        return
    for path in scripts:
        why = trouble(path)
        if why:
            harm = _FAILS if key in SHIM_LIMITS_S else _WITHOUT[key]
            fix = f"chmod 755 {path}" if "executable" in why else "put it there on every node"
            yield change(f"{key}={path} {why}: {harm}", f"{fix}, or remove {key} from slurm.conf")
        else:
            yield fine(f"{key}={path}")
    # An ordinary user may not be able to read root's scripts.
    if not any(scripts.values()) and all(os.access(path, os.R_OK) for path in scripts):
        yield look(f"{key} runs no shim of slurm-health: {_WITHOUT[key]}", f"add {shim}")


def _shim(shim: Shim, site: Site | None) -> Iterator[Advice]:
    unchecked = "it checks nothing, logs that, and lets every job start"
    why = trouble(shim.python)
    if why:
        text = f"{shim.path}: python={shim.python} {why}: {unchecked}"
        yield change(text, f"edit the line python= in {shim.path}")
    elif not ownership.replaceable(Path(shim.python)):  # or others could have root run theirs
        try:
            command.run([shim.python, "-I", "-c", f"import {_CALL}"], environ={"PATH": os.defpath})
        except SlurmCommandError:
            text = f"{shim.path}: python={shim.python} has no slurm_health: {unchecked}"
            fix = "install slurm-health there, or have init hooks rewrite the shim"
            yield change(text, f"{fix}: it names the interpreter that it is called with")
        except SlurmError:
            pass  # no answer says nothing
    if shutil.which("scontrol", path=shim.search_path) is None:
        text = f"{shim.path} finds no scontrol in {shim.search_path}: its hook never drains a node"
        yield change(text, f"edit the line slurm= in {shim.path}: the directory of scontrol")
    why = trouble(shim.config, program=False)
    if why:
        text = f"{shim.path}: config={shim.config} {why}: {unchecked}"
        yield change(text, f"put the config file there, or edit the line config= in {shim.path}")
    elif site is not None and Path(shim.config).resolve() != Path(site.path).resolve():
        text = f"{shim.path} follows {shim.config}, but this advice is about {site.path}"
        yield look(text, f"slurm-health doctor --config {shim.config}")


def _prolog_flags(config: Mapping[str, str]) -> Iterator[Advice]:
    flags = [flag for flag in config.get("PrologFlags", "").split(",") if flag]
    known = {flag.lower() for flag in flags}
    missing = [flag for flag in ("Alloc", "DeferBatch") if flag.lower() not in known]
    if missing:
        text = (
            f"PrologFlags lacks {' and '.join(missing)}: a batch script starts while the prologs of"
            " its other nodes are still running"
        )
        yield change(text, f"PrologFlags={','.join([*flags, *missing])}")
    else:
        yield fine("PrologFlags has Alloc and DeferBatch")


def _timeouts(config: Mapping[str, str], shims: Mapping[str, list[Shim]]) -> Iterator[Advice]:
    limits_s = {
        key: max((shim.limit_s for shim in shims[key]), default=default) + _KILL_AFTER_S
        for key, default in SHIM_LIMITS_S.items()
    }
    too_short = False
    for key, hooks in (
        ("PrologEpilogTimeout", ("Prolog", "Epilog")),
        ("PrologTimeout", ("Prolog",)),
        ("EpilogTimeout", ("Epilog",)),
    ):
        limit_s = max(limits_s[hook] for hook in hooks)
        slurms = _seconds(config, key)
        if slurms is not None and slurms <= limit_s:
            too_short = True
            text = f"{key}={slurms}: Slurm kills a hook that takes longer, and drains its node"
            fix = f"{key}={limit_s + _KILL_AFTER_S} or more, or a lower limit= in the shims"
            yield change(text, fix)
    if not too_short:
        yield fine(f"Slurm lets the hooks finish, which takes at most {max(limits_s.values())} s")


def _own_drains(config: Mapping[str, str], shims: Mapping[str, list[Shim]]) -> Iterator[Advice]:
    """Yield advice on limits that make Slurm drain healthy nodes, or keep nodes for ever."""
    kill_s, message_s = (
        _seconds(config, "UnkillableStepTimeout"),
        _seconds(config, "MessageTimeout"),
    )
    if kill_s and message_s and kill_s < _MESSAGES * message_s:
        text = (
            f"UnkillableStepTimeout={kill_s} is less than {_MESSAGES} times MessageTimeout"
            f" ({message_s} s): Slurm drains nodes whose processes only end slowly"
        )
        yield look(text, f"UnkillableStepTimeout={max(_UNKILLABLE_S, _MESSAGES * message_s)}")
    limits_s = [_seconds(config, key) for key in ("PrologEpilogTimeout", "EpilogTimeout")]
    if "PrologEpilogTimeout" in config and not any(s and s != _NO_LIMIT for s in limits_s):
        longest_s = max([SHIM_LIMITS_S["Epilog"], *(shim.limit_s for shim in shims["Epilog"])])
        text = "PrologEpilogTimeout is not set: an Epilog that hangs keeps its node for ever"
        yield look(text, f"PrologEpilogTimeout={longest_s + 2 * _KILL_AFTER_S} or more")


def _requeue(config: Mapping[str, str]) -> Iterator[Advice]:
    """Yield advice on the requeue of a job whose prolog fails."""
    parameters = [word for word in config.get("SchedulerParameters", "").split(",") if word]
    if config.get("JobRequeue") == "0":
        text = "JobRequeue=0: a job whose prolog fails is not started elsewhere"
        yield look(text, "JobRequeue=1")
    if "nohold_on_prolog_fail" not in parameters:
        text = (
            "SchedulerParameters lacks nohold_on_prolog_fail: a job whose prolog fails on a bad"
            " node is held until it is released"
        )
        wanted = ",".join([*parameters, "nohold_on_prolog_fail"])
        yield look(text, f"SchedulerParameters={wanted}")


def _health_check(
    config: Mapping[str, str], site: Site | None, shims: list[Shim]
) -> Iterator[Advice]:
    key = "HealthCheckProgram"
    program = config.get(key, "")
    if not program:
        return  # the advice on scripts covers it
    if not _seconds(config, "HealthCheckInterval"):
        text = f"HealthCheckInterval=0: {key} never runs: {_WITHOUT[key]}"
        yield look(text, "HealthCheckInterval=300")
        return
    limit_s = _seconds(config, "HealthCheckTimeout") or _HEALTH_CHECK_S
    if any(shim.limit_s + _KILL_AFTER_S >= limit_s for shim in shims):
        text = f"Slurm kills {key} after {limit_s} s, before its shim's own limit"
        yield look(text, f"HealthCheckTimeout={_HEALTH_CHECK_S}, or a lower limit= in {program}")
    word = config.get("HealthCheckNodeState", "") or "ANY"
    states = {state.strip() for state in word.upper().split(",")}
    if "ANY" in states:
        yield fine(f"{key} runs on nodes in state {word}")
    else:
        text = f"HealthCheckNodeState={word}: nodes in other states are not checked"
        returns = "" if site is not None and not site.recovery.passes else ", nor returned"
        yield look(f"{text}{returns}", "HealthCheckNodeState=ANY, unless a check needs idle nodes")


def _seconds(config: Mapping[str, str], key: str) -> int | None:
    number = re.match(r"\d{1,18}", config.get(key, ""))
    return int(number[0]) if number else None


def trouble(path: str, *, program: bool = True) -> str:
    """Return why slurmd cannot use a file; empty if it can, or if that is unknown.

    An ordinary user may not be able to enter root's directories.
    """
    try:
        mode = Path(path).stat().st_mode
    except PermissionError:
        return ""
    except OSError:
        return "is not there"
    if not stat.S_ISREG(mode):
        return "is not a file"
    return "is not executable" if program and not mode & 0o111 else ""
