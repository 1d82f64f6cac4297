# SPDX-License-Identifier: Apache-2.0
"""Start delivering, where something waits: hooks ask this, and load nothing else for it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from slurm_health.node import event_queue
from slurm_health.node.site_settings import Site
from slurm_health.system.killable import Answered, run_guarded

_LOOK_LIMIT_S = 2.0


def start_if_due(
    site: Site, environ: Mapping[str, str], *, look_beyond: bool, now_s: float
) -> None:
    """Start a process that delivers, where this node has something to be told; wait for nothing.

    With `look_beyond`, also where others left something that is due: they may be gone.
    """
    if not site.notify.targets or not site.breaker.directory:
        return
    if event_queue.is_empty(site.state) and not (look_beyond and _others_left(site, now_s)):
        return
    from slurm_health.system.processes import own_command, start_detached

    with contextlib.suppress(OSError):
        start_detached(own_command("notify", "--deliver", "--config", site.path), environ)


def _others_left(site: Site, now_s: float) -> bool:
    from slurm_health.node.draining.shared_state import STUCK

    def look() -> bytes:
        from slurm_health.node.notifying.deliver import read_post
        from slurm_health.node.rules.notices import due

        return b"1" if due(read_post(site), site.notify, now_s).batches else b""

    outcome = run_guarded(site.state, STUCK, look, _LOOK_LIMIT_S)
    return isinstance(outcome, Answered) and bool(outcome.data)
