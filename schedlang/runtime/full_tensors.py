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
    a: Assembly, mine: WeightedOutput, layout: SequenceLayout
) -> WeightedOutput:
    """Return the output of this rank's rows, from all ranks that have tokens of these rows."""
    assert a.tokens is not None
    group = a.ranks.group(a.context)
    found: list[Any] = [mine]
    if group.pg is not None:
        found = world.all_gather_tensors(mine, group.pg, a.ranks.device)
    outputs, rows, weights = zip(*found)
    return join_token_outputs(outputs, weights, layout, a.tokens.outputs), rows[0], sum(weights)


def join_token_outputs(
    outputs: Sequence[Any], weights: Sequence[float], layout: SequenceLayout, along: Any
) -> Any:
    """Join outputs to those of full sequences; `along` maps a leaf's path to its dim of tokens."""
    flat = [pytree.tree_flatten_with_path(output) for output in outputs]
    made: list[Any] = []
    for leaves in zip(*(leaves for leaves, _ in flat)):
        name, values = dotted_path(leaves[0][0]), [value for _, value in leaves]
        dim = along.get(name)
        if dim is not None and all(isinstance(value, Tensor) for value in values):
            own = [v.narrow(dim, 0, n) for v, n in zip(values, layout.counts)]
            made.append(layout.concatenate(own, dim))
            continue
        plain = all(can_stack(value) for value in values)
        whole = stack_outputs(values, [1] * len(values), weights) if plain else None
        scattered = isinstance(whole, Tensor) and whole.dim() > 0 and values[0].dim() > 0
        made.append(
            MissingOutput("its parts by tokens cannot be concatenated")
            if not plain or scattered
            else whole
        )
    return pytree.tree_unflatten(made, flat[0][1])


def join_token_gradients(
    grads: Sequence[Tensor | None], layout: SequenceLayout, along: bool
) -> Tensor | None:
    """Join gradients of an input from ranks with different tokens: concatenated in order, or
    summed."""
    there = [grad for grad in grads if grad is not None]
    if not there:
        return None
    if along and len(there) == len(grads):
        return layout.concatenate(there, 1)
    return torch.stack(there).sum(0)


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
        own = {
            k: (_gather_logits(_mark_missing(a, out)), *rest) for k, (out, *rest) in parts.items()
        }
    if made := _gather_copies(a, own):
        mine = (stack_outputs(*zip(*made)), *map(sum, list(zip(*made))[1:]))
        if layout is not None:
            mine = gather_token_outputs(a, mine, layout)
        output = _across_replicas(a, mine)
    return drop_missing(_broadcast_output(a, output))


def _gather_copies(a: Assembly, own: Mapping[int, Any]) -> list[Any]:
    """Return all microbatches in order on the ranks of the last stage's first copy; elsewhere
    nothing."""
    pipe = a.pipeline
    last = pipe.timeline.stages - 1
    places = {pipe.place_of(last, replica) for replica in range(pipe.timeline.replicas)}
    if a.stage_axis is not None and len(places) > 1:
        line = a.ranks.group(a.stage_axis)
        assert line.pg is not None
        everyone = world.all_gather_tensors(own, line.pg, a.ranks.device)
        own = {k: one for part in everyone for k, one in part.items()}
    return [own[k] for k in sorted(own)] if pipe.place == pipe.place_of(last) else []


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
    plain = (Tensor, ShardedLogits, bool, int, float, str, type(None))
    shorter = tuple(name for m in a.outputs_missing if (name := _LIST.split(m)[0]) != m and name)

    def kept(path: Any, leaf: Any) -> Any:
        place = pytree.keystr(path)
        # earlier stages have changed this list: it has another structure
        if place.startswith(shorter):
            upto = next(k for k, key in enumerate(path) if isinstance(key, pytree.SequenceKey))
            return MissingOutput(_EARLIER, place_text(path[:upto]))
        if place in a.outputs_missing or not isinstance(leaf, plain):
            return MissingOutput(_EARLIER)
        return leaf

    split = lambda leaf: isinstance(leaf, ShardedLogits)  # noqa: E731
    return pytree.tree_map_with_path(kept, output, is_leaf=split)


def _gather_logits(output: Any) -> Any:
    """Gather the vocabulary-sharded logits of an output; all ranks of their group call this."""
    made = lambda v: v.full() if isinstance(v, ShardedLogits) else v  # noqa: E731
    is_split = lambda value: isinstance(value, ShardedLogits)  # noqa: E731
    return pytree.tree_map(made, output, is_leaf=is_split)


def _across_replicas(a: Assembly, mine: WeightedOutput) -> Any:
    group = a.ranks.group(a.row_axes)
    if group.pg is None:
        return mine[0]
    return stack_outputs(*zip(*world.all_gather_tensors(mine, group.pg, a.ranks.device)))


def _broadcast_output(a: Assembly, output: Any) -> Any:
    if a.stage_axis is None:
        return output
    return world.broadcast_tensors(a.last_rank, output, a.ranks.device)


def local_shards(a: Assembly) -> dict[str, Tensor]:
    """Return this rank's shards of the parameters, as they are stored."""
    return {name: local_tensor(parameter) for name, parameter in a.parameters.items()}


def full_gradients(a: Assembly, to: ReceiverChoice | None = None) -> dict[str, Tensor]:
    """Return full gradients, on all ranks or those that `to` gives; without parameters that have
    none."""
    found = {name: local_gradient(parameter) for name, parameter in a.parameters.items()}
    own = {name: grad for name, grad in found.items() if grad is not None}
    return assemble_tensors(a.holdings, own, a.ranks, to, a.gather_routes)


def trained_names(a: Assembly) -> list[str]:
    """Return the names of the parameters that some rank trains, in model order."""
    mine = [name for name, p in a.parameters.items() if p.requires_grad]
    union = {name for names in world.distinct_objects(mine) for name in names}
    return [name for name in a.holdings if name in union]


def full_state_dict(a: Assembly, to: ReceiverChoice | None = None) -> dict[str, Tensor]:
    """Return parameters and buffers by the original's keys, on all ranks or those that `to`
    gives."""
    found = {
        **assemble_tensors(a.holdings, local_shards(a), a.ranks, to, a.gather_routes),
        **full_buffers(a),
    }
    for names in a.ties:
        found.update({name: found[names[0]] for name in names if names[0] in found})
    return {key: found[key] for key in a.keys if to is None or key in found}


def full_buffers(a: Assembly) -> dict[str, Tensor]:
    """Return all buffers by name, including those that a state dict omits; of copies the first
    rank's.

    For stages that are placed twice, the first replica's, which also evaluates: statistics of one
    replica, never a mixture of both.
    """
    own = {name: value.detach().cpu().clone() for name, value in a.buffers.items()}
    if a.stage_axis is None:
        return own
    place = a.ranks.mesh.index(a.ranks.rank, a.stage_axis)
    mine = {n: v for n, v in own.items() if place == a.buffer_homes.get(n, place)}
    merged: dict[str, Tensor] = {}
    for values in reversed(world.distinct_objects(mine)):
        merged.update(values)
    return merged


def buffer_errors(a: Assembly) -> dict[str, float]:
    """Return for each buffer 0 if its copies on all ranks that hold it are equal, else 1."""
    place = a.ranks.mesh.index(a.ranks.rank, a.stage_axis) if a.stage_axis is not None else 0
    stages = a.buffer_stages
    mine = {
        name: value.detach().cpu().clone()
        for name, value in a.buffers.items()
        if a.stage_axis is None or stages.get(name) is None or place in (stages[name] or ())
    }
    everyone = world.distinct_objects(mine)
    out = {}
    for name in dict.fromkeys(name for found in everyone for name in found):
        first, *others = [found[name] for found in everyone if name in found]
        out[name] = float(any(not torch.equal(first, other) for other in others))
    return out


def load_full_state(a: Assembly, state: Mapping[str, Tensor]) -> None:
    """Load full values; raises Refusal S641 before anything is changed."""
    if not isinstance(state, Mapping):
        title = f"a state dict is a dict, not {kind_of(state)}"
        raise Refusal.of("S641", title, helps=("`program.load` takes the path of a checkpoint",))
    shapes = {name: h.layout.shape for name, h in a.holdings.items()}
    wrong = [f"`{k}` is missing" for k in a.keys if k not in state]
    wrong += [f"`{k}` is unknown" for k in state if k not in a.keys]
    wrong += [
        f"`{name}` is {list(state[name].shape)}, not {list(shape)}"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    if wrong:
        more = (f"and {len(wrong) - 8} more like these",) * (len(wrong) > 8)
        helps = ("give the full state dict of this model, as `model.state_dict()` returns it",)
        notes = (*wrong[:8], *more)
        raise Refusal.of("S641", "the state dict is not of this model", notes=notes, helps=helps)
    with torch.no_grad(), open_quantized(a.parameters.values()):
        for name, parameter in a.parameters.items():
            part = shard_of(state[name], a.holdings[name], a.ranks.mesh, a.ranks.rank)
            local_tensor(parameter).copy_(part)
        for name, buffer in a.buffers.items():
            if name in state:
                buffer.copy_(state[name])


@torch.no_grad()
def replica_errors(a: Assembly) -> dict[str, float]:
    """Return the largest relative difference between copies of one shard, by parameter.

    Each rank receives its shard from the rank that is primary for it; padding is compared with
    zeros.
    """
    own = local_shards(a)
    sizes = {name: p.itemsize for name, p in a.module.named_parameters()}
    way = plan_copies(a.holdings, {n: sizes[n] for n in a.holdings}, a.ranks.mesh, a.gather_routes)
    theirs = {name: torch.zeros_like(part, device="cpu") for name, part in own.items()}
    for route in way.routes:
        redistribute_by_route(
            route, own.__getitem__, theirs.__getitem__, MESSAGE_BYTES, bucket_device(a.ranks.device)
        )
    mine = {}
    for name, part in theirs.items():
        if part.numel():
            scale = float(part.double().abs().max())
            error = float((own[name].cpu().double() - part.double()).abs().max())
            mine[name] = error / scale if scale else error
    everyone = world.all_gather_object(mine)
    return {name: max(found.get(name, 0.0) for found in everyone) for name in a.holdings}


def full_optimizer_state(
    a: Assembly, optimizer: torch.optim.Optimizer | None, to: ReceiverChoice | None = None
) -> dict[str, dict[str, Any]]:
    """Return the state by parameter name and slot: full tensors, and numbers as they are.

    On all ranks, or those that `to` gives.
    """
    laid: dict[tuple[str, str], Tensor] = {}
    plain: dict[tuple[str, str], Any] = {}
    states: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    for name, p in a.parameters.items():
        for key, value in states.get(p, {}).items():
            if is_sharded_like(value, p):
                laid[name, key] = local_tensor(value)
            else:
                plain[name, key] = value.cpu().clone() if isinstance(value, Tensor) else value
    keys = sorted(
        {key for told in world.distinct_objects(sorted({k for _, k in laid})) for key in told}
    )
    holdings = {(name, key): one for key in keys for name, one in a.holdings.items()}
    found: dict[tuple[str, str], Any] = dict(
        assemble_tensors(holdings, laid, a.ranks, to, a.gather_routes)
    )
    for values in reversed(world.distinct_objects(plain)):
        found.update(values)
    out: dict[str, dict[str, Any]] = {}
    for name, key in sorted(found, key=lambda one: one[1]):
        out.setdefault(name, {})[key] = found[name, key]
    return out


def full_input_gradients(
    a: Assembly, parts: Sequence[BatchPart], times: float = 1.0
) -> dict[str, Tensor | None]:
    """Return gradients of the batch's float tensors: rows of all replicas, summed over stages.

    The loss was multiplied by `times`.
    """
    mine = [
        {
            k: None if v.grad is None else v.grad / times
            for k, v in named_tensors(part.inputs).items()
            if v.requires_grad
        }
        for part in parts
    ]
    everyone = world.all_gather_object(mine)
    places = range(a.ranks.mesh.size(a.row_axes))
    names = mine[0] if mine else {}
    layout = parts[0].token_shard.layout if parts and parts[0].token_shard is not None else None
    return {
        n: _concatenate([_row_gradient(a, everyone, place, n, layout) for place in places])
        for n in names
    }


def _row_gradient(
    a: Assembly, everyone: Sequence[Any], place: int, name: str, layout: SequenceLayout | None
) -> Tensor | None:
    """Return the gradient of some rows, from all ranks that have tokens of these rows."""
    if layout is None or a.tokens is None:
        return _replica_gradient(a, everyone, place, name)
    count = len(layout.runs)
    found = [_replica_gradient(a, everyone, place * count + k, name) for k in range(count)]
    return join_token_gradients(found, layout, name in (a.tokens.along or ()))


def _replica_gradient(a: Assembly, everyone: Sequence[Any], place: int, name: str) -> Tensor | None:
    """Return the gradient of one replica's rows: the sum over stages."""
    found = [
        [part[name] for part in parts]
        for rank, parts in enumerate(everyone)
        if a.is_primary_rank(rank) and a.part_index(rank) == place
    ]
    return _concatenate([_sum_present(values) for values in zip(*found)])


def _concatenate(rows: Sequence[Tensor | None]) -> Tensor | None:
    there = [row for row in rows if row is not None]
    return torch.cat(there) if there and len(there) == len(rows) else None


def _sum_present(values: Sequence[Tensor | None]) -> Tensor | None:
    there = [value for value in values if value is not None]
    return torch.stack(there).sum(0) if there else None
