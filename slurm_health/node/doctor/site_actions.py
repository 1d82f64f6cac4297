# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`, the parts about what may be done to nodes, and who is told of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from slurm_health.node import notifying
from slurm_health.node.checks.check import first_few
from slurm_health.node.doctor import ownership
from slurm_health.node.doctor.advice import Advice, change, fine, look
from slurm_health.node.draining.shared_state import SharedStateUnusable
from slurm_health.node.rules.settings import Format, Target
from slurm_health.node.site_settings import Site
from slurm_health.records.text import counted
from slurm_health.system import SYSTEM_PATH

_HERE = frozenset({"localhost", "127.0.0.1", "::1"})


def advise_on_mending(site: Site, config: Mapping[str, str]) -> list[Advice]:
    """Return what keeps steps from being taken; nothing where the site wants none.

    Args:
        site: the site's file.
        config: the fields of slurm.conf, none where they are not known.
    """
    settings = site.mend
    if not settings.enabled:
        return []
    found = [*_commands(site), *_slurm(site, config)]
    if not settings.steps:
        found.append(
            look("mend.steps is empty: nothing is done to mend a node", 'steps = ["reset"]')
        )
    tells = any(target.wants("ticket") for target in site.notify.targets.values())
    if "ticket" in settings.steps and not tells:
        text = "mend.steps has ticket, and no target of [notify] takes tickets: no one is notified"
        found.append(look(text, "[notify.targets.NAME]: documentation, admin/notify.md"))
    if not site.breaker.directory:
        text = "breaker.directory is not set: steps cannot be counted, so none is taken"
        found.append(change(text, f"in {site.path}: [breaker] directory = …"))
    how = "said and not done (dry run)" if settings.dry_run else "taken"
    return found or [fine(f"steps to mend nodes are {how}: {', '.join(settings.steps)}")]


def _commands(site: Site) -> Iterator[Advice]:
    for step in ("reset", "reload", "deep_test"):
        argv = getattr(site.mend, step)
        if step not in site.mend.steps:
            continue
        path = shutil.which(argv[0], path=SYSTEM_PATH)
        if path is None:
            text = f"mend.{step}: {argv[0]} is not on this node: the step fails"
            yield change(text, "install it, or leave the step out of mend.steps")
        elif loose := ownership.replaceable(Path(path)):
            text = f"mend.{step}: root runs {path}, and others than root can change"
            yield change(f"{text} {first_few(loose)}", f"chown root, chmod go-w {first_few(loose)}")


def _slurm(site: Site, config: Mapping[str, str]) -> Iterator[Advice]:
    if "reboot" in site.mend.steps and config and not config.get("RebootProgram"):
        text = "mend.steps has reboot, and slurm.conf has no RebootProgram: Slurm reboots nothing"
        yield change(text, "RebootProgram=/usr/sbin/reboot")
    if "deep_test" in site.mend.steps and config.get("DisableRootJobs", "").lower() == "yes":
        text = "mend.steps has deep_test, and DisableRootJobs=YES: root's test cannot be submitted"
        yield change(text, "DisableRootJobs=NO, or leave the step out of mend.steps")


def advise_on_notices(site: Site) -> list[Advice]:
    """Return what keeps people from being told; nothing where the site tells nobody."""
    if not site.notify.targets:
        return []
    found = [each for name, target in site.notify.targets.items() for each in _target(name, target)]
    if not site.breaker.directory:
        text = "breaker.directory is not set: nodes have nowhere to queue events"
        found.append(change(text, f"in {site.path}: [breaker] directory = …"))
    elif os.getuid() == 0:
        found += _standing(site)
    names = ", ".join(site.notify.targets)
    return found or [
        fine(f"{names}: notified of what happens to nodes; try: slurm-health notify --test")
    ]


def _target(name: str, target: Target) -> Iterator[Advice]:
    where = f"notify.targets.{name}"
    if target.command:
        program = target.command[0]
        path = shutil.which(program, path=SYSTEM_PATH)
        if path is None:
            yield change(f"{where}: {program} cannot be run here", "install it, on every node")
        elif loose := ownership.replaceable(Path(path)):
            text = f"{where}: root runs {program}, and others than root can change"
            yield change(f"{text} {first_few(loose)}", f"chown root, chmod go-w {first_few(loose)}")
    if target.url and target.format in (Format.SLACK, Format.TEAMS):
        text = f"{where}: anyone with a chat's url can post there, and users can read this file"
        yield look(text, "url_file = a file with the url that only root can read")
    place = urlsplit(target.url)
    if target.secret_file and place.scheme == "http" and place.hostname not in _HERE:
        text = f"{where}: the secret, or what it signs, crosses the network unencrypted"
        yield look(text, "an https:// url")
    for file in filter(None, (target.secret_file, target.url_file)):
        if os.getuid() != 0:
            continue  # nobody else can read it
        try:
            notifying.private(file)
        except notifying.Undelivered as err:
            yield change(f"{where}: {err}", f"chown root {file}; chmod 600 {file}, on every node")


def _standing(site: Site) -> Iterator[Advice]:
    try:
        found = notifying.standing(site)
    except SharedStateUnusable:
        return  # as is said of the breaker
    for name, failure in found.failures.items():
        count = found.waiting.get(name, 0)
        times = "once" if failure.count == 1 else f"{failure.count} times in a row"
        text = f"{name} took no message {times} ({counted(count, 'event')} waiting)"
        yield look(f"{text}: {failure.why}", "slurm-health notify --test")
