# SPDX-License-Identifier: Apache-2.0
"""A heartbeat for scripts without one: a step of torch's optimizers is one of the training.

Python loads this at its start if PYTHONPATH leads here, before any module of the user's. It only
puts an object on `sys.meta_path` that compares names until `torch.optim.optimizer` is imported; the
user's own sitecustomize, which it hides, is then loaded as usual. After the import it registers a
hook by torch's public function, which counts steps for `heartbeat.py`.

Runs in any Python from 3.6 on, so without newer syntax. Every error is dropped: without torch, with
an older one, or if the kernel has no memfd, there is no heartbeat, and no message.
"""

import os
import sys

TYPE_CHECKING = False  # `typing` would take a third of what Python itself takes to start
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - loaded already
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))  # noqa: PTH120
_HEARTBEAT = os.path.join(_PACKAGE, "heartbeat.py")  # noqa: PTH118
_OPTIMIZERS = "torch.optim.optimizer"
_SCRIPTS_OWN = "slurm_health.heartbeat"
# A script with a heartbeat of its own reports its first step after the optimizer's.
_BEGINS_AT = 3


class _Waiting:
    """The first finder of modules, which waits for torch's optimizers."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name != _OPTIMIZERS or self._looking:
            return None
        self._looking = True
        try:
            for finder in list(sys.meta_path):
                spec = getattr(finder, "find_spec", lambda *_: None)(name, path, target)
                if spec is not None:
                    self._register_after(spec.loader)
                    return spec
        finally:
            self._looking = False
        return None

    def _register_after(self, loader: "Any") -> None:
        """Register the hook after this loader, which is the module's own, has run the module."""
        run = getattr(loader, "exec_module", None)
        if run is None:
            return

        def exec_module(module: "ModuleType") -> None:
            run(module)
            try:
                loader.__dict__.pop("exec_module", None)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    module.register_optimizer_step_post_hook(_Beats())
            except Exception:  # noqa: S110 - an older torch; training is worth more
                pass

        # A loader of another kind may have no place for it; `contextlib` would cost a start.
        if hasattr(loader, "__dict__"):
            loader.exec_module = exec_module


class _Beats:
    """The hook: counts the steps of every optimizer; the one with the most counts."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._most = 0
        self._heartbeat: Any = None
        self._silent = False

    def __call__(self, optimizer: "Any", *_: "Any") -> None:
        if self._silent:
            return
        try:
            count = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
            if count > self._most:
                self._most = count
                if count >= _BEGINS_AT:
                    self._beat(count)
        except Exception:  # training is worth more than its heartbeat
            self._silent = True

    def _beat(self, count: int) -> None:
        if self._heartbeat is None:
            main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
            # A probe of slurm-health's trains too, and then waits.
            is_ours = os.path.abspath(main).startswith(_PACKAGE + os.sep)  # noqa: PTH100
            # A script may report its steps itself, perhaps by a copy of heartbeat.py.
            modules = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
            has_own = any(m.get("MAGIC") == b"shbeat1\0" and m.get("_mine") for m in modules)
            self._heartbeat = None if is_ours or has_own else _loaded()
            self._silent = self._heartbeat is None
        own = sys.modules.get(_SCRIPTS_OWN)
        if own is not None and own is not self._heartbeat and own.__dict__.get("_mine"):
            self._silent = True  # it now reports its steps itself
            if self._heartbeat is not None:
                self._heartbeat.stop()
        if self._heartbeat is not None and not self._silent:
            self._heartbeat.step_of_optimizer(count)


def _loaded() -> "Any":
    """Return the script's own heartbeat module, or else ours, by its path."""
    own = sys.modules.get(_SCRIPTS_OWN)
    if own is not None and hasattr(own, "step_of_optimizer"):
        return own
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("_slurm_health_heartbeat", _HEARTBEAT)
    assert spec is not None and spec.loader is not None  # noqa: PT018 - it is a path of ours
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# Not if another module imports it by its full name.
if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Waiting())
    # Load the user's own sitecustomize, as Python would have done; its errors are Python's.
    _ours = sys.modules.get(__name__)
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]  # noqa: PTH100
    sys.modules.pop(__name__, None)
    try:
        __import__(__name__)
    except ImportError as _err:
        if _err.name != __name__:
            raise
    finally:
        if _ours is not None:
            sys.modules.setdefault(__name__, _ours)
