"""Two runs on the meta device: the original is recorded, the sharded copy is followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from schedlang.diagnostics.culprit import told
from schedlang.diagnostics.diagnostic import Diagnostic, Refusal
from schedlang.ir.mesh import neighbours
from schedlang.ir.placement import EVEN, R, S, Uneven
from schedlang.ir.plan import Plan
from schedlang.passes.propagate.saved_parts import coded_by, experts_of, recomputed

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.propagation.dry import Leaf
    from schedlang.runtime.propagation.narrowed import Narrowed
    from schedlang.runtime.propagation.trace import Mismatch, Note, Recording, SavedBy
    from schedlang.runtime.sharding.shard import Edge
    from schedlang.runtime.sharding.sizes import Counted

Loss = Callable[..., Any]
Below = tuple[tuple[str, str, int, Uneven], ...]  # what of a module is split: path, axis, ranks


class Number(NamedTuple):
    """A number by which modules of a class count that hold the same split things: old and new."""

    kind: str
    below: Below
    attribute: str
    value: int
    local: int


def _opaque(leaves: Mapping[str, Leaf]) -> Callable[[str], bool]:
    return lambda fqn: fqn in leaves and bool(leaves[fqn].kind)


def call(model: nn.Module, inputs: Mapping[str, Any], loss: Loss | None) -> Any:
    """The output of a model on the meta device, and its loss where a function gives it."""
    import torch

    from schedlang.runtime.batch import called

    with torch.device("meta"):  # a forward that makes tensors of its own makes them there
        output = called(model, inputs)
        return output, (loss(output, inputs) if loss is not None else None)


def record(
    plan: Plan,
    batch: Mapping[str, Any],
    inputs: Mapping[str, Any],
    loss: Loss | None,
    leaves: Mapping[str, Leaf],
) -> Recording:
    """What the model as it is calls, in order, with the shapes of each call."""
    from schedlang.runtime.activation_memory.second_run import watch_again
    from schedlang.runtime.propagation.many_rows import unbatched_draws
    from schedlang.runtime.propagation.reach import reached
    from schedlang.runtime.propagation.stand_ins import hollow_out
    from schedlang.runtime.propagation.trace import Recorder, Stack, watch_saved
    from schedlang.runtime.rng.logical_dropout import Watched
    from schedlang.runtime.storage.fewer import put_inside, uncoded
    from schedlang.runtime.tracing.constants import on_meta
    from schedlang.runtime.tracing.lossless import is_loss, no_loss, not_a_loss
    from schedlang.runtime.tracing.meta import hollow_model
    from schedlang.runtime.tracing.record import loss_of

    model, stack = hollow_model(plan.model.model, {}), Stack()
    model.train()
    hollow_out(model, {fqn: kind for fqn, kind in plan.computes.items() if fqn in leaves})
    put_inside(uncoded, model, experts_of(plan))
    watch_again(model, (name for one in recomputed(plan) for name in one.modules))
    stack.watch(model, _opaque(leaves))
    saved = watch_saved(model, coded_by(plan), stack)
    watched = Watched(lambda: stack.frames[-1][0])
    with on_meta(batch, inputs) as values, watched, Recorder(stack, inputs) as recorder:
        values.drew = watched.drew
        try:
            output, value = call(model, inputs, _telling(loss) if loss is not None else None)
        except Refusal:
            raise
        except Exception as error:
            raise rejected(error, left_over(plan.model.model, batch)) from error
    if loss is None:
        found = loss_of(output, inputs, None)
        lossless = no_loss(model, output, batch) if found is None else None
    else:  # a batch without labels may have none, and still be evaluated
        found = value if is_loss(value) else None
        lossless = not_a_loss(value, model, batch) if found is None else None
    recorder.recording.lossless = lossless
    recorder.recording.reached = reached(model, found)
    recorder.recording.asked = values.asked
    recorder.recording.random, recorder.recording.apart = watched.random, watched.apart
    recorder.recording.saved, recorder.recording.outside = saved, frozenset(stack.outside)
    recorder.recording.entries.update(stack.turns)
    recorder.recording.order.extend(stack.turns)
    recording: Recording = recorder.recording
    if recording.sourceless:
        recording.unbatched = unbatched_draws(plan.model.model, batch, loss, recording)
    return recording


def _telling(loss: Loss) -> Loss:
    """The user's loss, whose errors are told at its own line (S865) and not as the model's."""

    def tried(output: Any, batch: Mapping[str, Any]) -> Any:
        try:
            return loss(output, batch)
        except Exception as error:
            if _for_values(error):
                raise
            raise told(error, "loss", loss) from error

    return tried


def _for_values(error: Exception) -> bool:
    """Was a tensor without values asked for them, as by a function that wants it on the host?"""
    text = str(error)
    wanted = "on meta tensors" in text or "CPU" in text and "but got" in text and " meta " in text
    return isinstance(error, NotImplementedError) or wanted


def left_over(model: nn.Module, batch: Mapping[str, Any]) -> list[str]:
    """The keys of a batch that the forward does not take."""
    from schedlang.runtime.batch import taken

    return [key for key in batch if key not in taken(model, batch)]


def rejected(error: Exception, others: Sequence[str] = ()) -> Refusal:
    """What a model raised when it was followed on the meta device, as a message.

    `others`: keys of the batch that it was not given, of which one may be misspelled.
    """
    from schedlang.runtime.tracing.graph import asks_for_values, line_of

    if _for_values(error):
        return asks_for_values(error)
    text, line = f"{type(error).__name__}: {error}".split("\n")[0], line_of(error)
    return Refusal(
        Diagnostic(
            "S604",
            "the model rejects this batch",
            notes=(
                f"on the meta device it raised `{text}`{line and f', at {line}'}",
                *(f"its forward does not take `{key}` of the batch" for key in others),
            ),
            helps=("return the keyword arguments of the model's forward from `batch(seed)`",),
        )
    )


def _near(failure: Mismatch, number: Number) -> bool:
    """May this number have made the sizes in the failing call?  Of settings only those that do."""
    sized = any(whole and whole % number.value == 0 for whole in failure.integers)
    if number.value == failure.unit or sized:  # a whole tensor of as many heads may come from it
        return True
    return "." not in number.attribute and bool(failure.integers or failure.mixed)


def _locals(below: Below, value: int) -> Iterator[int]:
    """What a number may be on one rank: its share of the ranks, or of those that hold the same."""
    found = set()
    for _, _, ranks, uneven in below:
        found |= {value * uneven.wide / ranks, Fraction(value, uneven.repeat)}
    yield from (n.numerator for n in sorted(found) if n.denominator == 1 and n != value)


def _below(leaves: Mapping[str, Leaf], sizes: Mapping[str, int]) -> dict[str, Below]:
    """For every module that holds something split: what, by its path from there.

    What gathers its outputs is split for nobody around it: such modules are not alike.
    """
    found: dict[str, list[Any]] = {}
    for leaf in leaves.values():
        names = leaf.fqn.split(".")
        for depth in range(len(names) + 1):
            own = depth == len(names)
            mine = (w for w in leaf.wanted if w.splits and (own or not w.gathers))
            split = [(".".join(names[depth:]), w.axis, sizes[w.axis], w.uneven) for w in mine]
            if split:
                found.setdefault(".".join(names[:depth]), []).extend(split)
    return {fqn: tuple(split) for fqn, split in found.items()}


def _axes_below(leaves: Mapping[str, Leaf]) -> dict[str, list[str]]:
    """For every module that holds something sharded: the axes over which something is."""
    found: dict[str, list[str]] = {}
    for leaf in leaves.values():
        names = leaf.fqn.split(".")
        for depth in range(len(names) + 1):
            found.setdefault(".".join(names[:depth]), []).extend(w.axis for w in leaf.wanted)
    return found


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


class Run:
    """One forward of the sharded copy with some attributes divided."""

    def __init__(
        self,
        plan: Plan,
        batch: Mapping[str, Any],
        inputs: Mapping[str, Any],
        loss: Loss | None,
        leaves: Mapping[str, Leaf],
        recording: Recording,
        divided: frozenset[Choice],
    ) -> None:
        from schedlang.runtime.propagation.follow import Follower
        from schedlang.runtime.propagation.trace import Stack

        self.plan, self.batch, self.inputs, self.loss = plan, batch, inputs, loss
        self.leaves = leaves
        self.divided, self.stack = divided, Stack()
        over = (b.axis for boundaries in plan.boundaries.values() for b in boundaries)
        sizes = {name: plan.mesh.size(name) for name in (*plan.mesh.names, *over)}
        self.sizes, self.below = sizes, _below(leaves, sizes)
        self.follower = Follower(recording, self.stack, sizes, _axes_below(leaves))
        self.edges: dict[str, tuple[Edge, ...]] = {}
        self.numbers: list[tuple[str, str, int]] = []
        self.layouts: dict[tuple[str, int], list[tuple[Note, ...] | None]] = {}
        self.given: dict[tuple[str, int], Any] = {}
        self.parts: dict[str, tuple[Narrowed, ...]] = {}
        self.cuts: dict[tuple[str, str], Narrowed | None] = {}
        self.counted: dict[str, tuple[Counted, ...]] = {}
        self.saved: SavedBy = {}
        self.stack.seen = self._see

    def _see(self, frame: tuple[str, int], tree: Any) -> None:
        """Note how the tensors that a call is given, or gives, lie on the ranks."""
        from schedlang.runtime.tracing.torch_calls import tensors_in

        if frame not in self.given and frame[0]:
            self.given[frame] = tree  # first what goes in
        notes = None if self.follower.loose else tuple(map(self.follower.note, tensors_in(tree)))
        self.layouts.setdefault(frame, []).append(notes)

    def attempt(self) -> Mismatch | None:
        """Run; what disagreed first, or None."""
        from schedlang.runtime.propagation.trace import Hoist, Mismatch
        from schedlang.runtime.tracing.constants import on_meta

        model = self._copy()
        try:
            with on_meta(self.batch, self.inputs), self.follower:
                output, _ = call(model, self.inputs, self.loss)
            self._check_outputs(output)
        except Mismatch as failure:
            return failure
        except Hoist:
            raise
        except Exception as error:
            if not self.divided:
                raise
            # a number that counts something else was divided: this try leads nowhere
            return Mismatch(("", 0), str(error), None, (), -1)
        return None

    def _copy(self) -> nn.Module:
        from schedlang.runtime.activation_memory.second_run import watch_again
        from schedlang.runtime.forward import wrap
        from schedlang.runtime.propagation.dry import dry_forward
        from schedlang.runtime.propagation.narrowed import dry_parts
        from schedlang.runtime.propagation.trace import Note, Tag, watch_saved
        from schedlang.runtime.sharding.sizes import Sizes, set_number
        from schedlang.runtime.storage.fewer import put_inside, uncoded
        from schedlang.runtime.tracing.meta import hollow_model
        from schedlang.runtime.tracing.torch_calls import tensors_in

        plan = self.plan
        shapes = {name: plan.held(name).local_shape(plan.mesh) for name in plan.layouts}
        model = hollow_model(plan.model.model, shapes)
        model.train()
        for name, tensor in model.named_parameters():
            owner = name.rpartition(".")[0]
            tags = {s.axis: Tag(s.dim, s.blocks, owner, s.uneven) for s in plan.held(name).splits}
            for split in plan.held(name).splits:
                self.follower.unevens.setdefault(split.axis, set()).add(split.uneven)
                if split.uneven.repeat > 1:
                    copies = neighbours(split.axis, split.uneven.repeat)
                    self.follower.partial_over(frozenset([name]), copies)
            self.follower.put(tensor, Note(tags, frozenset() if tags else frozenset([name])))
        for given in tensors_in(dict(self.inputs)):
            self.follower.put(given, Note({}, frozenset(), True))
        for fqn, attribute, value in self._places():
            set_number(model.get_submodule(fqn), attribute, value)
            self.numbers.append((fqn, attribute, value))
        for fqn, counted in self._read():
            self.counted[fqn] = counted
            module = model.get_submodule(fqn)
            wrap(module, "sizes", Sizes(module, counted))
        for fqn, parts in self._narrowed():
            module = model.get_submodule(fqn)
            module.forward = dry_parts(module, parts, self.follower, partial(self._cut, fqn))
        for fqn, leaf in self.leaves.items():
            module = model.get_submodule(fqn)
            forward = dry_forward(leaf, module, self.follower, self._group_at(fqn), self.edges)
            module.forward = forward
        put_inside(uncoded, model, experts_of(plan))
        watch_again(model, (name for one in recomputed(plan) for name in one.modules))
        self.stack.watch(model, _opaque(self.leaves))
        self.saved = watch_saved(model, coded_by(plan), self.stack)
        return model

    def _cut(self, fqn: str, part: Narrowed, now: Narrowed | None) -> None:
        """Note how an argument is cut; it is at every call, or at none."""
        from schedlang.runtime.propagation.dry import differently

        if self.cuts.setdefault((fqn, part.name), now) != now:
            axis = part.edge.group.axes[0]
            raise differently(self.follower, f"`{fqn}`", f"`{part.name}`", axis)
        if now is not None and now not in self.parts.get(fqn, ()):
            self.parts[fqn] = (*self.parts.get(fqn, ()), now)

    def _narrowed(self) -> Iterator[tuple[str, tuple[Narrowed, ...]]]:
        """The modules that take parts of arguments."""
        from schedlang.runtime.propagation.narrowed import Narrowed
        from schedlang.runtime.sharding.shard import Edge

        chosen = [one for one in self.divided if isinstance(one, Part)]
        for fqn, below in self.below.items() if chosen else ():
            kind, group = self.plan.model.sites[fqn].classes[0], self._group_at(fqn)
            parts = tuple(
                Narrowed(p.name, p.dim, p.unit, Edge(group(p.axis), R, S(p.dim), R, R, False))
                for p in sorted(chosen)
                if (p.kind, p.below) == (kind, below)
            )
            if parts:
                yield fqn, parts

    def _read(self) -> Iterator[tuple[str, tuple[Counted, ...]]]:
        """The modules that count by sizes of their arguments."""
        from schedlang.runtime.sharding.sizes import Counted

        chosen = [one for one in self.divided if isinstance(one, Size)]
        for fqn, below in self.below.items() if chosen else ():
            kind = self.plan.model.sites[fqn].classes[0]
            counted = tuple(
                Counted(one.name, one.dim, one.parts)
                for one in sorted(chosen)
                if (one.kind, one.below) == (kind, below)
            )
            if counted:
                yield fqn, counted

    def _group_at(self, fqn: str) -> Callable[[str], Any]:
        from schedlang.runtime.comm.collectives import Group

        return lambda axis: Group((axis,), tuple(range(self.sizes[axis])), 0, None, fqn)

    def _places(self) -> Iterator[tuple[str, str, int]]:
        """Where divided attributes lie: on modules of the class that hold the same split things."""
        from schedlang.runtime.sharding.sizes import number_at

        divided = [one for one in self.divided if isinstance(one, Number)]
        kinds = {number.kind for number in divided}
        for fqn, below in self.below.items():
            site = self.plan.model.sites[fqn]
            for number in divided if site.classes[0] in kinds else ():
                if (site.classes[0], below) != (number.kind, number.below):
                    continue
                found = number_at(self.plan.model.model.get_submodule(fqn), number.attribute)
                if found == number.value:
                    yield fqn, number.attribute, number.local

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
            whole = gathered or failure.axis not in self.follower.note(tensor).tags
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

    def _check_outputs(self, output: Any) -> None:
        from schedlang.runtime.propagation.trace import Mismatch
        from schedlang.runtime.tracing.torch_calls import tensors_in

        for tensor in tensors_in(output):
            for axis, tag in self.follower.note(tensor).tags.items():
                failure = Mismatch(
                    ("", 0),
                    f"the model returns a tensor that is sharded over `{axis}`",
                    axis,
                    (),
                    self.follower.agreed,
                    ("gather it: `output=R` on the row of its module",),
                )
                failure.by = tag.by
                raise failure
