# SPDX-License-Identifier: Apache-2.0
"""What nodes that train together tell each other through torchrun's own store."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm_health.torchrun.in_job.nodes import TrainingNodes

SAYS_TOO_MUCH = """
import os, signal, sys
signal.alarm(60)
from slurm_health.torchrun.in_job.nodes import Tail
tail = Tail()
print("before", file=sys.stderr)
assert tail.text().endswith("before\\n")
try:
    for _ in range(64):
        os.write(2, b"x" * 65536)
except BrokenPipeError:
    print("told")
"""


# Whoever shares standard error may make it one that does not wait, for all.
SAYS_MUCH_TO_A_SLOW_READER = """
import os, signal, sys
signal.alarm(60)
from slurm_health.torchrun.in_job.nodes import Tail
os.set_blocking(2, sys.argv[1] == "waits")
tail = Tail()
for _ in range(64):
    os.write(2, b"x" * 8191 + b"\\n")
tail.end()
os.set_blocking(2, True)
print("the end", file=sys.stderr)
"""
# The disk is full for a moment.
SAYS_MUCH_TO_A_FULL_DISK = """
import os, resource, signal, sys
signal.alarm(60)
from slurm_health.torchrun.in_job.nodes import Tail
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (8, most))
tail = Tail()
print("first, and more than fits", file=sys.stderr)
tail.text()
tail.text()  # what was before is written by now
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
print("later", file=sys.stderr)
tail.end()
"""


@pytest.mark.torch
def test_a_node_that_waits_for_a_decision_can_still_tell_that_it_is_there() -> None:
    from torch.distributed import TCPStore

    server: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here: Any = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))
    heard: list[dict[str, Any]] = []
    waits = threading.Thread(target=lambda: heard.append(TrainingNodes(here, 1, 2).decision()))
    waits.start()

    def tell() -> None:
        """Do as torchrun's keep-alive, through the same connection."""
        for _ in range(10):
            here.set("alive", "yes")
            time.sleep(0.1)

    tells = threading.Thread(target=tell)
    tells.start()
    tells.join(30.0)
    told = not tells.is_alive()
    TrainingNodes(server, 0, 2).decide({"next": "stop"}, readers=1)
    waits.join()
    tells.join()

    assert told
    assert heard == [{"next": "stop"}]


@pytest.mark.heavy
@pytest.mark.parametrize("how", ["waits", "does not wait"])
def test_all_that_workers_wrote_arrives_at_a_slow_reader(how: str) -> None:
    argv = [sys.executable, "-c", SAYS_MUCH_TO_A_SLOW_READER, how]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        time.sleep(1.0)
        lines = 0
        while line := process.stderr.readline():
            time.sleep(0.05)
            lines += 1
            last = line
        assert process.wait() == 0

    assert (lines, last) == (65, b"the end\n")


def test_a_moment_without_room_costs_what_was_written_then_and_no_more(tmp_path: Path) -> None:
    with (tmp_path / "err").open("wb") as err:
        argv = [sys.executable, "-c", SAYS_MUCH_TO_A_FULL_DISK]
        done = subprocess.run(argv, stderr=err, check=False, timeout=90)

    assert done.returncode == 0
    assert (tmp_path / "err").read_bytes() == b"first, alater\n"


def test_workers_whose_reader_is_gone_are_told_so_and_do_not_wait() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SAYS_TOO_MUCH],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == "before\n"
        process.stderr.close()

        assert process.stdout.read() == "told\n"
