# SPDX-License-Identifier: Apache-2.0
"""On the batch host: whether and how a job is checked by the rules of its site.

Its nodes, its partition and its account were not all known at submission; now they are. Its user's
own wishes count as with `slurm-health sbatch`: variables and `#HEALTH` lines.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from slurm_health.preflight.chosen_probes import OFF
from slurm_health.preflight.decide.policy import OnHang
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.options import given_in_environ, given_in_script, job_spec
from slurm_health.preflight.sbatch.script import header
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ConfigError


class Rules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The site's rules as the launcher passes them. An empty tuple names all."""

    min_nodes: int = 1
    partitions: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    may_opt_out: bool = False
    check: str = ""
    watch: bool = False
    heartbeat: bool = False
    limit_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The spec of a check, None for a job that is not checked, with a message for the log.

    A check ends after `limit_s`. If `quiet`, nothing is added to the job's output.
    """

    spec: JobSpec | None
    limit_s: float = math.inf
    quiet: bool = True
    said: str = ""


def choose(rules_json: str, script: bytes, environ: Mapping[bytes, bytes]) -> Choice:
    """Decide about a job with this script, in the environment that Slurm gave it.

    `rules_json` are the rules, as the launcher has them. Nothing is raised: a job whose rules
    cannot be read is not checked, and the message says so.
    """
    try:
        rules = from_json(rules_json, Rules)
    except msgspec.MsgspecError as err:
        return Choice(spec=None, said=f"the site's rules cannot be read: {err}")
    text = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
    if not _named(rules, text):
        return Choice(spec=None)
    wishes: dict[str, Any] = {}
    message = ""
    readers: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: given_in_script(header(script), "the script"),
        lambda: given_in_environ(text),  # which wins over the script
    )
    for read in readers:
        try:
            wishes |= read()
        except ConfigError as err:
            message = f"the options of its user are not used: {err}"
    # The output of the script stays as it is, unless the user wants more.
    of_site = {
        "check": rules.check or None,
        "monitor": "report" if rules.watch and _has_several_ranks(text) else "off",
        "heartbeat": "auto" if rules.heartbeat else "off",
        "unasked": True,
    }
    spec = job_spec(of_site | wishes)
    if spec.check == OFF:
        if rules.may_opt_out:
            return Choice(spec=None, said="its user opted out")
        spec = job_spec(of_site | wishes | {"check": of_site["check"]})
    quiet = "monitor" not in wishes or spec.monitor is OnHang.OFF
    return Choice(spec=spec, limit_s=rules.limit_s or math.inf, quiet=quiet, said=message)


def _has_several_ranks(environ: Mapping[str, str]) -> bool:
    """Return whether a job may have several ranks: by its nodes, its tasks, or its GPUs."""
    counts = [environ.get(name, "") for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS")]
    counts.append(environ.get("SLURM_GPUS_ON_NODE", ""))
    return any(count.isdecimal() and int(count) > 1 for count in counts)


def _named(rules: Rules, environ: Mapping[str, str]) -> bool:
    """Return whether the rules name a job; a variable that Slurm does not set excludes none."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    if nodes.isdecimal() and int(nodes) < rules.min_nodes:
        return False
    return all(
        not names or not environ.get(variable) or environ[variable] in names
        for names, variable in (
            (rules.partitions, "SLURM_JOB_PARTITION"),
            (rules.accounts, "SLURM_JOB_ACCOUNT"),
        )
    )
