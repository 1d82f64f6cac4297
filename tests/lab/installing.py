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

_POLICY = Path("/usr/sbin/policy-rc.d")


def install() -> None:
    """Install the packages a lab needs; no service of theirs is started.

    Raises:
        LabUnavailable: not root.
        LabError: no apt-get, or it failed.
    """
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
    """Install another Slurm release in a directory of its own."""
    raise LabError(f"make-root {version} {directory}: not written yet")
