# SPDX-License-Identifier: Apache-2.0
"""Tensors of played devices, seen as the CPU's: both are memory of this process."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the CPU over the same memory; one of the CPU is returned as it is."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    if not count or not storage.data_ptr():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * (count * tensor.element_size())).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def mapped(value: Any, each: Callable[[Any], Any]) -> Any:
    """Return an argument or a result with something done to each of its parts."""
    if type(value) in (list, tuple):
        return type(value)(mapped(part, each) for part in value)
    if isinstance(value, tuple):  # a named one, as torch.return_types has them
        return tuple(mapped(part, each) for part in value)
    return each(value)


class Call:
    """The arguments of one call of an operator, as given, as the CPU's and as shapes alone."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self._device: torch.device | None = None
        self._given: dict[int, torch.Tensor] = {}  # by the alias's id
        self._aliases: list[torch.Tensor] = []  # alive, so that no id is given twice
        self.cpu_args = [mapped(value, self._cpu) for value in args]
        self.cpu_kwargs = {name: mapped(value, self._cpu) for name, value in kwargs.items()}
        self.cpu_kwargs.pop("pin_memory", None)
        self.device = self._device or torch.device("cuda", torch.cuda.current_device())

    def _cpu(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            self._device = self._device or value.device
            seen = alias(value)
            self._given[id(seen)] = value
            self._aliases.append(seen)
            return seen
        if isinstance(value, torch.device) and value.type == "cuda":
            index = torch.cuda.current_device() if value.index is None else value.index
            self._device = self._device or torch.device("cuda", index)
            return torch.device("cpu")
        if isinstance(value, torch.Generator) and value.device.type == "cuda":
            return _stand_in(value)
        return value

    def shapes(self) -> tuple[list[Any], dict[str, Any]]:
        return (
            [mapped(value, _meta) for value in self._args],
            {name: mapped(value, _meta) for name, value in self._kwargs.items()},
        )

    def keep_values(self) -> None:
        """Copy the CPU's own tensors: the caller may change them before the call is run."""

        def kept(value: Any) -> Any:
            is_own = isinstance(value, torch.Tensor) and id(value) not in self._given
            return value.clone() if is_own else value

        self.cpu_args = [mapped(value, kept) for value in self.cpu_args]
        self.cpu_kwargs = {name: mapped(value, kept) for name, value in self.cpu_kwargs.items()}

    def argument(self, position: int, name: str) -> Any:
        """Return an argument as it was given."""
        return self._args[position] if position < len(self._args) else self._kwargs.get(name)

    def fits(self) -> bool:
        """Tell whether no argument is an empty `out`, which would be resized."""
        return all(each.numel() for each in self._aliases)

    def given(self, result: Any) -> Any:
        """Return a result of the CPU as the device's: an argument where it is one, else a copy."""

        def one(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in self._given:
                return self._given[id(value)]
            return value if value.device.type != "cpu" else copied(value, self.device)

        return mapped(result, one)

    def resize_changed(self) -> None:
        """Give arguments the sizes that the operator has given to their aliases."""
        for seen in self._aliases:
            tensor = self._given[id(seen)]
            if seen.shape != tensor.shape:
                tensor.resize_(seen.shape)
                alias(tensor).copy_(seen)


def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        alias(made).copy_(tensor)
    return made


def allocated(shapes: Any, device: torch.device) -> Any:
    def one(shape: Any) -> Any:
        if not isinstance(shape, torch.Tensor):
            return shape
        return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)

    return mapped(shapes, one)


def fill(made: Any, result: Any) -> None:
    """Copy a result into the memory that was promised for it; None: it is there already."""
    if isinstance(made, torch.Tensor):
        if made.numel():
            made.copy_(result)
    elif isinstance(made, (list, tuple)):
        for one, other in zip(made, result, strict=True):
            fill(one, other)


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value


_generators: dict[int, tuple[int, torch.Generator]] = {}


def _stand_in(generator: torch.Generator) -> torch.Generator:
    """Return the CPU's generator that gives numbers in place of one of CUDA."""
    seed = int(generator.initial_seed())
    if id(generator) not in _generators or _generators[id(generator)][0] != seed:
        _generators[id(generator)] = (seed, torch.Generator().manual_seed(seed))
    return _generators[id(generator)][1]
