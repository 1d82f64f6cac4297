# SPDX-License-Identifier: Apache-2.0
"""What is put into the played venv: each of its interpreters begins with this.

The driver is loaded first, so that whatever asks for libcuda.so.1 or libnvidia-ml.so.1 gets the
played ones and never a real GPU's. PyTorch's operators are replaced as soon as it is imported.
"""

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).parent
_FIRST = ("libcuda.so.1", "libnvidia-ml.so.1")


class _OnceTorchIsThere(importlib.abc.MetaPathFinder):
    """Has torch's own finder and loader import it, then replaces its operators."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            from . import operators

            operators.replace_all()

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def start() -> None:
    """Load the played libraries, and have torch play."""
    for name in _FIRST:
        with contextlib.suppress(OSError):  # NVML is there only where it was built
            ctypes.CDLL(str(_HERE / name))
    sys.meta_path.insert(0, _OnceTorchIsThere())
