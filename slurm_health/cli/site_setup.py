# SPDX-License-Identifier: Apache-2.0
"""Setting a site up: doctor, init config, init hooks, init default."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from slurm_health.cli.hooks import config_option, load_site, site_if_any
from slurm_health.cli.output import page_here, print_result
from slurm_health.node.doctor import machine, slurm_conf
from slurm_health.node.doctor.advice import Advice, DoctorReport, Urgency, change, look
from slurm_health.node.doctor.slurm_conf import read_config
from slurm_health.node.site import Site
from slurm_health.preflight.by_default import installing
from slurm_health.preflight.by_default.installing import Installed
from slurm_health.preflight.config import site_file
from slurm_health.preflight.sbatch.submit import python_flags
from slurm_health.records.errors import ConfigError, ExitCode, SlurmError
from slurm_health.system import templates
from slurm_health.system.processes import ask_python
from slurm_health.system.slurm import command
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.reads import pyslurm_obstacle

_TORCH_LIMIT_S = 120.0
_SLURM_LIMIT_S = 30.0


@click.command(short_help="Say what to change in this site's slurm.conf and on this machine.")
@config_option
@click.option(
    "--python",
    metavar="PATH",
    default="python3",
    show_default=True,
    help="The interpreter that jobs train with.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the advice as JSON.")
@click.option(
    "--test-notify",
    is_flag=True,
    help="Only send a test event as [notify] says, and print what came of it; exit with 1 if it"
    " did not arrive.",
)
def doctor(config: str | None, python: str, as_json: bool, test_notify: bool) -> int:
    """Inspect slurm.conf and this machine, and say what to change.

    Changes nothing. Run it as root on a node, where the hooks run; an ordinary user is shown
    what can be seen without rights. Exits 1 when something must be changed.
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
    said = _slurm(advice)
    if said is not None:
        advice += slurm_conf.advise(said, site)
        advice += _size(site)
    if site is not None:
        limits_s = slurm_conf.hook_limits_s(said or {})
        advice += machine.advise_machine(site, (said or {}).get("ClusterName", ""), limits_s)
        advice += machine.advise_on_notify(site)
        advice += machine.advise_on_repair(site, said or {})
    if site is not None and said is not None:
        place = installing.directory_of(said)
        advice += installing.advise(place, said, site.default, lua(site))
    advice += [_torch(python)]
    report = DoctorReport(advice=tuple(advice))
    print_result(report.json() if as_json else report.text(page_here().width))
    return int(ExitCode.BAD_NODES if report.count(Urgency.CHANGE) else ExitCode.HEALTHY)


def _test_notify(site: Site) -> int:
    from slurm_health.node.notify import EventKind, NodeEvent, send_and_wait
    from slurm_health.node.run import node_name

    if not (site.notify.command or site.notify.urls):
        print_result(f"{site.path} sets neither command nor urls in [notify]: nothing is sent\n")
        return int(ExitCode.HEALTHY)
    event = NodeEvent(
        kind=EventKind.TEST,
        node=node_name(os.environ),
        time_s=time.time(),
        text="sent by slurm-health doctor --test-notify",
    )
    results = send_and_wait(site.notify, event)
    print_result("".join(f"{name}: {problem or 'sent'}\n" for name, problem in results))
    failed = any(problem for _, problem in results)
    return int(ExitCode.BAD_NODES if failed else ExitCode.HEALTHY)


def _slurm(advice: list[Advice]) -> Mapping[str, str] | None:
    """Return slurm.conf as slurmctld has it, None where it cannot be had; and how Slurm is read."""
    try:
        config = slurm_conf.read_config(_run(["scontrol", "show", "config"]))
    except SlurmError as err:
        text = f"slurm.conf cannot be inspected: {err}"
        advice.append(change(text, "run doctor where scontrol reaches slurmctld"))
        return None
    obstacle = pyslurm_obstacle(_run)
    if not obstacle:
        try:
            _run([sys.executable, "-I", "-c", "import pyslurm"])
        except SlurmError as err:
            obstacle = f"pyslurm does not load: {err}"
    advice.append(machine.reads_advice(obstacle))
    return config


def _size(site: Site | None) -> list[Advice]:
    """Return what the nodes of this cluster ask for; nothing if they are not known."""
    try:
        nodes = Client.for_hook(os.environ, limit_s=_SLURM_LIMIT_S).nodes()
    except SlurmError:
        return []
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = open_files == resource.RLIM_INFINITY
    most = math.inf if unlimited else open_files
    patterns = machine.unmatched(site, nodes) if site is not None else ()
    return [*slurm_conf.advise_on_size(len(nodes), most), *patterns]


def _run(argv: Sequence[str]) -> str:
    return command.run(argv, environ=command.clean_environ(os.environ))


def _torch(python: str) -> Advice:
    environ = dict(os.environ)
    question = machine.TORCH_QUESTION
    try:
        ended = ask_python(python, question, environ=environ, deadline_s=_TORCH_LIMIT_S)
    except (OSError, TimeoutError):
        text = f"{python} cannot be asked for torch: it is not on the PATH, or does not answer"
        return look(text, "slurm-health doctor --python PATH, with the one that jobs train with")
    return machine.torch_advice(ended.stdout.decode(errors="replace"), ended.returncode, python)


@click.group(short_help="Draft the config file; write the hooks, and the check by default.")
def init() -> None:
    """Write what an administrator installs: the config file, the hooks, the check by default."""


@init.command("config", short_help="Print a config file for nodes like this one.")
@click.option("--shared", metavar="DIR", default="", help="A directory that all nodes share.")
def init_config(shared: str) -> int:
    """Print a configuration drafted from this node as it is now.

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
    for each in left_out:
        click.echo(f"slurm-health: {each}", err=True)
    return int(ExitCode.HEALTHY)


@init.command("hooks", short_help="Write the scripts that slurm.conf names.")
@click.argument(
    "directory", metavar="[DIR]", type=click.Path(path_type=Path), default=templates.HOOKS_DIRECTORY
)
def init_hooks(directory: Path) -> int:
    """Write the prolog, the epilog and the health check, and print their lines of slurm.conf.

    They go below DIR, /etc/slurm-health unless another is named, and read DIR/config.toml.
    They run this installation of slurm-health. Scripts of an earlier one keep what the site has
    set in them. Nothing else is changed.
    """
    try:
        written = templates.install_hooks(directory.absolute(), sys.executable)
    except OSError as err:
        raise click.ClickException(f"cannot write {err.filename}: {err.strerror}") from err
    print_result("".join(f"{key}={path}\n" for key, path in written.items()))
    for file in templates.missing_config_files(written.values()):
        text = f"the hooks read {file}, which is not there: on a healthy, idle node, slurm-health"
        click.echo(f"slurm-health: {text} init config > {file}", err=True)
    return int(ExitCode.HEALTHY)


@init.command("default", short_help="Have jobs checked whose users type plain sbatch.")
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path), required=False)
@config_option
@click.option("--print", "only_print", is_flag=True, help="Write nothing; print the Lua.")
@click.option("--remove", is_flag=True, help="Remove what this command has written.")
def init_default(directory: Path | None, config: str | None, only_print: bool, remove: bool) -> int:
    """Write the Lua by which slurmctld has jobs checked, and print its line of slurm.conf.

    Run it as root on slurmctld's machine, and again whenever the table [default] of the site's file
    changes. DIR is the directory of slurm.conf [default: as scontrol says, else /etc/slurm]. A
    job_submit.lua of the site's own stays as it is; what to add to it is printed.

    Exits 1 where --remove could not remove everything, and says what to do first.
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
        passes=str(site.passes),
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
