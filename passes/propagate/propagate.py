"""Layouts in one forward: how tensors arrive at each sharded module (the door `propagate`).

The plan's model runs twice on the meta device: the original, then a copy with the plan's local
shapes, which is compared with the original call by call. If the copy fails because a module has
its own count of heads or widths, attributes that may hold the number are divided by trial; the
comparison of all later calls proves the choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import Facts, Label, Refusal
from schedlang.ir.features import SplittingHeads
from schedlang.ir.model import is_inside
from schedlang.ir.placement import R, Replicate, S
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.propagate.original_forward import Original, Recording, record_original
from schedlang.passes.propagate.saved_splits import SavedSplits
from schedlang.passes.propagate.sharded_run import (
    Choice,
    Loss,
    ShardedRun,
    hoist_gather,
    leaves_of,
    same_module_of_layers,
    shards_module,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from schedlang.runtime.grad_reduction.batch_statistics import BatchStatistics
    from schedlang.runtime.label_means import LabelMeans
    from schedlang.runtime.propagation.argument_shards import ArgumentShard
    from schedlang.runtime.propagation.dry_run import ShardedLeaf
    from schedlang.runtime.propagation.trace import Mismatch, Note, Tag
    from schedlang.runtime.sharding.edges import Edge
    from schedlang.runtime.sharding.module_sizes import SizeArgument
    from schedlang.runtime.tracing.equal_units import EqualUnits


def backward_root(model: Any, inputs: Mapping[str, Any], loss: Loss | None) -> Any:
    """Run a forward and return the tensor from which backward starts, or None.

    The tensor is the loss, else the sum of the model's outputs.
    """
    from schedlang.runtime.batch import run_forward

    return backward_root_of(*run_forward(model, inputs, loss))


def backward_root_of(output: Any, loss: Tensor | None) -> Tensor | None:
    """Return the tensor from which backward starts, or None if no tensor requires a gradient.

    The tensor is `loss`, else the model's own loss in `output`, else the sum of the outputs.
    """
    import torch

    from schedlang.runtime.batch import loss_of
    from schedlang.runtime.tracing.meta_runs import tensors_in

    root = loss if loss is not None else loss_of(output, {}, None)
    if root is None:
        floats = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
        root = torch.stack([t.sum() for t in floats]).sum() if floats else None
    return root if root is not None and root.requires_grad else None


MOST_RUNS = 64
RESHAPES = ("view", "reshape", "unflatten")


@dataclass(frozen=True)
class Traced(Original):
    """The results of two forwards: of the original, and of the copy sharded by the plan.

    edges                    module -> its edges; their process groups do not exist yet
    kinds                    module -> how the module computes (Linear, Conv1D, Embedding; "":
                             unchanged)
    local_numbers            attributes to be divided: (module, attribute, local value)
    counted_sizes            module -> sizes of its arguments that the module reads, and that must
                             be divided
    narrowed_arguments       module -> its full arguments of which the module needs only this rank's
                             shard
    partial                  parameter -> axes over which its gradient is partial and must be
                             reduced
    mask_layouts             (module, turn) of a random draw -> full shape and split dims by axis
    layouts                  (module, turn) -> notes on the input tensors and on the output tensors,
                             None where unknown; empty where nothing is sharded
    uncalled                 sharded modules that this batch did not reach: the layouts of their
                             inputs are unknown
    saved_splits             how ranks split tensors that modules save in fewer bits; None: they do
                             not split
    statistics               sums over all rows that must be reduced over the ranks that share a
                             batch
    paired_rows              the model's line that compares rows of the batch in the loss; "": none,
                             or the schedule or the user's weight allows it
    label_means              means over labels of their own in the loss, which ranks weigh one by
                             one; None: there are not several, or they are no weighted sum
    sharing_modules          modules whose input tensor is also redistributed, in the same way, by
                             another module
    is_shared_input_written  whether this shared tensor is written in place between the two modules
    """

    edges: Mapping[str, tuple[Edge, ...]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    local_numbers: tuple[tuple[str, str, int], ...] = ()
    counted_sizes: Mapping[str, tuple[SizeArgument, ...]] = field(default_factory=dict)
    narrowed_arguments: Mapping[str, tuple[ArgumentShard, ...]] = field(default_factory=dict)
    partial: Mapping[str, frozenset[str]] = field(default_factory=dict)
    mask_layouts: Mapping[tuple[str, int], tuple[tuple[int, ...], Mapping[str, Tag]]] = field(
        default_factory=dict
    )
    layouts: Mapping[tuple[str, int], Sequence[tuple[Note, ...] | None]] = field(
        default_factory=dict
    )
    uncalled: tuple[str, ...] = ()
    saved_splits: SavedSplits | None = None
    statistics: BatchStatistics | None = None
    paired_rows: str = ""
    label_means: LabelMeans | None = None
    sharing_modules: frozenset[str] = frozenset()
    is_shared_input_written: bool = False


# divided numbers; the call and the reason of the failure without the last of them
Division = tuple[frozenset[Choice], tuple[int, str]]


def propagate(plan: Plan, batch: Mapping[str, Any], loss: Loss | None = None) -> Traced:
    """Trace a plan with one microbatch on the meta device.

    Raises Refusal where the sharded copy does not compute what the original computes.
    """
    from schedlang.runtime.propagation.trace import Hoist

    placement_maps = (plan.boundaries, plan.layouts, plan.computes)
    key = (plan.mesh.axes, *(tuple(mapping.items()) for mapping in placement_maps))
    regions: Any = plan.model.cache.setdefault("regions", {})  # leaves whose inputs enter
    leaves = {**(regions.get(key) or leaves_of(plan))}
    recording = record_original(plan, batch, loss, leaves)
    if not leaves:
        return Traced(**vars(recording.original))
    successful: Any = plan.model.cache.setdefault(("divided", plan.mesh.axes), [])  # tried first
    hoists: Any = plan.model.cache.setdefault("hoisted", {})
    gathers: list[tuple[str, str]] = [*hoists.get(key, ())]  # by which module, over which axis
    for fqn, axis in gathers:
        leaves[fqn] = hoist_gather(fqn, leaves.get(fqn), axis)
    tries: list[Division] = [(division, (-1, "")) for division in (frozenset(), *successful)]
    pairs, tried, unhelpful = list[Division](), set[frozenset[Choice]](), set[Division]()
    best: Mismatch | None = None
    for _ in range(MOST_RUNS + len(plan.model.sites)):
        if not tries and not pairs:
            break
        single = bool(tries)
        divided, reached = (tries or pairs).pop()
        if not single and any((divided - {number}, reached) in unhelpful for number in divided):
            continue  # one of the two numbers changes nothing here
        try:
            arguments = plan, batch, loss, leaves, recording, divided
            if recording.original.equal_units:
                run, failure = attempt_imitating_run(*arguments)
            else:
                run = ShardedRun(*arguments)
                failure = run.attempt()
        except Hoist as hoist:
            for fqn in same_module_of_layers(plan, hoist.fqn):
                leaves[fqn] = hoist_gather(fqn, leaves.get(fqn), hoist.axis)
                gathers.append((fqn, hoist.axis))
            tries.append((divided, reached))
            continue
        except Refusal as refusal:
            raise _at_sharding_row(plan, refusal) from refusal
        if failure is None:
            if divided and divided not in successful:
                successful.append(divided)
            hoists[key] = tuple(gathers)
            return _traced(recording, run)
        if best is None or _report_key(failure) > _report_key(best):
            best = failure
        if failure.place <= reached[0]:  # no help alone; a call may have two: `split([q, k, k])`
            if (failure.place, failure.reason) == reached:
                unhelpful.add((divided, reached))
            elif single:
                larger = [divided | {number} for number in run.candidates(failure)]
                pairs += [(union, reached) for union in larger if union not in tried]
                tried.update(larger)
            continue
        tries += [(divided | {n}, (failure.place, failure.reason)) for n in run.candidates(failure)]
    assert best is not None
    if _enter_regions(plan, leaves, best):
        regions[key] = leaves
        return propagate(plan, batch, loss)
    raise _refusal(plan, best)


def _enter_regions(plan: Plan, leaves: dict[str, ShardedLeaf], failure: Mismatch) -> bool:
    """Let the inputs of the innermost module around a failure whose row has `input=R` enter it.

    The module then computes with parts, and the gradients of its input are summed over the ranks.
    Returns whether there is such a module; `leaves` changes.
    """
    names = failure.frame[0].split(".") if failure.frame[0] else []
    for depth in range(len(names), 0, -1):
        fqn = ".".join(names[:depth])
        leaf = leaves.get(fqn)
        if leaf is None or leaf.kind:
            continue
        for request in leaf.requests:
            fits = failure.axis in (None, request.axis) and not request.differ
            if fits and request.input == R and not request.hoisted:
                for other in same_module_of_layers(plan, fqn):
                    if other in leaves:
                        leaves[other] = leaves[other].entering(request)
                return True
    return False


def _report_key(failure: Mismatch) -> tuple[int, bool]:
    """Return the key that ranks failures: a later failure, then one with helps, is reported."""
    return failure.place, bool(failure.helps)


# -- the result --------------------------------------------------------------------------------


def _traced(recording: Recording, run: ShardedRun) -> Traced:
    return Traced(
        **vars(recording.original),
        edges=run.edges,
        kinds={fqn: run.leaves[fqn].kind for fqn in run.edges},
        local_numbers=tuple(run.numbers),
        counted_sizes=run.counted_sizes,
        narrowed_arguments=run.parts,
        partial={name: frozenset(axes) for name, axes in run.follower.partial.items()},
        mask_layouts=run.follower.masks,
        layouts=run.layouts,
        uncalled=tuple(fqn for fqn in run.leaves if fqn not in run.edges),
        sharing_modules=frozenset(run.follower.arrivals.sharing),
        is_shared_input_written=run.follower.arrivals.written,
    )


def _refusal(plan: Plan, failure: Mismatch) -> Refusal:
    """Return a failure as a refusal at the row that shards the failing module."""
    fqn = failure.frame[0]
    action = _blamed_row(plan, failure)
    heads, row_facts = _heads_message(plan, failure)
    line = f", at {failure.line}" if failure.line else ""
    notes: tuple[str, ...] = (f"in the forward of `{fqn or plan.model.class_name}`{line}",)
    title = heads[0] if heads else failure.reason
    if not heads and failure.raw:
        split = f"a `{failure.axis}` shard" if failure.axis is not None else "a shard"
        title = f"`{fqn or plan.model.class_name}` needs the full tensor, but gets {split}"
        notes = (*notes, f"torch says: {failure.reason}")
    label = Label(action.span) if action is not None else Label()
    helps = (
        (*heads[1:], *failure.helps)
        if heads
        else failure.helps or _boundary_helps(plan, action, fqn)
    )
    missing = () if heads else tuple(_missing_splits(plan, failure))
    texts = (
        (site, ", ".join(f"{name}=S({dim})" for name, dim in dims.items()))
        for site, dims in missing
    )
    other_rows = (f"{site}  shard({splits}, over={failure.axis})" for site, splits in texts)
    helps = (*(f"shard the other one, too: `{row}`" for row in other_rows), *helps)
    if not heads and action is not None:
        helps = (*_missing_rows(plan, failure, action), *helps)
    if line and not heads and failure.call in RESHAPES and failure.integers:
        helps = (
            f"write -1 in place of the number of heads, or of their size, at {failure.line}",
            *helps,
        )
    return Refusal.of(
        "S403" if heads else "S405",
        title,
        label,
        notes=notes,
        helps=helps,
        facts=(
            *(fact for site, dims in missing[:1] for fact in _missing_row_facts(site, dims)),
            *((("line", line),) if line else ()),
            *(row_facts if heads else failure.row_arguments),
        ),
    )


def _missing_row_facts(site: str, dims: Mapping[str, int]) -> Facts:
    """Return facts on a missing row: its module, and the dims that the row would split."""
    splits = ", ".join(f"{name}={dim}" for name, dim in dims.items())
    return ("module", site), ("splits", splits)


def _missing_splits(plan: Plan, failure: Mismatch) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield (module, split dims) of replicated parameters that are combined with sharded heads.

    An example is a table of biases.
    """
    names, size = failure.made
    dims_by_site: dict[str, dict[str, int]] = {}
    for name in sorted(names, reverse=True) if failure.axis is not None else ():
        param, site = plan.model.parameters[name], plan.model.owner(name)
        dims = [dim for dim, full_size in enumerate(param.shape) if full_size == size]
        if (
            len(dims) == 1
            and not site.dims
            and failure.axis not in plan.effective_layout(name).axes
        ):
            dims_by_site.setdefault(str(site), {})[name.rpartition(".")[2]] = dims[0]
    yield from dims_by_site.items()  # a norm's weight and its bias are sharded together


COMBINED = ("add", "iadd", "radd", "mul", "imul", "rmul", "sub", "isub", "rsub")  # two tensors


def _missing_rows(plan: Plan, failure: Mismatch, action: Action) -> Iterator[str]:
    """Yield the row for a full projection whose output is combined with the sharded one's output.

    Both are in the same forward, and have the same size along the split dim; an example is the
    second projection of LoRA. Yields nothing where several projections fit.
    """
    fqn, source, axis, sites = failure.frame[0], failure.by, failure.axis, plan.model.sites
    holder = f"{fqn}." if fqn else ""
    combines = failure.call.strip("_") in COMBINED
    if not combines or axis is None or source not in action.sites or not source.startswith(holder):
        return
    helps: list[str] = []
    cuts = {
        name: plan.effective_layout(param.name).splits
        for name, param in sites[source].parameters.items()
    }
    split = {
        (name, shard.dim) for name, splits in cuts.items() for shard in splits if shard.axis == axis
    }
    sizes = {(name, dim, sites[source].parameters[name].shape[dim]) for name, dim in split}
    for site in sites.values():
        params = {name: param for name, param in site.parameters.items() if name in cuts}
        excluded = site.fqn in action.sites or not site.fqn.startswith(holder)
        if excluded or not site.dims or "weight" not in params:
            continue
        pairs = (
            (params[name].shape[dim : dim + 1], size) for name, dim, size in sizes if name in params
        )
        fits = all(shape == (size,) for shape, size in pairs)  # a norm's weight has one dim
        if fits and not any(
            axis in plan.effective_layout(param.name).axes for param in params.values()
        ):
            stem, tail = source.removeprefix(holder), site.fqn.removeprefix(holder)
            similar = [f"{shard.removesuffix(stem)}{tail}" for shard in action.sites]
            selector = _selector_of([shard for shard in similar if shard in sites], sites)
            helps.append(f"shard what it is combined with, too: `{selector}  {action.primitive}`")
    if len(helps) == 1:  # of several it is not known which
        yield helps[0]


def _selector_of(alike: Sequence[str], sites: Mapping[str, object]) -> str:
    """Return a selector of modules: one path with `*` for different segments, else all names."""
    parts = [set(segments) for segments in zip(*(fqn.split(".") for fqn in alike))]
    path = [next(iter(segments)) if len(segments) == 1 else "*" for segments in parts]
    names = [fqn.split(".") for fqn in sites if fqn.count(".") == len(path) - 1]
    matching = [fqn for fqn in names if all(p in ("*", name) for p, name in zip(path, fqn))]
    return ".".join(path) if len(matching) == len(alike) else ", ".join(alike)


def _boundary_helps(plan: Plan, action: Action | None, fqn: str) -> tuple[str, ...]:
    """Return helps that change the layouts at the edges of a row; `fqn` is the failing module."""
    if action is None or len(action.primitive.along) != 1:
        return ()
    (axis,) = action.primitive.along
    edges = [b for site in action.sites for b in plan.boundaries.get(site, ()) if b.axis == axis]
    if not edges or axis in (completion.axis for completion in plan.completions):
        return ()
    own_boundaries = [boundary for boundary in edges if boundary.row == action.row]
    within = any(fqn != site and is_inside(fqn, site) for site in action.sites)
    split = next((b.input for b in own_boundaries if isinstance(b.input, S)), None)
    if within and split is not None:  # a module inside gets a shard
        return (f"drop `input=` of this row: what is inside needs more than a part of {split}",)
    missing = f"add the missing rows: `complete(over={axis})`, below"
    if any(isinstance(boundary.output, Replicate) for boundary in own_boundaries):
        return (missing,)
    return (missing, "or gather its output: `output=R`")


def _at_sharding_row(plan: Plan, refusal: Refusal) -> Refusal:
    """Return a refusal without a place, placed at the last row that shards its module."""
    sites = {value for d in refusal.diagnostics for kind, value in d.facts if kind == "site"}
    shards = list(plan.rows_changing(Facet.PLACEMENT))
    row = next((a for a in reversed(shards) if sites & set(a.sites)), None)
    return refusal if row is None else refusal.at(row.span)


def _blamed_row(plan: Plan, failure: Mismatch) -> Action | None:
    """Return the row to blame for a failure.

    It is the row of the failing module, else the row that split the tensor, else one inside.
    """
    fqn, source = failure.frame[0], failure.by
    shards = plan.rows_changing(Facet.PLACEMENT)
    exact = (a for name in (fqn, source) if name for a in reversed(shards) if name in a.sites)
    return next(exact, next((a for a in shards if shards_module(a, fqn)), None))


def _heads_message(plan: Plan, failure: Mismatch) -> tuple[tuple[str, ...], Facts]:
    """Return (title, *helps) and the row's arguments for heads that ranks cannot divide evenly.

    The arguments are those of the first remedy. Returns empty tuples where heads are no problem.
    """
    axis, count = failure.axis, next(iter(failure.counted), None)
    if axis is None or count is None:
        return (), ()
    ranks, row = plan.mesh.size(axis), _head_row(plan, failure.by, axis)
    if count % ranks == 0 or (row is not None and row.settles_heads):
        return (), ()
    divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
    title = f"{count} heads of `{failure.frame[0]}` cannot be split over {axis}={ranks}"
    helps = [f"`{axis}` may be one of {divisors}"]
    row_facts: Facts = ()
    if row is not None:
        row_helps, row_facts = row.remedies(failure.by, count, ranks, len(failure.counted) > 2)
        helps += row_helps
    return (title, *helps), row_facts


def _head_row(plan: Plan, fqn: str, axis: str) -> SplittingHeads | None:
    """Return the row that splits a module over an axis and has an argument for heads."""
    rows = ((a, row) for a, row in reversed(plan.rows_with(SplittingHeads)) if fqn in a.sites)
    return next((row for _, row in rows if fqn and row.along == (axis,)), None)


class ImitatingRun(ShardedRun):
    """A run of the sharded copy in which two units of each kind run."""

    units: EqualUnits | None = None

    def attempt(self) -> Mismatch | None:
        """Run the forward; return the first mismatch with the original, or None."""
        with ExitStack() as self._exit:
            return super().attempt()

    def _copy(self) -> nn.Module:
        from schedlang.runtime.propagation.imitated_units import EqualLayouts
        from schedlang.runtime.tracing.equal_units import EqualUnits

        model, equal = super()._copy(), self.recording.original.equal_units
        narrowed = self.parts, self.argument_splits
        observer = EqualLayouts(self.follower, self.edges, self.layouts, *narrowed)
        self.units = EqualUnits(model, equal, observer=observer)
        self._exit.enter_context(self.units.using())
        return model


def attempt_imitating_run(
    plan: Plan,
    batch: Mapping[str, Any],
    loss: Loss | None,
    leaves: Mapping[str, ShardedLeaf],
    recording: Recording,
    divided: frozenset[Choice],
) -> tuple[ShardedRun, Mismatch | None]:
    """Run the sharded copy of a model with equal units; return the run, and its first mismatch
    with the original, or None.

    A run with imitated units counts only if it agrees with the original, or fails before the first
    of these.
    """
    from schedlang.runtime.propagation.trace import Hoist

    run = ImitatingRun(plan, batch, loss, leaves, recording, divided)
    try:
        failure = run.attempt()
    except Hoist:
        raise
    except Exception:
        if not _is_imitated(run):
            raise
    else:
        if failure is None and not (run.units and run.units.different):
            return run, None
        if not _is_imitated(run):
            return run, failure
    full_run = ShardedRun(plan, batch, loss, leaves, recording, divided)
    return full_run, full_run.attempt()


def _is_imitated(run: ImitatingRun) -> bool:
    """Return whether a unit of a run was imitated, or could not be."""
    return run.units is not None and bool(run.units.imitated or run.units.different)
