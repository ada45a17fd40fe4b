"""The sharded copy on the meta device: what its modules want, and one run beside the original.

* The sharded modules of a plan: how each computes, and what it wants.
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
from schedlang.ir.mesh import neighbours
from schedlang.ir.model import inside
from schedlang.ir.placement import EVEN, P, R, S, Split, Uneven
from schedlang.ir.plan import Action, Plan
from schedlang.ir.primitive import Facet
from schedlang.passes.propagate.original import Recording

if TYPE_CHECKING:
    from torch import nn

    from schedlang.ir.model import Site
    from schedlang.runtime.propagation.dry import Leaf, Wanted
    from schedlang.runtime.propagation.narrowed import Narrowed
    from schedlang.runtime.propagation.trace import Mismatch, Note
    from schedlang.runtime.sharding.shard import Edge
    from schedlang.runtime.sharding.sizes import Counted


LINES = ("down", "along", "deep")  # of a cube, in the order in which its axes are named
CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")
POOLS = tuple(f"{kind}Pool{dims}d" for kind in ("Max", "Avg") for dims in (1, 2, 3))
NORMS = ("GroupNorm", *(f"BatchNorm{dims}d" for dims in (1, 2, 3)))
# classes that say how they compute
CLASSES = ("Linear", "Conv1D", "Embedding", "EmbeddingBag", *CONVOLUTIONS, *POOLS, *NORMS)


def leaves_of(plan: Plan) -> dict[str, Leaf]:
    """The sharded modules of a plan; axes of size 1 shard nothing."""
    from schedlang.runtime.propagation.dry import Leaf

    if plan.model.ties:
        _check_ties(plan)
    leaves = {}
    for fqn, boundaries in plan.boundaries.items():
        real = [b for b in boundaries if plan.mesh.size(b.axis) > 1]
        if not real:
            continue
        site = plan.model.sites[fqn]
        kind = plan.computes.get(fqn) or next((k for k in CLASSES if site.is_a(k)), "")
        kind = kind or ("norm" if _normalises(plan, site, real) else "")
        make = WANTED.get(kind, _projection)
        wanted = tuple(make(plan, fqn, kind, b) for b in real)
        split = any(plan.held(fact.name).splits for fact in site.parameters.values())
        names = tuple(fact.name for fact in site.parameters.values())
        pending = any(isinstance(w.computes, P) for w in wanted)
        bias = site.parameters.get("bias")
        own = split or fqn in plan.computes or kind in NORMS or any(w.parts for w in wanted)
        split_kind = kind if own else ""
        last = bias.name if bias and pending else None
        inner = _inner(plan, site, wanted) if len(site.dims) > 2 else ()
        leaves[fqn] = Leaf(fqn, split_kind, wanted, names, last, inner)
    return leaves


def _inner(plan: Plan, site: Site, wanted: tuple[Wanted, ...]) -> tuple[tuple[str, str], ...]:
    """Return axes, each with a parameter of an adapter that is whole where the weight is split."""
    from schedlang.runtime.adapted import Adapted

    inner = Adapted.inner if site.is_a("Adapted") else ()
    axes = [one.axis for one in wanted if one.splits]
    facts = [site.parameters[name] for name in inner if name in site.parameters]
    return tuple(
        (axis, fact.name)
        for axis in axes
        for fact in facts
        if not set(plan.mesh.fold(axis)) & plan.split_axes(fact.name)
    )


def _normalises(plan: Plan, site: Site, boundaries: list[Boundary]) -> bool:
    """Return whether a module keeps parameters along a hidden dim that comes and goes in parts."""
    from schedlang.runtime.sharding.shard import dim_of

    facts = site.parameters.values()
    inside = all(len(f.shape) == 1 and plan.held(f.name).splits for f in facts)
    ends = [end for b in boundaries for end in (b.input, b.output)]
    last = all(isinstance(end, S) and dim_of(end) == -1 for end in ends)
    replaced = any(site.fqn in a.sites for a in plan.rows_changing(Facet.STRUCTURE))
    one = len(boundaries) == 1 and not site.children and not replaced
    return bool(facts) and inside and last and one


def _check_ties(plan: Plan) -> None:
    """Every module that uses a split parameter must be sharded over the same axes."""
    for names in plan.model.ties:
        name = names[0]
        for used in names if name in plan.layouts else ():
            owner = plan.model.owner(used).fqn
            if not any(plan.model.sites[owner].is_a(kind) for kind in CLASSES):
                continue  # a holder; whatever it does with its parameter is followed
            known = {a for b in plan.boundaries.get(owner, ()) for a in plan.mesh.fold(b.axis)}
            for split in plan.held(name).splits:
                if not known.issuperset(plan.mesh.fold(split.axis)):
                    raise Refusal(_half_sharded(plan, name, used, split))


def _half_sharded(plan: Plan, name: str, used: str, split: Split) -> Diagnostic:
    site, axis = plan.model.owner(used), split.axis
    owners = [plan.model.owner(other) for other in plan.model.parameters[name].names]
    row = next(a for a in plan.actions if {o.fqn for o in owners} & {*a.sites} or touches(a, name))
    words = any(owner.is_a("Embedding") for owner in owners)
    styles = ("vocab" if words else "col", "col" if site.is_a("Embedding") else "row")
    style = styles[split.dim ^ site.is_a("Conv1D")] if split.dim < 2 else styles[0]
    return Diagnostic(
        "S506",
        f"`{site.fqn}` shares a sharded weight, but has no `shard` row",
        Label(row.span),
        notes=(f"`{used}` and `{name}` are the same tensor", f"it is sharded over `{axis}`"),
        facts=(("parameter", used),),
        helps=(f"shard it, too: `{site.fqn} shard({style}, over={axis})`",),
    )


def alike(plan: Plan, fqn: str) -> list[str]:
    """The modules that stand in other layers where this one stands in its own."""
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(fqn)))
    kind = plan.model.sites[fqn].kind
    return [
        name for name, s in plan.model.sites.items() if pattern.fullmatch(name) and s.kind == kind
    ]


def hoisted(fqn: str, known: Leaf | None, axis: str) -> Leaf:
    """The module that gathers its input for its children, beside what it did before."""
    from schedlang.runtime.propagation.dry import Leaf, Wanted

    before = known.wanted if known is not None else ()
    wanted = Wanted(axis, R, None, None, splits=False, hoisted=True)
    return Leaf(fqn, "", (*before, wanted))


def _projection(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Return the demand of a Linear, Conv1D, Embedding, or unchanged module on one axis."""
    from schedlang.runtime.propagation.dry import Wanted

    axis, entry, output = boundary.axis, boundary.input, boundary.output
    site = plan.model.sites[fqn]
    weight = site.parameters.get("weight")
    layout = plan.held(weight.name) if weight is not None else None
    split = next((s for s in layout.splits if s.axis == axis), None) if layout else None
    if not kind or split is None or layout is None or weight is None:
        return Wanted(axis, entry, output, None, splits=False, differ=boundary.differ)
    name = site.dims["weight"][split.dim]
    blocks = split.blocks if len(set(split.blocks)) > 1 else len(split.blocks)
    lies = S(-1, blocks, split.uneven)
    if name == "in" and isinstance(entry, S):
        entry = replace(lies, dim=entry.dim)  # inputs lie as the weight does
    if name in ("out", "hidden"):
        head = isinstance(output, S) and output.dim == "vocab"
        cut = weight.shape[split.dim] if head else None
        return Wanted(axis, entry, output, lies, splits=True, cut=cut, head=head)
    return Wanted(axis, entry, output, P(), splits=True)


def _convolution(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Return the demand of a convolution on an axis that splits its channels, or positions."""
    from schedlang.runtime.propagation.dry import Wanted

    axis, entry, output = boundary.axis, boundary.input, boundary.output
    site = plan.model.sites[fqn]
    layout = plan.held(site.parameters["weight"].name)
    split = next((s for s in layout.splits if s.axis == axis), None)
    if split is None:
        return _window(plan, fqn, kind, boundary)
    name = site.dims["weight"][split.dim]
    blocks = split.blocks if len(set(split.blocks)) > 1 else len(split.blocks)
    if name == "in":
        return Wanted(axis, S(1, blocks), output, P(), splits=True)
    if plan.model.model.get_submodule(fqn).groups == 1:
        return Wanted(axis, entry or R, output, S(1, blocks), splits=True)
    own = S(1, blocks)  # each group sees its own channels
    return Wanted(axis, own, output, own, splits=False)


def _window(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Return the demand of a convolution or pool on an axis that splits positions, if it does."""
    from schedlang.runtime.propagation.dry import Wanted

    axis, entry = boundary.axis, boundary.input
    across = isinstance(entry, S) and isinstance(entry.dim, int) and entry.dim > 1
    return Wanted(axis, entry, boundary.output, None, splits=False, parts=across)


def _on_grid(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Return the demand of a module on a grid: rows split the batch, columns the hidden dim."""
    from schedlang.runtime.propagation.dry import Wanted

    _check_data(plan, fqn)
    if plan.boundaries[fqn].index(boundary) == 0:
        return Wanted(boundary.axis, None, None, R, splits=False, told="down")
    return replace(_results(plan, fqn, boundary), splits=True, told="along")


def _on_cube(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Return the demand of a module on a cube of ranks: inputs over two lines, results over the
    third."""
    from schedlang.runtime.propagation.dry import Wanted

    place = plan.boundaries[fqn].index(boundary)
    _check_data(plan, fqn)
    if place < len(LINES):
        return Wanted(boundary.axis, None, None, R, splits=False, told=LINES[place])
    if boundary.output is None:
        return Wanted(boundary.axis, boundary.input, R, R, splits=True, told="in")
    return replace(_results(plan, fqn, boundary), told="out")


def _results(plan: Plan, fqn: str, boundary: Boundary) -> Wanted:
    """Return the demand for a product's results, which lie as its weight does."""
    from schedlang.runtime.propagation.dry import Wanted

    site, output = plan.model.sites[fqn], boundary.output
    weight, head = site.parameters["weight"], isinstance(output, S) and output.dim == "vocab"
    if site.is_a("Embedding"):
        return Wanted(boundary.axis, None, output, S(-1), splits=False)
    outer = site.dims["weight"].index("out")
    blocks = next((s.blocks for s in plan.layout(weight.name).splits if s.dim == outer), (1,))
    computes = S(-1, blocks if len(set(blocks)) > 1 else len(blocks))
    cut = weight.shape[outer] if head else None
    entry = boundary.input
    return Wanted(boundary.axis, entry, output, computes, splits=False, cut=cut, head=head)


def _normed(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Return the demand of a norm over a split hidden dim: it takes parts, and gives parts."""
    from schedlang.runtime.propagation.dry import Wanted

    return Wanted(boundary.axis, S(-1), boundary.output or S(-1), S(-1), splits=True)


def _check_data(plan: Plan, fqn: str) -> None:
    """The first axis of a grid splits the batch, or gradients would be summed twice; no other."""
    first, *others = (plan.mesh.fold(b.axis) for b in plan.boundaries[fqn])
    row = next(a for a in plan.rows_changing(Facet.PLACEMENT) if fqn in a.sites)
    label = Label(row.span)
    if plan.mesh.size(first) > 1 and not set(first) <= set(plan.data_axes):
        said = f"no row splits the batch over `{first[0]}`, for the grid of `{fqn}`"
        add = f"add `zero(stage=0, over={first[0]})` at the end"
        raise Refusal.of("S510", said, label, helps=(add,))
    for axis in {plain for axes in others for plain in axes} & set(plan.data_axes):
        if plan.mesh.size(axis) > 1:
            said = f"`{axis}` cannot shard both the batch and the hidden dim of `{fqn}`"
            raise Refusal.of("S510", said, label, helps=(f"leave `{axis}` out of `zero`",))


def _experts(plan: Plan, fqn: str, kind: str, boundary: Boundary) -> Wanted:
    """Tokens that ranks see alike are shared out and results summed; other tokens are sent."""
    from schedlang.runtime.propagation.dry import Wanted

    axis, told = boundary.axis, plan.told[fqn]
    if axis == told.within and set(plan.mesh.fold(axis)) & set(plan.data_axes):
        raise Refusal.of(
            "S428",
            f"`{axis}` cannot shard both the batch and each expert of `{fqn}`",
            notes=("the ranks that share an expert must have the same tokens",),
            helps=("use an axis that no `zero` row names: `inner=tp`",),
        )
    if axis in plan.data_axes:
        return Wanted(axis, None, None, None, splits=False, told=told)
    return Wanted(axis, R, R, P(), splits=True, told=told)


# kinds that a row chose (plan.computes) and what each wants of one axis
WANTED: Mapping[str, Callable[[Plan, str, str, Boundary], Wanted]] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys((*POOLS, *NORMS), _window),
    "summa Linear": _on_grid,
    "summa Conv1D": _on_grid,
    "summa Embedding": _on_grid,
    "cube Linear": _on_cube,
    "cube Conv1D": _on_cube,
    "cube Embedding": _on_cube,
    "norm": _normed,
    "experts": _experts,
}


def touches(action: Action, fqn: str) -> bool:
    """Return whether a row shards the module, or something in it."""
    shards = action.changes(Facet.PLACEMENT)
    return shards and any(inside(s, fqn) for s in action.sites)


Loss = Callable[..., Any]
Below = tuple[tuple[str, str, int, Uneven], ...]  # what of a module is split: path, axis, ranks


class Number(NamedTuple):
    """A number by which modules of a class count that hold the same split things: old and new."""

    kind: str
    below: Below
    attribute: str
    value: int
    local: int


def _near(failure: Mismatch, number: Number) -> bool:
    """Return whether a number may have made the sizes in the failing call."""
    sized = any(whole and whole % number.value == 0 for whole in failure.integers)
    if number.value == failure.unit or sized:  # a whole tensor of as many heads may come from it
        return True
    return "." not in number.attribute and bool(failure.integers or failure.mixed)


def _locals(below: Below, value: int) -> Iterator[int]:
    """Yield a number's values on one rank: its share of the ranks, or of those that hold the
    same."""
    found = set()
    for _, _, ranks, uneven in below:
        found |= {value * uneven.wide / ranks, Fraction(value, uneven.repeat)}
    yield from (n.numerator for n in sorted(found) if n.denominator == 1 and n != value)


class Part(NamedTuple):
    """An argument of modules of a class, of which each rank needs its own part along a dim.

    `unit` is the number of heads, which stands in the dim for each row of the batch; 0: the dim is
    one of tokens.
    """

    kind: str
    below: Below
    name: str
    dim: int
    unit: int
    axis: str


class Size(NamedTuple):
    """A size that modules of a class read of an argument, and of which a rank counts its part."""

    kind: str
    below: Below
    name: str
    dim: int
    parts: int


Choice = Number | Part | Size
C = TypeVar("C", Number, Part, Size)


@dataclass(eq=False)
class Run:
    """One forward of the sharded copy with some attributes divided."""

    plan: Plan
    batch: Mapping[str, Any]
    loss: Loss | None
    leaves: Mapping[str, Leaf]
    recording: Recording
    divided: frozenset[Choice]
    edges: dict[str, tuple[Edge, ...]] = field(default_factory=dict)
    numbers: list[tuple[str, str, int]] = field(default_factory=list)
    layouts: dict[tuple[str, int], list[tuple[Note, ...] | None]] = field(default_factory=dict)
    given: dict[tuple[str, int], Any] = field(default_factory=dict)
    parts: dict[str, tuple[Narrowed, ...]] = field(default_factory=dict)
    cuts: dict[tuple[str, str], Narrowed | None] = field(default_factory=dict)
    counted: dict[str, tuple[Counted, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from schedlang.runtime.propagation.follow import Follower
        from schedlang.runtime.propagation.trace import Stack

        plan, known = self.plan, self.recording
        self.stack = Stack(seen=self._see)
        over = (b.axis for boundaries in plan.boundaries.values() for b in boundaries)
        self.sizes = {name: plan.mesh.size(name) for name in (*plan.mesh.names, *over)}
        splits = {fqn: [w.axis for w in leaf.wanted] for fqn, leaf in self.leaves.items()}
        tried: Any = plan.model.cache.setdefault("by parts", {})
        draws = known.original.random
        self.follower = Follower(known.frames, self.stack, self.sizes, splits, draws, tried)

    @cached_property
    def below(self) -> Mapping[str, Below]:
        """The splits, by path, in every module that holds something sharded.

        What gathers its outputs is split for nobody around it: such modules are not alike.
        """
        found: dict[str, list[Any]] = {}
        for leaf in self.leaves.values():
            names = leaf.fqn.split(".")
            for depth in range(len(names) + 1):
                fqn, path = ".".join(names[:depth]), ".".join(names[depth:])
                mine = (w for w in leaf.wanted if w.splits and not (path and w.gathers))
                split = [(path, w.axis, self.sizes[w.axis], w.uneven) for w in mine]
                if split:
                    found.setdefault(fqn, []).extend(split)
        return {fqn: tuple(split) for fqn, split in found.items()}

    def _see(self, frame: tuple[str, int], tree: Any) -> None:
        """Note how the tensors that a call is given, or gives, lie on the ranks."""
        from schedlang.runtime.tracing.meta import tensors_in

        if frame not in self.given and frame[0]:
            self.given[frame] = tree  # first what goes in
        notes = None if self.follower.loose else tuple(map(self.follower.of, tensors_in(tree)))
        self.layouts.setdefault(frame, []).append(notes)

    def attempt(self) -> Mismatch | None:
        """Run; what disagreed first, or None."""
        from schedlang.runtime.batch import forward
        from schedlang.runtime.kept_outside import kept_outside
        from schedlang.runtime.propagation.trace import Hoist, Mismatch, Note, Trace, of_the_model
        from schedlang.runtime.tracing.meta import tensors_in, without_values

        model = self._copy()
        try:
            kept = kept_outside(self.plan.model.model, self.loss)
            with kept, without_values(self.batch) as (inputs, _):
                for given in tensors_in(inputs):
                    self.follower.put(given, Note(data=True))
                with Trace(self.stack, self.follower, asked=self.recording.original.truths):
                    output, _ = forward(model, inputs, self.loss)
            for tensor in tensors_in(output):
                for axis, tag in self.follower.of(tensor).tags.items():
                    raise self._returned(axis, tag.by)
        except Mismatch as failure:
            return failure
        except Hoist:
            raise
        except Exception as error:
            if self.divided:  # a number that counts something else: this try leads nowhere
                return Mismatch(("", 0), str(error), None, (), -1)
            if not of_the_model(error):
                raise
            found = self.follower.refuse(str(error).split("\n")[0], None)
            found.frame, found.raw = self.stack.broke, True
            return found
        return None

    def _copy(self) -> nn.Module:
        from schedlang.runtime.propagation.dry import dry_forward
        from schedlang.runtime.propagation.trace import Note, Tag
        from schedlang.runtime.tracing.meta import meta_model

        plan = self.plan
        shapes = {name: plan.held(name).local_shape(plan.mesh) for name in plan.layouts}
        model = meta_model(plan.model.model, shapes)
        model.train()
        for name, tensor in model.named_parameters():
            owner = name.rpartition(".")[0]
            tags = {s.axis: Tag(s.dim, s.blocks, owner, s.uneven) for s in plan.held(name).splits}
            for split in plan.held(name).splits:
                self.follower.uneven_splits.setdefault(split.axis, set()).add(split.uneven)
                if split.uneven.repeat > 1:
                    self.follower.repeats = True
                    copies = neighbours(split.axis, split.uneven.repeat)
                    self.follower.partial.setdefault(name, set()).add(copies)
            self.follower.put(tensor, Note(tags, frozenset() if tags else frozenset([name])))
        if self.divided:
            self._divide(model)
        for fqn, leaf in self.leaves.items():
            module = model.get_submodule(fqn)
            known = leaf, module, module.forward, self.follower, self.edges
            module.forward = partial(dry_forward, *known)
        self.stack.watch(model, {fqn for fqn, leaf in self.leaves.items() if leaf.kind})
        return model

    def _divide(self, model: nn.Module) -> None:
        """Divide the numbers, sizes and arguments that are tried in this run."""
        from schedlang.runtime.comm.collectives import Group
        from schedlang.runtime.forward import wrap
        from schedlang.runtime.propagation.narrowed import Narrowed, dry_parts
        from schedlang.runtime.sharding.shard import Edge
        from schedlang.runtime.sharding.sizes import Counted, Sizes, number_at, set_number

        for fqn, numbers in self._chosen(Number):
            whole = self.plan.model.model.get_submodule(fqn)
            for one in numbers:
                if number_at(whole, one.attribute) == one.value:
                    set_number(model.get_submodule(fqn), one.attribute, one.local)
                    self.numbers.append((fqn, one.attribute, one.local))
        for fqn, sizes in self._chosen(Size):
            self.counted[fqn] = tuple(Counted(one.name, one.dim, one.parts) for one in sizes)
            module = model.get_submodule(fqn)
            wrap(module, "sizes", Sizes(module, self.counted[fqn]))
        for fqn, cuts in self._chosen(Part):
            module, parts = model.get_submodule(fqn), tuple[Narrowed, ...]()
            for cut in cuts:
                group = Group((cut.axis,), tuple(range(self.sizes[cut.axis])), 0, None, fqn)
                edge = Edge(group, R, S(cut.dim), R, R, False)
                parts = (*parts, Narrowed(cut.name, cut.dim, cut.unit, edge))
            module.forward = dry_parts(module, parts, self.follower, partial(self._cut, fqn))

    def _cut(self, fqn: str, part: Narrowed, now: Narrowed | None) -> None:
        """Note how an argument is cut; it is at every call, or at none."""
        from schedlang.runtime.propagation.dry import differently

        if self.cuts.setdefault((fqn, part.name), now) != now:
            axis = part.edge.group.axes[0]
            raise differently(self.follower, f"`{fqn}`", f"`{part.name}`", axis)
        if now is not None and now not in self.parts.get(fqn, ()):
            self.parts[fqn] = (*self.parts.get(fqn, ()), now)

    def _chosen(self, kind: type[C]) -> Iterator[tuple[str, list[C]]]:
        """Modules, each with the choices of a kind that are about what it is and holds."""
        chosen: list[Any] = sorted((c for c in self.divided if isinstance(c, kind)), key=repr)
        for fqn, below in self.below.items():
            of = self.plan.model.sites[fqn].classes[0], below
            mine = [one for one in chosen if one[:2] == of]
            if mine:
                yield fqn, mine

    def candidates(self, failure: Mismatch) -> list[Choice]:
        """Numbers and arguments of the modules that were running that might mend the failure."""
        return [*self._sizes(failure), *self._numbers(failure), *self._parts(failure)]

    def _sizes(self, failure: Mismatch) -> list[Size]:
        """Widths and channels of whole arguments of the module that failed, if it holds parts."""
        from schedlang.runtime.sharding.sizes import arguments

        (fqn, _), given = failure.frame, self.given.get(failure.frame)
        below = self.below.get(fqn, ())
        ranks = {n for _, axis, n, uneven in below if axis == failure.axis and uneven == EVEN}
        if not failure.integers or given is None or len(ranks) != 1:
            return []
        (parts,), kind = ranks, self.plan.model.sites[fqn].classes[0]
        wanted = self.leaves[fqn].wanted if fqn in self.leaves else ()
        gathered, found = any(w.axis == failure.axis and w.input == R for w in wanted), []
        for name, tensor in arguments(self.plan.model.model.get_submodule(fqn), *given):
            whole = gathered or failure.axis not in self.follower.of(tensor).tags
            for dim in {-1, 1 - tensor.ndim} if whole and tensor.is_floating_point() else ():
                if tensor.ndim > 1 and tensor.shape[dim] % parts == 0:
                    found.append(Size(kind, below, name, dim, parts))
        return [one for one in found if one not in self.divided]

    def _parts(self, failure: Mismatch) -> list[Part]:
        """Arguments, whole on every rank, of the module that failed, where its heads are split."""
        from schedlang.runtime.propagation.narrowed import whole_arguments

        fqn, given = failure.frame[0], self.given.get(failure.frame)
        below = self.below.get(fqn, ())
        if not failure.unit or failure.axis is None or given is None or not below:
            return []
        kind = self.plan.model.sites[fqn].classes[0]
        module = self.plan.model.model.get_submodule(fqn)
        tokens = (failure.by, failure.axis) in self.follower.tokens
        found = whole_arguments(module, given, failure.axis, failure.unit, tokens)
        unit = 0 if tokens else failure.unit
        return [Part(kind, below, name, dim, unit, failure.axis) for name, dim in found]

    def _numbers(self, failure: Mismatch) -> list[Number]:
        """Attributes of the modules that were running whose division might mend the failure."""
        from schedlang.runtime.sharding.sizes import numbers_of

        if not failure.integers and not failure.mixed and not failure.unit:
            return []
        known = {one[:-1] for one in self.divided if isinstance(one, Number)}
        found: list[Number] = []
        names = failure.frame[0].split(".")
        for depth in range(len(names), 0, -1):
            fqn = ".".join(names[:depth])
            below = self.below.get(fqn, ())
            module = self.plan.model.model.get_submodule(fqn)
            kind = self.plan.model.sites[fqn].classes[0]
            for attribute, value in numbers_of(module) if below else ():
                for local in _locals(below, value):
                    number = Number(kind, below, attribute, value, local)
                    if number[:-1] not in known and _near(failure, number):
                        found.append(number)
        # tried from the last: an attribute whose very value stands in the call comes first, and
        # the module's own numbers come before those of its configuration
        return sorted(found, key=lambda n: (n.value in failure.integers, "." not in n.attribute))

    def _returned(self, axis: str, by: str) -> Mismatch:
        """Say that the model returns a tensor that is sharded, and who sharded it."""
        from schedlang.runtime.propagation.trace import Mismatch

        reason = f"the model returns a tensor that is sharded over `{axis}`"
        helps = ("gather it: `output=R` on the row of its module",)
        failure = Mismatch(("", 0), reason, axis, (), self.follower.agreed, helps)
        failure.by = by
        return failure
