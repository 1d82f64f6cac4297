# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`, the part about who is told of what happens to nodes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from slurm_health.node.checks.check import first_few
from slurm_health.node.doctor import ownership
from slurm_health.node.doctor.advice import Advice, change, fine, look
from slurm_health.node.draining.shared_state import Unusable
from slurm_health.node.notifying import deliver, send
from slurm_health.node.rules.settings import Format, Target
from slurm_health.node.site_settings import Site

_HERE = frozenset({"localhost", "127.0.0.1", "::1"})


def advise(site: Site) -> list[Advice]:
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
        if shutil.which(program, path=send.PATH) is None:
            yield change(f"{where}: {program} cannot be run here", "install it, on every node")
        elif loose := ownership.replaceable(Path(shutil.which(program, path=send.PATH) or program)):
            text = f"{where}: root runs {program}, and others than root can change"
            yield change(f"{text} {first_few(loose)}", f"chown root, chmod go-w {first_few(loose)}")
    if target.url and target.format in (Format.SLACK, Format.TEAMS):
        text = f"{where}: anyone with a chat's url can post there, and users can read this file"
        yield look(text, "url_file = a file with the url that only root can read")
    place = urlsplit(target.url)
    if target.secret_file and place.scheme == "http" and place.hostname not in _HERE:
        text = f"{where}: the secret, or what it signs, crosses the network unencrypted"
        yield look(text, "an https:// url")
    for path in filter(None, (target.secret_file, target.url_file)):
        if os.getuid() != 0:
            continue  # nobody else can read it
        try:
            send.private(path)
        except send.Undelivered as err:
            yield change(f"{where}: {err}", f"chown root {path}; chmod 600 {path}, on every node")


def _standing(site: Site) -> Iterator[Advice]:
    try:
        found = deliver.standing(site)
    except Unusable:
        return  # as is said of the breaker
    for name, failure in found.failures.items():
        count = found.waiting.get(name, 0)
        text = f"{name} took no message the last {failure.count} times ({count} events wait)"
        yield look(f"{text}: {failure.why}", "slurm-health notify --test")
