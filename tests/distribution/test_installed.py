# SPDX-License-Identifier: Apache-2.0
"""What is installed where there is nothing but a Python: the wheel, the `.deb`, the `.rpm`.

The packages are installed over a copy of this machine that is thrown away: what is written goes to
an overlay in memory.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PLAYED = ROOT / "tests" / "data" / "packages"
PYTHON = f"python3.{sys.version_info.minor}"
# Tells the copy from this machine: what runs there ends with it.
OVERLAY = (PLAYED / "overlay.sh").read_text()


def run(*words: object, check: bool = True, environ: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, words)), cwd="/", env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or not check, done
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the packages that are made here."""
    output = tmp_path_factory.mktemp("packages")
    named = {"DEBFULLNAME": "The HPC team", "DEBEMAIL": "hpc@example.org"}
    environ = {**os.environ, **named, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "distribution.packages", "--output", str(output)]
    subprocess.run(words, cwd=ROOT, env=environ, check=True, timeout=800)
    return output


@pytest.fixture
def copy(tmp_path: Path, packages: Path) -> Callable[[str], str]:
    """Run a script as root of a copy of this machine, and return what it prints."""
    if os.getuid() != 0 or not Path(f"/usr/bin/{PYTHON}").exists():
        pytest.skip(f"only root may mount, and the packages need /usr/bin/{PYTHON}")

    def within(script: str) -> str:
        words = ["unshare", "-m", "sh", "-c", OVERLAY, "copy", tmp_path, packages, script]
        return run(*words)

    return within


IN_PLACE = (PLAYED / "in_place.sh").read_text()
AFTERWARDS = (PLAYED / "afterwards.sh").read_text()


def holds(said: str) -> None:
    for line in (
        "slurm-health 0.", "#!/bin/bash",
        "/usr/share/bash-completion/completions/slurm-health",
        "python=/opt/slurm-health/bin/python", "Prolog=/root/hooks/prolog/slurm-health",
        "ModuleNotFoundError: No module named 'torch'",
        "[hooks]\nlimit=90\n", "was not checked", "jobs start", "gone",
    ):  # fmt: skip
        assert line in said, (line, said)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg here")
def test_a_deb_is_installed_upgraded_and_removed_and_the_sites_files_stay(
    copy: Callable[[str], str],
) -> None:
    install = "dpkg -i /packages/*.deb"
    said = copy(f"{install}\n{IN_PLACE}\n{install}\ndpkg -V slurm-health\ndpkg -r slurm-health\n"
                f"{AFTERWARDS}")  # fmt: skip
    holds(said)


@pytest.mark.skipif(
    shutil.which("rpmbuild") is None, reason="no rpmbuild here: apt-get install rpm"
)
def test_an_rpm_is_installed_upgraded_and_removed_and_the_sites_files_stay(
    copy: Callable[[str], str],
) -> None:
    # A database of its own: on Debian, rpm knows no package that has a Python.
    rpm = "rpm --dbpath /root/rpm --nodeps"
    said = copy(f"{rpm} -i /packages/*.rpm\n{IN_PLACE}\n{rpm} -U --force /packages/*.rpm\n"
                f"{rpm} -e slurm-health\n{AFTERWARDS}")  # fmt: skip
    holds(said)


@pytest.mark.skipif(shutil.which("lintian") is None, reason="no lintian here")
def test_the_deb_keeps_debians_rules_or_says_why_not(packages: Path) -> None:
    limits = ("--fail-on", "error,warning", "--tag-display-limit", "0")
    run("lintian", "--allow-root", *limits, *packages.glob("*.deb"))


@pytest.mark.skipif(
    None in (shutil.which("rpmlint"), shutil.which("rpmbuild")), reason="no rpmlint or rpmbuild"
)
def test_the_rpm_keeps_rpms_rules_or_says_why_not(packages: Path) -> None:
    filters = ROOT / "distribution/rpmlint.toml"
    said = run("rpmlint", "--strict", "--config", filters, *packages.glob("*.rpm"))
    assert "0 errors, 0 warnings" in said


def test_an_environment_that_somebody_made_there_is_left_alone(
    copy: Callable[[str], str], packages: Path
) -> None:
    if not list(packages.glob("*.deb")):
        pytest.skip("no dpkg here")
    said = copy("mkdir -p /opt/slurm-health; touch /opt/slurm-health/pyvenv.cfg\n"
                "! dpkg -i /packages/*.deb\nls -A /opt/slurm-health")  # fmt: skip

    assert "is a virtual environment already; move it away first" in said
    assert "\npyvenv.cfg\n" in f"\n{said}"


def test_a_wheel_works_in_an_environment_without_torch(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment)
    run(environment / "bin/pip", "install", "--quiet", ROOT)
    command = environment / "bin/slurm-health"

    assert run(command, "templates", "sweep").startswith("#!/")
    assert '"title": "slurm-health"' in run(command, "templates", "dashboard")
    assert f"Prolog={tmp_path}/prolog/" in run(command, "init", "hooks", tmp_path)
    assert f"\npython={environment}/bin/python" in (tmp_path / "prolog/slurm-health").read_text()
    # `make` puts an interpreter with torch first on PATH, where the check would find it.
    without = {**os.environ, "PATH": f"{environment}/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    said = run(command, "check", "--local", "2", check=False, environ=without)
    assert "light probes (no torch found by" in " ".join(said.split())
