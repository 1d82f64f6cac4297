# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`, the parts about what may be done to nodes, and what is notified of it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slurm_health.node import notify
from slurm_health.node.checks.check import first_few
from slurm_health.node.doctor import ownership
from slurm_health.node.doctor.advice import Advice, change, fine, look
from slurm_health.node.site_settings import Site
from slurm_health.system import SYSTEM_PATH


def advise_on_repair(site: Site, config: Mapping[str, str]) -> list[Advice]:
    """Return what keeps repairs from being done; nothing if the site wants none.

    Args:
        site: the config file.
        config: the fields of slurm.conf, none if they are not known.
    """
    settings = site.repair
    if not (settings.steps or settings.test):
        return []
    advice = []
    commands = {"reset": settings.reset if "reset" in settings.steps else (), "test": settings.test}
    for key, argv in commands.items():
        path = shutil.which(argv[0], path=SYSTEM_PATH) if argv else None
        if argv and path is None:
            text = f"repair.{key}: {argv[0]} is not on this node, so it fails"
            advice.append(change(text, "install it, or leave it out of [repair]"))
        elif path is not None and (loose := ownership.replaceable(Path(path))):
            text = f"repair.{key}: root runs {path}, and others than root can change"
            names = first_few(loose)
            advice.append(change(f"{text} {names}", f"chown root, chmod go-w {names}"))
    if "reboot" in settings.steps and config and not config.get("RebootProgram"):
        text = "repair.steps has reboot, and slurm.conf has no RebootProgram: Slurm reboots nothing"
        advice.append(change(text, "RebootProgram=/usr/sbin/reboot"))
    if "administrator" in settings.steps and not (site.notify.command or site.notify.urls):
        text = "repair.steps has administrator, and [notify] sends nothing: no one is notified"
        advice.append(look(text, "set command or urls in [notify]"))
    if not site.breaker.directory:
        text = "breaker.directory is not set: steps cannot be counted, so none is taken"
        advice.append(change(text, f"in {site.path}: [breaker] directory = …"))
    how = "logged and not done (dry run)" if settings.dry_run else "done"
    steps = ", ".join([*settings.steps, *(["test"] if settings.test else [])])
    return advice or [fine(f"repairs of nodes are {how}: {steps}")]


def advise_on_notify(site: Site) -> list[Advice]:
    """Return what keeps events from arriving; nothing if the site sends none."""
    settings = site.notify
    if not (settings.command or settings.urls):
        return []
    advice = [*_notify_command(settings.command), *_notify_urls(site)]
    return advice or [
        fine("events of nodes are sent as [notify] says; try: slurm-health notify --test")
    ]


def _notify_command(command: Sequence[str]) -> Iterator[Advice]:
    if not command:
        return
    path = shutil.which(command[0], path=SYSTEM_PATH)
    if path is None:
        text = f"notify.command: {command[0]} cannot be run here"
        yield change(text, "install it, on every node")
    elif loose := ownership.replaceable(Path(path)):
        text = f"notify.command: root runs {command[0]}, and others than root can change"
        yield change(f"{text} {first_few(loose)}", f"chown root, chmod go-w {first_few(loose)}")


def _notify_urls(site: Site) -> Iterator[Advice]:
    if not site.notify.urls:
        return
    if importlib.util.find_spec("apprise") is None:
        text = f"notify.urls needs apprise, which {sys.executable} does not have"
        yield change(text, "pip install 'slurm-health[notify]', on every node")
    files = [entry for entry in site.notify.urls if entry.startswith("/")]
    if len(files) < len(site.notify.urls) and Path(site.path).stat().st_mode & 0o044:
        text = f"notify.urls: a URL may hold a password, and users can read {site.path}"
        yield look(text, "urls = [a file of URLs that only root can read]")
    for file in files if os.getuid() == 0 else []:  # others cannot look
        if problem := notify.file_problem(file):
            yield change(f"notify.urls: {problem}", f"chown root {file}; chmod 600 {file}")
