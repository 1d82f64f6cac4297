# SPDX-License-Identifier: Apache-2.0
"""What the kernel counts of connections is read."""

import json
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from slurm_health.training.monitor.connections import traffic

CHUNK = 64 << 10
# In a network of its own, whose packets are dropped once a connection stands.
CUT = """
import json, socket, subprocess, sys, time
from slurm_health.training.monitor.connections import traffic
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
server = socket.create_server(("127.0.0.1", 0))
with socket.create_connection(server.getsockname()) as client, server.accept()[0] as peer:
    client.sendall(b"x")
    assert peer.recv(1) == b"x" and not traffic().broken
    drop = ["iptables", "--wait", "-A", sys.argv[1], "-p", "tcp", "-j", "DROP"]
    subprocess.run(drop, check=True)
    client.sendall(b"y")
    until_s = time.monotonic() + 60
    while not (broken := traffic().broken) and time.monotonic() < until_s:
        time.sleep(0.1)
print(json.dumps(broken))
"""
# Addresses that nothing serves, of which one is behind a firewall.
TRY = """
import json, subprocess
from slurm_health.training.monitor.connections import reached
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
drop = ["iptables", "--wait", "-A", "INPUT", "-d", "127.0.0.2", "-j", "DROP"]
subprocess.run(drop, check=True)
# There is no route to 10.0.0.1.
print(json.dumps(reached(["127.0.0.1", "127.0.0.2", "10.0.0.1", "127.0.0.3"], 0.5)))
"""


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


needs_firewall = pytest.mark.skipif(not shutil.which("iptables"), reason="no iptables")


@pytest.mark.root
@needs_firewall
@pytest.mark.parametrize("chain", ["INPUT", "OUTPUT"])
def test_a_connection_is_broken_whether_the_network_drops_its_data_or_its_own_node_does(
    chain: str,
) -> None:
    ((peer, resent),) = in_a_network_of_its_own(CUT, chain)

    assert (peer, resent >= 4) == ("127.0.0.1", True)


@pytest.mark.root
@needs_firewall
def test_a_node_that_refuses_a_connection_is_reached_and_one_that_does_not_answer_is_not() -> None:
    assert in_a_network_of_its_own(TRY) == ["127.0.0.1", "127.0.0.3"]


def in_a_network_of_its_own(program: str, *arguments: str) -> Any:
    argv = ["unshare", "--net", sys.executable, "-c", program, *arguments]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)
