# SPDX-License-Identifier: Apache-2.0
"""`slurm-health init-default`: has jobs checked whose users type plain `sbatch`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from slurm_health.cli.hooks import config_option, load_site
from slurm_health.cli.output import print_result
from slurm_health.node.doctor.slurm_conf import read_config
from slurm_health.node.site_settings import Site
from slurm_health.preflight.by_default import installing
from slurm_health.preflight.by_default.installing import Installed
from slurm_health.preflight.sbatch.submit import python_flags
from slurm_health.records.errors import ExitCode, SlurmError
from slurm_health.system.slurm import command


@click.command("init-default", short_help="Have jobs checked whose users type plain sbatch.")
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path), required=False)
@config_option
@click.option("--print", "only_print", is_flag=True, help="Write nothing; print the Lua.")
@click.option("--remove", is_flag=True, help="Take away what this command has written.")
def init_default(directory: Path | None, config: str | None, only_print: bool, remove: bool) -> int:
    """Write the Lua by which slurmctld has jobs checked, and print its line of slurm.conf.

    Run it as root on the machine of slurmctld, again after a change of the table [default] in the
    site's file. DIR is where slurm.conf lies [default: as scontrol says, else /etc/slurm]. A
    job_submit.lua of the site's own stays as it is; what to add to it is printed.

    Exits 1 where --remove could not take away everything, and says what to do first.
    """
    said = _config()
    place = (directory or installing.directory_of(said)).absolute()
    try:
        if remove:
            done = installing.remove(place, is_loaded=installing.is_loaded(said))
            return _removed(done)
        site = load_site(config)
        text = lua(site)
        if only_print:
            print_result(text)
            return int(ExitCode.HEALTHY)
        if not place.is_dir():
            raise click.ClickException(f"{place} is no directory: name the one with slurm.conf")
        done = installing.install(place, text)
    except OSError as err:
        raise click.ClickException(f"cannot write {err.filename}: {err.strerror}") from err
    print_result("".join(f"wrote {path}\n" for path in done.written) + done.left)
    if not installing.is_loaded(said):
        line = installing.plugin_line(said)
        print_result(f"In slurm.conf, then scontrol reconfigure:\n    {line}\n")
    return int(ExitCode.HEALTHY)


def lua(site: Site) -> str:
    """Return the Lua for a site, with this interpreter."""
    flags = python_flags(os.environ)
    return installing.lua(
        site.default,
        python=sys.executable,
        flags=flags,
        site=site.path,
        passes=site.hooks.passes,
    )


def _removed(done: Installed) -> int:
    print_result("".join(f"removed {path}\n" for path in done.removed) or "nothing was there\n")
    if done.left:
        click.echo(f"slurm-health: {done.left}", err=True, nl=False)
    return int(ExitCode.BAD_NODES if done.left else ExitCode.HEALTHY)


def _config() -> Mapping[str, str]:
    """Return slurm.conf as slurmctld has it, nothing where it does not answer."""
    try:
        text = command.run(
            ["scontrol", "show", "config"], environ=command.clean_environ(os.environ)
        )
    except SlurmError:
        return {}
    return read_config(text)
