# SPDX-License-Identifier: Apache-2.0
"""Setting a site up: doctor, init config, init hooks, init default."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click

from slurm_health.cli.hooks import load_site, site_if_any
from slurm_health.cli.options import config_option, json_option
from slurm_health.cli.output import page_here, print_lines, print_result
from slurm_health.node.doctor import machine, slurm_conf
from slurm_health.node.doctor.advice import Advice, DoctorReport, Urgency, change, look
from slurm_health.node.site import Site
from slurm_health.preflight.by_default import installing
from slurm_health.preflight.config import site_file
from slurm_health.preflight.sbatch.submit import python_flags
from slurm_health.records.errors import ConfigError, ExitCode, SlurmError
from slurm_health.system import templates
from slurm_health.system.slurm import command
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.reads import pyslurm_obstacle

_SLURM_LIMIT_S = 30.0


@click.command()
@json_option
@click.option(
    "--test-notify",
    is_flag=True,
    help="Only send a test event as [notify] says; exit with 1 if it did not arrive.",
)
@config_option
def doctor(as_json: bool, test_notify: bool, config: str | None) -> int:
    """Inspect slurm.conf and this machine, and say what to change.

    Changes nothing. Run it as root on a node, where the hooks run; an ordinary user is shown
    what can be seen without rights. Exits 1 if something must be changed.
    """
    if test_notify:
        return _test_notify(load_site(config))
    advice: list[Advice] = []
    site: Site | None = None
    try:
        site = site_if_any(config)
        if site is None:
            text = f"{site_file(os.environ)} does not exist: no hooks are installed on this machine"
            advice.append(look(text, "nothing, or as root: documentation, admin/install.md"))
    except ConfigError as err:
        advice.append(change(str(err), "fix it; for a draft of one: slurm-health init config"))
    conf: Mapping[str, str] = {}
    try:
        conf = _slurm_conf()
    except SlurmError as err:
        text = f"slurm.conf cannot be inspected: {err}"
        advice.append(change(text, "run doctor where scontrol reaches slurmctld"))
    else:
        run = functools.partial(command.run, environ=command.clean_environ(os.environ))
        advice += [machine.reads_advice(pyslurm_obstacle(run)), *slurm_conf.advise(conf, site)]
        advice += _advise_on_patterns(site)
    if site is not None:
        advice += machine.advise_machine(site, conf.get("ClusterName", ""))
        advice += [*machine.advise_on_notify(site), *machine.advise_on_repair(site, conf)]
    if site is not None and conf:
        place = installing.directory_of(conf)
        advice += installing.advise(place, conf, site.default, lua(site))
    report = DoctorReport(advice=tuple(advice))
    print_result(report.json() if as_json else report.text(page_here().width))
    return ExitCode.BAD_NODES if report.count(Urgency.CHANGE) else ExitCode.HEALTHY


def _test_notify(site: Site) -> int:
    from slurm_health.node.notify import EventKind, NodeEvent, send_and_wait
    from slurm_health.node.run import node_name

    if not (site.notify.command or site.notify.urls):
        print_result(f"{site.path} sets neither command nor urls in [notify]: nothing is sent\n")
        return ExitCode.HEALTHY
    event = NodeEvent(
        kind=EventKind.TEST,
        node=node_name(os.environ),
        time_s=time.time(),
        text="sent by slurm-health doctor --test-notify",
    )
    results = send_and_wait(site.notify, event)
    print_lines(f"{name}: {problem or 'sent'}" for name, problem in results)
    failed = any(problem for _, problem in results)
    return ExitCode.BAD_NODES if failed else ExitCode.HEALTHY


def _slurm_conf() -> Mapping[str, str]:
    """Return slurm.conf as slurmctld has it.

    Raises:
        SlurmError: it does not answer.
    """
    environ = command.clean_environ(os.environ)
    return slurm_conf.read_config(command.run(["scontrol", "show", "config"], environ=environ))


def _advise_on_patterns(site: Site | None) -> list[Advice]:
    """Return the patterns that match nothing in this cluster; none if its nodes are not known."""
    try:
        nodes = Client.for_hook(os.environ, limit_s=_SLURM_LIMIT_S).nodes() if site else {}
    except SlurmError:
        return []
    return [*machine.unmatched(site, nodes)] if site else []


@click.group()
def init() -> None:
    """Write what an administrator installs: config file, hooks, check by default."""


@init.command("config")
@click.option("--shared", metavar="DIR", default="", help="A directory that all nodes share.")
def init_config(shared: str) -> int:
    """Print a config file for nodes like this one.

    Run it on a node that is known to be healthy, while nothing else runs there. Every check that
    could drain begins in shadow mode, in which it only logs. What cannot be measured is left out
    and named on standard error.
    """
    from slurm_health.node.checks.check import CheckContext
    from slurm_health.node.hooks.init_config import draft
    from slurm_health.node.run import node_name

    place = CheckContext(environ=dict(os.environ), now_s=time.time())
    text, left_out = draft(place, node=node_name(os.environ), shared=shared)
    print_result(text)
    for reason in left_out:
        click.echo(f"slurm-health: {reason}", err=True)
    return ExitCode.HEALTHY


@init.command("hooks")
@click.argument(
    "directory", metavar="[DIR]", type=click.Path(path_type=Path), default=templates.HOOKS_DIRECTORY
)
def init_hooks(directory: Path) -> int:
    """Write the scripts that slurm.conf names, and print its lines.

    The prolog, the epilog and the health check go below DIR, /etc/slurm-health unless another is
    named, and read DIR/config.toml. They run this installation of slurm-health. Scripts of an
    earlier one keep what the site has set in them. Nothing else is changed.
    """
    try:
        written = templates.install_hooks(directory.absolute(), sys.executable)
    except OSError as err:
        raise _cannot_write(err) from err
    print_lines(f"{key}={path}" for key, path in written.items())
    for file in templates.missing_config_files(written.values()):
        text = f"the hooks read {file}, which is not there: on a healthy, idle node, slurm-health"
        click.echo(f"slurm-health: {text} init config > {file}", err=True)
    return ExitCode.HEALTHY


def _cannot_write(err: OSError) -> click.ClickException:
    return click.ClickException(f"cannot write {err.filename}: {err.strerror}")


@init.command("default")
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path), required=False)
@click.option("--print", "only_print", is_flag=True, help="Write nothing; print the Lua.")
@click.option("--remove", is_flag=True, help="Remove what this command has written.")
@config_option
def init_default(directory: Path | None, only_print: bool, remove: bool, config: str | None) -> int:
    """Have jobs checked whose users type plain sbatch.

    Writes the Lua by which slurmctld does so, and prints its line of slurm.conf. Run it as root on
    slurmctld's machine, and again when the table [default] of the config file changes. DIR is the
    directory of slurm.conf [default: as scontrol says, else /etc/slurm]. A job_submit.lua of the
    site's own stays as it is; what to add to it is printed.

    Exits 1 if --remove could not remove everything, and says what to do first.
    """
    try:
        conf = _slurm_conf()
    except SlurmError:
        conf = {}
    place = (directory or installing.directory_of(conf)).absolute()
    try:
        if remove:
            done = installing.remove(place, is_loaded=installing.is_loaded(conf))
            print_lines([f"removed {path}" for path in done.removed] or ["nothing was there"])
            if done.left:
                click.echo(f"slurm-health: {done.left}", err=True, nl=False)
            return ExitCode.BAD_NODES if done.left else ExitCode.HEALTHY
        text = lua(load_site(config))
        if only_print:
            print_result(text)
            return ExitCode.HEALTHY
        if not place.is_dir():
            raise click.ClickException(f"{place} is no directory: name the one with slurm.conf")
        done = installing.install(place, text)
    except OSError as err:
        raise _cannot_write(err) from err
    print_result("".join(f"wrote {path}\n" for path in done.written) + done.left)
    if not installing.is_loaded(conf):
        line = installing.plugin_line(conf)
        print_result(f"In slurm.conf, then scontrol reconfigure:\n    {line}\n")
    return ExitCode.HEALTHY


def lua(site: Site) -> str:
    """Return the Lua for a site, with this interpreter."""
    return installing.lua(
        site.default,
        python=sys.executable,
        flags=python_flags(os.environ),
        site=site.path,
    )
