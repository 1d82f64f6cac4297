# SPDX-License-Identifier: Apache-2.0
"""`slurm-health notify` on the command line: who is told, whether it arrives, a test of that."""

from __future__ import annotations

import os
import time

import click

from slurm_health.cli.hooks import config_option, load_site
from slurm_health.cli.output import print_result
from slurm_health.node.site_settings import Site
from slurm_health.records.errors import ExitCode


@click.command(short_help="Show who is notified of drained nodes, and test it.")
@config_option
@click.option("--test", is_flag=True, help="Send a test message to each target.")
@click.option("--deliver", is_flag=True, help="Send the events that hooks have queued.")
def notify(config: str | None, test: bool, deliver: bool) -> int:
    """List the targets of [notify], and how many events wait for each.

    With --test, each target is sent a message that says it is a test, whatever events it is for,
    and what came back is printed; the exit code is 1 where one did not take it. Hooks start
    --deliver by themselves, and wait for nothing.
    """
    if test and deliver:
        raise click.UsageError("--test and --deliver are two things: leave one out")
    site = load_site(config)
    if deliver:
        return _deliver(site)
    if not site.notify.targets:
        print_result(f"{site.path} has no [notify.targets.NAME]: no one is notified of anything\n")
        return int(ExitCode.HEALTHY)
    return _test(site) if test else _list(site)


def _deliver(site: Site) -> int:
    from slurm_health.node.draining.shared_state import Unusable, shared_directory
    from slurm_health.node.hooks.log import Log
    from slurm_health.node.hooks.run_checks import node_name
    from slurm_health.node.notifying.deliver import deliver

    node = node_name(os.environ)
    try:
        shared_directory(site.breaker)  # where the events of all nodes meet
    except Unusable as err:
        raise click.ClickException(str(err)) from err
    deliver(site, node, Log("notify", node).say)
    return int(ExitCode.HEALTHY)


def _test(site: Site) -> int:
    from slurm_health.node.hooks.run_checks import node_name
    from slurm_health.node.notifying.send import send_all
    from slurm_health.node.rules.notices import Batch, Event, EventKind

    event = Event(
        id="test",
        kind=EventKind.TEST,
        node=node_name(os.environ),
        time_s=time.time(),
        text="sent by slurm-health notify --test",
    )
    batches = [Batch(target=name, events=(event,)) for name in site.notify.targets]
    outcomes = send_all(batches, site.notify)
    lines = [f"{each.target}: {why_not or answer}\n" for each, answer, why_not in outcomes]
    print_result("".join(lines))
    failed = any(why_not for _, _, why_not in outcomes)
    return int(ExitCode.BAD_NODES if failed else ExitCode.HEALTHY)


def _list(site: Site) -> int:
    from slurm_health.node.draining.shared_state import Unusable
    from slurm_health.node.notifying.deliver import Backlog, standing

    try:
        found = standing(site)
    except Unusable as err:
        click.echo(f"slurm-health: whether it arrives cannot be determined: {err}", err=True)
        found = Backlog(waiting={}, failures={})
    for name, target in site.notify.targets.items():
        events = ", ".join(target.events) or "all events"
        way = target.command[0] if target.command else "a webhook"
        print_result(f"{name}: {events}, as {target.format.value} to {way}\n")
        if count := found.waiting.get(name, 0):
            print_result(f"  {count} event{'s' if count > 1 else ''} to be told\n")
        if failure := found.failures.get(name):
            times = "once" if failure.count == 1 else f"{failure.count} times in a row"
            print_result(f"  not taken {times}: {failure.why}\n")
    return int(ExitCode.BAD_NODES if found.failures else ExitCode.HEALTHY)
