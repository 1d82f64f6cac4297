# SPDX-License-Identifier: Apache-2.0
"""An accused node is tested with partners by a job of the site's own; its epilog acts on that.

The epilog of the user's job asks for the test, that of the test finds the verdict in its journal:
so no process of ours waits for it, and what drains is the one way to drain. Off unless the site
switches it on.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import msgspec

from slurm_health.node.draining import pair_tests
from slurm_health.node.draining.drain import Cause
from slurm_health.node.draining.shared_state import Unusable
from slurm_health.node.hooks.hook import Hook
from slurm_health.node.hooks.user_journal import JobEnded
from slurm_health.node.rules import pair_test
from slurm_health.node.rules.accusations import Accusation, standing
from slurm_health.node.rules.pair_test import Asked
from slurm_health.records.errors import SlurmError
from slurm_health.system.processes import own_command
from slurm_health.system.slurm.command import clean_environ

_SITE_FILE = "SLURM_HEALTH_CONFIG"


def ask(hook: Hook, ended: JobEnded, accusation: Accusation) -> None:
    """Have this node tested with partners, if the site wants that and it is not too often."""
    wanted = Asked(
        node=hook.node, time_s=hook.context.now_s, uid=ended.uid, accusing=accusation.job
    )
    try:
        reserved = pair_tests.reserve(hook.site, wanted)
        if reserved.why_not:
            hook.log.info(f"no test with partners: {reserved.why_not}")
            return
        partition = hook.environ.get("SLURM_JOB_PARTITION", "")
        words = pair_test.options(hook.node, partition, reserved.marked, hook.site.pair_test)
        job = hook.controller().submit(words, _script(hook), clean_environ(hook.environ))
        pair_tests.keep(hook.site, msgspec.structs.replace(wanted, job=job))
    except (SlurmError, Unusable) as err:
        hook.log.warning(f"it could not be tested with partners: {err}")
        return
    hook.log.info(f"job {job} tests it with partners")


def test_that_ended(hook: Hook, ended: JobEnded) -> Asked | None:
    """Return the test of this node that the ended job was, None where it was none."""
    if not hook.site.pair_test.enabled or not hook.site.breaker.directory:
        return None
    try:
        return pair_tests.test_of(hook.site, hook.node, ended.job)
    except Unusable as err:
        hook.log.warning(f"it is not known whether this was a test with partners: {err}")
        return None


def judge(hook: Hook, asked: Asked, said: Sequence[Accusation]) -> Cause | None:
    """Return the cause that a test gives to drain this node; without one, it may clear its marks.

    A test that did not come to a verdict, as one that gave way or could not measure, says nothing.
    """
    found = standing(said)
    if found is not None and not found.slow:
        what = f"{found.component}: {found.reason} (with partners, after job {asked.accusing})"
        return Cause(
            checks=("pair-test",),
            text=what,
            job=asked.job,
            uid=asked.uid,
            hook="epilog",
        )
    if found is not None or not said:
        hook.log.info("the test with partners did not tell whether this node is bad")
        return None
    try:
        pair_tests.clear_marks(hook.site, hook.node)
    except Unusable as err:
        hook.log.warning(f"its marks could not be removed: {err}")
        return None
    hook.log.info("the test with partners found it healthy: its marks are removed")
    return None


def _script(hook: Hook) -> str:
    settings = hook.site.pair_test
    given = {"check": settings.check, "python": settings.python}
    words = own_command("check", *(f"--{name}={value}" for name, value in given.items() if value))
    return f"#!/bin/sh\n{_SITE_FILE}={shlex.quote(hook.site.path)} exec {shlex.join(words)}\n"
