# SPDX-License-Identifier: Apache-2.0
"""Reads a command line as `arguments.py` does, by torchrun's own parser without torch.

To load torch takes each of a test's nodes seconds of a processor, which a test of what nodes do
with one another does not need. Called as `torchrun_reading.py arguments.py WORDS...`.
"""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_RUN = "torch.distributed.run"


def main() -> None:
    """Run the program that is named first, with a `torch.distributed.run` that only parses."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    parser = _definitions(Path(torch.origin).parents[1], _RUN, {"get_args_parser"})
    for name in ("torch", "torch.distributed", _RUN):
        sys.modules[name] = ModuleType(name)
    vars(sys.modules[_RUN]).update(parser)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _definitions(root: Path, module: str, wanted: set[str]) -> dict[str, Any]:
    """Return functions and classes of a module, with what they use of torch's other modules."""
    tree = ast.parse(root.joinpath(*module.split(".")).with_suffix(".py").read_text())
    taken = [each for each in tree.body if getattr(each, "name", "") in wanted]
    used = {e.id for each in taken for e in ast.walk(each) if isinstance(e, ast.Name)}
    names: dict[str, Any] = {"__name__": module}
    imports: list[ast.stmt] = []
    for each in tree.body:
        if isinstance(each, ast.ImportFrom) and str(each.module).startswith("torch"):
            here = {e.name: e.asname or e.name for e in each.names if (e.asname or e.name) in used}
            found = _definitions(root, str(each.module), set(here)) if here else {}
            names |= {here[name]: found[name] for name in here}
        elif isinstance(each, ast.ImportFrom) or ast.unparse(each) == "import os":
            imports.append(each)
    exec(compile(ast.Module([*imports, *taken], []), module, "exec"), names)
    return names


if __name__ == "__main__":
    main()
