# SPDX-License-Identifier: Apache-2.0
"""`slurm-health init default`: the Lua files beside slurm.conf, written and taken away."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slurm_health.node.doctor.advice import Advice, change, fine, look
from slurm_health.node.rules.settings import Default
from slurm_health.preflight.by_default.at_start import Rules
from slurm_health.preflight.sbatch import script
from slurm_health.system.templates import write_script

LOADER, CHECK = "job_submit.lua", "slurm-health.lua"
PLUGIN = "lua"
# Stands in the launcher where the Lua writes another: no site can ask for so long a check.
_LIMIT_S = 987654321.5
_HERE = Path(__file__).parent
_OURS = "-- Written by slurm-health init default"
_CALLED_BY_SITE = """\
{loader} is the site's own, and stays as it is. Have it call ours, with these lines at its top:
    local loaded, check = pcall(dofile, {check})
and these in slurm_job_submit, before it returns slurm.SUCCESS:
    if loaded then pcall(check, job_desc, part_list) end
"""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What was done: files `written` or `removed`, and what is left for a person, in words."""

    written: tuple[Path, ...] = ()
    removed: tuple[Path, ...] = ()
    left: str = ""


def lua(rules: Default, *, python: str, flags: Sequence[str], site: str, passes: str = "") -> str:
    """Return the Lua that looks at each job, for jobs that are checked by this interpreter.

    `site` is its file, `passes` where its nodes' hooks say that they have passed.
    """
    at_start = Rules(
        min_nodes=rules.min_nodes,
        partitions=rules.partitions,
        accounts=rules.accounts,
        may_opt_out=bool(rules.opt_out),
        check=rules.check,
        limit_s=_LIMIT_S,
        passes=passes if rules.passed_min else "",
        passed_min=rules.passed_min,
    )
    launcher = script.by_default(
        template=script.read_template(by_default=True),
        python=python,
        flags=flags,
        rules=msgspec.json.encode(at_start).decode(),
    )
    # How long a check may take differs from job to job, and nothing else does.
    before, _, after = launcher.partition(str(_LIMIT_S).encode())
    return _filled(
        "default.lua",
        {
            "site": site,
            "before_limit": lua_string(before),
            "after_limit": lua_string(after),
            "min_nodes": str(rules.min_nodes),
            "gpus": str(rules.gpus).lower(),
            "partitions": _names(rules.partitions),
            "accounts": _names(rules.accounts),
            "min_time_min": str(rules.min_time_min),
            "limit_s": str(rules.limit_s),
            "share": str(rules.share),
            "opt_out": lua_string(rules.opt_out.encode()),
            "submitted": lua_string(f"\n# {script.SUBMITTED}:".encode()),
        },
    )


def loader(check: Path) -> str:
    """Return the file that slurmctld loads, where the site has none of its own."""
    return _filled("job_submit.lua", {"default": lua_string(os.fsencode(check))})


def lua_string(data: bytes) -> str:
    """Return bytes as a string of Lua, as it is where it has lines."""
    if b"\n" in data[1:] and data.isascii() and b"]==]" not in data:
        return f"[==[\n{data.decode()}]==]"
    plain = frozenset(range(32, 127)) - {ord('"'), ord("\\")}
    return '"' + "".join(chr(each) if each in plain else f"\\{each:03d}" for each in data) + '"'


def directory_of(config: Mapping[str, str]) -> Path:
    """Return where slurmctld has slurm.conf, and looks for job_submit.lua."""
    return Path(config.get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent


def plugin_line(config: Mapping[str, str]) -> str:
    """Return the line of slurm.conf, with what the site has there already."""
    there = [each for each in config.get("JobSubmitPlugins", "").split(",") if each]
    return "JobSubmitPlugins=" + ",".join([*there, *([] if PLUGIN in there else [PLUGIN])])


def is_loaded(config: Mapping[str, str]) -> bool:
    """Tell whether slurmctld calls Lua for each job."""
    return PLUGIN in config.get("JobSubmitPlugins", "").split(",")


def advise(
    directory: Path, config: Mapping[str, str], rules: Default, text: str
) -> Iterator[Advice]:
    """Say what is wrong with an installation here, or that there is one; nothing without rules.

    `text` is the Lua as it would be written now.
    """
    check, load = directory / CHECK, directory / LOADER
    again = "on the machine of slurmctld, as root: slurm-health init default"
    if not check.exists():
        if rules != Default() or (load.exists() and is_ours(load)):
            yield look(f"jobs are not checked by default: {check} is not on this machine", again)
        return
    if not is_loaded(config):
        told = "jobs are not checked by default: slurmctld loads no Lua"
        yield change(told, f"in slurm.conf: {plugin_line(config)}; then scontrol reconfigure")
    elif not load.exists():
        yield change(f"{load} is not there: slurmctld does not start without it", again)
    elif CHECK not in load.read_text(encoding="utf-8", errors="replace"):
        yield change(f"jobs are not checked by default: {load} does not call {check}", again)
    elif check.read_text(encoding="utf-8", errors="replace") != text:
        yield change(f"{check} is not what the site's file and this installation make it", again)
    else:
        yield fine(f"batch jobs of {rules.min_nodes} or more nodes are checked by default")


def install(directory: Path, text: str) -> Installed:
    """Write the files; a job_submit.lua of the site's own is left alone.

    slurmctld reads the loader again once that is newer, so it is written last.

    Raises:
        OSError: one cannot be written.
    """
    check, load = directory / CHECK, directory / LOADER
    write_script(check, text, mode=0o644)
    if os.path.lexists(load) and not is_ours(load):
        named = lua_string(os.fsencode(check))
        return Installed(written=(check,), left=_CALLED_BY_SITE.format(loader=load, check=named))
    write_script(load, loader(check), mode=0o644)
    return Installed(written=(check, load))


def remove(directory: Path, *, is_loaded: bool) -> Installed:
    """Take away what `install` wrote.

    While slurmctld is told to load job_submit.lua it does not start without one: that stays, and
    does nothing.

    Raises:
        OSError: one cannot be removed.
    """
    check, load = directory / CHECK, directory / LOADER
    left, ours = "", [check]
    if not os.path.lexists(load):
        pass
    elif not is_ours(load):
        if CHECK in load.read_text(encoding="utf-8", errors="replace"):
            left = f"{load} is the site's own: take the lines with {CHECK} out of it\n"
    elif is_loaded:
        left = (
            f"{load} stays, and does nothing: without it slurmctld would not start. Take {PLUGIN}"
            " out of JobSubmitPlugins in slurm.conf, run scontrol reconfigure, and then this"
            " again.\n"
        )
    else:
        ours.append(load)
    there = tuple(path for path in ours if os.path.lexists(path))
    for path in there:
        path.unlink()
    if left and os.path.lexists(load) and is_ours(load):
        os.utime(load)  # slurmctld reads it again
    return Installed(removed=there, left=left)


def is_ours(path: Path) -> bool:
    """Tell whether a job_submit.lua was written by `install`."""
    return _OURS in path.read_text(encoding="utf-8", errors="replace")


def _names(names: Sequence[str]) -> str:
    return "{ " + "".join(f"[{lua_string(name.encode())}] = true, " for name in names) + "}"


def _filled(name: str, values: Mapping[str, str]) -> str:
    text = (_HERE / name).read_text(encoding="ascii")
    return re.sub(r"@(\w+)@", lambda place: values[place[1]], text)
