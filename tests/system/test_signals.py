# SPDX-License-Identifier: Apache-2.0
"""Real signals to real processes: they end them wherever Python is, and are said by name."""

import signal
import subprocess
import sys

import pytest

from slurm_health.system.signals import exit_text
from tests.support.rows import rows


@rows
def test_the_end_of_a_process_is_said_in_words(returncode: int, text: str) -> None:
    assert exit_text(returncode) == text


# Python drops what is raised in the callback, in which this one spends most of its time.
IN_CALLBACKS = """
import signal, time, weakref
from slurm_health.system.signals import leaving_on
class Node: pass
def gone(_): time.sleep(0.005)
try:
    with leaving_on(signal.SIGTERM):
        print("ready", flush=True)
        while True:
            node = Node()
            watched = weakref.ref(node, gone)
            del node
            time.sleep(0.001)
except KeyboardInterrupt:
    raise SystemExit(128 + signal.SIGINT) from None
finally:
    print("left in peace", flush=True)
"""


# Another thread lets go of the interpreter so seldom that what is to come later comes at once.
BUSY = """
import sys, threading
def work():
    while True: pass
sys.setswitchinterval(0.05)
threading.Thread(target=work, daemon=True).start()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("before", ["", BUSY])
def test_a_signal_ends_a_process_wherever_python_is_at_that_moment(
    before: str, number: signal.Signals
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", before + IN_CALLBACKS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(number)
    said, errors = child.communicate(timeout=60)
    assert (child.returncode, said, errors) == (128 + number, b"left in peace\n", b"")
