"""One forward of the sharded copy of a model on the meta device, beside the recorded original.

Numbers, sizes and arguments that modules count by may be divided in the copy: the choices of `Run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from schedlang.ir.mesh import neighbours
from schedlang.ir.placement import EVEN, R, S, Uneven
from schedlang.ir.plan import Plan
from schedlang.passes.propagate.original import Recording

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.propagation.dry import Leaf
    from schedlang.runtime.propagation.narrowed import Narrowed
    from schedlang.runtime.propagation.trace import Mismatch, Note
    from schedlang.runtime.sharding.shard import Edge
    from schedlang.runtime.sharding.sizes import Counted


Loss = Callable[..., Any]
Below = tuple[tuple[str, str, int, Uneven], ...]  # splits inside a module: path, axis, ranks


class Number(NamedTuple):
    """A number in an attribute of modules of a class with the same splits: full and local value."""

    kind: str
    below: Below
    attribute: str
    value: int
    local: int


def _may_explain(failure: Mismatch, number: Number) -> bool:
    """Return whether a number may be the origin of sizes in the failing call."""
    sized = any(whole and whole % number.value == 0 for whole in failure.integers)
    if number.value == failure.unit or sized:  # or of a full tensor with as many heads
        return True
    return "." not in number.attribute and bool(failure.integers or failure.mixed)


def _local_values(below: Below, value: int) -> Iterator[int]:
    """Yield possible values on one rank: its share, and that of ranks with the same shard."""
    found = set()
    for _, _, ranks, uneven in below:
        found |= {value * uneven.wide / ranks, Fraction(value, uneven.repeat)}
    yield from (n.numerator for n in sorted(found) if n.denominator == 1 and n != value)


class Part(NamedTuple):
    """An argument of modules of a class, of which each rank needs its own shard along a dim.

    `unit` is the number of heads per row of the batch in the dim; 0: the dim holds tokens.
    """

    kind: str
    below: Below
    name: str
    dim: int
    unit: int
    axis: str


class Size(NamedTuple):
    """A size of an argument that modules of a class read, and that must be divided on a rank."""

    kind: str
    below: Below
    name: str
    dim: int
    parts: int


Choice = Number | Part | Size
C = TypeVar("C", Number, Part, Size)


@dataclass(eq=False)
class Run:
    """One forward of the sharded copy, in which numbers, sizes and arguments are divided.

    `given`: (module, turn) -> its inputs. `cuts`: (module, argument) -> its first split. For other
    results see `Traced`.
    """

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
        self.stack = Stack(seen=self._note_layouts)
        over = (b.axis for boundaries in plan.boundaries.values() for b in boundaries)
        self.sizes = {name: plan.mesh.size(name) for name in (*plan.mesh.names, *over)}
        splits = {fqn: [w.axis for w in leaf.wanted] for fqn, leaf in self.leaves.items()}
        tried: Any = plan.model.cache.setdefault("by parts", {})
        draws = known.original.random
        self.follower = Follower(known.frames, self.stack, self.sizes, splits, draws, tried)

    @cached_property
    def below(self) -> Mapping[str, Below]:
        """Return the splits inside every module that holds a sharded module.

        A module that gathers its outputs is split only for itself, not for modules around it.
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

    def _note_layouts(self, frame: tuple[str, int], tree: Any) -> None:
        """Note the layouts of a call's inputs, or of its outputs."""
        from schedlang.runtime.tracing.meta import tensors_in

        if frame not in self.given and frame[0]:
            self.given[frame] = tree  # inputs come first
        notes = None if self.follower.loose else tuple(map(self.follower.of, tensors_in(tree)))
        self.layouts.setdefault(frame, []).append(notes)

    def attempt(self) -> Mismatch | None:
        """Run the forward; return the first mismatch with the original, or None."""
        from schedlang.runtime.batch import forward
        from schedlang.runtime.kept_outside import kept_outside
        from schedlang.runtime.propagation.trace import Hoist, Mismatch, Note, Trace
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
                    raise self._returns_shard(axis, tag.by)
        except Mismatch as failure:
            return failure
        except Hoist:
            raise
        except Exception as error:
            if not self.divided:
                raise
            # a number with another meaning was divided: this division is wrong
            return Mismatch(("", 0), str(error), None, (), -1)
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
        """Divide the numbers, sizes and arguments of this run in the copy."""
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
            module.forward = dry_parts(module, parts, self.follower, partial(self._note_cut, fqn))

    def _note_cut(self, fqn: str, part: Narrowed, now: Narrowed | None) -> None:
        """Note how an argument is split; raise Mismatch if two calls differ."""
        from schedlang.runtime.propagation.dry import differently

        if self.cuts.setdefault((fqn, part.name), now) != now:
            axis = part.edge.group.axes[0]
            raise differently(self.follower, f"`{fqn}`", f"`{part.name}`", axis)
        if now is not None and now not in self.parts.get(fqn, ()):
            self.parts[fqn] = (*self.parts.get(fqn, ()), now)

    def _chosen(self, kind: type[C]) -> Iterator[tuple[str, list[C]]]:
        """Yield modules with the choices of a kind that fit their class and their splits."""
        chosen: list[Any] = sorted((c for c in self.divided if isinstance(c, kind)), key=repr)
        for fqn, below in self.below.items():
            of = self.plan.model.sites[fqn].classes[0], below
            mine = [one for one in chosen if one[:2] == of]
            if mine:
                yield fqn, mine

    def candidates(self, failure: Mismatch) -> list[Choice]:
        """Return divisions that might repair the failure: sizes, numbers and arguments."""
        return [*self._sizes(failure), *self._numbers(failure), *self._parts(failure)]

    def _sizes(self, failure: Mismatch) -> list[Size]:
        """Return sizes of full arguments of the failing module, if modules inside are sharded."""
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
        """Return full arguments of the failing module that may need a split by heads or tokens."""
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
        """Return attributes of the running modules whose division might repair the failure."""
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
                for local in _local_values(below, value):
                    number = Number(kind, below, attribute, value, local)
                    if number[:-1] not in known and _may_explain(failure, number):
                        found.append(number)
        # the last is tried first: attributes whose value is in the failing call, and numbers of
        # the module before those of its configuration
        return sorted(found, key=lambda n: (n.value in failure.integers, "." not in n.attribute))

    def _returns_shard(self, axis: str, by: str) -> Mismatch:
        """Return the mismatch for a sharded tensor that the model returns; `by` sharded it."""
        from schedlang.runtime.propagation.trace import Mismatch

        reason = f"the model returns a tensor that is sharded over `{axis}`"
        helps = ("gather it: `output=R` on the row of its module",)
        failure = Mismatch(("", 0), reason, axis, (), self.follower.agreed, helps)
        failure.by = by
        return failure
