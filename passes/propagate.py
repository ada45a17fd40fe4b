"""Layouts through one forward: how tensors arrive at each sharded module, and all that follows.

The plan's model runs twice on the meta device: once as it is, once with this plan's local shapes,
call by call beside the first.  Where the sharded one fails because a module counts heads or widths
by itself, the attribute that holds the number is found by trying, and divided; the comparison of
all later calls proves the choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedlang.diagnostic import Diagnostic, Label, Refusal
from schedlang.placement import P, R, S
from schedlang.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.dry import Leaf
    from schedlang.runtime.follow import Hoist, Mismatch, Tag
    from schedlang.runtime.shard import Edge
    from schedlang.runtime.trace import LabelRule, Recording

Loss = Callable[..., Any]
Number = tuple[str, str, int]  # class of a module, attribute, its value in the original
MOST_RUNS = 64


@dataclass(frozen=True)
class Exchange:
    """One collective of one forward and backward: what, over which axes, how many bytes, where."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    fqn: str
    backward: bool


@dataclass(frozen=True)
class Traced:
    """What one forward showed.

    edges     module -> its edges, with groups that have no processes yet
    kinds     module -> how it computes (Linear, Conv1D, Embedding, or "" for as it is)
    numbers   attributes to be divided: (module, attribute, local value)
    partial   parameter -> axes over which its gradient must still be summed
    masks     (module, turn) of a random draw -> whole shape and split dims by axis
    order     modules in the order of their first call; entries: how often each is called
    """

    edges: Mapping[str, tuple[Edge, ...]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    numbers: tuple[tuple[str, str, int], ...] = ()
    partial: Mapping[str, frozenset[str]] = field(default_factory=dict)
    masks: Mapping[tuple[str, int], tuple[tuple[int, ...], Mapping[str, Tag]]] = field(
        default_factory=dict
    )
    exchanges: tuple[Exchange, ...] = ()
    labels: tuple[LabelRule, ...] = ()
    random: bool = False
    order: tuple[str, ...] = ()
    entries: Mapping[str, int] = field(default_factory=dict)


def propagate(plan: Plan, batch: Mapping[str, Any], loss: Loss | None = None) -> Traced:
    """Trace a plan with a batch of the size of one microbatch; raises Refusal where it cannot work."""
    from schedlang.runtime.follow import Hoist
    from schedlang.runtime.meta import hollow_batch

    inputs = hollow_batch(dict(batch))
    leaves = leaves_of(plan)
    recording = _record(plan, inputs, loss, leaves)
    if not leaves:
        return _traced(plan, recording)
    tries: list[tuple[frozenset[Number], int]] = [(frozenset(), -1)]
    best: Mismatch | None = None
    for _ in range(MOST_RUNS + len(plan.model.sites)):
        if not tries:
            break
        divided, reached = tries.pop()
        run = _Run(plan, inputs, loss, leaves, recording, divided)
        try:
            failure = run.attempt()
        except Hoist as place:
            for fqn in _alike(plan, place.fqn):
                leaves[fqn] = _hoisted(fqn, leaves.get(fqn), place.axis)
            tries.append((divided, reached))
            continue
        if failure is None:
            return _traced(plan, recording, run)
        if failure.place <= reached:
            continue  # this division did not help
        if best is None or failure.place > best.place:
            best = failure
        tries += [(divided | {number}, failure.place) for number in run.candidates(failure)]
    assert best is not None
    raise _refusal(plan, best)


# -- what is sharded ---------------------------------------------------------------------------------


def leaves_of(plan: Plan) -> dict[str, Leaf]:
    """The sharded modules of a plan; axes of size 1 shard nothing."""
    from schedlang.runtime.dry import Leaf

    _check_ties(plan)
    leaves = {}
    for fqn, boundaries in plan.boundaries.items():
        real = [b for b in boundaries if plan.mesh.size(b.axis) > 1]
        if not real:
            continue
        site = plan.model.sites[fqn]
        kind = next((k for k in ("Linear", "Conv1D", "Embedding") if site.is_a(k)), "")
        wanted = tuple(_wanted(plan, fqn, kind, b.axis, b.input, b.output) for b in real)
        split = any(plan.held(fact.name).splits for fact in site.parameters.values())
        names = tuple(fact.name for fact in site.parameters.values())
        pending = any(isinstance(w.computes, P) for w in wanted)
        bias = site.parameters.get("bias")
        split_kind = kind if split else ""
        leaves[fqn] = Leaf(fqn, split_kind, wanted, names, bias.name if bias and pending else None)
    return leaves


def _check_ties(plan: Plan) -> None:
    """Every module that uses a split parameter must be sharded over the same axes."""
    for name in plan.layouts:
        for used in plan.model.parameters[name].names:
            owner = plan.model.owner(used).fqn
            known = {b.axis for b in plan.boundaries.get(owner, ())}
            for split in plan.held(name).splits:
                if split.axis not in known:
                    raise Refusal(_half_sharded(plan, name, used, split.axis))


def _half_sharded(plan: Plan, name: str, used: str, axis: str) -> Diagnostic:
    owner = plan.model.owner(used).fqn
    row = next(a for a in plan.actions if plan.model.owner(name).fqn in a.sites or _touches(a, name))
    return Diagnostic(
        "S506", f"`{owner}` shares a weight that is split, and is not sharded itself",
        Label(row.span) if row.span is not None else Label(),
        notes=(f"`{used}` and `{name}` are the same tensor", f"it is split over `{axis}`"),
        helps=(f"shard it too: `{owner} shard(vocab, over={axis})`",),
    )  # fmt: skip


def _alike(plan: Plan, fqn: str) -> list[str]:
    """The modules that stand in other layers where this one stands in its own."""
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(fqn)))
    kind = plan.model.sites[fqn].kind
    return [name for name, s in plan.model.sites.items() if pattern.fullmatch(name) and s.kind == kind]


def _hoisted(fqn: str, known: Leaf | None, axis: str) -> Leaf:
    """The module that gathers its input for its children, beside what it did before."""
    from schedlang.runtime.dry import Leaf, Wanted

    before = known.wanted if known is not None else ()
    wanted = Wanted(axis, R, None, None, splits=False, hoisted=True)
    return Leaf(fqn, "", (*before, wanted))


def _wanted(plan: Plan, fqn: str, kind: str, axis: str, entry: Any, output: Any) -> Any:
    from schedlang.runtime.dry import Wanted

    site = plan.model.sites[fqn]
    weight = site.parameters.get("weight")
    layout = plan.held(weight.name) if weight is not None else None
    split = next((s for s in layout.splits if s.axis == axis), None) if layout else None
    if not kind or split is None or layout is None or weight is None:
        return Wanted(axis, entry, output, None, splits=False)
    name = site.dims["weight"][split.dim]
    cut = weight.shape[split.dim] if layout.padded != layout.shape else None
    if name == "out":
        blocks: int | tuple[int, ...] = split.blocks if len(split.blocks) > 1 else 1
        if isinstance(blocks, tuple) and len(set(blocks)) == 1:
            blocks = len(blocks)
        head = isinstance(output, S) and output.dim == "vocab"
        cut = weight.shape[split.dim] if head else cut
        return Wanted(axis, entry, output, S(-1, blocks), splits=True, cut=cut, head=head)
    return Wanted(axis, entry, output, P(), splits=True)


# -- the two runs ------------------------------------------------------------------------------------


def _opaque(leaves: Mapping[str, Leaf]) -> Callable[[str], bool]:
    return lambda fqn: fqn in leaves and bool(leaves[fqn].kind)


def _call(model: nn.Module, inputs: Mapping[str, Any], loss: Loss | None) -> Any:
    import torch

    with torch.device("meta"):  # a forward that makes tensors of its own makes them there
        output = model(**inputs)
        return output, (loss(output, inputs) if loss is not None else None)


def _record(
    plan: Plan, inputs: Mapping[str, Any], loss: Loss | None, leaves: Mapping[str, Leaf]
) -> Recording:
    from schedlang.runtime.meta import hollow_model
    from schedlang.runtime.trace import Recorder, Stack

    model, stack = hollow_model(plan.model.model, {}), Stack()
    model.train()
    stack.watch(model, _opaque(leaves))
    with Recorder(stack, inputs) as recorder:
        try:
            _call(model, inputs, loss)
        except Exception as error:
            raise _rejected(error) from error
    recorder.recording.entries.update(stack.turns)
    recorder.recording.order.extend(stack.turns)
    return recorder.recording


def _rejected(error: Exception) -> Refusal:
    text = f"{type(error).__name__}: {error}".split("\n")[0]
    return Refusal(
        Diagnostic(
            "S604", "the model rejects this batch",
            notes=(f"on the meta device it raised `{text}`",),
            helps=("let `batch(seed)` return the keyword arguments of the model's forward",),
        )
    )  # fmt: skip


class _Run:
    """One forward of the sharded copy with some attributes divided."""

    def __init__(
        self, plan: Plan, inputs: Mapping[str, Any], loss: Loss | None,
        leaves: Mapping[str, Leaf], recording: Recording, divided: frozenset[Number],
    ) -> None:  # fmt: skip
        from schedlang.runtime.follow import Follower
        from schedlang.runtime.trace import Stack

        self.plan, self.inputs, self.loss, self.leaves = plan, inputs, loss, leaves
        self.divided, self.stack = divided, Stack()
        sizes = {name: plan.mesh.size(name) for name in plan.mesh.names}
        self.sizes = sizes
        self.follower = Follower(recording, self.stack, sizes)
        self.edges: dict[str, tuple[Edge, ...]] = {}
        self.exchanges: list[Exchange] = []
        self.backward = False
        self.numbers: list[tuple[str, str, int]] = []

    def attempt(self) -> Mismatch | None:
        """Run; what disagreed first, or None."""
        from schedlang.runtime.collective import listening
        from schedlang.runtime.follow import Mismatch

        model = self._copy()
        try:
            with listening(self._heard):
                with self.follower:
                    output, loss = _call(model, self.inputs, self.loss)
                self._check_outputs(output)
                self._backward(output, loss)
        except Mismatch as failure:
            return failure
        return None

    def _copy(self) -> nn.Module:
        from schedlang.runtime.dry import dry_forward
        from schedlang.runtime.follow import Note, Tag
        from schedlang.runtime.meta import hollow_model

        plan = self.plan
        shapes = {name: plan.held(name).local_shape(plan.mesh) for name in plan.layouts}
        model = hollow_model(plan.model.model, shapes)
        model.train()
        for name, tensor in model.named_parameters():
            tags = {s.axis: Tag(s.dim, s.blocks) for s in plan.held(name).splits}
            self.follower.put(tensor, Note(tags, frozenset() if tags else frozenset([name])))
        for value in self.inputs.values():
            if hasattr(value, "device"):
                self.follower.put(value, Note({}, frozenset(), True))
        for fqn, attribute, value in self._places(model):
            setattr(model.get_submodule(fqn), attribute, value)
            self.numbers.append((fqn, attribute, value))
        for fqn, leaf in self.leaves.items():
            module = model.get_submodule(fqn)
            forward = dry_forward(leaf, module, self.follower, self._group_at(fqn), self.edges)
            module.forward = forward  # type: ignore[method-assign]
        self.stack.watch(model, _opaque(self.leaves))
        return model

    def _group_at(self, fqn: str) -> Callable[[str], Any]:
        from schedlang.runtime.collective import Group

        return lambda axis: Group((axis,), tuple(range(self.sizes[axis])), 0, None, fqn)

    def _heard(self, kind: str, group: Any, size: int) -> None:
        self.exchanges.append(Exchange(kind, group.axes, size, group.label, self.backward))

    def _places(self, model: nn.Module) -> Iterator[tuple[str, str, int]]:
        """Where divided attributes lie: on modules of the class that hold something sharded."""
        for fqn, site in self.plan.model.sites.items():
            for kind, attribute, value in self.divided:
                ranks = self._ranks_below(fqn)
                found = vars(self.plan.model.model.get_submodule(fqn)).get(attribute)
                if site.classes[0] == kind and found == value and ranks > 1:
                    yield fqn, attribute, value // ranks

    def _ranks_below(self, fqn: str) -> int:
        """The ranks over which parameters of this module's subtree are split."""
        prefix = f"{fqn}." if fqn else ""
        for leaf in self.leaves.values():
            if leaf.fqn == fqn or leaf.fqn.startswith(prefix):
                split = [w.axis for w in leaf.wanted if w.splits]
                if split:
                    return self.sizes[split[0]]
        return 1

    def candidates(self, failure: Mismatch) -> list[Number]:
        """Attributes of the modules that were running whose division might mend the failure."""
        if not failure.integers:
            return []
        found: list[Number] = []
        fqn: str | None = failure.frame[0]
        while fqn is not None:
            ranks = self._ranks_below(fqn)
            module = self.plan.model.model.get_submodule(fqn)
            kind = self.plan.model.sites[fqn].classes[0]
            for attribute, value in vars(module).items():
                number = (kind, attribute, value)
                plain = isinstance(value, int) and not isinstance(value, bool) and value > 1
                if plain and ranks > 1 and value % ranks == 0 and number not in self.divided:
                    found.append(number)
            fqn = fqn.rpartition(".")[0] if fqn else None
            if fqn == "":
                break
        # tried from the last: an attribute whose very value stands in the call comes first
        return sorted(found, key=lambda number: number[2] in failure.integers)

    def _check_outputs(self, output: Any) -> None:
        from schedlang.runtime.follow import Mismatch
        from schedlang.runtime.trace import tensors_in

        for tensor in tensors_in(output):
            for axis in self.follower.note(tensor).tags:
                raise Mismatch(
                    ("", 0), f"a tensor that is split over `{axis}` leaves the model", axis, (),
                    self.follower.agreed, ("gather it: `output=R` on the row of its module",),
                )  # fmt: skip

    def _backward(self, output: Any, loss: Any) -> None:
        from schedlang.runtime.trace import tensors_in

        self.backward = True
        value = loss if loss is not None else getattr(output, "loss", None)
        if value is None and isinstance(output, Mapping):
            value = output.get("loss")
        if value is None:
            floats = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
            value = sum(t.sum() for t in floats) if floats else None
        if value is not None and value.requires_grad:
            value.backward()


# -- the result --------------------------------------------------------------------------------------


def _traced(plan: Plan, recording: Recording, run: _Run | None = None) -> Traced:
    shared = {
        "labels": tuple(recording.labels),
        "random": recording.random,
        "order": tuple(recording.order),
        "entries": dict(recording.entries),
    }
    if run is None:
        return Traced(**shared)  # type: ignore[arg-type]
    partial = {name: frozenset(axes) for name, axes in run.follower.partial.items()}
    return Traced(
        edges=run.edges, kinds={fqn: run.leaves[fqn].kind for fqn in run.edges}, numbers=tuple(run.numbers), partial=partial, masks=run.follower.masks,
        exchanges=tuple(run.exchanges), **shared,  # type: ignore[arg-type]
    )  # fmt: skip


def _refusal(plan: Plan, failure: Mismatch) -> Refusal:
    """The failure as a message at the row that shards what was running."""
    fqn = failure.frame[0]
    action = next((a for a in plan.actions if _touches(a, fqn)), None)
    heads = _heads(plan, failure)
    notes = (f"in the forward of `{fqn or plan.model.class_name}`",)
    title = heads[0] if heads else failure.reason
    label = Label(action.span) if action is not None and action.span is not None else Label()
    return Refusal(
        Diagnostic(
            "S403" if heads else "S405", title, label, notes=notes,
            helps=(*(heads[1:] if heads else ()), *failure.helps),
        )
    )  # fmt: skip


def _touches(action: Any, fqn: str) -> bool:
    shards = "placement" in action.primitive.writes
    return shards and any(s == fqn or s.startswith(f"{fqn}.") or not fqn for s in action.sites)


def _heads(plan: Plan, failure: Mismatch) -> tuple[str, ...]:
    """Where a view takes a split dim apart into fewer parts than there are ranks: say so."""
    axis = failure.axis
    if axis is None or failure.counted is None:
        return ()
    count, ranks = failure.counted, plan.mesh.size(axis)
    if count % ranks == 0:
        return ()
    legal = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
    title = f"{count} heads of `{failure.frame[0]}` cannot be split over {axis}={ranks}"
    return title, f"`{axis}` may be one of {legal}"



