"""State dicts of a program's module and optimizer, in loops of a user: full values in, marked
shards out.

`program.state_dict` and `program.load_state_dict` have full values. Those of torch have what this
rank holds: averages and snapshots of that are right, a file of it would lack the values of other
ranks. A file of the optimizer's state is right on ranks with the same shards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import python_span
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.checkpointing.holdings import shard_of
from schedlang.runtime.checkpointing.optimizer_state import SHARDS, is_sharded_like
from schedlang.runtime.redistribution.sharding import full_slice
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


def _other_rank_refusal(what: str, name: str) -> Refusal:
    return Refusal.of(
        "S617",
        f"{what} is of another rank: its shard of `{name}` differs",
        notes=("`state_dict()`, of torch, has what the rank holds that calls it",),
        helps=(
            "`program.save(folder)` and `program.load(folder)` save and load all of it",
            "or write and read a file for each rank, under the same schedule and version",
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
            full_values = _FullValues(a, own)
            module.register_load_state_dict_pre_hook(full_values)  # type: ignore[no-untyped-call]
            mark = partial(_mark_values, own, full_values.parts)
            module.register_state_dict_post_hook(mark)  # type: ignore[no-untyped-call]


class _FullValues:
    """Replaces full values of a state dict by this rank's shards; a copy of the module keeps it."""

    def __init__(self, a: Assembly, own: Mapping[str, str]) -> None:
        self.holdings = {key: a.holdings[name] for key, name in own.items()}
        self.mesh, self.rank = a.ranks.mesh, a.ranks.rank
        held = {key: holding.part(self.mesh, self.rank) for key, holding in self.holdings.items()}
        self.parts = {key: str(part) for key, part in held.items()}

    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        *unused: object,
    ) -> None:
        saved = metadata.get(SHARDS, {})
        for key, holding in self.holdings.items():
            value, parameter = state.get(prefix + key), module._parameters[key]
            if isinstance(value, DTensor) and saved.get(key, self.parts[key]) != self.parts[key]:
                raise _other_rank_refusal("the state of this module", holding.name)
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
    own: Mapping[str, str],
    parts: Mapping[str, str],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
) -> None:
    """Mark values that are plain tensors; of a DTensor torch knows that it is a shard, and the
    metadata has of which part."""
    metadata[SHARDS] = dict(parts)
    for key, name in own.items():
        value = state.get(prefix + key)
        if type(value) is Tensor:  # not of `keep_vars=True`
            state[prefix + key] = mark_shard_tensor(value, name)


@dataclass(frozen=True)
class OptimizerShards:
    """Hooks of a rank's optimizer: its state dict names its shards, and takes no others."""

    assembly: Assembly

    def mark(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Add the shards of a state dict, unless each rank has all of every parameter."""
        names, shards = self._names(optimizer), self._shards(optimizer)
        states: Mapping[Any, Any] = optimizer.state
        sharded = {
            names[id(parameter)]
            for parameter, values in states.items()
            if id(parameter) in names
            and any(is_sharded_like(value, parameter) for value in values.values())
        }
        if sharded and shards:
            state[SHARDS] = {name: shards[name] for name in sharded}

    def check(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Refuse (S617) the state of other shards than those of this rank."""
        saved, own = state.get(SHARDS) or {}, self._shards(optimizer)
        for name in [name for name, part in saved.items() if own.get(name) != part]:
            raise _other_rank_refusal("the optimizer's state", name)

    def _names(self, optimizer: torch.optim.Optimizer) -> dict[int, str]:
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = self.assembly.parameters.items()
        return {id(p): name for name, p in parameters if id(p) in owned}

    def _shards(self, optimizer: torch.optim.Optimizer) -> dict[str, str]:
        """Return this rank's parts of its parameters; empty if each rank has all of every one."""
        a, names = self.assembly, self._names(optimizer).values()
        parts = {name: a.holdings[name].part(a.ranks.mesh, a.ranks.rank) for name in names}
        full = {name: full_slice(a.holdings[name].layout.shape) for name in names}
        if parts == full and all(name in a.parameters for name in a.holdings):
            return {}
        return {name: str(part) for name, part in parts.items()}
