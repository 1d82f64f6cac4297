# SPDX-License-Identifier: Apache-2.0
"""Installs what a lab needs: the distribution's packages, and other Slurm releases."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from . import requirements
from .errors import LabError

# Slurm release → the Debian suite that has it.
SUITES = {"24.11": "trixie", "26.05": "forky"}

# Where `make-root` puts them unless told otherwise.
ROOTS = Path("/var/cache/slurm-health-lab")

_POLICY = Path("/usr/sbin/policy-rc.d")


def install() -> None:
    """Install the packages a lab needs; no service of theirs is started."""
    requirements.require_root()
    if shutil.which("apt-get") is None:
        needed = " ".join(requirements.packages())
        raise LabError(f"no apt-get here; install what Debian calls {needed} by other means")
    with _no_services(_POLICY):
        _apt(["apt-get", "update", "-q"])
        _apt(["apt-get", "install", "-yq", "--no-install-recommends", *requirements.packages()])


@contextlib.contextmanager
def _no_services(policy: Path) -> Iterator[None]:
    """Forbid packages to start their services; the lab runs daemons of its own."""
    if policy.exists():  # the machine has a policy, which is not ours to change
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def _apt(argv: list[str]) -> None:
    result = subprocess.run(argv, env=None, stdin=subprocess.DEVNULL, check=False)
    if result.returncode != 0:
        raise LabError(f"{' '.join(argv[:2])} ended with {result.returncode}")


def make_root(version: str, directory: Path) -> None:
    """Install another Slurm release in a directory of its own, with debootstrap."""
    requirements.require_root()
    if shutil.which("debootstrap") is None:
        raise LabError("make-root needs debootstrap (apt-get install debootstrap)")
    if directory.exists():
        raise LabError(f"{directory} exists already")
    suite = SUITES[version]
    draft = directory.with_name(directory.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.parent.mkdir(parents=True, exist_ok=True)
    # python3 for the libraries the machine's own interpreter needs when it runs in there.
    packages = ",".join([*requirements.packages(), "procps", "python3"])
    # The script is named because an older debootstrap does not know the newer suites; all
    # suites since long share one.
    argv = ["debootstrap", "--variant=minbase", f"--include={packages}", suite, str(draft)]
    argv += [_mirror(), "/usr/share/debootstrap/scripts/sid"]
    result = subprocess.run(argv, stdin=subprocess.DEVNULL, check=False)
    if result.returncode != 0:
        raise LabError(f"debootstrap ended with {result.returncode}; see {draft}/debootstrap")
    found = _slurm_version(draft)
    if found != version:
        shutil.rmtree(draft)
        raise LabError(f"Debian {suite} has Slurm {found}, not {version}")
    shutil.rmtree(draft / "var/cache/apt/archives", ignore_errors=True)
    draft.rename(directory)


def _mirror() -> str:
    """The Debian archive this machine installs from."""
    argv = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    archives = [line for line in result.stdout.split() if line.rstrip("/").endswith("/debian")]
    if not archives:
        raise LabError("apt-get names no Debian archive to make a root from (apt-get update?)")
    return archives[0]


def _slurm_version(root: Path) -> str:
    argv = ["chroot", str(root), "slurmd", "-V"]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    words = result.stdout.split()
    if len(words) < 2:
        raise LabError(f"slurmd does not run in {root}: {result.stderr.strip()}")
    return ".".join(words[1].split(".")[:2])
