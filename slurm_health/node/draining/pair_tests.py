# SPDX-License-Identifier: Apache-2.0
"""The tests with partners that were asked for, among what all nodes keep in `breaker.directory`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from slurm_health.node.draining import shared_state
from slurm_health.node.draining.shared_state import ROOT_ONLY, Unusable, in_child, under_lock
from slurm_health.node.rules import pair_test
from slurm_health.node.rules.pair_test import Asked
from slurm_health.node.site_settings import Site
from slurm_health.records.decoding import from_json, from_msgpack
from slurm_health.system.private_files import publish

_FILE = "pair-tests.json"


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a test may be asked for: not, where `why_not` says so. `marked` are no partners."""

    why_not: str = ""
    marked: tuple[str, ...] = ()


def reserve(site: Site, wanted: Asked) -> Reserved:
    """Count a test before it is asked for, if it may be.

    Raises:
        Unusable: tests cannot be counted.
    """

    def work(shared: Path) -> bytes:
        asked = _read(shared)
        why_not = pair_test.refusal(asked, wanted, site.pair_test)
        if not why_not:
            _keep(shared, pair_test.with_asked(asked, wanted))
        marked = tuple(shared_state.marked_nodes(site.breaker))
        return msgspec.json.encode(Reserved(why_not=why_not, marked=marked))

    return from_json(under_lock(site, work), Reserved)


def keep(site: Site, asked: Asked) -> None:
    """Keep as which job a test is run.

    Raises:
        Unusable: it cannot be kept.
    """

    def work(shared: Path) -> bytes:
        _keep(shared, pair_test.with_asked(_read(shared), asked))
        return b""

    under_lock(site, work)


def test_of(site: Site, node: str, job: int) -> Asked | None:
    """Return the test of a node that a job was, None where it was none.

    Raises:
        Unusable: the tests cannot be read.
    """

    def work() -> bytes:
        found = pair_test.test_of(_read(shared_state.shared_directory(site.breaker)), node, job)
        return msgspec.msgpack.encode([found] if found else [])

    return next(iter(from_msgpack(in_child(site, work), list[Asked])), None)


def clear_marks(site: Site, node: str) -> None:
    """Remove the marks of a node.

    Raises:
        Unusable: the shared directory cannot be used.
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
        raise Unusable(f"{path} cannot be read: {err}") from err


def _keep(shared: Path, asked: tuple[Asked, ...]) -> None:
    publish(shared / _FILE, msgspec.json.encode(asked), mode=ROOT_ONLY)
