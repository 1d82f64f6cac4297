# SPDX-License-Identifier: Apache-2.0
"""Which check precedes the restart of a script: the one that was asked for, unless it takes long.

A failure may be the first sign of what only that one shows, as of a node that has become slow.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_health.records import probe_catalog

QUICK = "quick"
# A job that Slurm requeues waits two minutes at the least: to restart in place is to be sooner.
LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class CheckAgain:
    """What is to be checked, and why that is less than was asked for; else empty."""

    check: str
    less: str = ""


def check_again(asked: str | None, took_s: float | None, *, quick: str = QUICK) -> CheckAgain:
    """Return the check before a restart.

    Args:
        asked: what the user wants checked before the script, None where that was left open.
        took_s: how long that check took, seconds; None where it came to no verdict.
        quick: the check of seconds that is made otherwise.
    """
    items = {item.strip() for item in (asked or "").split(",")}
    if probe_catalog.LIGHT_SET in items:
        return CheckAgain(check=probe_catalog.LIGHT_SET)
    if asked is None or items <= {probe_catalog.AUTO, "off", quick}:
        return CheckAgain(check=quick)
    if took_s is None:
        return CheckAgain(check=quick, less=f"{asked} came to no verdict before")
    if took_s > LIMIT_S:
        less = f"{asked} took {took_s:.0f} s before, and a restart waits {LIMIT_S:.0f} s at most"
        return CheckAgain(check=quick, less=less)
    return CheckAgain(check=asked)
