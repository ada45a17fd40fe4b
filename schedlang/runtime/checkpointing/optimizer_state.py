"""Optimizer state by parameter name, and the state of compressed reductions, in a checkpoint.

`archive` describes and loads both with the functions of this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Diagnostic, Refusal, quote_names
from schedlang.runtime.checkpointing.boxes import BoxedTensor, replicated_tensor, zeros
from schedlang.runtime.checkpointing.index import DTYPE_NAMES, DTYPES
from schedlang.runtime.checkpointing.plain_values import (
    can_replace,
    equal_values,
    from_plain,
    tensors_within,
    to_plain,
)
from schedlang.runtime.comm import world
from schedlang.runtime.storage.folder import run_on_all_ranks
from schedlang.runtime.storage.offloaded_gradients import local_tensor

if TYPE_CHECKING:
    from schedlang.runtime.program import Program

# ---- Optimizer state by parameter name: described by all ranks together, and loaded.


NOT_SAVED = ("params", "param_names")  # entries of a group that are no hyperparameters
SHARDS = "schedlang"  # entry of a state dict: the shards in it, by parameter
RARE = ("common", "own")  # fields of `SavedOptimizer`
Hyper = dict[str, Any]


@dataclass
class SavedOptimizer:
    """The state of an optimizer without its large tensors; the fields are keys of the checkpoint.

    kind    the optimizer's class; None: no rank has an optimizer
    groups  hyperparameters, once for each distinct set; `of` has the index of each parameter's set
    parts   parameter -> state key -> dtype, of tensors that are sharded as the parameter
    values  parameter -> state key -> other values (the number of steps)
    common  state that belongs to no parameter, equal on all ranks
    own     what the `state_dict` of the optimizer's class has beside state and groups, as well
    """

    kind: str | None = None
    groups: list[Hyper] = field(default_factory=list)
    of: dict[str, int] = field(default_factory=dict)
    parts: dict[str, dict[str, str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the fields as plain data; few optimizers have the last two, and older versions of
        schedlang do not know them."""
        return {key: value for key, value in vars(self).items() if value or key not in RARE}


def describe_optimizer(program: Program | None) -> SavedOptimizer:
    """Gather the state of the optimizers of all ranks; None: this rank has no part of the program.

    Raises Refusal S637 on all ranks for a value that is neither tensor nor plain data, or that
    differs between ranks although it is not sharded.
    """
    local = run_on_all_ranks(
        lambda: SavedOptimizer() if program is None else _local_state(program),
        lambda error: Diagnostic("S637", str(error)),
    )
    local_states = world.distinct_objects(local)
    merged = SavedOptimizer(next((m.kind for m in local_states if m.kind is not None), None))
    for state in local_states:
        for name, number in state.of.items():
            merged.of.setdefault(name, _group_number(merged.groups, state.groups[number]))
        for name, parts in state.parts.items():
            merged.parts.setdefault(name, {}).update(parts)
        for name, values in state.values.items():
            for key, value in values.items():
                first_value = merged.values.setdefault(name, {}).setdefault(key, value)
                if not equal_values(first_value, value):
                    raise _differing(f"`{key}` of the optimizer for `{name}`")
    _merge_common(merged, [state for state in local_states if state.kind is not None])
    for name, values in merged.values.items():
        for key in values.keys() & merged.parts.get(name, {}).keys():
            raise _differing(f"`{key}` of the optimizer for `{name}`")
    return merged


def _merge_common(merged: SavedOptimizer, states: Sequence[SavedOptimizer]) -> None:
    """Take the state that belongs to no parameter; refuse (S637) ranks that differ in it."""
    for state in states:
        if not equal_values([state.common, state.own], [states[0].common, states[0].own]):
            raise _differing("the optimizer's state that belongs to no parameter")
        merged.common, merged.own = state.common, state.own


def trained_parameters(program: Program) -> dict[str, nn.Parameter]:
    """Return the parameters that this rank's optimizer updates."""
    if program.optimizer is None:
        return {}
    owned = {id(p) for group in program.optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in program.assembly.parameters.items() if id(p) in owned}


def is_sharded_like(value: Any, parameter: nn.Parameter) -> TypeGuard[Tensor]:
    """Return whether a value of the optimizer's state is sharded as the parameter."""
    same_shape = (
        isinstance(value, Tensor) and local_tensor(value).shape == local_tensor(parameter).shape
    )
    return same_shape and not hasattr(value, "of_whole")


def mark_unsharded(value: Any) -> Any:
    """Mark a value of a full parameter: it is no shard, whatever its shape."""
    if isinstance(value, Tensor):  # a row statistic may have the shape of a shard
        value.of_whole = True  # type: ignore[attr-defined]
    return value


def optimizer_tensors(program: Program) -> dict[tuple[str, str], Tensor]:
    """Return this rank's shards of the optimizer's state, by parameter and key."""
    states: Mapping[Any, Any] = {} if program.optimizer is None else program.optimizer.state
    return {
        (name, key): local_tensor(value)
        for name, parameter in trained_parameters(program).items()
        for key, value in states.get(parameter, {}).items()
        if is_sharded_like(value, parameter)
    }


def load_optimizer(
    program: Program, saved: SavedOptimizer, parts: Mapping[tuple[str, str], Tensor]
) -> None:
    """Load state into this rank's optimizer: `parts` are local tensors by name and key."""
    if program.optimizer is None:
        return
    _load_common(program.optimizer, saved)
    owned = trained_parameters(program)
    names = {id(parameter): name for name, parameter in owned.items()}
    for group in program.optimizer.param_groups:
        first_name = next((names[id(p)] for p in group["params"] if id(p) in names), None)
        if first_name is not None:
            _set_group(group, saved.groups[saved.of[first_name]])
    for name, parameter in owned.items():
        program.optimizer.state.pop(parameter, None)
        values = saved.values.get(name, {})
        state = {
            key: mark_unsharded(from_plain(value, parameter.device))
            for key, value in values.items()
        }
        for key in saved.parts.get(name, {}):
            state[key] = sharded_like(parts[name, key], parameter)
        if state:
            program.optimizer.state[parameter] = state


def group_mismatch(program: Program, saved: SavedOptimizer) -> str:
    """Return why saved hyperparameters do not fit the groups here; "" if they do."""
    owned = {id(p): name for name, p in trained_parameters(program).items()}
    groups = program.optimizer.param_groups if program.optimizer is not None else ()
    named_groups = [(g, [owned[id(p)] for p in g["params"] if id(p) in owned]) for g in groups]
    for _, names in named_groups:
        other_name = next((n for n in names if saved.of[n] != saved.of[names[0]]), None)
        if other_name is not None:
            return f"its parameter groups differ: {quote_names([names[0], other_name])} were in two"
    first_of: dict[int, tuple[Hyper, str]] = {}  # saved set -> the first group here that gets it
    for group, names in named_groups:
        if not names:
            continue
        number = saved.of[names[0]]
        other, other_name = first_of.setdefault(number, (group, names[0]))
        for key, value in saved.groups[number].items():
            if key in group and not can_replace(group[key], value):
                return f"`{key}` of its groups has a different type here"
            # a loop may have set all rates alike
            if key != "lr" and not equal_values(group.get(key), other.get(key)):
                pair = quote_names([other_name, names[0]])
                return f"its parameter groups differ: {pair} had one `{key}`, and have two here"
    return _full_tensor_mismatch(program, saved)


def _full_tensor_mismatch(program: Program, saved: SavedOptimizer) -> str:
    """Return which saved list holds full tensors, of which this rank could not take its shard."""
    holdings = program.assembly.holdings
    for name, parameter in trained_parameters(program).items() if program.whole is None else ():
        shape = torch.Size(holdings[name].layout.shape)
        for key, value in saved.values.get(name, {}).items():
            full = any(tensor.shape == shape for tensor in tensors_within(value))
            if full and local_tensor(parameter).shape != shape:
                return f"`{key}` of `{name}` is a list of full tensors, and this rank has a shard"
    several = program.assembly.ranks.mesh.world > 1
    if several and any(t.numel() > 1 for v in (saved.common, saved.own) for t in tensors_within(v)):
        return "it has tensors that belong to no parameter, which only one rank can load"
    return ""


def _local_state(program: Program) -> SavedOptimizer:
    """Return this rank's state, of the parameters for which it is primary."""
    state, optimizer, a = SavedOptimizer(), program.optimizer, program.assembly
    if optimizer is None:
        return state
    state.kind = type(optimizer).__qualname__
    common = {key: v for key, v in optimizer.state.items() if not isinstance(key, Tensor)}
    state.common = to_plain("state", common) if common else {}
    own = _own_entries(optimizer)
    state.own = to_plain("state_dict()", own) if own else {}
    owned = trained_parameters(program)
    names = {id(parameter): name for name, parameter in owned.items()}
    for group in optimizer.param_groups:
        hyper = {key: to_plain(key, v) for key, v in group.items() if key not in NOT_SAVED}
        number = _group_number(state.groups, hyper)
        state.of.update({names[id(p)]: number for p in group["params"] if id(p) in names})
    for name, parameter in owned.items():
        if not a.holdings[name].is_primary(a.ranks.mesh, a.ranks.rank):
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(key, str):
                raise _bad_key(name, key)
            if is_sharded_like(value, parameter):
                kind = DTYPE_NAMES[value.dtype]
                state.parts.setdefault(name, {})[key] = kind
            else:
                state.values.setdefault(name, {})[key] = to_plain(f"{name}.{key}", value)
    return state


def _bad_key(name: str, key: Any) -> Refusal:
    return Refusal.of(
        "S637",
        f"the optimizer's state of `{name}` has the key {key!r}",
        notes=("state of a parameter is saved by the names of its entries",),
        helps=("use text as keys: `state['momentum']`",),
    )


def _own_entries(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a `state_dict` of the user has beside state and groups."""
    base, kind = torch.optim.Optimizer, type(optimizer)
    changed = kind.state_dict is not base.state_dict
    if not changed and not getattr(optimizer, "_optimizer_state_dict_post_hooks", None):
        return {}
    entries = optimizer.state_dict().items()
    return {key: value for key, value in entries if key not in ("state", "param_groups", SHARDS)}


def _load_common(optimizer: torch.optim.Optimizer, saved: SavedOptimizer) -> None:
    """Load the state that belongs to no parameter; that of parameters is lost."""
    cpu = torch.device("cpu")
    if saved.own:
        groups = optimizer.state_dict()["param_groups"]
        own = from_plain(saved.own, cpu)
        optimizer.load_state_dict({**own, "state": {}, "param_groups": groups})
    for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
        del optimizer.state[key]
    optimizer.state.update(from_plain(saved.common, cpu) if saved.common else {})


def _group_number(groups: list[Hyper], hyper: Hyper) -> int:
    """Return the index of these hyperparameters in the list; append them if they are new."""
    for number, group in enumerate(groups):
        if equal_values(group, hyper):
            return number
    groups.append(hyper)
    return len(groups) - 1


def _set_group(group: dict[str, Any], hyper: Hyper) -> None:
    parameter = group["params"][0]
    for key, value in hyper.items():
        restored, current = from_plain(value, parameter.device), group.get(key)
        if isinstance(current, Tensor) and isinstance(restored, Tensor):
            current.copy_(restored)  # a compiled step may refer to this tensor
        else:
            group[key] = restored


def sharded_like(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a state tensor that is sharded as the parameter; the same tensor if it is."""
    if type(part) is type(parameter.data) and (part.shape, part.device) == (
        parameter.shape,
        parameter.device,
    ):
        return part
    sharded = torch.zeros_like(parameter, dtype=part.dtype, requires_grad=False)
    local_tensor(sharded).copy_(part)
    return sharded


def _differing(what: str) -> Refusal:
    return Refusal.of(
        "S637",
        f"ranks differ in {what}",
        notes=("it does not have the shape of the parameter: it must be equal on all ranks",),
        helps=(
            "compute it only from values that are equal on all ranks",
            "or save it yourself, rank by rank",
        ),
    )


# ---- The state of compressed reductions in a checkpoint: errors, starts of power iterations.
# The errors of a parameter are one tensor whose dim 0 is the rank in the group, followed by the
# dims of the parameter. If the group has the same size after a load, each rank gets its own error
# back; otherwise all ranks share the sum of the errors equally, so that a later step still adds
# them. A start belongs to a shard of a matrix, and is loaded by the ranks with that shard.


ERRORS, STARTS = ("sums", "errors"), ("sums", "starts")
SavedResidue = Mapping[str, Any]


def describe_residue(program: Program) -> dict[str, Any] | None:
    """Return a description of the compressor's state over all ranks; None without one."""
    c = program.assembly.compressor
    if c is None:
        return None
    local = {
        "errors": {
            n: DTYPE_NAMES[m.error.dtype] for n, m in c.memories.items() if m.error is not None
        },
        "starts": {
            f"{n} {_part_key(program, n)}": [list(m.q.shape), DTYPE_NAMES[m.q.dtype]]
            for n, m in c.memories.items()
            if m.q is not None
        },
    }
    merged: dict[str, Any] = {"step": c.step, "places": c.group.size, "errors": {}, "starts": {}}
    for residue in world.distinct_objects(local):
        merged["errors"].update(residue["errors"])
        merged["starts"].update(residue["starts"])
    return merged


def residue_tensors(program: Program) -> list[BoxedTensor]:
    """Return the tensors of this rank's compressor."""
    c = program.assembly.compressor
    tensors: list[BoxedTensor] = []
    if c is None:
        return tensors
    for name, memory in c.memories.items():
        if memory.error is not None:
            index, count = _place_in_group(program), c.group.size
            tensors.append(_error_box(program, name, memory.error[None], (index,), count))
        if memory.q is not None:
            path = (*STARTS, f"{name} {_part_key(program, name)}")
            primary = _is_primary(program, name) and _place_in_group(program) == 0
            tensors.append(replicated_tensor(path, memory.q, primary=primary))
    return tensors


def empty_residue(program: Program, saved: SavedResidue | None) -> list[BoxedTensor]:
    """Return tensors for the compressor state of a checkpoint for this rank's parts."""
    c = program.assembly.compressor
    if c is None or saved is None:
        return []
    tensors: list[BoxedTensor] = []
    count = saved["places"]
    places_held = (_place_in_group(program),) if count == c.group.size else tuple(range(count))
    for name in c.names:
        kind = saved["errors"].get(name) if c.codec.feedback else None
        if kind is not None:
            shape = local_tensor(program.assembly.parameters[name]).shape
            empty = zeros((len(places_held), *shape), DTYPES[kind])
            tensors.append(_error_box(program, name, empty, places_held, count))
        start = f"{name} {_part_key(program, name)}"
        size, kind = saved["starts"].get(start, ((0, 0), ""))
        if c.codec.kind == "powersgd" and size[1] == c.codec.rank:
            tensors.append(replicated_tensor((*STARTS, start), zeros(size, DTYPES[kind])))
    return tensors


def restore_residue(
    program: Program, saved: SavedResidue | None, parts: Sequence[BoxedTensor]
) -> None:
    """Load the compressor state that was read; start empty if there was none."""
    from schedlang.runtime.grad_reduction.compressed import CompressionState

    c = program.assembly.compressor
    if c is None:
        return
    c.step = saved["step"] if saved is not None else 0
    c.memories.clear()
    for tensor in parts:
        is_error = tensor.path[:-1] == ERRORS
        name = tensor.path[-1] if is_error else tensor.path[-1].rpartition(" ")[0]
        device = program.assembly.parameters[name].device
        memory = c.memories.setdefault(name, CompressionState())
        if is_error:
            share = tensor.local.sum(0) / (1 if len(tensor.local) == 1 else c.group.size)
            rows = share.reshape(share.shape[0], math.prod(share.shape[1:]))  # a slice may be empty
            memory.error = rows.to(device)
        else:
            memory.q = tensor.local.to(device)


def _error_box(
    program: Program, name: str, error: Tensor, held_indices: tuple[int, ...], count: int
) -> BoxedTensor:
    """Return the errors of some of `count` places, for this rank's part of a parameter."""
    a = program.assembly
    holding, mesh, rank = a.holdings[name], a.ranks.mesh, a.ranks.rank
    shape = holding.layout.shape
    runs = tuple((runs, index, 1) for runs, index in enumerate(held_indices))
    part = (runs, *holding.part(mesh, rank))
    tensor = error.reshape(len(held_indices), *local_tensor(a.parameters[name]).shape)
    return BoxedTensor((*ERRORS, name), tensor, (count, *shape), part, _is_primary(program, name))


def _place_in_group(program: Program) -> int:
    """Return the place of this rank in the group of the reduction."""
    a = program.assembly
    assert a.compressor is not None
    return a.ranks.mesh.index(a.ranks.rank, a.compressor.group.axes)


def _is_primary(program: Program, name: str) -> bool:
    """Return whether this rank is primary for its part, among those at its place."""
    a = program.assembly
    assert a.compressor is not None
    mesh = a.ranks.mesh
    zero = dict.fromkeys(mesh.fold(a.compressor.group.axes), 0)
    return a.holdings[name].is_primary(mesh, mesh.rank({**mesh.coordinates(a.ranks.rank), **zero}))


def _part_key(program: Program, name: str) -> str:
    """Return the part of a parameter that this rank holds, as text."""
    a = program.assembly
    runs = a.holdings[name].segments(a.ranks.mesh, a.ranks.rank)
    return ",".join("+".join(f"{run.start}:{run.length}" for run in dim) for dim in runs)
