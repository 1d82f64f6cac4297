# SPDX-License-Identifier: Apache-2.0
"""Products of matrices, which are what a device's speed is measured by."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from .memory import Call, mapped

_HALF = (torch.bfloat16, torch.float16)


def flop(args: Sequence[Any]) -> float:
    """Return the operations that a product takes: of the last two matrices, or batches of them."""
    matrices = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() in (2, 3)]
    if len(matrices) < 2:
        return 0.0
    left, right = matrices[-2:]
    batch = left.shape[0] if left.dim() == 3 else 1
    return 2.0 * batch * left.shape[-2] * left.shape[-1] * right.shape[-1]


def computed(operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the product; of half precision by single precision, which CPUs are faster at."""
    out = kwargs.get("out")
    plain = kwargs.keys() <= {"out", "alpha", "beta"} and operator._overloadname in {
        "default",
        "out",
    }
    halves = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dtype in _HALF]
    if not halves or not plain:
        return operator(*args, **kwargs)
    name = str(operator.overloadpacket._qualified_op_name).removeprefix("aten::")
    changed = args[0] if name.endswith("_") else out
    single = getattr(torch.ops.aten, name.rstrip("_")).default
    numbers = {name: value for name, value in kwargs.items() if name != "out"}
    result = single(*mapped(args, _single), **numbers)
    return result.to(halves[0].dtype) if changed is None else changed.copy_(result)


def _single(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in _HALF
    return value.float() if is_half else value


def not_computed(operator: Any, call: Call) -> Any:
    """Return something of the product's shape."""
    if "out" in call.cpu_kwargs:
        return call.cpu_kwargs["out"]
    args, kwargs = call.shapes()
    shape = operator(*args, **kwargs)
    return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)


def flip_a_bit(result: torch.Tensor) -> None:
    """Change one number in the middle by a bit that shows: of the upper half of its fraction."""
    size = result.element_size()
    address = result.data_ptr() + result.numel() // 2 * size + max(0, size - 2)
    byte = ctypes.c_ubyte.from_address(address)
    byte.value ^= 0x10
