"""Put full outputs and full tensors of a program together from the shards of each rank.

* Outputs, and gradients of inputs, from ranks with different tokens, in order.
* The model's output for the full batch, on every rank, from microbatches, replicas and stages.
* Full tensors of a program under the original's names. All ranks call each function here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import Refusal, kind_of
from schedlang.ir import pytree
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.batch import (
    BatchPart,
    MissingOutput,
    can_stack,
    dotted_path,
    named_tensors,
    stack_outputs,
)
from schedlang.runtime.checkpointing.holdings import (
    MESSAGE_BYTES,
    ReceiverChoice,
    assemble_tensors,
    plan_copies,
    shard_of,
)
from schedlang.runtime.checkpointing.optimizer_state import is_sharded_like
from schedlang.runtime.comm import world
from schedlang.runtime.context_parallel.token_layout import SequenceLayout
from schedlang.runtime.grad_reduction.gradient import local_gradient
from schedlang.runtime.lazy_logits.vocab_parallel import ShardedLogits
from schedlang.runtime.redistribution.execution import bucket_device, redistribute_by_route
from schedlang.runtime.storage.offloaded_gradients import local_tensor
from schedlang.runtime.storage.quantized_parameters import open_quantized

WeightedOutput = tuple[Any, int, float]  # an output, its rows, and its weight in a mean


def gather_token_outputs(
    a: Assembly, local: WeightedOutput, layout: SequenceLayout
) -> WeightedOutput:
    """Return the output of this rank's rows, from all ranks that have tokens of these rows."""
    assert a.tokens is not None
    group = a.ranks.group(a.context)
    gathered: list[Any] = [local]
    if group.pg is not None:
        gathered = world.all_gather_tensors(local, group.pg, a.ranks.device)
    outputs, rows, weights = zip(*gathered)
    return join_token_outputs(outputs, weights, layout, a.tokens.outputs), rows[0], sum(weights)


def join_token_outputs(
    outputs: Sequence[Any], weights: Sequence[float], layout: SequenceLayout, token_dims: Any
) -> Any:
    """Join outputs to those of full sequences; `token_dims` maps a leaf's path to its dim of
    tokens."""
    flat = [pytree.tree_flatten_with_path(output) for output in outputs]
    joined: list[Any] = []
    for leaves in zip(*(leaves for leaves, _ in flat)):
        name, values = dotted_path(leaves[0][0]), [value for _, value in leaves]
        dim = token_dims.get(name)
        if dim is not None and all(isinstance(value, Tensor) for value in values):
            unpadded = [v.narrow(dim, 0, n) for v, n in zip(values, layout.counts)]
            joined.append(layout.concatenate(unpadded, dim))
            continue
        stackable = all(can_stack(value) for value in values)
        stacked = stack_outputs(values, [1] * len(values), weights) if stackable else None
        scattered = isinstance(stacked, Tensor) and stacked.dim() > 0 and values[0].dim() > 0
        joined.append(
            MissingOutput("its parts by tokens cannot be concatenated")
            if not stackable or scattered
            else stacked
        )
    return pytree.tree_unflatten(joined, flat[0][1])


def join_token_gradients(
    grads: Sequence[Tensor | None], layout: SequenceLayout, has_tokens: bool
) -> Tensor | None:
    """Join gradients of an input from ranks with different tokens: concatenated in order, or
    summed."""
    present = [grad for grad in grads if grad is not None]
    if not present:
        return None
    if has_tokens and len(present) == len(grads):
        return layout.concatenate(present, 1)
    return torch.stack(present).sum(0)


_EARLIER = "an earlier stage of the pipeline has it"
_LIST = re.compile(r"\[\d+\]")  # an index of a list, as pytree writes it


def full_output(
    a: Assembly, parts: Mapping[int, WeightedOutput], layout: SequenceLayout | None = None
) -> tuple[Any, dict[str, str]]:
    """Return the full output, and its missing leaves (None in the output): path -> reason.

    `parts` are the microbatches whose last stage is on this rank; all ranks call this.
    `layout` gives the tokens of each rank, where ranks split sequences.
    """
    output = None
    with torch.no_grad():
        local_parts = {
            k: (_gather_logits(_mark_missing(a, out)), *rest) for k, (out, *rest) in parts.items()
        }
    if copies := _gather_copies(a, local_parts):
        local = (stack_outputs(*zip(*copies)), *map(sum, list(zip(*copies))[1:]))
        if layout is not None:
            local = gather_token_outputs(a, local, layout)
        output = _across_replicas(a, local)
    return drop_missing(_broadcast_output(a, output))


def _gather_copies(a: Assembly, local: Mapping[int, Any]) -> list[Any]:
    """Return all microbatches in order on the ranks of the last stage's first copy; elsewhere
    nothing."""
    pipe = a.pipeline
    last = pipe.timeline.stages - 1
    last_places = {pipe.place_of(last, replica) for replica in range(pipe.timeline.replicas)}
    if a.stage_axis is not None and len(last_places) > 1:
        group = a.ranks.group(a.stage_axis)
        assert group.pg is not None
        gathered = world.all_gather_tensors(local, group.pg, a.ranks.device)
        local = {k: output for part in gathered for k, output in part.items()}
    return [local[k] for k in sorted(local)] if pipe.place == pipe.place_of(last) else []


def drop_missing(output: Any) -> tuple[Any, dict[str, str]]:
    """Replace `MissingOutput` leaves of an output by None; return the output, and the reasons by
    path."""
    leaves, spec = pytree.tree_flatten_with_path(output)
    missing = {
        leaf.place or place_text(path): leaf.reason
        for path, leaf in leaves
        if isinstance(leaf, MissingOutput)
    }
    present = [None if isinstance(leaf, MissingOutput) else leaf for _, leaf in leaves]
    return pytree.tree_unflatten(present, spec), missing


def place_text(path: Sequence[Any]) -> str:
    """Return a path in a nest as `name.0.name`."""
    steps = [
        next(str(getattr(key, kind)) for kind in ("key", "idx", "name") if hasattr(key, kind))
        for key in path
    ]
    return ".".join(steps) or "output"


def _mark_missing(a: Assembly, output: Any) -> Any:
    """Mark values in a microbatch's output that the last stage does not have as `MissingOutput`."""
    if a.stage_axis is None:
        return output
    plain_types = (Tensor, ShardedLogits, bool, int, float, str, type(None))
    shorter = tuple(name for m in a.outputs_missing if (name := _LIST.split(m)[0]) != m and name)

    def kept(path: Any, leaf: Any) -> Any:
        name = pytree.keystr(path)
        # earlier stages have changed this list: it has another structure
        if name.startswith(shorter):
            depth = next(k for k, key in enumerate(path) if isinstance(key, pytree.SequenceKey))
            return MissingOutput(_EARLIER, place_text(path[:depth]))
        if name in a.outputs_missing or not isinstance(leaf, plain_types):
            return MissingOutput(_EARLIER)
        return leaf

    split = lambda leaf: isinstance(leaf, ShardedLogits)  # noqa: E731
    return pytree.tree_map_with_path(kept, output, is_leaf=split)


def _gather_logits(output: Any) -> Any:
    """Gather the vocabulary-sharded logits of an output; all ranks of their group call this."""
    to_full = lambda v: v.full() if isinstance(v, ShardedLogits) else v  # noqa: E731
    is_split = lambda value: isinstance(value, ShardedLogits)  # noqa: E731
    return pytree.tree_map(to_full, output, is_leaf=is_split)


def _across_replicas(a: Assembly, local: WeightedOutput) -> Any:
    group = a.ranks.group(a.row_axes)
    if group.pg is None:
        return local[0]
    outputs, rows, weights = zip(*world.all_gather_tensors(local, group.pg, a.ranks.device))
    own = _without_gathered_rows(outputs, rows) if a.gathers_rows else outputs
    return stack_outputs(own, rows, weights)


def _without_gathered_rows(outputs: Sequence[Any], rows: Sequence[int]) -> Sequence[Any]:
    """Return the outputs of replicas, in which each has its own rows of what all have in full.

    Such a tensor has the rows of the full batch in dim 0, and is equal on all replicas but for
    rounding.
    """
    flat = [pytree.tree_flatten(output) for output in outputs]
    spec = flat[0][1]
    if any(other_spec != spec for _, other_spec in flat[1:]):
        return outputs
    by_leaf = [
        leaves[0].split(list(rows)) if _are_gathered(leaves, sum(rows)) else leaves
        for leaves in zip(*(leaves for leaves, _ in flat))
    ]
    return [
        pytree.tree_unflatten([leaves[index] for leaves in by_leaf], spec)
        for index in range(len(outputs))
    ]


def _are_gathered(values: Sequence[Any], total: int) -> bool:
    """Return whether the values of all replicas are one tensor with `total` rows."""
    first = values[0]
    if not all(isinstance(value, Tensor) and value.shape == first.shape for value in values):
        return False
    if not first.ndim or first.shape[0] != total:
        return False
    if not first.is_floating_point():
        return all(torch.equal(value, first) for value in values)
    limit = torch.finfo(first.dtype).eps ** 0.5  # sums in another order, on devices that do so
    return all(torch.allclose(v, first, rtol=limit, atol=limit, equal_nan=True) for v in values)


def _broadcast_output(a: Assembly, output: Any) -> Any:
    if a.stage_axis is None:
        return output
    return world.broadcast_tensors(a.last_rank, output, a.ranks.device)


def local_shards(a: Assembly) -> dict[str, Tensor]:
    """Return this rank's shards of the parameters, as they are stored."""
    return {name: local_tensor(parameter) for name, parameter in a.parameters.items()}


def full_gradients(a: Assembly, receivers: ReceiverChoice | None = None) -> dict[str, Tensor]:
    """Return full gradients, on all ranks or those that `receivers` gives; without parameters that
    have none."""
    with torch._C.DisableTorchFunctionSubclass():  # those of shards may be marked
        grads = {name: local_gradient(parameter) for name, parameter in a.parameters.items()}
    local_grads = {name: grad for name, grad in grads.items() if grad is not None}
    return assemble_tensors(a.holdings, local_grads, a.ranks, receivers, a.gather_routes)


def trained_names(a: Assembly) -> list[str]:
    """Return the names of the parameters that some rank trains, in model order."""
    local = [name for name, p in a.parameters.items() if p.requires_grad]
    union = {name for names in world.distinct_objects(local) for name in names}
    return [name for name in a.holdings if name in union]


def full_state_dict(a: Assembly, receivers: ReceiverChoice | None = None) -> dict[str, Tensor]:
    """Return parameters and buffers by the original's keys, on all ranks or those that `receivers`
    gives."""
    tensors = {
        **assemble_tensors(a.holdings, local_shards(a), a.ranks, receivers, a.gather_routes),
        **full_buffers(a),
    }
    for names in a.ties:
        tensors.update({name: tensors[names[0]] for name in names if names[0] in tensors})
    keys = (*a.keys, *_added_names(a))
    return {key: tensors[key] for key in keys if receivers is None or key in tensors}


def _added_names(a: Assembly) -> list[str]:
    """Return the names of saved buffers that forwards have added since the build, of all ranks."""
    local = list(a.added_buffers)
    if a.stage_axis is None:
        return local
    return list(dict.fromkeys(name for names in world.distinct_objects(local) for name in names))


def full_buffers(a: Assembly) -> dict[str, Tensor]:
    """Return all buffers by name, including those that a state dict omits; of copies the first
    rank's.

    For stages that are placed twice, the first replica's, which also evaluates: statistics of one
    replica, never a mixture of both.
    """
    local = {name: value.detach().cpu().clone() for name, value in a.buffers.items()}
    if a.stage_axis is None:
        return local if a.replica_buffers is None else world.distinct_objects(local)[0]
    stage_rank = a.ranks.mesh.index(a.ranks.rank, a.stage_axis)
    primary = {n: v for n, v in local.items() if stage_rank == a.buffer_homes.get(n, stage_rank)}
    loaded = {n: primary.pop(n) for n, v in a.added_buffers.items() if a.is_as_loaded(n, v)}
    merged: dict[str, Tensor] = {}
    for values in reversed([*world.distinct_objects(primary), *world.distinct_objects(loaded)]):
        merged.update(values)
    return merged


def buffer_errors(a: Assembly) -> dict[str, float]:
    """Return for each buffer 0 if its copies on all ranks that hold it are equal, else 1."""
    stage_rank = a.ranks.mesh.index(a.ranks.rank, a.stage_axis) if a.stage_axis is not None else 0
    stages = a.buffer_stages
    local = {
        name: value.detach().cpu().clone()
        for name, value in a.buffers.items()
        if a.stage_axis is None or stages.get(name) is None or stage_rank in (stages[name] or ())
    }
    rank_buffers = world.distinct_objects(local)
    errors = {}
    for name in dict.fromkeys(name for buffers in rank_buffers for name in buffers):
        first, *others = [buffers[name] for buffers in rank_buffers if name in buffers]
        errors[name] = float(any(not torch.equal(first, other) for other in others))
    return errors


def load_full_state(a: Assembly, state: Mapping[str, Tensor]) -> None:
    """Load full values; raises Refusal S641 before anything is changed."""
    if not isinstance(state, Mapping):
        message = f"a state dict is a dict, not {kind_of(state)}"
        raise Refusal.of("S641", message, helps=("`program.load` takes the path of a checkpoint",))
    problems = [f"`{k}` is missing" for k in a.keys if k not in state]
    problems += [f"`{k}` is unknown" for k in state if k not in a.keys]
    shapes: dict[str, Sequence[int]] = {n: h.layout.shape for n, h in a.holdings.items()}
    shapes |= {name: buffer.shape for name, buffer in a.saved_buffers.items()}
    shapes |= {n: shapes[names[0]] for names in a.ties for n in names if names[0] in shapes}
    given = {name: state[name] for name in shapes if name in state}
    problems += filter(None, (_misfit(n, value, shapes[n]) for n, value in given.items()))
    if problems:
        rest = (f"and {len(problems) - 8} more like these",) * (len(problems) > 8)
        helps = ("give the full state dict of this model, as `model.state_dict()` returns it",)
        notes = (*problems[:8], *rest)
        raise Refusal.of("S641", "the state dict is not of this model", notes=notes, helps=helps)
    values = dict(given)
    for names in a.ties:  # as torch, which copies one name after the other: the last one counts
        for name in filter(given.__contains__, names):
            values[names[0]] = given[name]
    with torch.no_grad(), open_quantized(a.parameters.values()):
        for name, parameter in a.parameters.items():
            if name in values:
                part = shard_of(values[name], a.holdings[name], a.ranks.mesh, a.ranks.rank)
                local_tensor(parameter).copy_(part)
        for name, buffer in a.buffers.items():
            if name in values:
                buffer.copy_(values[name])


def _misfit(name: str, value: Any, shape: Sequence[int]) -> str:
    """Return why a value of a state dict is not the full tensor of this name; "" if it is."""
    if not isinstance(value, Tensor):
        return f"`{name}` is {kind_of(value)}, not a tensor"
    if value.is_meta:
        return f"`{name}` has no values: it is on the meta device"
    given, wanted = list(value.shape), list(shape)
    return "" if given == wanted else f"`{name}` is {given}, not {wanted}"


@torch.no_grad()
def replica_errors(a: Assembly) -> dict[str, float]:
    """Return the largest relative difference between copies of one shard, by parameter.

    Each rank receives its shard from the rank that is primary for it; padding is compared with
    zeros.
    """
    local = local_shards(a)
    sizes = {name: p.itemsize for name, p in a.module.named_parameters()}
    plan = plan_copies(a.holdings, {n: sizes[n] for n in a.holdings}, a.ranks.mesh, a.gather_routes)
    target = {name: torch.zeros_like(part, device="cpu") for name, part in local.items()}
    for route in plan.routes:
        redistribute_by_route(
            route,
            local.__getitem__,
            target.__getitem__,
            MESSAGE_BYTES,
            bucket_device(a.ranks.device),
        )
    errors = {}
    for name, part in target.items():
        if part.numel():
            scale = float(part.double().abs().max())
            error = float((local[name].cpu().double() - part.double()).abs().max())
            errors[name] = error / scale if scale else error
    rank_errors = world.all_gather_object(errors)
    return {
        name: max(found_errors.get(name, 0.0) for found_errors in rank_errors)
        for name in a.holdings
    }


def full_optimizer_state(
    a: Assembly, optimizer: torch.optim.Optimizer | None, to: ReceiverChoice | None = None
) -> dict[str, dict[str, Any]]:
    """Return the state by parameter name and slot: full tensors, and numbers as they are.

    On all ranks, or those that `to` gives.
    """
    sharded: dict[tuple[str, str], Tensor] = {}
    unsharded: dict[tuple[str, str], Any] = {}
    states: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    for name, p in a.parameters.items():
        for key, value in states.get(p, {}).items():
            if is_sharded_like(value, p):
                sharded[name, key] = local_tensor(value)
            else:
                unsharded[name, key] = value.cpu().clone() if isinstance(value, Tensor) else value
    keys = sorted(
        {
            key
            for some_keys in world.distinct_objects(sorted({k for _, k in sharded}))
            for key in some_keys
        }
    )
    holdings = {(name, key): holding for key in keys for name, holding in a.holdings.items()}
    values_by_key: dict[tuple[str, str], Any] = dict(
        assemble_tensors(holdings, sharded, a.ranks, to, a.gather_routes)
    )
    for values in reversed(world.distinct_objects(unsharded)):
        values_by_key.update(values)
    state: dict[str, dict[str, Any]] = {}
    for name, key in sorted(values_by_key, key=lambda holding: holding[1]):
        state.setdefault(name, {})[key] = values_by_key[name, key]
    return state


def full_input_gradients(
    a: Assembly, parts: Sequence[BatchPart], divisor: float = 1.0
) -> dict[str, Tensor | None]:
    """Return gradients of the batch's float tensors: rows of all replicas, summed over stages.

    The loss was multiplied by `divisor`.
    """
    local = [
        {
            k: None if v.grad is None else v.grad / divisor
            for k, v in named_tensors(part.inputs).items()
            if v.requires_grad
        }
        for part in parts
    ]
    gathered = world.all_gather_object(local)
    indices = range(a.ranks.mesh.size(a.row_axes))
    names = local[0] if local else {}
    layout = parts[0].token_shard.layout if parts and parts[0].token_shard is not None else None
    return {
        n: _concatenate([_row_gradient(a, gathered, index, n, layout) for index in indices])
        for n in names
    }


def _row_gradient(
    a: Assembly, gathered: Sequence[Any], index: int, name: str, layout: SequenceLayout | None
) -> Tensor | None:
    """Return the gradient of some rows, from all ranks that have tokens of these rows."""
    if layout is None or a.tokens is None:
        return _replica_gradient(a, gathered, index, name)
    count = len(layout.runs)
    grads = [_replica_gradient(a, gathered, index * count + k, name) for k in range(count)]
    return join_token_gradients(grads, layout, name in (a.tokens.along or ()))


def _replica_gradient(a: Assembly, gathered: Sequence[Any], index: int, name: str) -> Tensor | None:
    """Return the gradient of one replica's rows: the sum over stages."""
    grads = [
        [part[name] for part in parts]
        for rank, parts in enumerate(gathered)
        if a.is_primary_rank(rank) and a.part_index(rank) == index
    ]
    return _concatenate([_sum_present(values) for values in zip(*grads)])


def _concatenate(rows: Sequence[Tensor | None]) -> Tensor | None:
    present = [row for row in rows if row is not None]
    return torch.cat(present) if present and len(present) == len(rows) else None


def _sum_present(values: Sequence[Tensor | None]) -> Tensor | None:
    present = [value for value in values if value is not None]
    return torch.stack(present).sum(0) if present else None
