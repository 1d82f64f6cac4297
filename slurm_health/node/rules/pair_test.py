# SPDX-License-Identifier: Apache-2.0
"""Root's own test of a node that a user's job accuses, together with good partners. Pure.

What is wrong between nodes no test of one node can see. So a short job of the site's own checks the
accused node with two others: one alone could not tell which of two is bad. Its journal is no
user's word: what it says of the node it was started for drains that node, or clears it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slurm_health.node.rules.settings import PairTest

JOB_NAME = "slurm-health-pair-test"
PARTNERS = 2
_HOUR_S = 3600.0
_KEPT_S = 7 * 24 * _HOUR_S
_MOST = 1000
# All other jobs go first: the most that every release of Slurm takes from a user.
_NICE = 1_000_000


class Asked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One test: of which node, because of which user's job; as which job, 0 until there is one."""

    node: str
    time_s: float
    uid: int
    accusing: int
    job: int = 0


def refusal(asked: Sequence[Asked], wanted: Asked, settings: PairTest) -> str:
    """Say why a test is not asked for, empty for no reason.

    However many users accuse, and however often: tests take nodes from others.
    """
    recent = [
        each for each in asked if 0 <= wanted.time_s - each.time_s < settings.again_h * _HOUR_S
    ]
    if any(each.node == wanted.node for each in recent):
        return f"it was tested with partners within {settings.again_h:g} hours"
    in_hour = [each for each in asked if abs(wanted.time_s - each.time_s) < _HOUR_S]
    if len(in_hour) >= settings.per_hour:
        return f"{settings.per_hour} nodes were tested with partners within the hour"
    if sum(each.uid == wanted.uid for each in in_hour) >= settings.per_user_hour:
        times = settings.per_user_hour
        return f"jobs of user {wanted.uid} have had {times} nodes tested with partners in this hour"
    return ""


def with_asked(asked: Sequence[Asked], wanted: Asked) -> tuple[Asked, ...]:
    """Return the tests with one more, or with its job, without those of long ago."""
    key = (wanted.node, wanted.time_s)
    others = [
        each
        for each in asked
        if (each.node, each.time_s) != key and abs(wanted.time_s - each.time_s) < _KEPT_S
    ]
    return (*others, wanted)[-_MOST:]


def test_of(asked: Sequence[Asked], node: str, job: int) -> Asked | None:
    """Return the test of a node that a job was; None where it was none."""
    return next((each for each in asked if (each.node, each.job) == (node, job)), None)


def options(node: str, partition: str, avoid: Sequence[str], settings: PairTest) -> list[str]:
    """Return the options of sbatch: this node, and partners that Slurm chooses among the free."""
    chosen = {
        "uid": "" if settings.user == "root" else settings.user,
        "partition": settings.partition or partition,
        "account": settings.account,
        "qos": settings.qos,
        "exclude": ",".join(each for each in avoid if each != node),
    }
    return [
        f"--job-name={JOB_NAME}",
        *(f"--{name}={value}" for name, value in chosen.items() if value),
        f"--nodelist={node}",
        f"--nodes={1 + PARTNERS}",
        "--ntasks-per-node=1",
        "--exclusive",
        f"--nice={_NICE}",
        f"--time={settings.limit_min}",
        f"--deadline=now+{settings.limit_min + settings.waits_min}minutes",
        "--no-requeue",
        "--output=/dev/null",
        "--chdir=/",
        *settings.sbatch,
    ]
