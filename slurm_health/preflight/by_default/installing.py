# SPDX-License-Identifier: Apache-2.0
"""`slurm-health init default`: write and remove the Lua files beside slurm.conf."""

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
# A placeholder in the launcher, which the Lua replaces: no site can ask for so long a check.
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
    """The files `written` or `removed`, and what is `left` for an administrator, in words."""

    written: tuple[Path, ...] = ()
    removed: tuple[Path, ...] = ()
    left: str = ""


def lua(rules: Default, *, python: str, flags: Sequence[str], site: str) -> str:
    """Return the Lua that reads every job, for checks by this interpreter.

    `site` is the config file.
    """
    at_start = Rules(
        min_nodes=rules.min_nodes,
        partitions=rules.partitions,
        accounts=rules.accounts,
        may_opt_out=bool(rules.opt_out),
        check=rules.check,
        watch=rules.watch,
        heartbeat=rules.heartbeat,
        limit_s=_LIMIT_S,
    )
    launcher = script.by_default(
        template=script.read_template(by_default=True),
        python=python,
        flags=flags,
        rules=msgspec.json.encode(at_start).decode(),
    )
    # Only the limit of a check differs from job to job.
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
    """Return the file that slurmctld loads, for a site without its own."""
    return _filled("job_submit.lua", {"default": lua_string(os.fsencode(check))})


def lua_string(data: bytes) -> str:
    """Return bytes as a string of Lua; text of several lines stays readable."""
    if b"\n" in data[1:] and data.isascii() and b"]==]" not in data:
        return f"[==[\n{data.decode()}]==]"
    plain = frozenset(range(32, 127)) - {ord('"'), ord("\\")}
    return '"' + "".join(chr(byte) if byte in plain else f"\\{byte:03d}" for byte in data) + '"'


def directory_of(config: Mapping[str, str]) -> Path:
    """Return the directory of slurm.conf, in which slurmctld looks for job_submit.lua."""
    return Path(config.get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent


def plugin_line(config: Mapping[str, str]) -> str:
    """Return the line of slurm.conf, with the plugins that the site has already."""
    there = [name for name in config.get("JobSubmitPlugins", "").split(",") if name]
    return "JobSubmitPlugins=" + ",".join([*there, *([] if PLUGIN in there else [PLUGIN])])


def is_loaded(config: Mapping[str, str]) -> bool:
    """Return whether slurmctld runs Lua on every job."""
    return PLUGIN in config.get("JobSubmitPlugins", "").split(",")


def advise(
    directory: Path, config: Mapping[str, str], rules: Default, text: str
) -> Iterator[Advice]:
    """Yield what is wrong with an installation here, or that it works; nothing without rules.

    `text` is the Lua as `install` would write it now.
    """
    check, load = directory / CHECK, directory / LOADER
    again = "on the machine of slurmctld, as root: slurm-health init default"
    if not check.exists():
        if rules != Default() or (load.exists() and is_ours(load)):
            yield look(f"jobs are not checked by default: {check} is not on this machine", again)
        return
    if not is_loaded(config):
        problem = "jobs are not checked by default: slurmctld loads no Lua"
        yield change(problem, f"in slurm.conf: {plugin_line(config)}; then scontrol reconfigure")
    elif not load.exists():
        yield change(f"{load} is not there: slurmctld does not start without it", again)
    elif CHECK not in load.read_text(encoding="utf-8", errors="replace"):
        yield change(f"jobs are not checked by default: {load} does not call {check}", again)
    elif check.read_text(encoding="utf-8", errors="replace") != text:
        yield change(f"{check} differs from what the config file and this installation make", again)
    else:
        yield fine(f"batch jobs of {rules.min_nodes} or more nodes are checked by default")


def install(directory: Path, text: str) -> Installed:
    """Write the files, but never over a job_submit.lua of the site's own.

    The loader is written last: slurmctld reads both again once it is newer.

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
    """Remove what `install` wrote.

    While slurm.conf names the plugin, slurmctld does not start without job_submit.lua: that stays,
    and does nothing.

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
    """Return whether `install` wrote a job_submit.lua."""
    return _OURS in path.read_text(encoding="utf-8", errors="replace")


def _names(names: Sequence[str]) -> str:
    return "{ " + "".join(f"[{lua_string(name.encode())}] = true, " for name in names) + "}"


def _filled(name: str, values: Mapping[str, str]) -> str:
    text = (_HERE / name).read_text(encoding="ascii")
    return re.sub(r"@(\w+)@", lambda place: values[place[1]], text)
