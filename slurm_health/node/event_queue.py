# SPDX-License-Identifier: Apache-2.0
"""Events of this node that wait to be delivered, in root's own directory: a file each.

Hooks add, and wait for nothing: what cannot be kept is lost, and a reboot loses none on a disk.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from slurm_health.node.rules.notices import NodeEvent
from slurm_health.node.site_settings import Site
from slurm_health.records.decoding import from_json
from slurm_health.records.text import cut, one_line

_DIRECTORY = "events"
# A shared directory that is away for a month must not fill this disk.
_MOST = 500
_MOST_BYTES = 1 << 16
_TEXT, _EVIDENCE, _LINES = 600, 100, 30


def tell(site: Site, event: NodeEvent) -> None:
    """Queue an event for those whom the site has notified, under an id of its own."""
    if not site.notify.targets:
        return
    from slurm_health.system.private_files import publish

    queued = msgspec.structs.replace(
        event,
        id=f"{time.time_ns():016x}-{os.urandom(8).hex()}",  # in their order
        text=cut(event.text, _TEXT),
        evidence=tuple(cut(one_line(each), _EVIDENCE) for each in event.evidence[:_LINES]),
    )
    directory = site.state / _DIRECTORY
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if len(list(directory.iterdir())) < _MOST:
            publish(directory / f"{queued.id}.json", msgspec.json.encode(queued), mode=0o600)


def is_empty(state: Path) -> bool:
    """Tell whether no event waits here."""
    try:
        return not any((state / _DIRECTORY).iterdir())
    except OSError:
        return True


def read(state: Path) -> dict[Path, NodeEvent | None]:
    """Return what waits, the oldest first; None for a file that holds no event."""
    found: dict[Path, NodeEvent | None] = {}
    directory = state / _DIRECTORY
    with contextlib.suppress(OSError):
        for path in sorted(directory.glob("*.json"), key=lambda each: each.name):
            try:
                found[path] = from_json(path.read_bytes()[:_MOST_BYTES], NodeEvent)
            except msgspec.DecodeError:
                found[path] = None
    return dict(sorted(found.items(), key=lambda each: each[1].time_s if each[1] else 0.0))


def remove(paths: list[Path]) -> None:
    """Remove what others keep by now."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
