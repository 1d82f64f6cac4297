# SPDX-License-Identifier: Apache-2.0
"""Machines for `slurm-health run` that share no directory: each has a home and a TMPDIR of its own.

Their workers measure nothing (`fake_worker`), and what they train is `echo`.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.supervised import eventually

COMMAND = str(Path(sys.executable).with_name("slurm-health"))
FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
# torchrun waits 300 s for a node whose training failed: what that node said is worth the wait.
DEADLINE_S = 360

# An interpreter: its workers play, and its torchrun says how it was called, unless it is to train.
_PYTHON = """\
#!/bin/sh
case "{trains} $*" in
    False*torch.distributed.run*|False*quiet_torchrun.py*) echo "TRAINS $*"; exit 0 ;;
    */probes/worker.py*) exec {fake} "$@" ;;
esac
exec {real} "$@"
"""


def free_port() -> int:
    """Return a port that no process uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def played_python(directory: Path, *, trains: bool) -> Path:
    """Return an interpreter whose workers play; unless it `trains`, so does its torchrun."""
    path = directory / "python"
    path.write_text(_PYTHON.format(fake=FAKE_WORKER, real=sys.executable, trains=trains))
    path.chmod(0o755)
    return path


class Machine:
    """One node of a run, with nothing in common with the others but the loopback.

    Its probes and its training are played; the training is real if it `trains`, both if `real`.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, root: Path, rank: int, *, real: bool = False, trains: bool = False) -> None:
        self.rank = rank
        self.home = root / f"machine{rank}"
        self.temporary = self.home / "tmp"
        self.temporary.mkdir(parents=True)
        (self.home / "train.py").touch()  # what is played is to be there all the same
        self.played = root / "played"
        self.played.mkdir(exist_ok=True)
        self.python = played_python(self.home, trains=trains)
        self._chosen = [] if real else [f"--python={self.python}"]
        self._output = self.home / "output"

    def plays(self, behaviour: str) -> None:
        (self.played / f"node{self.rank}").write_text(behaviour)

    def run(
        self,
        *words: str,
        program: str = "train.py",
        given: Sequence[str] = (),
        check: bool = True,
        **environ: str,
    ) -> None:
        """Start `slurm-health run` of a program here, as a node with a rank if it is to `check`."""
        checked = {"NODE_RANK": str(self.rank)} if check else {}
        words = ("--network-check", *words) if check else words
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [COMMAND, "run", *self._chosen, *words, program, *given],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.home,
                env={
                    **os.environ,
                    "HOME": str(self.home),
                    "TMPDIR": str(self.temporary),
                    "FAKE_WORKER_DIR": str(self.played),
                    "OMP_NUM_THREADS": "1",
                    **checked,
                    **environ,
                },
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def says(self, text: str) -> None:
        eventually(
            lambda: text in self.said or self.process.poll() is not None,
            f"node{self.rank} said {text!r}: {self.said}",
            within_s=DEADLINE_S,
        )
        assert text in self.said, self.said

    def wait(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"node{self.rank} did not end: {self.said}") from None

    def signal(self, number: signal.Signals) -> None:
        """Send its process, and no other, a signal: SIGINT as Ctrl-C here."""
        self.process.send_signal(number)

    def lose(self) -> None:
        """Kill all that runs here."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"HOME={self.home}\0" in path.read_text():
                    os.kill(int(path.parent.name), signal.SIGKILL)
        if hasattr(self, "process"):
            self.process.wait()

    def journals(self) -> list[Path]:
        return sorted(self.home.glob(".slurm-health/journal/torchrun/*/*/master.jsonl"))

    def left(self) -> list[Path]:
        return list(self.temporary.iterdir())

    def __repr__(self) -> str:
        return f"node{self.rank}: {self.said}"
