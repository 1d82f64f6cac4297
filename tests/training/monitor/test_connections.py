# SPDX-License-Identifier: Apache-2.0
"""What the kernel counts of connections is read."""

from __future__ import annotations

import socket
import time

from slurm_health.training.monitor.connections import traffic

CHUNK = 64 << 10


def test_what_is_sent_over_a_connection_is_counted_with_the_time_that_it_took() -> None:
    # An address that nothing else on this machine is likely to use.
    with (
        socket.create_server(("127.77.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=30) as client,
        server.accept()[0] as peer,
    ):
        before = traffic().sent["127.77.0.1"]
        received = traffic().received
        for _ in range(64):
            client.sendall(bytes(CHUNK))
            left = CHUNK
            while left:
                left -= len(peer.recv(left))
        # What has arrived is acknowledged soon, and not at once.
        until_s = time.monotonic() + 30
        while (after := traffic().sent["127.77.0.1"])[0] < before[0] + 64 * CHUNK:
            assert time.monotonic() < until_s
        assert traffic().received >= received + 64 * CHUNK
    assert after[1] >= before[1]


def test_connections_of_ipv6_and_ipv4_are_told_by_the_same_address() -> None:
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server,
        socket.create_connection(("127.77.0.2", server.getsockname()[1])),
        server.accept()[0] as peer,
    ):
        assert peer.getpeername()[0].startswith("::ffff:")
        assert "127.77.0.2" in traffic().sent
