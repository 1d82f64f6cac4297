# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`, the part about slurm.conf: what of it should be changed."""

from __future__ import annotations

import glob
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from slurm_health.node.doctor import cluster, ownership
from slurm_health.node.doctor.advice import Advice, change, fine, look
from slurm_health.node.site_settings import Site
from slurm_health.records.errors import SlurmCommandError, SlurmError
from slurm_health.records.text import whole_number
from slurm_health.system import templates
from slurm_health.system.slurm import command
from slurm_health.system.templates import HOOKS_DIRECTORY, SHIMS, search_path

_GLOB = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"\d{1,18}")
# `timeout -k 5` in the shims.
_KILL_AFTER_S = 5
# What the shims say as they are shipped. An epilog may test the node, with DCGM for minutes.
SHIM_LIMITS_S = {"Prolog": 120, "Epilog": 480}
_TIMEOUTS = {
    "PrologEpilogTimeout": ("Prolog", "Epilog"),
    "PrologTimeout": ("Prolog",),
    "EpilogTimeout": ("Epilog",),
}
# What `limit=` of the health check's shim leaves for it to end, below Slurm's own limit.
_ENDS_BEFORE_S = 10
_WITHOUT = {
    "Prolog": "nodes are not checked before a job",
    "Epilog": "what users' jobs find out is not followed up, and nothing is cleaned up",
    "HealthCheckProgram": "idle nodes are neither checked nor returned to service",
}
# What sites have values of their own in, so that a line of ours below theirs takes them away.
_LISTS = ("PrologFlags", "SchedulerParameters")
# Files that include one another.
_DEEPEST = 5
_FAILS = "every job fails there, and Slurm drains its nodes"


def read_config(text: str) -> dict[str, str]:
    """Return the fields of `scontrol show config`."""
    fields = {}
    for line in _printable(text).splitlines():
        name, sign, value = line.partition("=")
        if sign:
            fields[name.strip()] = "" if value.strip() == "(null)" else value.strip()
    return fields


def _printable(text: str) -> str:
    # A path with a zero byte in it names no file, and to ask for it is a ValueError.
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def advise(config: Mapping[str, str], site: Site | None) -> list[Advice]:
    """Return what slurm.conf and the scripts that it names should have."""
    named = {key: entries(key, config) for key in SHIMS}
    shims = {key: [shim for _, shim in found if shim] for key, found in named.items()}
    every = {shim.path: shim for found in shims.values() for shim in found}
    scripts = [path for found in named.values() for path, _ in found]
    commands = [each for shim in every.values() for each in shim.search_path.split(":") if each]
    return [
        *(each for key in ("Prolog", "Epilog") for each in _scripts(key, config)),
        *ownership.advise(scripts, commands, [shim.python for shim in every.values()]),
        *_lost(config),
        *_prolog_flags(config),
        *_timeouts(config, shims),
        *_requeue(config),
        *_credential(config, shims["Prolog"]),
        *_health_check(config, site, shims["HealthCheckProgram"]),
        *(each for shim in every.values() for each in _shim(shim, site)),
        *cluster.failover(config),
        *cluster.advise_on_release(config),
    ]


def hook_limits_s(config: Mapping[str, str]) -> dict[str, int]:
    """Return the shortest time after which a shim ends prolog and epilog, by key of slurm.conf."""
    return {
        key: min((shim.limit_s for _, shim in entries(key, config) if shim), default=limit_s)
        for key, limit_s in SHIM_LIMITS_S.items()
    }


def entries(key: str, config: Mapping[str, str]) -> list[tuple[str, Shim | None]]:
    """Return every script slurm.conf names under a key, with what stands in it if it is a shim."""
    return [(path, read_shim(Path(path))) for path in _paths(key, config) for path in _files(path)]


def _paths(key: str, config: Mapping[str, str]) -> list[str]:
    # 23.02 and newer number several entries: Prolog[0].
    return [
        entry
        for name, value in config.items()
        if re.fullmatch(rf"{key}(\[\d+\])?", name) and value
        for entry in value.split(",")
    ]


def _files(entry: str) -> list[str]:
    # slurmd expands a pattern in the same way.
    return sorted(glob.glob(entry)) if _GLOB.search(entry) else [entry]  # noqa: PTH207


def _scripts(key: str, config: Mapping[str, str]) -> Iterator[Advice]:
    paths = _paths(key, config)
    shim = f"{key}={HOOKS_DIRECTORY}/{SHIMS[key]}"
    if not paths:
        text = f"{key} is not set: {_WITHOUT[key]}"
        yield look(text, f"slurm-health init-hooks, then {shim}")
        return
    for entry in paths:
        if _GLOB.search(entry):
            yield from _pattern(key, entry)
        else:
            yield _script(key, entry)
    found = entries(key, config)
    if (
        found
        and not any(each for _, each in found)
        and all(os.access(p, os.R_OK) for p, _ in found)
    ):
        yield look(f"{key} runs no shim of slurm-health: {_WITHOUT[key]}", f"add {shim}")


def _pattern(key: str, entry: str) -> Iterator[Advice]:
    found = _files(entry)
    if not found:
        if os.access(Path(entry).parent, os.R_OK | os.X_OK) or not Path(entry).parent.exists():
            text = f"{key}={entry} matches nothing: {_FAILS}"
            yield change(text, f"name each script, or remove {key} from slurm.conf")
        else:
            yield look(f"{key}={entry}: this user cannot see what is there", "run doctor as root")
        return
    for path in found:
        why = trouble(path)
        if why:
            yield change(
                f"{key}={entry}: {path} {why}: {_FAILS}", f"chmod 755 it, or remove {path}"
            )
    text = f"{key}={entry} is a pattern: any stray file there makes every job fail"
    yield look(text, "name each script in slurm.conf")


def _script(key: str, entry: str) -> Advice:
    why = trouble(entry)
    if why:
        mend = f"chmod 755 {entry}" if "executable" in why else "put it there on every node"
        return change(f"{key}={entry} {why}: {_FAILS}", f"{mend}, or remove {key} from slurm.conf")
    return fine(f"{key}={entry}")


def _shim(shim: Shim, site: Site | None) -> Iterator[Advice]:
    why = trouble(shim.python)
    unchecked = "it checks nothing, says so in the log, and lets every job start"
    if why:
        text = f"{shim.path}: python={shim.python} {why}: {unchecked}"
        yield change(text, f"edit the line python= in {shim.path}")
    elif not ownership.replaceable(Path(shim.python)) and not _has_hooks(shim.python):
        text = f"{shim.path}: python={shim.python} has no slurm_health: {unchecked}"
        mend = "install slurm-health there, or have init-hooks rewrite the shim"
        yield change(text, f"{mend}: it names the interpreter that it is called with")
    if shutil.which("scontrol", path=shim.search_path) is None:
        text = f"{shim.path} finds no scontrol in {shim.search_path}: its hook never drains a node"
        yield change(text, f"edit the line slurm= in {shim.path}: the directory of scontrol")
    why = trouble(shim.config, program=False)
    if why:
        text = f"{shim.path}: config={shim.config} {why}: {unchecked}"
        yield change(text, f"put the site's file there, or edit the line config= in {shim.path}")
    elif site is not None and Path(shim.config).resolve() != Path(site.path).resolve():
        text = f"{shim.path} follows {shim.config}, but this advice is about {site.path}"
        yield look(text, f"slurm-health doctor --config {shim.config}")


def _has_hooks(python: str) -> bool:
    """Tell whether an interpreter starts the hooks as a shim has it do that, or cannot be asked."""
    try:
        command.run([python, "-I", "-c", f"import {_CALL}"], environ={"PATH": os.defpath})
    except SlurmCommandError:
        return False
    except SlurmError:
        return True
    return True


def _prolog_flags(config: Mapping[str, str]) -> list[Advice]:
    flags = [flag for flag in config.get("PrologFlags", "").split(",") if flag]
    known = {flag.lower() for flag in flags}
    missing = [flag for flag in ("Alloc", "DeferBatch") if flag.lower() not in known]
    if missing:
        text = (
            f"PrologFlags lacks {' and '.join(missing)}: a batch script starts while the prologs of"
            " its other nodes are still running"
        )
        return [change(text, f"PrologFlags={','.join([*flags, *missing])}")]
    return [fine("PrologFlags has Alloc and DeferBatch")]


def _lost(config: Mapping[str, str]) -> Iterator[Advice]:
    """Look for settings that stand twice in slurm.conf: Slurm takes the last and drops the rest."""
    path = config.get("SLURM_CONF", "")
    lines = _lines(Path(path)) if path else []
    for key in _LISTS:
        said = [line.partition("=")[2].split("#")[0].strip() for line in lines if _sets(line, key)]
        words = list(dict.fromkeys(word for each in said for word in each.split(",") if word))
        lost = [word for word in words if word not in said[-1].split(",")]
        if lost:
            text = f"{path} sets {key} {len(said)} times, and Slurm takes the last"
            yield change(f"{text}: {','.join(lost)} is lost", f"one line: {key}={','.join(words)}")


def _lines(path: Path, depth: int = 0) -> list[str]:
    """Return the lines of slurm.conf and of the files that it includes; none it cannot read."""
    try:
        text = path.read_text(errors="replace")
    except (OSError, ValueError):  # the latter for a path that is none
        return []
    found = []
    for line in text.splitlines():
        words = line.split()
        is_include = len(words) == 2 and words[0].lower() == "include" and depth < _DEEPEST
        found += _lines(path.parent / words[1], depth + 1) if is_include else [line]
    return found


def _sets(line: str, key: str) -> bool:
    return line.partition("=")[0].strip().lower() == key.lower()


def _timeouts(config: Mapping[str, str], shims: Mapping[str, list[Shim]]) -> list[Advice]:
    limits_s = {
        key: max((shim.limit_s for shim in shims[key]), default=default) + _KILL_AFTER_S
        for key, default in SHIM_LIMITS_S.items()
    }
    found = []
    for key, hooks in _TIMEOUTS.items():
        limit_s = max(limits_s[hook] for hook in hooks)
        number = _NUMBER.match(config.get(key, ""))
        if number and int(number.group()) <= limit_s:
            text = (
                f"{key}={number.group()}: Slurm kills a hook that takes longer, and drains its node"
            )
            mend = f"{key}={limit_s + _KILL_AFTER_S} or more, or a lower limit= in the shims"
            found.append(change(text, mend))
    longest_s = max(limits_s.values())
    return found or [fine(f"Slurm lets the hooks finish, which takes at most {longest_s} s")]


def _requeue(config: Mapping[str, str]) -> list[Advice]:
    found = []
    if config.get("JobRequeue") == "0":
        text = "JobRequeue=0: a job whose prolog fails is not started elsewhere"
        found.append(look(text, "JobRequeue=1"))
    parameters = [each for each in config.get("SchedulerParameters", "").split(",") if each]
    if "nohold_on_prolog_fail" not in parameters:
        text = (
            "SchedulerParameters lacks nohold_on_prolog_fail: a job whose prolog finds a bad node"
            " is held until it is released"
        )
        wanted = ",".join([*parameters, "nohold_on_prolog_fail"])
        found.append(look(text, f"SchedulerParameters={wanted}"))
    return found or cluster.wait(config)


def _credential(config: Mapping[str, str], shims: list[Shim]) -> Iterator[Advice]:
    """Look whether a job's credential outlives its prolog; slurmd refuses an expired one."""
    expire_s = cluster.cred_expire_s(config)
    longest_s = max((shim.limit_s for shim in shims), default=0)
    if expire_s is not None and expire_s < longest_s:
        text = (
            f"AuthInfo has cred_expire={expire_s}: a prolog may take the {longest_s} s of its"
            " shim, and a job whose credential expires meanwhile fails"
        )
        yield look(text, f"cred_expire={longest_s} or more, or a lower limit= in the prolog's shim")


def _health_check(
    config: Mapping[str, str], site: Site | None, shims: list[Shim]
) -> Iterator[Advice]:
    key = "HealthCheckProgram"
    program = config.get(key, "")
    if not program:
        yield look(f"{key} is not set: {_WITHOUT[key]}", f"{key}={HOOKS_DIRECTORY}/{SHIMS[key]}")
        return
    why = trouble(program)
    if why:
        mend = f"put it there on every node, executable, or remove {key} from slurm.conf"
        yield change(f"{key}={program} {why}: {_WITHOUT[key]}", mend)
    elif not shims and os.access(program, os.R_OK):
        text = f"{key}={program} is no shim of slurm-health: what it drained stays drained"
        yield look(text, f"call {HOOKS_DIRECTORY}/{SHIMS[key]} from it")
    number = _NUMBER.match(config.get("HealthCheckInterval", ""))
    if not number or int(number.group()) == 0:
        text = f"HealthCheckInterval=0: {key} never runs: {_WITHOUT[key]}"
        yield look(text, "HealthCheckInterval=300")
        return
    limit_s = cluster.health_check_limit_s(config)
    if any(shim.limit_s + _KILL_AFTER_S >= limit_s for shim in shims):
        text = f"Slurm kills {key} after {limit_s} s, before its shim's own limit"
        yield look(text, _longer(limit_s, program))
    state = config.get("HealthCheckNodeState", "") or "ANY"
    found = list(_node_state({each.strip() for each in state.upper().split(",")}, state, site))
    yield from found or [fine(f"{key} runs every {number.group()} s on nodes in state {state}")]


def _longer(limit_s: int, program: str) -> str:
    """Say how a health check ends before Slurm kills it."""
    if limit_s != cluster.HEALTH_CHECK_LIMIT_S:
        return f"HealthCheckTimeout={cluster.HEALTH_CHECK_LIMIT_S}, or a lower limit= in {program}"
    return f"limit={limit_s - _ENDS_BEFORE_S} in {program}"


def _node_state(states: set[str], said: str, site: Site | None) -> Iterator[Advice]:
    """Look which nodes the health check passes by."""
    if "ANY" in states:
        return
    mend = "HealthCheckNodeState=ANY"
    if states & {"START_ONLY", "REBOOT_ONLY"}:
        when = "slurmd starts" if "START_ONLY" in states else "the node has been rebooted"
        text = f"HealthCheckNodeState={said}: nodes are checked when {when}, and then no more:"
        yield look(f"{text} a drained node is not returned, idle ones are not checked", mend)
        return
    if "IDLE" not in states and (site is None or site.recovery.release):
        text = f"HealthCheckNodeState={said}: a drained node is never returned to service"
        yield look(text, mend)
    if not states & {"IDLE", "NONDRAINED_IDLE"}:
        yield look(f"HealthCheckNodeState={said}: idle nodes are not checked", mend)
    elif not states & {"ALLOC", "MIXED"}:
        text = f"HealthCheckNodeState={said}: what breaks under a job is found by the next prolog"
        yield look(text, f"{mend}, unless a check of the health check needs its node alone")


_CALL = "slurm_health.node.hooks"
_MOST_BYTES = 64 << 10


class Shim(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of a shim that a site edits, and where it looks for commands."""

    path: str
    python: str
    config: str
    search_path: str
    limit_s: int


def read_shim(path: Path) -> Shim | None:
    """Return what a script says; None for one that is no shim, or that cannot be read."""
    try:
        with path.open("rb") as file:
            text = _printable(file.read(_MOST_BYTES).decode(errors="replace"))
    except OSError:
        return None
    if _CALL not in text:
        return None
    said = templates.settings(text)
    limit = said.get("limit", "")
    return Shim(
        path=str(path),
        python=said.get("python", ""),
        config=said.get("config", ""),
        search_path=search_path(text),
        limit_s=whole_number(limit) or 0,
    )


def trouble(path: str, *, program: bool = True) -> str:
    """Return why slurmd cannot use a file; empty when it can, or when it cannot be told.

    An ordinary user may not be able to look where root keeps its scripts.
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
