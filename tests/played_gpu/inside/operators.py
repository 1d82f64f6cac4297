# SPDX-License-Identifier: Apache-2.0
"""No kernel runs on a played device: PyTorch's operators run the CPU's kernels on the same memory.

An operator is work of the current stream, as on a GPU. It runs at once if the stream has nothing
to do and no time is described for it; else it is queued, the shape of its result is asked of
PyTorch's meta kernels, and the caller goes on. Only what needs a result waits: `.item()`, a copy to
the host, a shape that hangs on data. So the stack of a rank that hangs stands where it would on a
GPU.
"""

import atexit
import ctypes
import itertools
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import products
from .memory import Call, alias, allocated, fill, mapped

_AT_ONCE, _LOST = 1, 2
# Right as they are: they allocate, look or keep books, and run no kernel.
_KEPT = {
    *("empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "resize_"),
    *("set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"),
    *("unfold", "alias", "view_as_real", "view_as_complex", "record_stream", "is_set_to"),
    *("is_pinned", "_pin_memory", "_efficientzerotensor", "_nested_tensor_from_mask"),
    "_local_scalar_dense",
}
# They have no kernel of CUDA's own: on a GPU they would ask cuDNN, or copy by the driver.
_ADDED = ("convolution", "convolution_backward", "convolution_overrideable")
# What asks a library: where that is to fail, PyTorch's own kernel runs, and asks it.
_ASKS = {"peer_error": {"copy_"}, "cublas_error": {"mm"}}
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_"})
# A product on a device of a given speed is not computed if it would take the CPU a second.
_MOST_FLOP = 2e10
_TIMED_BYTES = 1 << 20

_played = ctypes.CDLL("libplayed.so")  # loaded already: found by its name
_played.played_has_fault.argtypes = [ctypes.c_char_p]
_played.played_begin.argtypes = [ctypes.c_void_p]
_played.played_end.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_double, ctypes.c_double]
_played.played_put.argtypes = [
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long),
    *(ctypes.c_double, ctypes.c_double),
]
for _seconds in ("product", "copy", "host_copy"):
    _function = getattr(_played, f"played_{_seconds}_seconds")
    _function.argtypes, _function.restype = [ctypes.c_int, ctypes.c_double], ctypes.c_double

_numbers = itertools.count(1)
_queued: dict[int, tuple[Callable[[], object], int]] = {}
_replacements: list[torch.library.Library] = []  # undone once this is gone


def _run_queued(number: int) -> None:
    """Run work when its stream has come to it. A mistake in it ends the context, as in a kernel."""
    work, device = _queued.pop(number)
    try:
        work()
    except Exception:
        traceback.print_exc()
        print("played CUDA: an operator failed on its stream", file=sys.stderr, flush=True)
        _played.played_lose(device)


_RUN_QUEUED = ctypes.CFUNCTYPE(None, ctypes.c_long)(_run_queued)


def _stream(device: torch.device) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def _wait(device: torch.device) -> None:
    """Wait for the current stream; raise what PyTorch raises if the device is lost."""
    torch.cuda.current_stream(device).synchronize()


def _put(
    device: torch.device, work: Callable[[], object], *, flop: float = 0.0, nbytes: float = 0.0
) -> None:
    number = next(_numbers)
    _queued[number] = (work, device.index)
    _played.played_put(_stream(device), _RUN_QUEUED, number, flop, nbytes)


class _Operator:
    """An operator as played devices run it."""

    def __init__(self, operator: Any) -> None:
        schema = operator._schema
        self._operator = operator
        self._is_product = schema.name.removeprefix("aten::") in _PRODUCTS
        self._changes = bool(schema.is_mutable)
        # For each value that it returns: position and name of the argument that this is, if any.
        self._returned = [_argument_of(schema, value) for value in schema.returns]
        self._gives_tensors = all(
            str(value.type) in {"Tensor", "List[Tensor]"} for value in schema.returns
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(args, kwargs)
        how = _played.played_begin(_stream(call.device))
        if how == _LOST:
            _wait(call.device)
        # What takes a described time is queued: host and cores may then be late, and it is not.
        is_timed = _played.played_product_seconds(call.device.index, self._flop(call)) > 0
        promised = None if how == _AT_ONCE and not is_timed else self._promised(call)
        if promised is None:
            if how != _AT_ONCE:
                _wait(call.device)
            return self._run(call)
        call.keep_values()
        result = promised[0]
        made = None if self._changes else mapped(result, _alias_of_any)
        _put(call.device, lambda: fill(made, self._compute(call)), flop=self._flop(call))
        return result

    def _run(self, call: Call) -> Any:
        begun_s = time.perf_counter()
        result = self._compute(call)
        if self._changes:
            call.resize_changed()
        result = call.given(result)
        cpu_s = time.perf_counter() - begun_s
        _played.played_end(_stream(call.device), cpu_s, self._flop(call), 0.0)
        return result

    def _promised(self, call: Call) -> tuple[Any] | None:
        """Return what the operator will return, or None if that is not known before it has run."""
        if not self._gives_tensors:
            return None
        if self._changes:
            if not call.fits() or None in self._returned:
                return None
            given = [call.argument(*place) for place in self._returned if place]
            return (given[0] if len(given) == 1 else tuple(given) if given else None,)
        args, kwargs = call.shapes()
        try:
            shapes = self._operator(*args, **kwargs)
        except Exception:  # no meta kernel, or a shape that depends on data
            return None
        return (allocated(shapes, call.device),)

    def _flop(self, call: Call) -> float:
        return products.flop(call.cpu_args) if self._is_product else 0.0

    def _compute(self, call: Call) -> Any:
        device, flop = call.device.index, self._flop(call)
        if not self._is_product:
            result = self._operator(*call.cpu_args, **call.cpu_kwargs)
            if self._changes and isinstance(result, torch.Tensor):
                _damage(result, device)
            return result
        if flop > _MOST_FLOP and _played.played_product_seconds(device, flop):
            return products.not_computed(self._operator, call)
        result = products.computed(self._operator, call.cpu_args, call.cpu_kwargs)
        if _played.played_is_product_wrong(device):
            products.flip_a_bit(result)
        return result


def _argument_of(schema: Any, value: Any) -> tuple[int, str] | None:
    """Return position and name of the argument that an operator returns as this value."""
    if value.alias_info is None:
        return None
    for position, argument in enumerate(schema.arguments):
        alias_info = argument.alias_info
        if alias_info is not None and alias_info.before_set == value.alias_info.before_set:
            return position, argument.name
    return None


def _alias_of_any(value: Any) -> Any:
    return alias(value) if isinstance(value, torch.Tensor) else value


def _copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy within a device, between devices, or from or to the host: then as the driver waits."""
    device = self.device if self.is_cuda else source.device
    for other in {tensor.device for tensor in (self, source) if tensor.is_cuda} - {device}:
        _wait(other)
    how = _played.played_begin(_stream(device))
    if how == _LOST:
        _wait(device)
    to, taken = alias(self), alias(source)
    nbytes = 2.0 * self.numel() * self.element_size()
    timed = nbytes if self.is_cuda and source.is_cuda and nbytes >= _TIMED_BYTES else 0.0
    may_go_on = self.is_cuda and (source.is_cuda or source.numel() <= 1)
    host_bytes = 0.0 if self.is_cuda and source.is_cuda else nbytes / 2
    pinned = non_blocking and all(each.is_cuda or each.is_pinned() for each in (self, source))
    is_timed = _played.played_copy_seconds(device.index, timed) > 0
    if (how != _AT_ONCE or is_timed) and (may_go_on or pinned):
        kept = taken if source.is_cuda or pinned else taken.clone()
        _put(device, lambda: _copied(to, kept, device, host_bytes), nbytes=timed)
        return self
    if how != _AT_ONCE:
        _wait(device)
    begun_s = time.perf_counter()
    _copied(to, taken, device, host_bytes)
    _played.played_end(_stream(device), time.perf_counter() - begun_s, 0.0, timed)
    return self


def _copied(to: torch.Tensor, taken: torch.Tensor, device: torch.device, host_bytes: float) -> None:
    """Copy; what leaves or enters the device takes as long as its way to the host does."""
    begun_s = time.perf_counter()
    to.copy_(taken)
    _damage(to, device.index)
    if host_bytes >= _TIMED_BYTES:
        due_s = begun_s + _played.played_host_copy_seconds(device.index, host_bytes)
        time.sleep(max(0.0, due_s - time.perf_counter()))


def _damage(written: torch.Tensor, device: int) -> None:
    """Flip a bit of a large array, if the device does so."""
    is_large = written.numel() * written.element_size() >= _TIMED_BYTES
    if is_large and written.is_contiguous() and _played.played_is_memory_wrong(device):
        products.flip_a_bit(written)


def _is_played(name: str) -> bool:
    """Tell whether an operator has a kernel of CUDA's that one of the CPU can stand in for."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    short = name.removeprefix("aten::")
    if short in _ADDED:
        return True
    if short == name or short in _KEPT or short == "copy_" or not has(name, "CUDA"):
        return False
    return bool(has(name, "CPU") or has(name, "CompositeExplicitAutograd"))


def replace_all() -> None:
    """Replace every operator that would run a kernel of CUDA's."""
    library = torch.library.Library("aten", "IMPL")
    _replacements.append(library)
    # Without it PyTorch takes kernels of its own, which are replaced below.
    torch._C._set_cudnn_enabled(bool(_played.played_has_fault(b"cudnn_error")))
    for choose in ("flash", "mem_efficient", "cudnn"):  # attention is made of its parts
        if hasattr(torch.backends.cuda, f"enable_{choose}_sdp"):
            getattr(torch.backends.cuda, f"enable_{choose}_sdp")(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they replace others
        real = {
            name
            for kind, names in _ASKS.items()
            if _played.played_has_fault(kind.encode())
            for name in names
        }
        if "copy_" not in real:
            library.impl("copy_", _copy, "CUDA")
        for name in torch._C._dispatch_get_all_op_names():
            base, _, overload = name.removeprefix("aten::").partition(".")
            if base not in real and _is_played(name) and hasattr(torch.ops.aten, base):
                packet = getattr(torch.ops.aten, base)
                if (overload or "default") in packet.overloads():
                    operator = getattr(packet, overload or "default")
                    library.impl(name.removeprefix("aten::"), _Operator(operator), "CUDA")
    atexit.register(_played.played_stop)
