"""Dry run of a sharded module on the meta device, used by layout propagation.

Resolves the module's edges from the layouts of the tensors that arrive, and notes the layouts of
the tensors that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from schedlang.ir.placement import EVEN, P, Placement, R, Replicate, S, Uneven
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.lazy_logits.vocab_parallel import ShardedLogits
from schedlang.runtime.low_rank_adapters import AdaptedProjection
from schedlang.runtime.propagation.follower import GATHER, Follower
from schedlang.runtime.propagation.pending_sums import pending_mismatch
from schedlang.runtime.propagation.trace import Hoist, Mismatch, Note, Tag
from schedlang.runtime.sharding.convolution import CHANNELS, CONVOLUTIONS
from schedlang.runtime.sharding.edges import (
    Edge,
    block_sizes,
    dim_of,
    is_activation,
    is_all_to_all,
    map_argument,
    map_result,
)
from schedlang.runtime.sharding.norms import NeedsFullDim
from schedlang.runtime.sharding.sharded_layer import ShardedLayer
from schedlang.runtime.tracing.meta_runs import tensors_in

PROJECTIONS = ("Linear", "Conv1D", *CONVOLUTIONS)
TABLES = ("Embedding", "EmbeddingBag")
PLAIN = (*PROJECTIONS, *TABLES)  # kinds split along one dim for each axis
GATHER_NORM = "gather its input: `output=R` on the row before; keep this module replicated"


@dataclass(frozen=True)
class AxisRequest:
    """One axis of one sharded module, before the layouts of its arriving tensors are known.

    `input` None: tensors are taken as they arrive.  `computes` None: equal to the input's placement
    (a module that runs unchanged).  `parts`: each rank computes other positions, so all gradients
    of the module are partial.  `variant`: the variant that a row chooses; over an axis of the
    variant "out" no tensor may arrive split.
    """

    axis: str
    input: Placement | None
    output: Placement | None
    computes: Placement | None
    splits: bool
    cut: int | None = None
    head: bool = False
    hoisted: bool = False
    parts: bool = False
    variant: Any = None
    differ: bool = (
        False  # its result is full on every rank, and each rank uses a part of the result
    )

    @property
    def gathers(self) -> bool:
        """Whether the module splits its outputs, and every rank gets all of them."""
        return isinstance(self.computes, S) and isinstance(self.output, Replicate)

    @property
    def uneven(self) -> Uneven:
        """The rule by which the module's own split fits the ranks."""
        placements = (self.computes, self.input)
        return next((p.uneven for p in placements if isinstance(p, S)), EVEN)


@dataclass(frozen=True)
class ShardedLeaf:
    """A sharded module: its kind, its axes, and its own parameters (first names).

    A module of `kind` "" runs unchanged between its edges, and its own calls are followed.
    `inner`: pairs of an axis that splits the weight, and a parameter that is full over that axis
    and used before the results are summed, or used with a part of them: its gradient is partial.
    """

    fqn: str
    kind: str
    requests: tuple[AxisRequest, ...]
    parameters: tuple[str, ...] = ()
    bias: str | None = None  # first name of the bias, if it is added after a pending reduction
    inner: tuple[tuple[str, str], ...] = ()

    def entering(self, request: AxisRequest) -> ShardedLeaf:
        """Return the leaf with inputs that enter where it has this request."""
        requests = (replace(r, differ=r.differ or r == request) for r in self.requests)
        return replace(self, requests=tuple(requests))


GATHER_OUTPUT = "gather it: `output=R` on the row of its module"
SPLIT_READER = "split what reads its output: `shard(row)` on the next projection"


def dry_forward(
    leaf: ShardedLeaf,
    module: nn.Module,
    inner: Callable[..., Any],
    follower: Follower,
    known_edges: dict[str, tuple[Edge, ...]],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a sharded module: resolve its edges at its first call, and note its results.

    `inner` is the module's own forward; the edges are added to `known_edges` under the module's
    name. Raises Mismatch or Hoist.
    """
    main = _main(args, kwargs)
    note = follower.of(main)
    if follower.after_logits and not follower.has_note(main):
        reason = f"`{leaf.fqn}` is sharded, and gets sharded logits"
        raise follower.refuse(reason, None, GATHER)
    for axis in note.pending:
        raise pending_mismatch(follower, f"`{leaf.fqn}` gets", axis)
    edges: tuple[Edge, ...] = ()
    if not leaf.kind:
        summed = (request.axis for request in leaf.requests if request.output == R)
        follower.summing[leaf.fqn] = frozenset(summed)
        if any(request.differ for request in leaf.requests):
            follower.regions.add(leaf.fqn)
    for request in leaf.requests:
        # each edge takes the result of the edge before: another axis may gather the same tensor
        tensor = main if leaf.kind else _main(args, kwargs)
        ranks = tuple(range(follower.sizes[request.axis]))
        group = Group((request.axis,), ranks, 0, None, leaf.fqn)
        edge = _edge(leaf, request, tensor, follower.of(tensor), group)
        edges = (*edges, edge)
        if leaf.kind:  # `input=` of another module says where
            if edge.input_before != edge.input_after == R and not edge.hoisted:
                _hoist(edge, main, follower)
        else:
            args, kwargs = map_argument(partial(_enter, edge, follower), args, kwargs)
    if leaf.kind:
        recording = tuple(replace(edge, cache=follower.arrivals) for edge in edges)
        sharded = partial(ShardedLayer(module, leaf.kind, recording), inner)
        try:
            out = sharded(*args, **kwargs)
        except NeedsFullDim as fault:  # its own call that does not work on parts
            axis = edges[0].group.axes[0]
            raise follower.refuse(str(fault), axis, GATHER_NORM) from fault
        _note_leaf(leaf, edges, note, out, follower)
        if follower.draws and isinstance(module, AdaptedProjection) and module.drops_input:
            _note_mask(leaf, edges, main, follower)
    else:
        out = inner(*args, **kwargs)
        edges = tuple(_with_output(edge, w, out, follower) for edge, w in zip(edges, leaf.requests))
        for edge in edges:
            out = map_result(partial(_exit, edge, follower), out)
    if known_edges.setdefault(leaf.fqn, edges) != edges:
        axis = next(e.group.axes[0] for e, f in zip(edges, known_edges[leaf.fqn]) if e != f)
        raise repeated_call_mismatch(follower, f"`{leaf.fqn}`", "input", axis)
    return out


def repeated_call_mismatch(follower: Follower, fqn: str, label: str, axis: str) -> Mismatch:
    """Return the mismatch of a module that is called again with another layout of `label`."""
    frames = follower.stack.frames
    repeated = next((name for name, call_number in frames if name and call_number), frames[-1][0])
    reason = f"{fqn} is called several times, and its {label} arrives differently"
    help_ = f"let each call give the full tensor: `{repeated}  shard(output=R, over={axis})`"
    return follower.refuse(reason, axis, help_)


def check_results(
    follower: Follower,
    leaves: Mapping[str, ShardedLeaf],
    outputs: Sequence[Tensor],
    loss: Tensor | None,
) -> None:
    """Raise Mismatch for an output that is sharded, and for a loss whose gradient would be summed.

    Each rank computes such a loss in full, behind a module that sums the ranks' gradients: they
    would count it once for each rank. Without a loss the first output is taken for what it reads.
    """
    for tensor in outputs:
        for axis in follower.of(tensor).pending:
            raise pending_mismatch(follower, "the model returns", axis)
        for axis, tag in follower.of(tensor).tags.items():
            reason = f"the model returns a tensor that is sharded over `{axis}`"
            failure = Mismatch(("", 0), reason, axis, (), follower.agreed, (GATHER_OUTPUT,))
            failure.by = tag.by
            raise failure
    first = next((tensor for tensor in outputs if tensor.is_floating_point()), None)
    read = first if loss is None else loss
    for axis in follower.of(read).entered if read is not None else ():
        entered = (leaf for leaf in leaves.values() for request in leaf.requests if request.differ)
        *_, last = entered
        reason = (
            f"the loss is computed in full on each rank of `{axis}`, and `{last.fqn}` would sum its"
            " gradient over them"
        )
        failure = Mismatch((last.fqn, 0), reason, axis, (), follower.agreed, (SPLIT_READER,))
        failure.by = last.fqn
        raise failure


def _main(args: Any, kwargs: Any) -> Tensor:
    """Return the tensor of a call that crosses an edge."""
    tensors = tensors_in((args, kwargs))
    return next((t for t in tensors if t.is_floating_point()), tensors[0])


def _hoist(edge: Edge, main: Tensor, follower: Follower) -> None:
    """Raise Hoist for the outermost enclosing module that was given the same tensor object.

    That module may read sizes from the tensor (batch and sequence), and its children share one
    gather.
    """
    enclosing = list(zip(follower.stack.frames, follower.stack.mains))[:-1]
    outermost = None
    for (fqn, _), module_input in reversed(enclosing):
        if module_input is not main:
            break
        outermost = fqn
    if outermost:
        raise Hoist(outermost, edge.group.axes[0])


def _with_output(edge: Edge, request: AxisRequest, output: Any, follower: Follower) -> Edge:
    """Return the edge with the placement that the module's output was found to have."""
    main = next((t for t in tensors_in(output) if is_activation(t)), None)
    note = Note() if main is None else follower.of(main)
    tag = note.tags.get(request.axis)
    computes: Placement = R if tag is None else placement_of(tag)
    computes = P() if request.axis in note.pending else computes
    leaves = computes if request.output is None else request.output
    if isinstance(leaves, S) and main is not None:
        leaves = replace(leaves, dim=dim_of(leaves) % main.ndim)
        if isinstance(computes, S) and computes != leaves and not is_all_to_all(computes, leaves):
            reason = f"it computes {computes} and cannot output {leaves}"
            raise _refuse(reason, request.axis, edge.group.label)
    return replace(edge, output_before=computes, output_after=leaves)


def _enter(edge: Edge, follower: Follower, x: Tensor) -> Tensor:
    """Let a tensor enter a module whose own calls are followed, and note its layout there."""
    axes = frozenset(edge.group.axes[:1] if edge.differ else ())
    enter = replace(edge, cache=follower.arrivals).enter
    return _cross(edge, follower, x, enter, edge.input_after, axes)


def _exit(edge: Edge, follower: Follower, x: Tensor) -> Tensor:
    if edge.output_before == edge.output_after:
        return x
    return _cross(edge, follower, x, edge.exit, edge.output_after, frozenset())


def _cross(
    edge: Edge,
    follower: Follower,
    x: Tensor,
    cross: Callable[[Tensor], Tensor],
    placement: Placement,
    entered: frozenset[str],
) -> Tensor:
    """Let a tensor cross an edge, and note its placement behind over the edge's axis."""
    note, axis = follower.of(x), edge.group.axes[0]
    crossed = follower.run_muted(cross, x)
    tags = {tag_axis: tag for tag_axis, tag in note.tags.items() if tag_axis != axis}
    if isinstance(placement, S):
        tags[axis] = _tag(edge, placement, dim_of(placement) % x.ndim, crossed, follower)
    pending = note.pending - {axis}
    follower.put(crossed, Note(tags, frozenset(), True, note.entered | entered, pending=pending))
    return crossed


def _edge(leaf: ShardedLeaf, request: AxisRequest, main: Tensor, note: Note, group: Group) -> Edge:
    tag = note.tags.get(request.axis)
    arrives: Placement = R if tag is None else placement_of(tag)
    if request.variant == "out" and tag is not None:
        reason = f"`{leaf.fqn}` gets a hidden dim in the order of its own outputs"
        raise _refuse(reason, request.axis, leaf.fqn, "swap the last two axes of its `over`")
    wants = arrives if request.input is None else request.input
    if isinstance(wants, S):
        wants = replace(wants, dim=dim_of(wants) % main.ndim)
        switched = not leaf.kind and is_all_to_all(arrives, wants)
        if isinstance(arrives, S) and arrives != wants and not switched:
            reason = f"`{leaf.fqn}` needs its input as {request.input}, but gets {arrives}"
            raise _refuse(reason, request.axis, leaf.fqn)
    computes = wants if request.computes is None else request.computes
    leaves = computes if request.output is None else request.output
    if isinstance(leaves, P):  # the follower has no partial tensors: it would take this for full
        reason = f"`{leaf.fqn}` returns a partial sum that no row reduces"
        raise _refuse(
            reason, request.axis, leaf.fqn, "use `output=R` (all-reduce), or shard the sum"
        )
    if isinstance(computes, S):
        ndim = main.ndim + (not main.is_floating_point())  # an embedding adds a dim to its ids
        ndim = 2 if leaf.kind == "EmbeddingBag" else ndim
        computes = replace(computes, dim=dim_of(computes) % ndim)
        if isinstance(leaves, S):
            leaves = replace(computes, dim=dim_of(leaves) % ndim)
    if leaf.kind in PLAIN and request.splits:
        _check_whole(leaf, arrives, wants, computes, leaves, main)
    differ = request.splits or request.differ or (request.hoisted and tag is not None)
    differ = differ and request.axis not in note.entered
    return Edge(
        group,
        arrives,
        wants,
        computes,
        leaves,
        differ,
        request.cut,
        request.head,
        request.hoisted,
        request.variant,
    )


def _check_whole(
    leaf: ShardedLeaf,
    arrives: Placement,
    wants: Placement,
    computes: Placement,
    leaves: Placement,
    main: Tensor,
) -> None:
    """Refuse placements that a split projection or embedding cannot take or return."""
    if leaf.kind == "EmbeddingBag" and not isinstance(arrives, Replicate):
        reason = f"`{leaf.fqn}` needs replicated `per_sample_weights`, but gets {arrives}"
        raise _refuse(reason, None, leaf.fqn, "gather them first: `output=R` on the row before")
    reason, inner = "", CHANNELS if leaf.kind in CONVOLUTIONS else main.ndim - 1
    if isinstance(computes, S):
        if not isinstance(wants, Replicate):
            reason = f"`{leaf.fqn}` shards its outputs, and needs a replicated input"
        elif isinstance(leaves, S) and leaves.dim != computes.dim:
            reason = f"`{leaf.fqn}` computes {computes} and cannot output {leaves}"
        elif leaf.bias is not None:
            reason = (
                f"`{leaf.fqn}` adds its bias to a sum over one axis, but another axis shards it"
            )
    elif isinstance(wants, S) and wants.blocks != 1 and arrives != wants:
        reason = f"`{leaf.fqn}` needs inputs sharded in blocks, but gets others"
    elif leaf.kind not in TABLES and not (isinstance(wants, S) and wants.dim == inner):
        along = "their channels" if leaf.kind in CONVOLUTIONS else "their last dim"
        reason = f"`{leaf.fqn}` needs inputs sharded along {along}, but gets {wants}"
    if reason:
        helps = ("leave out `input=`, `output=` and `blocks=`: a style sets what fits",)
        raise _refuse(reason, None, leaf.fqn, *helps)


def _refuse(reason: str, axis: str | None, module_name: str, *helps: str) -> Mismatch:
    failure = Mismatch(("", 0), reason, axis, (), 0, helps)
    failure.by = module_name
    return failure


def _note_leaf(
    leaf: ShardedLeaf, edges: Sequence[Edge], note: Note, out: Any, follower: Follower
) -> None:
    """Note the result of a projection or embedding, and which of its gradients are partial."""
    own_edges = {edge.group.axes[0]: edge for edge in edges}
    parts = {request.axis for request in leaf.requests if request.parts}
    if leaf.kind in PROJECTIONS:  # if its input is split along positions
        inner = CHANNELS if leaf.kind in CONVOLUTIONS else out.ndim - 1
        parts |= {
            a
            for a, e in own_edges.items()
            if isinstance(e.input_after, S) and dim_of(e.input_after) != inner
        }
    parts |= (note.entered | note.tags.keys()) - own_edges.keys()
    differ = frozenset(request.axis for request in leaf.requests if request.differ)
    partial_axes = {name: {*parts, *differ} for name in leaf.parameters}
    for axis, name in leaf.inner:
        partial_axes.setdefault(name, set()).add(axis)
    for axis, edge in own_edges.items():
        if (
            leaf.bias is not None
            and isinstance(edge.output_before, P)
            and isinstance(edge.output_after, S)
        ):
            partial_axes.setdefault(leaf.bias, set()).add(axis)
    for name, axes in partial_axes.items():
        follower.note_use(name, axes)
    if isinstance(out, ShardedLogits):
        follower.after_logits = True
        return
    tags = {axis: tag for axis, tag in note.tags.items() if axis not in own_edges}
    for axis, edge in own_edges.items():
        if isinstance(edge.output_after, S):
            dim = dim_of(edge.output_after) % out.ndim
            tags[axis] = _tag(edge, edge.output_after, dim, out, follower)
    follower.put(out, Note(tags, frozenset(), True, (note.entered - own_edges.keys()) | differ))


def _note_mask(leaf: ShardedLeaf, edges: Sequence[Edge], main: Tensor, follower: Follower) -> None:
    """Note the mask that a leaf draws for its input, and the input's layout behind its edges."""
    arrived, full_shape = follower.of(main).tags, list(main.shape)
    for tag in arrived.values():
        full_shape[tag.dim] = sum(tag.blocks)
    tags = dict(arrived)
    for edge in edges:
        axis, wants = edge.group.axes[0], edge.input_after
        if edge.input_before != wants:
            tags.pop(axis, None)
            if isinstance(wants, S):
                dim = dim_of(wants) % main.ndim
                blocks = block_sizes(wants, full_shape[dim])
                tags[axis] = Tag(dim, blocks, edge.group.label, wants.uneven)
    call_number = follower.draw_counts.get(leaf.fqn, 0)
    follower.draw_counts[leaf.fqn] = call_number + 1
    follower.masks[leaf.fqn, call_number] = (tuple(full_shape), tags)


def _tag(edge: Edge, placement: S, dim: int, local: Tensor, follower: Follower) -> Tag:
    """Return the tag of a tensor that an edge puts into a placement."""
    if dim % local.ndim != local.ndim - 1:
        follower.tokens.add((edge.group.label, edge.group.axes[0]))
    uneven = placement.uneven
    full_size = uneven.true_size(local.shape[dim], edge.group.size)
    return Tag(dim, block_sizes(placement, full_size), edge.group.label, uneven)


def placement_of(tag: Tag) -> S:
    """Return the placement that a tag describes."""
    blocks = len(tag.blocks) if len(set(tag.blocks)) == 1 else tag.blocks
    return S(tag.dim, blocks, tag.uneven)
