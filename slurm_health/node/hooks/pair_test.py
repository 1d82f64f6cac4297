# SPDX-License-Identifier: Apache-2.0
"""An accused node is tested with partners by a job of the site's own; its epilog acts on that.

The epilog of the user's job asks for the test, that of the test finds the verdict in its journal:
so no process of ours waits for it, and what drains is the one way to drain. Off unless the site
switches it on.

Tests that were asked for stand among what all nodes keep in `breaker.directory`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from slurm_health.node.draining import shared_state
from slurm_health.node.draining.drain import Cause
from slurm_health.node.draining.shared_state import (
    ROOT_ONLY,
    SharedStateUnusable,
    in_child,
    under_lock,
)
from slurm_health.node.hooks.hook import Hook
from slurm_health.node.hooks.user_journal import JobEnded
from slurm_health.node.rules import accusations
from slurm_health.node.rules.accusations import Accusation, Asked, standing
from slurm_health.node.site_settings import Site
from slurm_health.records.decoding import from_json, from_msgpack
from slurm_health.records.errors import SlurmError
from slurm_health.system.private_files import publish
from slurm_health.system.processes import own_command
from slurm_health.system.slurm.command import clean_environ

_SITE_FILE = "SLURM_HEALTH_CONFIG"
_FILE = "pair-tests.json"


def ask(hook: Hook, ended: JobEnded, accusation: Accusation) -> None:
    """Have this node tested with partners, if the site wants that and it is not too often."""
    wanted = Asked(
        node=hook.node, time_s=hook.context.now_s, uid=ended.uid, accusing=accusation.job
    )
    try:
        reserved = reserve(hook.site, wanted)
        if reserved.why_not:
            hook.log.info(f"no test with partners: {reserved.why_not}")
            return
        partition, controller = hook.environ.get("SLURM_JOB_PARTITION", ""), hook.controller()
        others = [each for each in reserved.marked if each != hook.node]
        # One that Slurm has no more, as after a repair that failed, is no name that sbatch takes.
        known = controller.nodes() if others else {}
        avoid = [each for each in others if each in known]
        words = accusations.options(hook.node, partition, avoid, hook.site.pair_test)
        job = controller.submit(words, _script(hook), clean_environ(hook.environ))
        keep(hook.site, msgspec.structs.replace(wanted, job=job))
    except (SlurmError, SharedStateUnusable) as err:
        hook.log.warning(f"it could not be tested with partners: {err}")
        return
    hook.log.info(f"job {job} tests it with partners")


def test_that_ended(hook: Hook, ended: JobEnded) -> Asked | None:
    """Return the test of this node that the ended job was, None where it was none."""
    if not hook.site.pair_test.enabled or not hook.site.breaker.directory:
        return None
    try:
        return test_of(hook.site, hook.node, ended.job)
    except SharedStateUnusable as err:
        hook.log.warning(f"whether this job was a test with partners is not known: {err}")
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
        hook.log.info("the test with partners was inconclusive")
        return None
    try:
        clear_marks(hook.site, hook.node)
    except SharedStateUnusable as err:
        hook.log.warning(f"its marks could not be removed: {err}")
        return None
    hook.log.info("the test with partners found it healthy: its marks are removed")
    return None


def _script(hook: Hook) -> str:
    settings = hook.site.pair_test
    given = {"check": settings.check, "python": settings.python}
    words = own_command("check", *(f"--{name}={value}" for name, value in given.items() if value))
    return f"#!/bin/sh\n{_SITE_FILE}={shlex.quote(hook.site.path)} exec {shlex.join(words)}\n"


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a test may be asked for: not, where `why_not` says so. `marked` are no partners."""

    why_not: str = ""
    marked: tuple[str, ...] = ()


def reserve(site: Site, wanted: Asked) -> Reserved:
    """Count a test before it is asked for, if it may be.

    Raises:
        SharedStateUnusable: tests cannot be counted.
    """

    def work(shared: Path) -> bytes:
        asked = _read(shared)
        why_not = accusations.refusal(asked, wanted, site.pair_test)
        if not why_not:
            _keep(shared, accusations.with_asked(asked, wanted))
        marked = tuple(
            each
            for each in shared_state.marked_nodes(site.breaker)
            if _is_marked(site, each, wanted.time_s)
        )
        return msgspec.json.encode(Reserved(why_not=why_not, marked=marked))

    return from_json(under_lock(site, work), Reserved)


def _is_marked(site: Site, node: str, now_s: float) -> bool:
    """Tell whether a mark of a node counts still; of one whose marks cannot be read it may."""
    try:
        marks = shared_state.marks_of(site.breaker, node)
    except SharedStateUnusable:
        return True
    return bool(accusations.alive(marks, now_s, site.marks))


def keep(site: Site, asked: Asked) -> None:
    """Keep as which job a test is run.

    Raises:
        SharedStateUnusable: it cannot be kept.
    """

    def work(shared: Path) -> bytes:
        _keep(shared, accusations.with_asked(_read(shared), asked))
        return b""

    under_lock(site, work)


def test_of(site: Site, node: str, job: int) -> Asked | None:
    """Return the test of a node that a job was, None where it was none.

    Raises:
        SharedStateUnusable: the tests cannot be read.
    """

    def work() -> bytes:
        found = accusations.test_of(_read(shared_state.shared_directory(site.breaker)), node, job)
        return msgspec.msgpack.encode([found] if found else [])

    return next(iter(from_msgpack(in_child(site, work), list[Asked])), None)


def clear_marks(site: Site, node: str) -> None:
    """Remove the marks of a node.

    Raises:
        SharedStateUnusable: the shared directory cannot be used.
    """

    def work() -> bytes:
        shared_state.forget_marks(site.breaker, node)
        return b""

    in_child(site, work)


def _read(shared: Path) -> tuple[Asked, ...]:
    path = shared / _FILE
    try:
        return from_json(path.read_bytes(), tuple[Asked, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as err:
        raise SharedStateUnusable(f"{path} cannot be read: {err}") from err


def _keep(shared: Path, asked: tuple[Asked, ...]) -> None:
    publish(shared / _FILE, msgspec.json.encode(asked), mode=ROOT_ONLY)
