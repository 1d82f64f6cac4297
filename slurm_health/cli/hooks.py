# SPDX-License-Identifier: Apache-2.0
"""The administrator's commands: prolog, epilog, healthcheck, init-config, init-hooks, nodes.

slurmd does not call these but the shims, which start `slurm_health.node.hooks` without click.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slurm_health.cli.output import print_result
from slurm_health.records.errors import ConfigError, ExitCode
from slurm_health.system import templates

if TYPE_CHECKING:
    from slurm_health.node.checks.check import CheckContext
    from slurm_health.node.rules.finding import CheckResult
    from slurm_health.node.site_settings import Site
    from slurm_health.system.slurm.client import Client

_F = TypeVar("_F", bound=Callable[..., Any])
# A person waits longer than a hook may.
_PATIENCE_S = 30.0


def config_option(command: _F) -> _F:
    """Add the option that names the site's file."""
    return click.option(
        "--config",
        metavar="FILE",
        help="The site's file [default: SLURM_HEALTH_CONFIG, else /etc/slurm-health/config.toml].",
    )(command)


def load_site(config: str | None) -> Site:
    """Read the site's file: the named one, else the one all commands use.

    Raises:
        ConfigError: it cannot be read or trusted, or says something impossible.
    """
    from slurm_health.node.site_settings import load
    from slurm_health.preflight.config import refuse_unreadable, site_file

    path = Path(config) if config else site_file(os.environ)
    if not os.path.lexists(path):
        raise ConfigError(
            str(path),
            "",
            f"does not exist; on a healthy, idle node: slurm-health init-config > {path}"
            " (see slurm-health docs install), or name another file with --config",
        )
    return load(path, refuse_unreadable)


def site_if_any(config: str | None) -> Site | None:
    """Read the site's file; None where none is named and none is installed.

    Raises:
        ConfigError: as `load_site`.
    """
    from slurm_health.preflight.config import site_file

    if config is None and not site_file(os.environ).exists():
        return None
    return load_site(config)


def _place(context: str, site: Site) -> CheckContext:
    import msgspec

    from slurm_health.node.checks.check import CheckContext
    from slurm_health.node.draining.own_drain import returned_uptime_s

    # What checks remember belongs to the hooks; a person who looks must not move it.
    place = CheckContext(environ=dict(os.environ), now_s=time.time(), context=context)
    returned_s = returned_uptime_s(site.state, place.boot_time())
    return msgspec.structs.replace(place, returned_uptime_s=returned_s)


def _controller() -> Client:
    from slurm_health.system.slurm.client import Client

    return Client.for_hook(os.environ, limit_s=_PATIENCE_S)


def _hook(name: str, config: str | None) -> int:
    from slurm_health.node.hooks.__main__ import run

    site = load_site(config)
    try:
        return int(ExitCode.BAD_NODES if run(name, site, os.environ) else ExitCode.HEALTHY)
    except PermissionError as err:
        look = f"slurm-health healthcheck --context {name} runs its checks and changes nothing"
        problem = f"{name} is for root: {err.filename}: {err.strerror}; {look}"
        raise click.UsageError(problem) from err


@click.command(short_help="Check this node before a job, as slurmd's Prolog does.")
@config_option
def prolog(config: str | None) -> int:
    """Check this node before a job; drain it when it has a proven fault.

    In slurm.conf, name the shim prolog/slurm-health and not this command: the shim turns errors
    of slurm-health itself into exit code 0, so that they never drain a node.
    """
    return _hook("prolog", config)


@click.command(short_help="Clean up and check this node after a job, as slurmd's Epilog does.")
@config_option
def epilog(config: str | None) -> int:
    """Clean up after a job, and look into what its own check says about this node.

    In slurm.conf, name the shim epilog/slurm-health and not this command.
    """
    return _hook("epilog", config)


@click.command(short_help="Run this node's checks and print what they find.")
@config_option
@click.option(
    "--context",
    type=click.Choice(["prolog", "epilog", "healthcheck", "retest"]),
    default="healthcheck",
    show_default=True,
    help="Run the checks of this hook.",
)
@click.option("--explain", is_flag=True, help="Run nothing; say what would run here, and why.")
@click.option(
    "--act", is_flag=True, help="Drain and return to service, as HealthCheckProgram does."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option(
    "--serve",
    "socket",
    metavar="SOCKET",
    type=click.Path(path_type=Path),
    help="Stay, and run the checks whenever a launcher asks at this Unix socket (gRPC).",
)
def healthcheck(
    config: str | None, context: str, explain: bool, act: bool, as_json: bool, socket: Path | None
) -> int:
    """Run the checks that are configured for this node and print what they find.

    Nothing is drained or returned to service without --act. Exits 0 when the node is healthy, 1
    for a proven fault, 3 when something could not be measured.
    """
    if socket is not None:
        if explain or as_json:
            raise click.UsageError("--serve prints nothing: leave out --explain and --json")
        return _serve(socket, config, context, act=act)
    if act:
        return _act(config, as_json=as_json)
    from slurm_health.node.hooks import explain as texts
    from slurm_health.node.hooks.run_checks import choose, node_name, run_checks, running
    from slurm_health.node.rules.settings import CONTEXTS

    site = load_site(config)
    node = node_name(os.environ)
    partition = os.environ.get("SLURM_JOB_PARTITION")
    choices = {
        each: choose(site.checks, context=each, node=node, partition=partition) for each in CONTEXTS
    }
    if explain:
        print_result(texts.explain(site, choices, node))
        return int(ExitCode.HEALTHY)
    results = run_checks(running(choices[context]), _place(context, site))
    print_result(_results_json(results) if as_json else texts.results_text(results))
    return int(_exit_code(results))


def _act(config: str | None, *, as_json: bool) -> int:
    from slurm_health.node.hooks import healthcheck as hook
    from slurm_health.node.hooks.__main__ import frame

    this = frame("healthcheck", load_site(config), os.environ)
    faulty = hook.run(this)
    if as_json:
        print_result(_results_json(this.found))
    return int(ExitCode.BAD_NODES if faulty else ExitCode.HEALTHY)


def _serve(socket: Path, config: str | None, context: str, *, act: bool) -> int:
    from slurm_health.node.hooks.run_checks import node_name
    from slurm_health.node.hooks.serve import serve
    from slurm_health.system.processes import own_command

    path = load_site(config).path  # mistakes in it are told now, not to a job that asks
    words = ["healthcheck", "--json", f"--config={path}", f"--context={context}"]
    check = own_command(*words, *(["--act"] if act else []))
    serve(socket.absolute(), check=check, node=node_name(os.environ), environ=os.environ)
    return int(ExitCode.HEALTHY)


def _results_json(results: list[CheckResult]) -> str:
    import msgspec

    return json.dumps(msgspec.to_builtins(results), indent=2) + "\n"


def _exit_code(results: list[CheckResult]) -> ExitCode:
    from slurm_health.node.rules.finding import Status, node_faults

    if node_faults(results):
        return ExitCode.BAD_NODES
    if any(each.status is Status.INCONCLUSIVE for each in results):
        return ExitCode.INCONCLUSIVE
    return ExitCode.HEALTHY


@click.command("init-config", short_help="Write a site's file for nodes like this one.")
@click.option("--shared", metavar="DIR", default="", help="A directory that all nodes share.")
def init_config(shared: str) -> int:
    """Print a configuration drafted from this node as it is now.

    Run it on a node that is known to be healthy, while nothing else runs there. Every check that
    could drain begins in shadow. What cannot be measured is left out, and told.
    """
    from slurm_health.node.checks.check import CheckContext
    from slurm_health.node.hooks.init_config import draft
    from slurm_health.node.hooks.run_checks import node_name

    place = CheckContext(environ=dict(os.environ), now_s=time.time())
    text, left_out = draft(place, node=node_name(os.environ), shared=shared)
    print_result(text)
    for each in left_out:
        click.echo(f"slurm-health: {each}", err=True)
    return int(ExitCode.HEALTHY)


@click.command(short_help="Write the scripts that slurm.conf names.")
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
    for file in templates.files_that_lack(written.values()):
        text = f"the hooks read {file}, which is not there: on a healthy, idle node, slurm-health"
        click.echo(f"slurm-health: {text} init-config > {file}", err=True)
    return int(ExitCode.HEALTHY)


@click.group(
    invoke_without_command=True,
    short_help="List the nodes slurm-health has drained; release them.",
)
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print it all as JSON.")
@click.pass_context
def nodes(context: click.Context, config: str | None, as_json: bool) -> int:
    """List the nodes that slurm-health has drained, since when and why.

    And what it has not drained: the exit code is 1 where a breaker has tripped, its ledger cannot
    be used, or a node that its last health check found faulty is in the pool.
    """
    context.obj = config
    if context.invoked_subcommand is not None:
        return int(ExitCode.HEALTHY)
    import msgspec

    from slurm_health.node.hooks import nodes as listing

    found = listing.listing(site_if_any(config), _controller().nodes(), time.time())
    if as_json:
        print_result(json.dumps(msgspec.to_builtins(found), indent=2) + "\n")
    else:
        print_result(listing.text(found, time.time()))
    return int(ExitCode.BAD_NODES if found.needs_a_person else ExitCode.HEALTHY)


@nodes.command(short_help="Return nodes that slurm-health has drained to service.")
@click.argument("names", metavar="NODE...", nargs=-1, required=True)
@click.pass_obj
def release(config: str | None, names: tuple[str, ...]) -> int:
    """Return nodes that slurm-health has drained to service, and delete their marks.

    A node that was drained by others is left as it is. One that is still faulty is returned all
    the same, and named: on the node itself its checks run first, elsewhere its last health check
    tells.
    """
    from slurm_health.node.hooks import last_check
    from slurm_health.node.hooks import nodes as listing
    from slurm_health.node.hooks.run_checks import node_name

    wanted, site = _expanded(names), load_site(config)
    checked, here = last_check.read_all(site), node_name(os.environ)
    doubts = listing.doubts(site, wanted, checked, here, _place("retest", site))
    came = listing.release(site, wanted, _controller(), doubts)
    print_result("".join(f"{name}: {text}\n" for name, text in came.items()))
    failed = any(not text.startswith(listing.RELEASED) for text in came.values())
    return int(ExitCode.BAD_NODES if failed else ExitCode.HEALTHY)


def _expanded(names: tuple[str, ...]) -> tuple[str, ...]:
    from slurm_health.records.nodeset import expand

    try:
        return tuple(name for each in names for name in expand(each))
    except ValueError as err:
        raise click.UsageError(str(err)) from err


@nodes.command(short_help="List when each node's last health check ran.")
@click.argument("names", metavar="[NODE]...", nargs=-1)
@click.pass_obj
def checked(config: str | None, names: tuple[str, ...]) -> int:
    """List when each node's last health check ran, and how it ended."""
    from slurm_health.node.hooks import last_check
    from slurm_health.node.hooks import nodes as listing

    found = last_check.read_all(load_site(config))
    print_result(listing.checked_text(found, _expanded(names), time.time()))
    return int(ExitCode.HEALTHY)


@nodes.command(short_help="Repeat, on this node, the checks it was drained for.")
@click.pass_obj
def retest(config: str | None) -> int:
    """Run again, on this node, the checks that it was drained for. Nothing else is done."""
    from slurm_health.node.draining import own_drain
    from slurm_health.node.hooks import explain as texts
    from slurm_health.node.hooks import nodes as listing
    from slurm_health.node.hooks.run_checks import node_name

    site = load_site(config)
    kept = own_drain.recall(site.state, node_name(os.environ))
    if kept is None:
        print_result("this node was not drained by its hooks\n")
        return int(ExitCode.HEALTHY)
    results = listing.repeat(site, kept, _place("retest", site))
    needed = site.recovery.passes
    print_result(f"{kept.reason}\npasses so far: {kept.passes} of {needed}\n\n")
    print_result(texts.results_text(results))
    return int(_exit_code(results))


@nodes.command("marks", short_help="List accusations by users' jobs that count still.")
@click.argument("names", metavar="[NODE]...", nargs=-1)
@click.pass_obj
def marks_command(config: str | None, names: tuple[str, ...]) -> int:
    """List accusations by users' jobs that no check of the node has confirmed."""
    from slurm_health.node.draining.shared_state import Unusable
    from slurm_health.node.hooks import nodes as listing

    try:
        print_result(listing.marks_text(load_site(config), names, time.time()))
    except Unusable as err:
        raise click.ClickException(str(err)) from err
    return int(ExitCode.HEALTHY)


@nodes.command(short_help="Let the breaker allow drains again.")
@click.pass_obj
def reset(config: str | None) -> int:
    """Let the breaker allow drains again, once the common cause is found."""
    from slurm_health.node.draining.shared_state import Unusable
    from slurm_health.node.hooks import nodes as listing

    try:
        print_result(listing.reset(load_site(config)))
    except Unusable as err:
        raise click.ClickException(str(err)) from err
    return int(ExitCode.HEALTHY)


COMMANDS: tuple[click.Command, ...] = (
    prolog,
    epilog,
    healthcheck,
    init_config,
    init_hooks,
    nodes,
)
