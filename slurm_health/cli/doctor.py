# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor` on the command line: asks Slurm and the machine, prints the advice."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping, Sequence

import click

from slurm_health.cli import by_default
from slurm_health.cli.hooks import config_option, site_if_any
from slurm_health.cli.output import print_result, terminal
from slurm_health.node.doctor import cluster, machine, site_actions, slurm_conf
from slurm_health.node.doctor.advice import Advice, Report, Urgency, change, look
from slurm_health.node.site_settings import Site
from slurm_health.preflight.by_default import installing
from slurm_health.preflight.config import site_file
from slurm_health.records.errors import ConfigError, ExitCode, SlurmError
from slurm_health.system.processes import ask_python
from slurm_health.system.slurm import command
from slurm_health.system.slurm.pyslurm_client import choose, proven

_TORCH_LIMIT_S = 120.0


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
def doctor(config: str | None, python: str, as_json: bool) -> int:
    """Inspect slurm.conf and this machine, and say what to change.

    Changes nothing. Run it as root on a node, where the hooks run; an ordinary user is shown
    what can be seen without rights. Exits 1 when something must be changed.
    """
    advice: list[Advice] = []
    site: Site | None = None
    try:
        site = site_if_any(config)
        if site is None:
            text = f"{site_file(os.environ)} does not exist: no hooks are installed on this machine"
            advice.append(look(text, "nothing, or as root: slurm-health docs install"))
    except ConfigError as err:
        advice.append(change(str(err), "fix it; for a draft of one: slurm-health init-config"))
    said = _slurm(advice)
    if said is not None:
        advice += slurm_conf.advise(said, site)
        advice += _size(said)
    if site is not None:
        limits_s = slurm_conf.hook_limits_s(said or {})
        advice += machine.advise_machine(site, (said or {}).get("ClusterName", ""), limits_s)
        advice += site_actions.advise_on_notices(site)
        advice += site_actions.advise_on_mending(site, said or {})
    if site is not None and said is not None:
        place = installing.directory_of(said)
        advice += installing.advise(place, said, site.default, by_default.lua(site))
    advice += [machine.byte_code_advice(), _torch(python)]
    report = Report(advice=tuple(advice))
    print_result(report.json() if as_json else report.text(terminal()[0]))
    return int(ExitCode.BAD_NODES if report.count(Urgency.CHANGE) else ExitCode.HEALTHY)


def _slurm(advice: list[Advice]) -> Mapping[str, str] | None:
    """Return slurm.conf as slurmctld has it, None where it cannot be had; and how Slurm is read."""
    try:
        config = slurm_conf.read_config(_run(["scontrol", "show", "config"]))
    except SlurmError as err:
        text = f"slurm.conf cannot be inspected: {err}"
        advice.append(change(text, "run doctor where scontrol reaches slurmctld"))
        return None
    choice = proven(choose(_run), _run)
    advice.append(machine.reads_advice(choice.name, choice.why))
    return config


def _size(config: Mapping[str, str]) -> list[Advice]:
    """Return what this cluster's size asks for; nothing where its size is not known."""
    try:
        names = set(_run(["sinfo", "--all", "--noheader", "--Node", "--format=%N"]).split())
    except SlurmError:
        return []
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = open_files == resource.RLIM_INFINITY
    return cluster.advise_on_size(config, len(names), math.inf if unlimited else open_files)


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
