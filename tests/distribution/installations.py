# SPDX-License-Identifier: Apache-2.0
"""slurm-health as a site has it: installed from a wheel.

The environment borrows all other packages from that of the tests, so that nothing is downloaded.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

_ROOT = Path(__file__).parents[2]


class Installation:
    """An environment of its own in which a wheel is installed."""

    def __init__(self, directory: Path) -> None:
        """Make it, without slurm-health."""
        venv.create(directory, symlinks=True)
        self.python = directory / "bin/python"
        self.command = directory / "bin/slurm-health"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.packages = directory / "lib" / version / "site-packages"
        # What a directory that is named so has in its .pth files does not count: the checkout.
        (self.packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))

    def install(self, wheel: Path) -> None:
        """Install a wheel, in place of what was installed before."""
        words = ["--no-index", "--no-deps", "--force-reinstall", "--quiet", str(wheel)]
        _run(sys.executable, "-m", "pip", "--python", str(self.python), "install", *words)


def wheel(output: Path, source: Path = _ROOT) -> Path:
    """Build the wheel of a source tree into a directory; today's of the checkout."""
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(output), cwd=source)
    return next(output.glob("*.whl"))


def _run(*words: str, cwd: Path | None = None) -> None:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
