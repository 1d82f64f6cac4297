# SPDX-License-Identifier: Apache-2.0
"""The nodes that slurm-health has drained, and what is notified of it: `nodes`, `notify`."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from typing import TYPE_CHECKING

import click

from slurm_health.cli.clean import read_age, reading
from slurm_health.cli.hooks import (
    check_context,
    config_option,
    exit_code_of,
    load_site,
    site_if_any,
)
from slurm_health.cli.output import print_result
from slurm_health.records.errors import ExitCode

if TYPE_CHECKING:
    from slurm_health.system.slurm.client import Client

# A person waits longer than a hook may.
_PATIENCE_S = 30.0


def read_until(text: str) -> float:
    """Return when `12h`, `2026-12-04`, `2026-12-04T12:00` or `now` is; ValueError for no time."""
    if text == "now":
        return time.time()
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        pass
    try:
        return time.time() + read_age(text)
    except ValueError:
        problem = "expected an age as 12h or 3d, a date as 2026-12-04, or now"
        raise ValueError(f"{problem}, found {text!r}") from None


@click.group(
    invoke_without_command=True,
    short_help="List the nodes slurm-health has drained; release them.",
)
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print it all as JSON.")
@click.pass_context
def nodes(context: click.Context, config: str | None, as_json: bool) -> int:
    """List the nodes that slurm-health has drained, since when and why.

    Also listed is what it has not drained, and why. The exit code is 1 where a breaker has tripped,
    its ledger cannot be used, or a node that its last health check found faulty is in service.
    """
    context.obj = config
    if context.invoked_subcommand is not None:
        return int(ExitCode.HEALTHY)
    import msgspec

    from slurm_health.node.hooks import nodes as listing

    found = listing.listing(site_if_any(config), _slurm().nodes(), time.time())
    if as_json:
        print_result(json.dumps(msgspec.to_builtins(found), indent=2) + "\n")
    else:
        print_result(listing.text(found, time.time()))
    return int(ExitCode.BAD_NODES if found.needs_administrator else ExitCode.HEALTHY)


@nodes.command(short_help="Return nodes that slurm-health has drained to service.")
@click.argument("names", metavar="NODE...", nargs=-1, required=True)
@click.pass_obj
def release(config: str | None, names: tuple[str, ...]) -> int:
    """Return nodes that slurm-health has drained to service, and delete their marks.

    A node that was drained by others is left as it is. One that is still faulty is returned all
    the same, and you are told so: on the node itself by its checks, which run first, elsewhere by
    its last health check.
    """
    from slurm_health.node.hooks import nodes as listing
    from slurm_health.node.hooks.healthcheck import read_last_checks
    from slurm_health.node.run import node_name

    wanted, site = _expanded(names), load_site(config)
    checked, here = read_last_checks(site), node_name(os.environ)
    doubts = listing.doubts(site, wanted, checked, here, check_context("retest", site))
    came = listing.release(site, wanted, _slurm(), doubts)
    print_result("".join(f"{name}: {text}\n" for name, text in came.items()))
    for name, text in came.items():
        _log_act(f"nodes release: {name} by {_caller()}: {text}")
    failed = any(not text.startswith(listing.RELEASED) for text in came.values())
    return int(ExitCode.BAD_NODES if failed else ExitCode.HEALTHY)


def _expanded(names: tuple[str, ...]) -> tuple[str, ...]:
    from slurm_health.records.nodeset import expand

    try:
        return tuple(name for each in names for name in expand(each))
    except ValueError as err:
        raise click.UsageError(str(err)) from err


@nodes.command(short_help="Leave nodes in service for a while, whatever their checks say.")
@click.argument("names", metavar="NODE...", nargs=-1, required=True)
@click.option(
    "--until",
    "until_s",
    metavar="WHEN",
    required=True,
    callback=reading(read_until),
    help="An age (12h, 3d, 2w), a date (2026-12-04) or a date and time; now ends it.",
)
@click.option("--why", metavar="TEXT", default="", help="What others should know about it.")
@click.pass_obj
def ignore(config: str | None, names: tuple[str, ...], until_s: float, why: str) -> int:
    """Leave nodes in service until then: their checks run, and drain them for nothing.

    slurm-health nodes lists them, and who ignored them.
    """
    from slurm_health.node.hooks import nodes as listing
    from slurm_health.node.shared import StoreUnusable

    site, wanted = load_site(config), _expanded(names)
    known = _slurm().nodes()
    if unknown := [name for name in wanted if name not in known]:
        raise click.UsageError(f"Slurm knows no node {', '.join(unknown)}")
    try:
        listing.ignore(site, wanted, until_s, by=_caller(), why=why)
    except StoreUnusable as err:
        raise click.ClickException(str(err)) from err
    _log_act(f"nodes ignore: {','.join(names)} by {_caller()}, for {until_s - time.time():.0f} s")
    return int(ExitCode.HEALTHY)


def _caller() -> str:
    """Return who runs this: behind sudo, the user who typed it."""
    from slurm_health.node.shared import user_name

    return os.environ.get("SUDO_USER") or user_name(os.getuid())


def _log_act(text: str) -> None:
    """Write what an administrator has done into the system's log."""
    from slurm_health.system.telemetry import send_line

    send_line("warning", f"slurm-health: {text}")


@nodes.command(short_help="Repeat, on this node, the checks it was drained for.")
@click.pass_obj
def retest(config: str | None) -> int:
    """Run again, on this node, the checks that it was drained for. Nothing else is done."""
    from slurm_health.node import state
    from slurm_health.node.hooks import explain as texts
    from slurm_health.node.hooks import nodes as listing
    from slurm_health.node.run import node_name

    site = load_site(config)
    kept = state.load_record(site.state, node_name(os.environ))
    if kept is None:
        print_result("this node was not drained by its hooks\n")
        return int(ExitCode.HEALTHY)
    results = listing.repeat(site, kept, check_context("retest", site))
    needed = site.recovery.passes
    print_result(f"{kept.reason}\npasses so far: {kept.passes} of {needed}\n\n")
    print_result(texts.results_text(results))
    return int(exit_code_of(results))


@nodes.command(short_help="Let the breaker allow drains again.")
@click.pass_obj
def reset(config: str | None) -> int:
    """Let the breaker allow drains again, once the common cause is found."""
    from slurm_health.node.hooks import nodes as listing
    from slurm_health.node.shared import StoreUnusable

    try:
        print_result(listing.reset(load_site(config)))
    except StoreUnusable as err:
        raise click.ClickException(str(err)) from err
    return int(ExitCode.HEALTHY)


def _slurm() -> Client:
    from slurm_health.system.slurm.client import Client

    return Client.for_hook(os.environ, limit_s=_PATIENCE_S)
