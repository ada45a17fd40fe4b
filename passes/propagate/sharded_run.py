"""The sharded copy of a model on the meta device: its sharded modules, and one run of the copy.

The run is compared with the recorded original; numbers that modules count by may be divided in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from schedlang.diagnostics.diagnostic import Diagnostic, Label, Refusal
from schedlang.ir.annotations import Boundary
from schedlang.ir.mesh import run_axis
from schedlang.ir.model import is_inside
from schedlang.ir.placement import EVEN, P, R, S, Split, Uneven
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.propagate.original_forward import Recording

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.model import Site
    from schedlang.runtime.propagation.argument_shards import ArgumentShard
    from schedlang.runtime.propagation.dry_run import AxisRequest, ShardedLeaf
    from schedlang.runtime.propagation.trace import Mismatch, Note
    from schedlang.runtime.sharding.edges import Edge
    from schedlang.runtime.sharding.module_sizes import SizeArgument


CUBE_LINES = ("down", "along", "deep")  # lines of a cube, in the order of its axes
CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")
POOLS = tuple(f"{kind}Pool{dims}d" for kind in ("Max", "Avg") for dims in (1, 2, 3))
NORMS = ("GroupNorm", *(f"BatchNorm{dims}d" for dims in (1, 2, 3)))
# classes whose computation is known
CLASSES = ("Linear", "Conv1D", "Embedding", "EmbeddingBag", *CONVOLUTIONS, *POOLS, *NORMS)


def leaves_of(plan: Plan) -> dict[str, ShardedLeaf]:
    """Return the sharded modules of a plan, by name; axes of size 1 are left out."""
    from schedlang.runtime.propagation.dry_run import ShardedLeaf

    if plan.model.ties:
        _check_ties(plan)
    leaves, first_names = dict[str, ShardedLeaf](), dict[Any, str]()
    for fqn, boundaries in plan.boundaries.items():
        active = [b for b in boundaries if plan.mesh.size(b.axis) > 1]
        first = first_names.setdefault(plan.model.model.get_submodule(fqn), fqn)
        if not active or (first != fqn and plan.boundaries[first] == boundaries):
            continue
        site = plan.model.sites[fqn]
        kind = plan.computes.get(fqn) or next((k for k in CLASSES if site.is_a(k)), "")
        kind = kind or ("norm" if _is_split_norm(plan, site, active) else "")
        make = WANTED.get(kind, _wanted_by_projection)
        requests = tuple(make(plan, fqn, kind, b) for b in active)
        names = tuple(param.name for param in site.parameters.values())
        is_split = any(plan.effective_layout(name).splits for name in names)
        pending = any(isinstance(request.computes, P) for request in requests)
        bias = site.parameters.get("bias")
        special = is_split or fqn in plan.computes or kind in NORMS
        special = special or any(request.parts for request in requests)
        last_bias = bias.name if bias and pending else None
        inner = _full_adapter_parameters(plan, site, requests) if len(site.dims) > 2 else ()
        leaves[fqn] = ShardedLeaf(fqn, kind if special else "", requests, names, last_bias, inner)
    return leaves


def _full_adapter_parameters(
    plan: Plan, site: Site, requests: tuple[AxisRequest, ...]
) -> tuple[tuple[str, str], ...]:
    """Return pairs of a split axis of the weight and an adapter's parameter without this split."""
    from schedlang.runtime.low_rank_adapters import AdaptedProjection

    inner = AdaptedProjection.inner if site.is_a("AdaptedProjection") else ()
    axes = [request.axis for request in requests if request.splits]
    params = [site.parameters[name] for name in inner if name in site.parameters]
    return tuple(
        (axis, param.name)
        for axis in axes
        for param in params
        if not set(plan.mesh.fold(axis)) & plan.split_axes(param.name)
    )


def _is_split_norm(plan: Plan, site: Site, boundaries: list[Boundary]) -> bool:
    """Return whether a module's parameters have one dim, split like the last dim of its tensors."""
    from schedlang.runtime.sharding.edges import dim_of

    params = site.parameters.values()
    split = all(len(p.shape) == 1 and plan.effective_layout(p.name).splits for p in params)
    ends = [end for b in boundaries for end in (b.input, b.output)]
    is_last_dim = all(isinstance(end, S) and dim_of(end) == -1 for end in ends)
    replaced = any(site.fqn in a.sites for a in plan.rows_changing(Facet.STRUCTURE))
    is_alone = len(boundaries) == 1 and not site.children and not replaced
    return bool(params) and split and is_last_dim and is_alone


def _check_ties(plan: Plan) -> None:
    """Refuse (S506) a module that uses a split parameter and is not sharded over the same axes."""
    for names in plan.model.ties:
        name = names[0]
        for used in names if name in plan.layouts else ():
            owner = plan.model.owner(used).fqn
            if not any(plan.model.sites[owner].is_a(kind) for kind in CLASSES):
                continue  # only holds the parameter; its operations are traced
            known_axes = {a for b in plan.boundaries.get(owner, ()) for a in plan.mesh.fold(b.axis)}
            for split in plan.effective_layout(name).splits:
                if not known_axes.issuperset(plan.mesh.fold(split.axis)):
                    raise Refusal(_missing_row(plan, name, used, split))


def _missing_row(plan: Plan, name: str, used: str, split: Split) -> Diagnostic:
    site, axis = plan.model.owner(used), split.axis
    owners = [plan.model.owner(alias) for alias in plan.model.parameters[name].names]
    owned = {owner.fqn for owner in owners}
    row = next(a for a in plan.actions if owned & {*a.sites} or shards_module(a, name))
    has_embedding = any(owner.is_a("Embedding") for owner in owners)
    styles = ("vocab" if has_embedding else "col", "col" if site.is_a("Embedding") else "row")
    style = styles[split.dim ^ site.is_a("Conv1D")] if split.dim < 2 else styles[0]
    return Diagnostic(
        "S506",
        f"`{site.fqn}` shares a sharded weight, but has no `shard` row",
        Label(row.span),
        notes=(f"`{used}` and `{name}` are the same tensor", f"it is sharded over `{axis}`"),
        facts=(("parameter", used),),
        helps=(f"shard it, too: `{site.fqn} shard({style}, over={axis})`",),
    )


def same_module_of_layers(plan: Plan, fqn: str) -> list[str]:
    """Return the modules of the same kind whose names differ from `fqn` in numbers only."""
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(fqn)))
    kind = plan.model.sites[fqn].kind
    sites = plan.model.sites.items()
    return [name for name, s in sites if pattern.fullmatch(name) and s.kind == kind]


def hoist_gather(fqn: str, leaf: ShardedLeaf | None, axis: str) -> ShardedLeaf:
    """Return the leaf of a module that also gathers its input, for its children."""
    from schedlang.runtime.propagation.dry_run import AxisRequest, ShardedLeaf

    requests = leaf.requests if leaf is not None else ()
    hoisted = AxisRequest(axis, R, None, None, splits=False, hoisted=True)
    return ShardedLeaf(fqn, "", (*requests, hoisted))


def _wanted_by_projection(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> AxisRequest:
    """Return the layouts that a Linear, Conv1D, Embedding or unchanged module needs on one axis."""
    from schedlang.runtime.propagation.dry_run import AxisRequest

    axis, entry, output = boundary.axis, boundary.input, boundary.output
    site = plan.model.sites[fqn]
    weight = site.parameters.get("weight")
    layout = plan.effective_layout(weight.name) if weight is not None else None
    split = next((s for s in layout.splits if s.axis == axis), None) if layout else None
    if not kind or split is None or layout is None or weight is None:
        differ = boundary.replicated_output
        return AxisRequest(axis, entry, output, None, splits=False, differ=differ)
    name = site.dims["weight"][split.dim]
    blocks = split.blocks if len(set(split.blocks)) > 1 else len(split.blocks)
    weight_layout = S(-1, blocks, split.uneven)
    if name == "in" and isinstance(entry, S):
        entry = replace(weight_layout, dim=entry.dim)  # inputs have the layout of the weight
    if name in ("out", "hidden"):
        is_head = isinstance(output, S) and output.dim == "vocab"
        size = weight.shape[split.dim] if is_head else None
        return AxisRequest(axis, entry, output, weight_layout, splits=True, cut=size, head=is_head)
    return AxisRequest(axis, entry, output, P(), splits=True)


def _wanted_by_convolution(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> AxisRequest:
    """Return the layouts that a convolution needs on an axis that splits channels or positions."""
    from schedlang.runtime.propagation.dry_run import AxisRequest

    axis, entry, output = boundary.axis, boundary.input, boundary.output
    site = plan.model.sites[fqn]
    layout = plan.effective_layout(site.parameters["weight"].name)
    split = next((s for s in layout.splits if s.axis == axis), None)
    if split is None:
        return _wanted_by_window(plan, fqn, kind, boundary)
    name = site.dims["weight"][split.dim]
    blocks = split.blocks if len(set(split.blocks)) > 1 else len(split.blocks)
    if name == "in":
        return AxisRequest(axis, S(1, blocks), output, P(), splits=True)
    if plan.model.model.get_submodule(fqn).groups == 1:
        return AxisRequest(axis, entry or R, output, S(1, blocks), splits=True)
    channel_layout = S(1, blocks)  # each group has its own channels
    return AxisRequest(axis, channel_layout, output, channel_layout, splits=False)


def _wanted_by_window(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> AxisRequest:
    """Return the layouts of a convolution, pool or norm on an axis that may split positions."""
    from schedlang.runtime.propagation.dry_run import AxisRequest

    axis, entry = boundary.axis, boundary.input
    across = isinstance(entry, S) and isinstance(entry.dim, int) and entry.dim > 1
    return AxisRequest(axis, entry, boundary.output, None, splits=False, parts=across)


def _wanted_on_grid(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> AxisRequest:
    """Return the layouts of a module on a grid: rows split the batch, columns the hidden dim."""
    from schedlang.runtime.propagation.dry_run import AxisRequest

    _check_data(plan, fqn)
    if plan.boundaries[fqn].index(boundary) == 0:
        return AxisRequest(boundary.axis, None, None, R, splits=False, variant="down")
    return replace(_wanted_results(plan, fqn, boundary), splits=True, variant="along")


def _wanted_on_cube(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> AxisRequest:
    """Return the layouts of a module on a cube: two lines split inputs, the third one results."""
    from schedlang.runtime.propagation.dry_run import AxisRequest

    line_index = plan.boundaries[fqn].index(boundary)
    _check_data(plan, fqn)
    if line_index < len(CUBE_LINES):
        variant = CUBE_LINES[line_index]
        return AxisRequest(boundary.axis, None, None, R, splits=False, variant=variant)
    if boundary.output is None:
        return AxisRequest(boundary.axis, boundary.input, R, R, splits=True, variant="in")
    return replace(_wanted_results(plan, fqn, boundary), variant="out")


def _wanted_results(plan: Plan, fqn: str, boundary: Boundary) -> AxisRequest:
    """Return the layout of a product's results, which is that of its weight."""
    from schedlang.runtime.propagation.dry_run import AxisRequest

    site, entry, output = plan.model.sites[fqn], boundary.input, boundary.output
    weight, is_head = site.parameters["weight"], isinstance(output, S) and output.dim == "vocab"
    if site.is_a("Embedding"):
        return AxisRequest(boundary.axis, None, output, S(-1), splits=False)
    out_dim = site.dims["weight"].index("out")
    blocks = next((s.blocks for s in plan.layout(weight.name).splits if s.dim == out_dim), (1,))
    computes = S(-1, blocks if len(set(blocks)) > 1 else len(blocks))
    size = weight.shape[out_dim] if is_head else None
    return AxisRequest(boundary.axis, entry, output, computes, splits=False, cut=size, head=is_head)


def _wanted_by_norm(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> AxisRequest:
    """Return the layouts of a norm over a split hidden dim: input and output are split."""
    from schedlang.runtime.propagation.dry_run import AxisRequest

    return AxisRequest(boundary.axis, S(-1), boundary.output or S(-1), S(-1), splits=True)


def _check_data(plan: Plan, fqn: str) -> None:
    """Refuse (S510) a grid where not exactly the first axis splits the batch."""
    batch_axes, *other_axes = (plan.mesh.fold(b.axis) for b in plan.boundaries[fqn])
    row = next(a for a in plan.rows_changing(Facet.PLACEMENT) if fqn in a.sites)
    label = Label(row.span)
    if plan.mesh.size(batch_axes) > 1 and not set(batch_axes) <= set(plan.data_axes):
        message = f"no row splits the batch over `{batch_axes[0]}`, for the grid of `{fqn}`"
        helps = (f"add `zero(stage=0, over={batch_axes[0]})` at the end",)
        raise Refusal.of("S510", message, label, helps=helps)
    for axis in {folded_axis for axes in other_axes for folded_axis in axes} & set(plan.data_axes):
        if plan.mesh.size(axis) > 1:
            message = f"`{axis}` cannot shard both the batch and the hidden dim of `{fqn}`"
            raise Refusal.of("S510", message, label, helps=(f"leave `{axis}` out of `zero`",))


def _wanted_by_experts(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> AxisRequest:
    """Return the layouts of experts: tokens are sent on data axes, results summed on others."""
    from schedlang.runtime.propagation.dry_run import AxisRequest

    axis, routing = boundary.axis, plan.kind_options[fqn]
    if axis == routing.within and set(plan.mesh.fold(axis)) & set(plan.data_axes):
        raise Refusal.of(
            "S428",
            f"`{axis}` cannot shard both the batch and each expert of `{fqn}`",
            notes=("the ranks that share an expert must have the same tokens",),
            helps=("use an axis that no `zero` row names: `inner=tp`",),
        )
    if axis in plan.data_axes:
        return AxisRequest(axis, None, None, None, splits=False, variant=routing)
    return AxisRequest(axis, R, R, P(), splits=True, variant=routing)


# kind of a module (its class, or chosen by a row in plan.computes) -> its layouts on one axis
WANTED: Mapping[str, Callable[[Plan, str, str, Boundary], AxisRequest]] = {
    **dict.fromkeys(CONVOLUTIONS, _wanted_by_convolution),
    **dict.fromkeys((*POOLS, *NORMS), _wanted_by_window),
    **{f"summa {kind}": _wanted_on_grid for kind in CLASSES[:3]},
    **{f"cube {kind}": _wanted_on_cube for kind in CLASSES[:3]},
    "norm": _wanted_by_norm,
    "experts": _wanted_by_experts,
}


def shards_module(action: Action, fqn: str) -> bool:
    """Return whether a row shards the module or a module inside it."""
    return action.changes(Facet.PLACEMENT) and any(is_inside(s, fqn) for s in action.sites)


Loss = Callable[..., Any]
InnerSplits = tuple[tuple[str, str, int, Uneven], ...]  # splits inside a module: path, axis, ranks


class NumberChoice(NamedTuple):
    """A number in an attribute of modules of a class with the same splits: full and local value."""

    kind: str
    below: InnerSplits
    attribute: str
    value: int
    local: int


def _may_explain(failure: Mismatch, number: NumberChoice) -> bool:
    """Return whether a number may be the origin of sizes in the failing call."""
    sized = any(full_size and full_size % number.value == 0 for full_size in failure.integers)
    if number.value == failure.unit or sized:  # or of a full tensor with as many heads
        return True
    return "." not in number.attribute and bool(failure.integers or failure.mixed)


def _local_values(inner: InnerSplits, value: int) -> Iterator[int]:
    """Yield possible values on one rank: its share, and that of ranks with the same shard."""
    candidates = set()
    for _, _, ranks, uneven in inner:
        candidates |= {value * uneven.wide / ranks, Fraction(value, uneven.repeat)}
    yield from (n.numerator for n in sorted(candidates) if n.denominator == 1 and n != value)


class ArgumentChoice(NamedTuple):
    """An argument of modules of a class, of which each rank needs its own shard along a dim.

    `unit` is the number of heads per row of the batch in the dim; 0: the dim holds tokens.
    """

    kind: str
    below: InnerSplits
    name: str
    dim: int
    unit: int
    axis: str


class SizeChoice(NamedTuple):
    """A size of an argument that modules of a class read, and that must be divided on a rank."""

    kind: str
    below: InnerSplits
    name: str
    dim: int
    parts: int


Choice = NumberChoice | ArgumentChoice | SizeChoice
C = TypeVar("C", NumberChoice, ArgumentChoice, SizeChoice)


@dataclass(eq=False)
class ShardedRun:
    """One forward of the sharded copy, in which numbers, sizes and arguments are divided.

    `call_inputs`: (module, turn) -> its inputs. `argument_splits`: (module, argument) -> its first
    split. For other results see `Traced`.
    """

    plan: Plan
    batch: Mapping[str, Any]
    loss: Loss | None
    leaves: Mapping[str, ShardedLeaf]
    recording: Recording
    divided: frozenset[Choice]
    edges: dict[str, tuple[Edge, ...]] = field(default_factory=dict)
    numbers: list[tuple[str, str, int]] = field(default_factory=list)
    layouts: dict[tuple[str, int], list[tuple[Note, ...] | None]] = field(default_factory=dict)
    call_inputs: dict[tuple[str, int], Any] = field(default_factory=dict)
    parts: dict[str, tuple[ArgumentShard, ...]] = field(default_factory=dict)
    argument_splits: dict[tuple[str, str], ArgumentShard | None] = field(default_factory=dict)
    counted_sizes: dict[str, tuple[SizeArgument, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from schedlang.runtime.propagation.follower import Follower
        from schedlang.runtime.propagation.trace import ModuleStack

        plan, recording = self.plan, self.recording
        self.stack = ModuleStack(observer=self._note_layouts)
        boundary_axes = (b.axis for boundaries in plan.boundaries.values() for b in boundaries)
        self.sizes = {name: plan.mesh.size(name) for name in (*plan.mesh.names, *boundary_axes)}
        splits = {fqn: [r.axis for r in leaf.requests] for fqn, leaf in self.leaves.items()}
        tried: Any = plan.model.cache.setdefault("by parts", {})
        draws = recording.original.is_random
        self.follower = Follower(recording.frames, self.stack, self.sizes, splits, draws, tried)

    @cached_property
    def inner_splits(self) -> Mapping[str, InnerSplits]:
        """Return the splits inside modules that hold sharded ones, also for bare modules there."""
        # a module that gathers its outputs is split only for itself, not for modules around it
        splits_by_module: dict[str, list[Any]] = {}
        for leaf in self.leaves.values():
            names = leaf.fqn.split(".")
            for depth in range(len(names) + 1):
                fqn, path = ".".join(names[:depth]), ".".join(names[depth:])
                requests = (r for r in leaf.requests if r.splits and not (path and r.gathers))
                split = [(path, r.axis, self.sizes[r.axis], r.uneven) for r in requests]
                splits_by_module.setdefault(fqn, []).extend(split)
        splits = {fqn: tuple(split) for fqn, split in splits_by_module.items() if split}
        bare = (n for n, s in self.plan.model.sites.items() if not (s.parameters or s.children))
        return {n: splits.get(n.rpartition(".")[0], ()) for n in bare} | splits

    def _note_layouts(self, frame: tuple[str, int], tree: Any) -> None:
        """Note the layouts of a call's inputs, or of its outputs."""
        from schedlang.runtime.tracing.meta_runs import tensors_in

        if frame not in self.call_inputs and frame[0]:
            self.call_inputs[frame] = tree  # inputs come first
        is_tracked = not self.follower.after_logits
        notes = tuple(map(self.follower.of, tensors_in(tree))) if is_tracked else None
        self.layouts.setdefault(frame, []).append(notes)

    def attempt(self) -> Mismatch | None:
        """Run the forward; return the first mismatch with the original, or None."""
        from schedlang.runtime.batch import run_forward
        from schedlang.runtime.global_state import restore_global_state
        from schedlang.runtime.propagation.dry_run import check_results
        from schedlang.runtime.propagation.trace import Hoist, Mismatch, Note, Trace, is_model_error
        from schedlang.runtime.tracing.meta_runs import tensors_in, without_values

        model = self._copy()
        try:
            state_restored = restore_global_state(self.plan.model.model, self.loss)
            with state_restored, without_values(self.batch) as (inputs, _):
                for input_tensor in tensors_in(inputs):
                    self.follower.put(input_tensor, Note(data=True))
                uses_conditions = self.recording.original.uses_batch_conditions
                with Trace(self.stack, self.follower, asked=uses_conditions):
                    output, loss = run_forward(model, inputs, self.loss)
            results = [*tensors_in(output), *([] if loss is None else [loss])]
            for note in map(self.follower.of, results):
                if note.tags or note.entered or note.pending:
                    check_results(self.follower, self.leaves, tensors_in(output), loss)
        except Mismatch as failure:
            return failure
        except Hoist:
            raise
        except Exception as error:
            if self.divided:  # a number that counts something else: this try leads nowhere
                return Mismatch(("", 0), str(error), None, (), -1)
            if not is_model_error(error):
                raise
            frame = self.stack.failed_frame
            return self.follower.module_failure(error, frame, self.call_inputs.get(frame, ()))
        return None

    def _copy(self) -> nn.Module:
        from schedlang.runtime.propagation.dry_run import dry_forward
        from schedlang.runtime.propagation.trace import Note, Tag
        from schedlang.runtime.tracing.meta_runs import meta_model

        plan = self.plan
        shapes = {name: plan.effective_layout(name).local_shape(plan.mesh) for name in plan.layouts}
        model = meta_model(plan.model.model, shapes)
        model.train()
        for name, tensor in model.named_parameters():
            owner = name.rpartition(".")[0]
            splits = plan.effective_layout(name).splits
            tags = {s.axis: Tag(s.dim, s.blocks, owner, s.uneven) for s in splits}
            for split in splits:
                self.follower.uneven_splits.setdefault(split.axis, set()).add(split.uneven)
                if split.uneven.repeat > 1:
                    self.follower.repeats = True
                    copies = run_axis(split.axis, split.uneven.repeat)
                    self.follower.partial.setdefault(name, set()).add(copies)
            self.follower.put(tensor, Note(tags, frozenset() if tags else frozenset([name])))
        if self.divided:
            self._divide(model)
        for fqn, leaf in self.leaves.items():
            module = model.get_submodule(fqn)
            forward = module.forward
            module.forward = partial(dry_forward, leaf, module, forward, self.follower, self.edges)
        self.stack.watch(model, {fqn for fqn, leaf in self.leaves.items() if leaf.kind})
        return model

    def _divide(self, model: nn.Module) -> None:
        """Divide the numbers, sizes and arguments of this run in the copy."""
        from schedlang.runtime.comm.collectives import Group
        from schedlang.runtime.forward import wrap
        from schedlang.runtime.propagation.argument_shards import ArgumentShard, dry_run_arguments
        from schedlang.runtime.sharding.edges import Edge
        from schedlang.runtime.sharding.module_sizes import (
            SizeArgument,
            SizesLayer,
            number_at,
            set_number,
        )

        for fqn, numbers in self._chosen(NumberChoice):
            full_module = self.plan.model.model.get_submodule(fqn)
            for choice in numbers:
                if number_at(full_module, choice.attribute) == choice.value:
                    set_number(model.get_submodule(fqn), choice.attribute, choice.local)
                    self.numbers.append((fqn, choice.attribute, choice.local))
        for fqn, sizes in self._chosen(SizeChoice):
            counted = tuple(SizeArgument(choice.name, choice.dim, choice.parts) for choice in sizes)
            module, self.counted_sizes[fqn] = model.get_submodule(fqn), counted
            wrap(module, "sizes", SizesLayer(module, counted))
        for fqn, cuts in self._chosen(ArgumentChoice):
            module, parts = model.get_submodule(fqn), tuple[ArgumentShard, ...]()
            for cut in cuts:
                group = Group((cut.axis,), tuple(range(self.sizes[cut.axis])), 0, None, fqn)
                edge = Edge(group, R, S(cut.dim), R, R, False)
                parts = (*parts, ArgumentShard(cut.name, cut.dim, cut.unit, edge))
            note = partial(self._note_cut, fqn)
            module.forward = dry_run_arguments(module, parts, self.follower, note)

    def _note_cut(self, fqn: str, part: ArgumentShard, shard: ArgumentShard | None) -> None:
        """Note how an argument is split; raise Mismatch if two calls differ."""
        from schedlang.runtime.propagation.dry_run import repeated_call_mismatch

        if self.argument_splits.setdefault((fqn, part.name), shard) != shard:
            axis = part.edge.group.axes[0]
            raise repeated_call_mismatch(self.follower, f"`{fqn}`", f"`{part.name}`", axis)
        if shard is not None and shard not in self.parts.get(fqn, ()):
            self.parts[fqn] = (*self.parts.get(fqn, ()), shard)

    def _chosen(self, kind: type[C]) -> Iterator[tuple[str, list[C]]]:
        """Yield modules with the choices of a kind that fit their class and their splits."""
        choices: list[Any] = sorted((c for c in self.divided if isinstance(c, kind)), key=repr)
        for fqn, inner in self.inner_splits.items():
            class_key = self.plan.model.sites[fqn].classes[0], inner
            if own_choices := [choice for choice in choices if choice[:2] == class_key]:
                yield fqn, own_choices

    def candidates(self, failure: Mismatch) -> list[Choice]:
        """Return divisions that might repair the failure: sizes, numbers and arguments."""
        return [*self._sizes(failure), *self._numbers(failure), *self._parts(failure)]

    def _sizes(self, failure: Mismatch) -> list[SizeChoice]:
        """Return sizes of full arguments of the failing module, if modules inside are sharded."""
        from schedlang.runtime.sharding.module_sizes import named_arguments

        (fqn, _), call_args = failure.frame, self.call_inputs.get(failure.frame)
        inner = self.inner_splits.get(fqn, ())
        ranks = {n for _, axis, n, uneven in inner if axis == failure.axis and uneven == EVEN}
        if not failure.integers or call_args is None or len(ranks) != 1:
            return []
        (parts,), kind = ranks, self.plan.model.sites[fqn].classes[0]
        requests = self.leaves[fqn].requests if fqn in self.leaves else ()
        gathered = any(r.axis == failure.axis and r.input == R for r in requests)
        choices = []
        for name, tensor in named_arguments(self.plan.model.model.get_submodule(fqn), *call_args):
            is_full = gathered or failure.axis not in self.follower.of(tensor).tags
            for dim in {-1, 1 - tensor.ndim} if is_full and tensor.is_floating_point() else ():
                if tensor.ndim > 1 and tensor.shape[dim] % parts == 0:
                    choices.append(SizeChoice(kind, inner, name, dim, parts))
        return [choice for choice in choices if choice not in self.divided]

    def _parts(self, failure: Mismatch) -> list[ArgumentChoice]:
        """Return full arguments of the failing module that may need a split by heads or tokens."""
        from schedlang.runtime.propagation.argument_shards import find_full_arguments

        fqn, call_args = failure.frame[0], self.call_inputs.get(failure.frame)
        inner = self.inner_splits.get(fqn, ())
        if not failure.unit or failure.axis is None or call_args is None or not inner:
            return []
        kind = self.plan.model.sites[fqn].classes[0]
        module = self.plan.model.model.get_submodule(fqn)
        tokens = (failure.by, failure.axis) in self.follower.tokens
        full_args = find_full_arguments(module, call_args, failure.axis, failure.unit, tokens)
        unit = 0 if tokens else failure.unit
        axis = failure.axis
        return [ArgumentChoice(kind, inner, name, dim, unit, axis) for name, dim in full_args]

    def _numbers(self, failure: Mismatch) -> list[NumberChoice]:
        """Return attributes of the running modules whose division might repair the failure."""
        from schedlang.runtime.sharding.module_sizes import numbers_of

        if not failure.integers and not failure.mixed and not failure.unit:
            return []
        tried_keys = {choice[:-1] for choice in self.divided if isinstance(choice, NumberChoice)}
        choices: list[NumberChoice] = []
        names = failure.frame[0].split(".")
        for depth in range(len(names), 0, -1):
            fqn = ".".join(names[:depth])
            inner = self.inner_splits.get(fqn, ())
            module = self.plan.model.model.get_submodule(fqn)
            kind = self.plan.model.sites[fqn].classes[0]
            for attribute, value in numbers_of(module) if inner else ():
                for local in _local_values(inner, value):
                    number = NumberChoice(kind, inner, attribute, value, local)
                    if number[:-1] not in tried_keys and _may_explain(failure, number):
                        choices.append(number)
        # the last is tried first: attributes whose value is in the failing call, and numbers of
        # the module before those of its configuration
        return sorted(choices, key=lambda n: (n.value in failure.integers, "." not in n.attribute))
