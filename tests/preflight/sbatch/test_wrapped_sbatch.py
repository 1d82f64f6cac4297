# SPDX-License-Identifier: Apache-2.0
"""An `sbatch` of the site's that calls `slurm-health sbatch` stands on PATH before Slurm's."""

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_health.system.slurm import command
from tests.support.command_line import COMMAND, DEADLINE_S
from tests.support.supervised import write_executable

# Plays Slurm's: counts its calls, keeps the script, and says what sbatch says.
SLURMS = """#!/bin/sh
echo "$*" >> "$RECORD.calls"
for last; do :; done
cat "$last" > "$RECORD.script" 2>/dev/null || cat > "$RECORD.script"
case "$*" in *--parsable*) echo 12;; *) echo Submitted batch job 12;; esac
"""
WRAPPERS = {
    "shell": f'#!/bin/sh\nexec {shlex.join(COMMAND)} sbatch "$@"\n',
    "no exec, and a variable": f'#!/bin/sh\nX="{shlex.join(COMMAND)}"\n$X sbatch "$@"; exit $?\n',
    "python": (
        f"#!{COMMAND[0]}\nimport subprocess, sys\n"
        f"sys.exit(subprocess.call([*{COMMAND!r}, 'sbatch', *sys.argv[1:]]))\n"
    ),
}


@dataclass
class Site:
    """Directories on PATH, the wrapper's before Slurm's."""

    record: Path
    environ: dict[str, str]

    def run(self, *argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, env=self.environ | extra, capture_output=True, text=True, timeout=DEADLINE_S,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    @property
    def calls(self) -> list[str]:
        path = Path(f"{self.record}.calls")
        return path.read_text().splitlines() if path.exists() else []

    @property
    def script(self) -> str:
        return Path(f"{self.record}.script").read_text()


@pytest.fixture(params=[*WRAPPERS.values()], ids=[*WRAPPERS])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    for name in ("site", "copy", "slurm"):
        (tmp_path / name).mkdir()
    write_executable(tmp_path / "site" / "sbatch", request.param)
    write_executable(tmp_path / "copy" / "sbatch", request.param)
    write_executable(tmp_path / "slurm" / "sbatch", SLURMS)
    (tmp_path / "train.sh").write_text("#!/bin/sh\necho hello\n")
    path = os.pathsep.join(
        [f"{tmp_path}/{name}" for name in ("site", "copy", "slurm")] + [os.environ["PATH"]]
    )
    record = tmp_path / "record"
    environ = {**os.environ, "PATH": path, "RECORD": str(record)}
    return Site(record=record, environ=environ)


def checked_once(text: str) -> bool:
    return text.count("-m slurm_health supervise") == 1


@pytest.mark.parametrize("called", [["sbatch"], [*COMMAND, "sbatch"]], ids=["wrapper", "ours"])
def test_whoever_calls_the_wrapper_submits_a_job_that_is_checked_once(
    site: Site, tmp_path: Path, called: list[str]
) -> None:
    done = site.run(*called, "-N2", f"{tmp_path}/train.sh")
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 12\n"), done.stderr
    assert checked_once(site.script)
    assert len(site.calls) == 1


def test_what_we_submit_ourselves_is_not_wrapped(site: Site) -> None:
    # As the helper does that requeues a job elsewhere; a wrapped one would be checked, and held.
    code = (
        "import os\nfrom slurm_health.system.slurm.client import Client\n"
        "print(Client(os.environ).submit(['-N1'], '#!/bin/sh\\necho helper\\n', os.environ))"
    )
    done = site.run(COMMAND[0], "-c", code)
    assert (done.returncode, done.stdout) == (0, "12\n"), done.stderr
    assert site.script == "#!/bin/sh\necho helper\n"


def test_a_job_may_submit_another_with_what_its_submission_left_in_the_environment(
    site: Site, tmp_path: Path
) -> None:
    stale = {command.CALLED: f"1.7:{tmp_path}/site/sbatch:{tmp_path}/slurm/sbatch"}
    done = site.run("sbatch", f"{tmp_path}/train.sh", **stale)
    assert done.returncode == 0, done.stderr
    assert checked_once(site.script)


def test_without_slurms_own_sbatch_nothing_loops(site: Site, tmp_path: Path) -> None:
    (tmp_path / "slurm" / "sbatch").unlink()
    done = site.run("sbatch", f"{tmp_path}/train.sh", PATH=f"{tmp_path}/site:/usr/bin:/bin")
    assert done.returncode != 0
    assert "sbatch" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_compiled_sbatch_gets_the_environment_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "sbatch").symlink_to("/bin/true")
    found = command.find_sbatch({"PATH": str(tmp_path)})
    assert found == command.Sbatch(
        path=f"{tmp_path}/sbatch", environ={"PATH": str(tmp_path)}, led_back=False
    )
