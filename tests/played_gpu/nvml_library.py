# SPDX-License-Identifier: Apache-2.0
"""Builds the played NVML; it needs a C compiler, and neither torch nor CUDA."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

SOURCE = Path(__file__).with_name("nvml.c")
NAME = "libnvidia-ml.so.1"


def build(directory: Path) -> Path:
    """Build the library where it can be found under its own name."""
    library = directory / NAME
    soname = f"-Wl,-soname,{NAME}"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", soname, "-o", library, SOURCE], check=True)
    return library


def missing() -> str | None:
    """What keeps the played NVML from being built and asked; None: nothing."""
    if shutil.which("gcc") is None or importlib.util.find_spec("pynvml") is None:
        return "needs gcc and nvidia-ml-py"
    return None


def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library for the tests of a module, or skip them."""
    import pytest  # the lab is started without it

    if reason := missing():
        pytest.skip(reason)
    return build(tmp_path_factory.mktemp("nvml"))
