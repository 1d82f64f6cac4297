# SPDX-License-Identifier: Apache-2.0
"""Where jobs are submitted from, with a fake sbatch on the PATH."""

import io
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.sbatch.submit import submit
from slurm_health.records.decoding import from_json

SCRIPT = b"#!/bin/bash\n#SBATCH -N 2\necho d\xe9j\xe0 vu"
MARKER = b"# The script as it was submitted:\n"


# Stands for sbatch: records what it is given, then says and does what the test wants.
FAKE = f"""#!{sys.executable} -S
import os, sys, time
record = os.environ["FAKE_RECORD"]
words = sys.argv[1:]
if words == ["--help"]:
    print("      --container-image=IMAGE  [pyxis] the image")
    open(record + ".help", "w").close()
    sys.exit(0)
open(record + ".words", "wb").write(b"".join(os.fsencode(word) + b"\\0" for word in words))
open(record + ".environ", "wb").write(open("/proc/self/environ", "rb").read())
script = next((word for word in words if os.path.isfile(word)), None)
text = open(script, "rb").read() if script else sys.stdin.buffer.read()
open(record + ".script", "wb").write(text)
print("Submitted batch job 12")
sys.stdout.flush()
print("sbatch: a word on stderr", file=sys.stderr)
open(record + ".ready", "w").close()
if "--wait" in words:
    time.sleep(1000)
sys.exit(int(os.environ.get("FAKE_CODE", "0")))
"""


@dataclass
class Desk:
    """Where jobs are submitted from, with a fake sbatch on the PATH."""

    directory: Path
    record: Path
    environ: dict[str, str]

    def submit(self, *words: str, stdin: bytes = b"", **extra: str) -> int:
        return submit(
            list(words),
            environ=self.environ | extra,
            stdin=io.BytesIO(stdin),
            python="/opt/slurm-health/bin/python",
            now_s=1_700_000_000.0,
        )

    def _recorded(self, what: str) -> bytes:
        return Path(f"{self.record}.{what}").read_bytes()

    @property
    def words(self) -> list[str]:
        return [os.fsdecode(word) for word in self._recorded("words").split(b"\0")[:-1]]

    @property
    def text(self) -> bytes:
        return self._recorded("script")

    @property
    def environment(self) -> dict[bytes, bytes]:
        entries = self._recorded("environ").split(b"\0")[:-1]
        return {name: value for name, _, value in (entry.partition(b"=") for entry in entries)}

    @property
    def called(self) -> bool:
        return Path(f"{self.record}.words").exists()


def inside(text: bytes) -> bytes:
    """Return the user's script in a batch script of ours."""
    assert text.startswith(b"#!/bin/sh\n")
    assert b"-m slurm_health supervise" in text
    return text.split(MARKER, 1)[1]


def launcher_words(text: bytes) -> list[str]:
    words = text.split(b"supervise", 1)[1].split(b" -- ", 1)[0].replace(b"\\\n", b" ")
    return [word for word in shlex.split(os.fsdecode(words)) if word.startswith("--")]


def launcher_spec(text: bytes) -> JobSpec:
    (spec,) = (word for word in launcher_words(text) if word.startswith("--spec="))
    return from_json(spec.removeprefix("--spec="), JobSpec)
