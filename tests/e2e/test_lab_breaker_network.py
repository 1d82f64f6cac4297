# SPDX-License-Identifier: Apache-2.0
"""Many nodes fail at once: the ledger on a filesystem that caches names, its server down."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.hooks_support import FLAG, hooked_site
from tests.lab import processes

NODES, FAILURES = 6, 50

pytestmark = [
    pytest.mark.lab(network_filesystem=True),
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # a mass failure takes some 10 s, on a machine that is busy 40
]


def test_in_fifty_mass_failures_no_more_nodes_are_drained_than_the_breaker_allows(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    drained = []
    with hooked_site(tmp_path_factory.mktemp("hooks"), NODES, volume_mb=16) as site:
        for _ in range(FAILURES):
            site.configure(share=0.5)
            for node in site.lab.nodes:
                site.on(node, "touch", FLAG)
            site.health_checks()
            drained.append(len(site.out_of_pool()))
            site.lab.reset()
    assert set(drained) <= {1, 2, 3}, drained


CHECK = """\
[checks.shared]
check = "filesystem"
path = "{path}"
writable = true
time_limit_s = 3
"""


def test_a_server_that_is_down_for_all_nodes_drains_none(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with hooked_site(tmp_path_factory.mktemp("hooks"), NODES, volume_mb=16) as site:
        # Nodes that hang are inconclusive, and are told apart from nodes that were not checked.
        site.configure(CHECK.format(path=site.lab.paths.shared), share=1.0)
        servers = [
            process.pid
            for process in processes.on_node(site.lab.pid())
            if process.name == "glusterfsd"
        ]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # it hangs; then it is dead
            for pid in servers:
                os.kill(pid, number)
            site.health_checks()
            assert site.out_of_pool() == {}
        logs = [site.hook_log(node) for node in site.lab.nodes]
        assert all(str(site.lab.paths.shared) in log for log in logs), logs
