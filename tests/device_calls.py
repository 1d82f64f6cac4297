# SPDX-License-Identifier: Apache-2.0
"""What the product calls of CUDA, torch.distributed, NVML and the tools of others.

All is read from its syntax trees: also what torch keeps to itself (`torch._…`), and memory of the
host that the driver holds for the device.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "slurm_health"
_ROOTS = ("torch.cuda", "torch.distributed")
# What these return is asked further questions; the words stand for it in the table.
_RETURNED = {
    "torch.distributed.all_reduce": "Work",
    "torch.distributed.all_gather": "Work",
    "torch.distributed.all_gather_into_tensor": "Work",
    "torch.distributed.broadcast": "Work",
    "torch.distributed.barrier": "Work",
    "torch.distributed.isend": "Work",
    "torch.distributed.irecv": "Work",
    "torch.distributed.TCPStore": "Store",
    "torch.distributed.PrefixStore": "Store",
    "torch.cuda.Event": "Event",
    "torch.cuda.Stream": "Stream",
    "torch.cuda.get_device_properties": "DeviceProperties",
}
_TOOLS = {"dcgmi": "dcgmi diag"}
# What these return is what they were given.
_PASS_ON = frozenset({"zip", "enumerate", "reversed", "list", "tuple"})
# Methods by which a Work is known wherever it comes from.
_OF_WORK = frozenset({"is_success", "is_completed", "get_future_result", "source_rank"})
_PINNED = "pin_memory"
_OF_TORCH_ALONE = re.compile(r"torch\._(?!_)")
_CUDA_LIBRARY = re.compile(r"^lib(cuda|cudart|nccl|nvidia-ml|nvml)\b.*\.so")


def calls(source: str) -> set[str]:
    """Return the calls in a module's source."""
    tree = ast.parse(source)
    found = _Reading(tree).found
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith("import torch"):  # run in another interpreter
                found |= calls(node.value)
            elif _CUDA_LIBRARY.match(node.value):
                found.add(f"ctypes {node.value}")
            elif node.value in _TOOLS:
                found.add(_TOOLS[node.value])
        elif _PINNED in (getattr(node, "attr", ""), getattr(node, "arg", "")):
            found.add(f"Tensor.{_PINNED}")
    return found


def calls_of_the_product() -> dict[str, list[str]]:
    """Return every call, and the modules in which it stands."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for call in calls(path.read_text()):
            found.setdefault(call, []).append(str(path.relative_to(PACKAGE)))
    return found


class _Reading:
    """Finds names that lead into torch, and what variables hold that came from there."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[str] = set()
        self._names: dict[str, str] = {}
        # A variable, or an attribute of self, and what it is. Where members of a group meet, a kit
        # has opened the store.
        self._held: dict[str, str] = {"self.store": "Store"}
        for node in ast.walk(tree):
            self._import(node)
        for _ in range(2):  # what is held may be assigned below where it is used
            for node in ast.walk(tree):
                self._hold(node)
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if id(node) not in inner:
                self._read(node)

    def _import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == "torch":
                    name = each.asname or "torch"
                    self._names[name] = each.name if each.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for each in node.names:
                self._names[each.asname or each.name] = f"{node.module}.{each.name}"
                self._say(f"{node.module}.{each.name}")

    def _dotted(self, node: ast.AST) -> str:
        """Return the whole name of what an expression names, empty where that is not torch's."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, "")
        if isinstance(node, ast.Attribute):
            before = self._dotted(node.value)
            return f"{before}.{node.attr}" if before else ""
        return ""

    def _kinds(self, node: ast.AST) -> Iterator[str]:
        """Yield what an expression may hold of what torch returned."""
        if isinstance(node, ast.Name | ast.Attribute):
            yield self._held.get(ast.unparse(node), "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) not in _PASS_ON:
            yield _RETURNED.get(self._dotted(node.func), "")
        else:
            for child in ast.iter_child_nodes(node):
                yield from self._kinds(child)

    def _hold(self, node: ast.AST) -> None:
        targets: list[ast.expr]
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.comprehension | ast.For):
            targets, value = [node.target], node.iter
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".append"):
            assert isinstance(node.func, ast.Attribute)
            targets, value = [node.func.value], node.args[0]
        else:
            return
        kind = next(filter(None, self._kinds(value)), "")
        for target in targets if kind else ():
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                self._held[ast.unparse(each)] = kind

    def _read(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute | ast.Name):
            self._say(self._dotted(node))
        if isinstance(node, ast.Attribute):
            base = node.value.value if isinstance(node.value, ast.Subscript) else node.value
            kind = self._held.get(ast.unparse(base), "")
            if isinstance(base, ast.Call):
                kind = _RETURNED.get(self._dotted(base.func), "")
            if not kind and node.attr in _OF_WORK:
                kind = "Work"
            if kind and node.attr != "append":  # of a list of them
                self.found.add(f"{kind}.{node.attr}")
            if re.match(r"(c_)?nvml[A-Z]", node.attr):
                self.found.add(f"pynvml.{node.attr}")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            asked, name = node.args[0], node.args[1]
            if isinstance(name, ast.Constant):
                self._say(f"{self._dotted(asked)}.{name.value!s}")
                kind = self._held.get(ast.unparse(asked), "")
                if kind:
                    self.found.add(f"{kind}.{name.value!s}")

    def _say(self, name: str) -> None:
        if _OF_TORCH_ALONE.match(name) or name.startswith(tuple(f"{root}." for root in _ROOTS)):
            self.found.add(name)
