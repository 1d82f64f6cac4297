# SPDX-License-Identifier: Apache-2.0
"""A job's directory over which its user has mounted a filesystem, and what of ours meets it.

Another lies over what an interrupted removal of that job seems to have left.

    python -m tests.system.journal.user_mount ROOT allow_other|""

It never answers. With `allow_other` whoever asks it waits, others than its user are refused else.
In a mount namespace of its own, as root. Prints one line of JSON: what each command said, and where
the check of a job of that id has its journal.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from slurm_health.system import journal
from tests.node.hooks.hung_filesystem import mounted
from tests.support.journals import run_started

COMMANDS = (
    ("lemons", "--json"),
    ("clean", "--yes", "--older-than=1h"),
    ("report",),
    ("report", "7"),
    ("report", "9_1"),  # a link of theirs to job 7
)
_USER = 4242
_LIMIT_S = 30


def main(root: Path, option: str) -> None:
    """Mount it over job 7, and call each command."""
    job = root / "lab" / "7"
    away = job.with_name(".removed-7")
    for each in (job, away):
        each.mkdir()
    link = job.with_name("9_1")
    link.symlink_to("7")
    for each in (job, away, link):
        os.chown(each, _USER, _USER, follow_symlinks=False)
    whose = f"user_id={_USER},group_id={_USER},{option}".rstrip(",")
    with mounted(job, whose), mounted(away, whose):
        said = [_said(root, words) for words in COMMANDS]
        print(json.dumps([*said, str(_checked_in(root))]), flush=True)


def _said(root: Path, words: tuple[str, ...]) -> str:
    argv = [sys.executable, "-m", "slurm_health", *words, f"--journal={root}"]
    environ = {**os.environ, "XDG_CACHE_HOME": str(root.parent)}
    try:
        ran = subprocess.run(
            argv, env=environ, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    return ran.stdout + ran.stderr


def _checked_in(root: Path) -> Path:
    directory, _ = journal.directory_of_check(root, run_started(["n1"], job_id=7))
    journal.create(directory, [journal.MASTER])
    return directory.relative_to(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
