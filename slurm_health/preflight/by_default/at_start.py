# SPDX-License-Identifier: Apache-2.0
"""On the batch host: whether a job that its site may have checked is checked, and how.

When it was submitted, its nodes, its partition and its account were not all known; now they are.
Its user's own wishes count as with `slurm-health sbatch`: variables and `#HEALTH` lines.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slurm_health.node import passes
from slurm_health.node.checks.check import CheckContext
from slurm_health.preflight.chosen_probes import OFF
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.options import given_in_environ, given_in_script, job_spec
from slurm_health.preflight.sbatch.script import header
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ConfigError


class Rules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the launcher tells of the site's rules. Without names in a tuple, all are named."""

    min_nodes: int = 1
    partitions: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    may_opt_out: bool = False
    check: str = ""
    limit_s: float = 0.0
    # Where a node's hooks say that it has passed, and for how long that is enough for a job on it.
    passes: str = ""
    passed_min: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is asked for, None for a job that is not checked; what there is to log.

    A check that takes longer than `limit_s` is given up.
    """

    spec: JobSpec | None
    limit_s: float = math.inf
    said: str = ""


def choose(told: str, script: bytes, environ: Mapping[bytes, bytes]) -> Choice:
    """Decide about a job with this script, in the environment that Slurm gave it.

    `told` are the rules, as the launcher has them. Nothing is raised: what cannot be understood
    leaves the job unchecked, and is said.
    """
    try:
        rules = from_json(told, Rules)
    except msgspec.MsgspecError as err:
        return Choice(spec=None, said=f"the site's rules cannot be read: {err}")
    text = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
    if not _named(rules, text) or _passed_alone(rules, text):
        return Choice(spec=None)
    wishes, said = _wishes(script, text)
    # The script and its output stay as they are, unless the user wants more.
    of_site = {
        "check": rules.check or None,
        "monitor": "off",
        "heartbeat": "off",
        "unasked": True,
    }
    spec = job_spec(of_site | wishes)
    if spec.check == OFF:
        if rules.may_opt_out:
            return Choice(spec=None, said="its user opted out")
        spec = job_spec(of_site | wishes | {"check": of_site["check"]})
    return Choice(spec=spec, limit_s=rules.limit_s or math.inf, said=said)


def _named(rules: Rules, environ: Mapping[str, str]) -> bool:
    """Tell whether the rules name a job; what Slurm does not tell does not except it."""
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


def _passed_alone(rules: Rules, environ: Mapping[str, str]) -> bool:
    """Tell whether the job is on one node only, this one, which has passed its own checks lately.

    Between several nodes lies a network, of which no node's hooks know.
    """
    if environ.get("SLURM_JOB_NUM_NODES") != "1" or not rules.passes or not rules.passed_min:
        return False
    now = CheckContext().boot_time()
    return bool(passes.recent(Path(rules.passes), now, 60 * rules.passed_min))


def _wishes(script: bytes, environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Return what the job's user has asked for, and what of it cannot be understood."""
    wishes: dict[str, Any] = {}
    said = ""
    readers: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: given_in_script(header(script), "the script"),
        lambda: given_in_environ(environ),  # which wins over the script
    )
    for read in readers:
        try:
            wishes |= read()
        except ConfigError as err:
            said = f"the options of its user are not used: {err}"
    return wishes, said
