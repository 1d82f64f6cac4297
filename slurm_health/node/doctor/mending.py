# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`, the part about what may be done to nodes to mend them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurm_health.node.checks.check import first_few
from slurm_health.node.doctor import ownership
from slurm_health.node.doctor.advice import Advice, change, fine, look
from slurm_health.node.mending.perform import PATH
from slurm_health.node.site_settings import Site


def advise(site: Site, config: Mapping[str, str]) -> list[Advice]:
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
        found.append(look(text, "[notify.targets.NAME]: slurm-health docs notify"))
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
        path = shutil.which(argv[0], path=PATH)
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
