"""State dicts of a program's module, in loops of a user: full values in, marked shards out.

`program.state_dict` and `program.load_state_dict` have full values. The module's own, of torch,
have what this rank holds: averages and snapshots of that are right, a file of it would lack the
values of other ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import python_span
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.checkpointing.holdings import shard_of
from schedlang.runtime.storage.offloaded_gradients import as_dtensor_like
from schedlang.runtime.storage.quantized_parameters import quantized_of


class ShardTensor(Tensor):
    """A rank's shard in a state dict: computes as a tensor; refused (S617) where a file reads it.

    What is computed of shards alone, in their shape (a copy, an average), is a shard. `tensor_name`
    is that of the full tensor.
    """

    tensor_name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            shard = next((value for value in args if isinstance(value, ShardTensor)), None)
            if shard is not None and func is Tensor.untyped_storage:  # as safetensors reads it
                raise _file_refusal(shard.tensor_name)
            result = func(*args, **(kwargs or {}))
            same = isinstance(result, Tensor) and shard is not None and result.shape == shard.shape
            others = [value for value in args if isinstance(value, Tensor) and value.dim()]
            if not same or func is Tensor.as_subclass or not all(map(_is_shard, others)):
                return result
            assert shard is not None
            return mark_shard_tensor(result, shard.tensor_name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, as `torch.save` does."""
        raise _file_refusal(self.tensor_name)


def mark_shard_tensor(value: Tensor, name: str) -> ShardTensor:
    """Return a tensor as a shard of the tensor `name`, on the same storage."""
    shard = value.as_subclass(ShardTensor)
    shard.tensor_name = name
    return shard


def _is_shard(value: object) -> bool:
    return isinstance(value, ShardTensor)


def _file_refusal(name: str) -> Refusal:
    return Refusal.of(
        "S617",
        f"a file would get this rank's shard of `{name}` for the parameter",
        notes=("`state_dict()` of a program's module has what this rank holds",),
        helps=(
            "`program.state_dict()`, called on all ranks, has full values",
            "or `program.save(folder)`, with the optimizer's state",
            "this rank's shard, for a file of its own: `value.as_subclass(torch.Tensor)`",
        ),
    ).at(python_span())


def guard_state(a: Assembly, shards: Collection[str]) -> None:
    """Let a module's `load_state_dict` take full values, and mark `shards` in its `state_dict`."""
    names = {id(parameter): name for name, parameter in a.parameters.items()}
    for module in a.module.modules():
        own = {
            key: names[id(parameter)]
            for key, parameter in module.named_parameters(recurse=False)
            if id(parameter) in names
            and (isinstance(parameter, DTensor) or names[id(parameter)] in shards)
        }
        if own:
            module.register_load_state_dict_pre_hook(_FullValues(a, own))  # type: ignore[no-untyped-call]
            module.register_state_dict_post_hook(partial(_mark_values, own))  # type: ignore[no-untyped-call]


class _FullValues:
    """Replaces full values of a state dict by this rank's shards; a copy of the module keeps it."""

    def __init__(self, a: Assembly, own: Mapping[str, str]) -> None:
        self.holdings = {key: a.holdings[name] for key, name in own.items()}
        self.mesh, self.rank = a.ranks.mesh, a.ranks.rank

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, *unused: object
    ) -> None:
        for key, holding in self.holdings.items():
            value, parameter = state.get(prefix + key), module._parameters[key]
            if not isinstance(value, Tensor) or isinstance(value, DTensor) or parameter is None:
                continue
            differs = isinstance(parameter, DTensor) or value.shape != parameter.shape
            full = tuple(value.shape) == holding.layout.shape
            if differs and full and quantized_of(parameter) is None:
                part = shard_of(value, holding, self.mesh, self.rank)
                part = part.to(parameter.device, parameter.dtype)
                state[prefix + key] = as_dtensor_like(part, parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> _FullValues:
        return self

    def __reduce__(self) -> Any:
        """Refuse to be pickled with its module."""
        raise _file_refusal(next(iter(self.holdings.values())).name)


def _mark_values(
    own: Mapping[str, str], module: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """Mark values that are plain tensors; of a DTensor torch knows that it is a shard."""
    for key, name in own.items():
        value = state.get(prefix + key)
        if type(value) is Tensor:  # not of `keep_vars=True`
            state[prefix + key] = mark_shard_tensor(value, name)
