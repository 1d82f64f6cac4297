# SPDX-License-Identifier: Apache-2.0
"""The nodes that slurm-health has drained, and what is notified of it: `nodes`, `notify`."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from slurm_health.cli.hooks import load_site, site_if_any
from slurm_health.cli.options import age, config_option, json_option
from slurm_health.cli.output import print_answer, print_result
from slurm_health.records.errors import ExitCode

if TYPE_CHECKING:
    from slurm_health.system.slurm.client import Client

# A person waits longer than a hook may.
_PATIENCE_S = 30.0


def _moment(ctx: click.Context, param: click.Parameter, text: str) -> float:
    """Return when `12h` or `now` is."""
    return time.time() + (0.0 if text == "now" else age(ctx, param, text))


def _node_names(
    _ctx: click.Context, _param: click.Parameter, lists: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the nodes that node lists stand for."""
    from slurm_health.records.nodeset import expand

    try:
        return tuple(name for nodelist in lists for name in expand(nodelist))
    except ValueError as err:
        raise click.UsageError(str(err)) from err


@click.group(invoke_without_command=True)
@config_option
@json_option
@click.pass_context
def nodes(context: click.Context, config: str | None, as_json: bool) -> int:
    """List the nodes that are drained by slurm-health, or by Slurm itself: since when and why.

    Also listed is what is not drained, and why. Exits 1 if an administrator is needed: a breaker
    has tripped, its ledger cannot be used, a faulty node is in service, or a node that Slurm
    drained does not return by itself.
    """
    context.obj = config
    if context.invoked_subcommand is not None:
        return ExitCode.HEALTHY
    from slurm_health.node.hooks import nodes as listing

    site, slurm = site_if_any(config), _slurm()
    nodes = slurm.nodes()
    ends = any("COMPLETING" in node.states for node in nodes.values())
    completing = slurm.completing() if ends else ()
    listed = listing.listing(site, nodes, time.time(), completing)
    print_answer(listed, listing.text(listed, time.time()), as_json=as_json)
    return ExitCode.BAD_NODES if listed.needs_administrator else ExitCode.HEALTHY


@nodes.command()
@click.argument("names", metavar="NODE...", nargs=-1, required=True, callback=_node_names)
@click.pass_obj
def release(config: str | None, names: tuple[str, ...]) -> int:
    """Return nodes that slurm-health has drained to service.

    Their marks are deleted. A node that others have drained stays as it is. One that is still
    faulty by its last health check is returned all the same, with a warning.
    """
    from slurm_health.node.hooks import nodes as listing
    from slurm_health.node.hooks.healthcheck import LAST_CHECKS

    site = load_site(config)
    doubts = listing.doubts(names, LAST_CHECKS.load(site.breaker), time.time())
    came = listing.release(site, names, _slurm(), doubts)
    print_result("".join(f"{name}: {text}\n" for name, text in came.items()))
    for name, text in came.items():
        _log_act(f"nodes release: {name} by {_caller()}: {text}")
    failed = any(not text.startswith(listing.RELEASED) for text in came.values())
    return ExitCode.BAD_NODES if failed else ExitCode.HEALTHY


@nodes.command()
@click.argument("names", metavar="NODE...", nargs=-1, required=True, callback=_node_names)
@click.option(
    "--until",
    "until_s",
    metavar="WHEN",
    required=True,
    callback=_moment,
    help="For how long: 12h, 3d, 2w; now ends it.",
)
@click.option("--why", metavar="TEXT", default="", help="What others should know about it.")
@click.pass_obj
def ignore(config: str | None, names: tuple[str, ...], until_s: float, why: str) -> int:
    """Leave nodes in service for a while, whatever their checks say.

    slurm-health nodes lists them, and who ignored them.
    """
    from slurm_health.node.hooks import nodes as listing
    from slurm_health.node.shared import StoreUnusable

    site = load_site(config)
    known = _slurm().nodes()
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"Slurm knows no node {', '.join(unknown)}")
    try:
        listing.ignore(site, names, until_s, by=_caller(), why=why)
    except StoreUnusable as err:
        raise click.ClickException(str(err)) from err
    _log_act(f"nodes ignore: {','.join(names)} by {_caller()}, for {until_s - time.time():.0f} s")
    return ExitCode.HEALTHY


def _caller() -> str:
    """Return who runs this: behind sudo, the user who typed it."""
    from slurm_health.node.shared import user_name

    return os.environ.get("SUDO_USER") or user_name(os.getuid())


def _log_act(text: str) -> None:
    """Write what an administrator has done into the system's log."""
    from slurm_health.system.telemetry import send_line

    send_line("warning", f"slurm-health: {text}")


@nodes.command()
@click.pass_obj
def reset(config: str | None) -> int:
    """Let the breaker allow drains again, once the cause is found."""
    from slurm_health.node.hooks import nodes as listing
    from slurm_health.node.shared import StoreUnusable

    try:
        print_result(listing.reset(load_site(config)))
    except StoreUnusable as err:
        raise click.ClickException(str(err)) from err
    return ExitCode.HEALTHY


def _slurm() -> Client:
    from slurm_health.system.slurm.client import Client

    return Client.for_hook(os.environ, limit_s=_PATIENCE_S)
