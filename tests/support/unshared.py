# SPDX-License-Identifier: Apache-2.0
"""Machines for `slurm-health run` that share no directory: each has a home and a TMPDIR of its own.

Their workers measure nothing (`fake_worker`), and what they train is `echo`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.support.supervised import eventually

COMMAND = str(Path(sys.executable).with_name("slurm-health"))
FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
DEADLINE_S = 240

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
    """Return a port that nobody uses at the moment."""
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
        self.process: subprocess.Popen[bytes] | None = None
        self._output = self.home / "output"

    @property
    def environ(self) -> dict[str, str]:
        """The environment of its processes."""
        return {
            **os.environ,
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "FAKE_WORKER_DIR": str(self.played),
            "OMP_NUM_THREADS": "1",
            "NODE_RANK": str(self.rank),
        }

    def plays(self, behaviour: str) -> None:
        """Have its workers behave so."""
        (self.played / f"node{self.rank}").write_text(behaviour)

    def run(
        self, *words: str, program: str = "train.py", given: Sequence[str] = (), **environ: str
    ) -> None:
        """Start `slurm-health run --network-check` here, of a program with what it is given."""
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [COMMAND, "run", "--network-check", *self._chosen, *words, program, *given],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.home,
                env={**self.environ, **environ},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """What it has printed so far."""
        return self._output.read_text() if self._output.exists() else ""

    def says(self, text: str, within_s: float = DEADLINE_S) -> None:
        """Wait until it has said this."""
        assert self.process is not None
        eventually(
            lambda: text in self.said or self.process.poll() is not None,  # type: ignore[union-attr]
            f"node{self.rank} said {text!r}: {self.said}",
            within_s=within_s,
        )
        assert text in self.said

    def end(self, within_s: float = DEADLINE_S) -> int:
        """Wait for its end; return its code."""
        assert self.process is not None
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"node{self.rank} did not end: {self.said}") from None
        assert "Traceback" not in self.said, self.said
        return code

    def kill(self) -> None:
        """Kill its process, and nothing else."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def interrupt(self) -> None:
        """Press Ctrl-C here."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)

    def report(self, job: str) -> subprocess.CompletedProcess[str]:
        """Ask for the report here."""
        return subprocess.run(
            [COMMAND, "report", job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.environ,
            timeout=DEADLINE_S,
            check=False,
        )

    def journals(self) -> list[Path]:
        """Return the runs whose journals are here."""
        return sorted(self.home.glob(".slurm-health/journal/torchrun/*/*/master.jsonl"))

    def left(self) -> list[Path]:
        """Return what it has left in its temporary directory."""
        return list(self.temporary.iterdir())

    def __repr__(self) -> str:
        return f"node{self.rank}: {self.said}"


class Cable:
    """A way to a port that can be cut: what goes through it ends, and nothing gets in."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: list[socket.socket] = []
        self.whole = True
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def carries(self) -> bool:
        """Whether a connection goes through it now."""
        return bool(self._ends)

    def cut(self) -> None:
        """Break all connections, and refuse others."""
        self.whole = False
        self._break()

    def mend(self) -> None:
        """Let connections through again."""
        self.whole = True

    def close(self) -> None:
        """Take it away."""
        self._listener.close()
        self._break()

    def _break(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            # What is only closed would stay open while another thread waits for it.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self.whole:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                near.close()
                continue
            self._ends += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            return
