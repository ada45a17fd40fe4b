"""Record what a model computes on the meta device: outputs of calls, and what modules save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.ir import nests as pytree
from schedlang.ir.placement import EVEN, Uneven, positions
from schedlang.runtime.batch import named_tensors, rows_of
from schedlang.runtime.rng.draws import masks, shapes_of
from schedlang.runtime.storage.saved import (
    around,
    given_whole,
    is_candidate,
    places,
    slot,
    within,
)
from schedlang.runtime.tracing.torch_calls import model_line, name_of, tensors_in

# ---- Records what a model computes on the meta device: each call's outputs, by module and turn.


Frame = tuple[str, int]  # a module and which of its calls


@dataclass(frozen=True)
class Call:
    """One call that gave tensors: its name, shapes in and out, the integers among its arguments."""

    name: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    integers: tuple[int, ...]


@dataclass(frozen=True)
class LabelRule:
    """How a model's loss reads its labels: from which input, through which operations.

    `count(batch)` is the number of labels that count in a part of the batch; the operations (a
    shift by one token, padding) are those that the model itself was seen to apply.
    """

    source: str
    steps: tuple[Callable[[Tensor], Tensor], ...]
    ignore_index: int

    def count(self, batch: Mapping[str, Any]) -> float:
        """How many labels count in this part of a batch; its rows if it has no labels."""
        return float(self.counted(batch))

    def counted(self, batch: Mapping[str, Any]) -> Tensor | float:
        """The same where the labels lie: of many parts they are read at once, by `numbers`."""
        labels = named_tensors(batch).get(self.source)
        if labels is None:
            return float(rows_of(batch))
        for step in self.steps:
            labels = step(labels)
        return (labels != self.ignore_index).sum()


@dataclass
class Recording:
    """Everything recorded in one forward of the original."""

    frames: dict[Frame, list[Call]] = field(default_factory=dict)
    entries: dict[str, int] = field(default_factory=dict)  # module -> how often it was called
    order: list[str] = field(default_factory=list)  # modules in the order of their first call
    labels: list[LabelRule] = field(default_factory=list)
    random: bool = False  # some operator drew random numbers
    # (module, turn) of each mask that is drawn -> its whole shape; () where it is not told
    drawn: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    sourceless: set[tuple[str, int]] = field(default_factory=set)  # of no tensor of the batch
    # draws that have no dim of samples, where some have none
    unbatched: Mapping[tuple[str, int], bool] = field(default_factory=dict)
    # what drew them in a way that cannot be drawn alike elsewhere: the module, and the line
    apart: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    lossless: Diagnostic | None = None  # said where nothing gave a loss
    asked: bool = False  # the model asked for values, and may call other modules for others
    reached: frozenset[str] = frozenset()  # parameters that the loss depends on
    # modules, and modules around them that did not run when they were called
    outside: frozenset[tuple[str, str]] = frozenset()
    saved: dict[str, list[Any]] = field(default_factory=dict)  # by modules that are asked for

    def choices(self) -> dict[str, str]:
        """The modules that choose by values (a top-k, a sort), and the first such call of each."""
        found = (
            (fqn, call.name)
            for (fqn, _), calls in self.frames.items()
            for call in reversed(calls)
            if call.name in CHOOSING
        )
        return dict(found)


def integers_in(tree: Any) -> tuple[int, ...]:
    """The plain integers of a nest, in order; bounds of slices among them."""
    found: list[int] = []
    for leaf in pytree.tree_leaves(tree):
        bounds = (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
        found += [n for n in bounds if isinstance(n, int) and not isinstance(n, bool)]
    return tuple(found)


class Stack:
    """Which module runs now; entered by wrapping the forwards of a throwaway copy."""

    def __init__(self) -> None:
        self.frames: list[Frame] = [("", 0)]
        self.mains: list[Tensor | None] = [None]  # the main tensor that each frame was given
        self.turns: dict[str, int] = {}
        self.outside: set[tuple[str, str]] = set()
        self.muted = 0
        # told what each call is given, and what it gives
        self.seen: Callable[[Frame, Any], None] = lambda frame, tree: None

    def watch(self, model: nn.Module, opaque: Callable[[str], bool]) -> None:
        """Wrap every forward of the copy; inside opaque modules nothing is recorded."""
        for fqn, module in model.named_modules():
            if fqn:
                module.forward = self._wrapped(fqn, module.forward, opaque(fqn))

    def _not_running(self, fqn: str) -> Iterator[str]:
        """The modules around one that is called now which do not run, nor anything else in them."""
        names = fqn.split(".")
        running = [name for name, _ in self.frames]
        for depth in range(1, len(names)):
            around = ".".join(names[:depth])
            if not any(name == around or name.startswith(f"{around}.") for name in running):
                yield around

    def _wrapped(self, fqn: str, inner: Callable[..., Any], opaque: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.muted:
                return inner(*args, **kwargs)
            turn = self.turns.get(fqn, 0)
            self.turns[fqn] = turn + 1
            self.outside.update((fqn, around) for around in self._not_running(fqn))
            self.frames.append((fqn, turn))
            floats = (t for t in tensors_in((args, kwargs)) if t.is_floating_point())
            self.mains.append(next(floats, None))
            self.seen(self.frames[-1], (args, kwargs))
            self.muted += opaque
            try:
                out = inner(*args, **kwargs)
            finally:
                self.muted -= opaque
                frame = self.frames.pop()
                self.mains.pop()
            self.seen(frame, out)
            return out

        return forward


CHOOSING = {
    "topk",
    "sort",
    "argsort",
    "argmax",
    "argmin",
    "kthvalue",
    "mode",
    "multinomial",
    "nonzero",
    "searchsorted",
    "bucketize",
    "histc",
}


class Recorder(TorchFunctionMode):
    """Records one forward of the original on the meta device."""

    def __init__(self, stack: Stack, inputs: Mapping[str, Any]) -> None:
        super().__init__()
        self.stack, self.recording = stack, Recording()
        for value in named_tensors(inputs).values():
            _mark(value)
        # a label is followed from an integer input to the loss: tensor id -> (tensor, input, steps)
        self.lineage: dict[int, tuple[Tensor, str, tuple[Any, ...]]] = {
            id(value): (value, name, ())
            for name, value in named_tensors(inputs).items()
            if not value.is_floating_point()
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call and write it down."""
        kwargs = dict(kwargs or {})
        if func is Tensor.__bool__:
            return False  # no values on the meta device; the same answer in every run
        if func is torch._is_all_true:  # by which distributions check what they are given
            return True
        given = tensors_in((args, kwargs))
        batched = any(map(_marked, given))  # before it may be written into
        out = func(*args, **kwargs)
        outputs = tensors_in(out)
        written = given[:1] if func is Tensor.__setitem__ else []
        for tensor in (*outputs, *written) if batched else ():
            _mark(tensor)
        if outputs and not self.stack.muted:
            shapes = tuple(tuple(t.shape) for t in given)
            found = tuple(tuple(t.shape) for t in outputs)
            call = Call(name_of(func), shapes, found, integers_in((args, kwargs)))
            self.recording.frames.setdefault(self.stack.frames[-1], []).append(call)
            self._note_draw(func, args, kwargs, batched)
        self._follow_labels(func, args, kwargs, out)
        return out

    def _note_draw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batched: bool
    ) -> None:
        """Of torch's function for multi-head attention it is seen that it drops, and no more."""
        rate = args[10] if len(args) > 10 else kwargs.get("dropout_p", 0.0)
        inside = func is F.multi_head_attention_forward and rate > 0
        if inside and kwargs.get("training", True):
            shapes: list[tuple[int, ...]] = [()]
        else:
            shapes = shapes_of(func, args, kwargs)[:1] if masks(func, args, kwargs) else []
        site, drawn = self.stack.frames[-1][0], self.recording.drawn
        for shape in shapes:
            at = site, sum(known == site for known, _ in drawn)
            drawn[at] = shape
            if not batched:
                self.recording.sourceless.add(at)

    def _follow_labels(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if func in (F.cross_entropy, F.nll_loss):
            given = {**dict(zip(("input", "target"), args)), **kwargs}
            known = self.lineage.get(id(given.get("target")))
            if known is not None and given.get("reduction", "mean") == "mean":
                ignore = int(given.get("ignore_index", -100))
                self.recording.labels.append(LabelRule(known[1], known[2], ignore))
            return
        if not args or not isinstance(out, Tensor) or out.is_floating_point():
            return
        known = self.lineage.get(id(args[0]))
        others = tensors_in((args[1:], kwargs))
        if known is None or others or out.dtype == torch.bool:
            return
        # keep what chooses or adds labels; moves and reshapes do not change how many count
        step = _replay(func, args[1:], kwargs)
        steps = (*known[2], step) if name_of(func) in ("__getitem__", "pad", "narrow") else known[2]
        self.lineage[id(out)] = (out, known[1], steps)


def _mark(tensor: Tensor) -> None:
    """Note on a tensor itself that it is made of tensors of the batch."""
    tensor.__dict__["_schedlang_batched"] = True


def _marked(tensor: Tensor) -> bool:
    return "_schedlang_batched" in tensor.__dict__


def _replay(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    def step(labels: Tensor) -> Tensor:
        result = func(labels, *args, **kwargs)
        assert isinstance(result, Tensor)
        return result

    return step


# ---- What is known of a tensor while a sharded forward is followed, and how following it can
# end.


@dataclass(frozen=True)
class Tag:
    """A tensor dim split over an axis, with the sizes of the blocks that lie side by side in it.

    `along`: a dim of a tensor whose parts several ranks hold, along which its values are alike: the
    dim into which each key-value head is repeated for its query heads.
    """

    dim: int
    blocks: tuple[int, ...]  # of the whole dim
    by: str = field(default="", compare=False)  # the sharded module that split it
    uneven: Uneven = EVEN
    along: int | None = None

    def positions(self, size: int, parts: int, place: int) -> list[int]:
        """What a rank holds of a dim of `size`, in its order; indices beyond `size` are zeros."""
        total = sum(self.blocks)
        sizes = [block * size // total for block in self.blocks]
        return positions(sizes, self.uneven, parts, place)


@dataclass
class Note:
    """What is known of a tensor: its splits by axis, and where its gradient would go.

    `entered` are axes over which the value is whole but the gradient a part, to be summed where the
    tensor entered the sharded region.
    """

    tags: Mapping[str, Tag] = field(default_factory=dict)
    roots: frozenset[str] = frozenset()  # parameters it is made of, and of nothing else
    data: bool = False  # made from the batch
    entered: frozenset[str] = frozenset()

    @property
    def parts(self) -> frozenset[str]:
        """The axes over which this tensor's gradient is, rightly, not the whole one."""
        return self.entered | self.tags.keys()


class Hoist(Exception):
    """A tensor should be gathered where an enclosing module takes it, not deeper inside."""

    def __init__(self, fqn: str, axis: str) -> None:
        super().__init__(fqn, axis)
        self.fqn, self.axis = fqn, axis


class Mismatch(Exception):
    """The sharded model does not compute what its shapes should be.

    `integers` are arguments of the original call that should have been divided by the ranks of
    `axis`; empty where no division can help.  `place` counts the calls that agreed before.
    """

    def __init__(
        self,
        frame: Frame,
        reason: str,
        axis: str | None,
        integers: tuple[int, ...],
        place: int,
        helps: tuple[str, ...] = (),
        asked: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(reason)
        self.frame, self.reason, self.axis = frame, reason, axis
        self.integers, self.place, self.helps = integers, place, helps
        self.asked = asked  # arguments of the row, by name, with which it would be legal
        self.line = model_line()  # of the model, that ran
        self.call = ""  # the function that was called there
        self.by = ""  # the sharded module that split what fails
        self.counted: tuple[
            int, ...
        ] = ()  # into which sizes (heads first) a view takes a split dim
        self.raw = False  # the reason is in the words of torch
        self.mixed = False  # parts that one rank holds met parts that several do
        # parameters of which whole tensors that met a split one are made, and how many it has
        self.made: tuple[frozenset[str], int] = (frozenset(), 0)
        self.unit = 0  # heads of a split tensor that met a whole one; 0: none did


# ---- What modules save for backward in a forward on the meta device: where, and of what shape.
# Of the original and of its sharded copy, one beside the other, this tells how the ranks split
# what each module saves.


class Saved(NamedTuple):
    """One tensor: the innermost module that saved it, and its shape."""

    site: str
    shape: tuple[int, ...]


SavedBy = dict[str, list[Saved]]  # by module, in order


def watch_saved(model: nn.Module, modules: Iterable[str], stack: Stack) -> SavedBy:
    """Wrap the forwards of some modules of a throwaway copy, so that what they save is noted.

    Only what may be coded counts: floats that are neither weights nor given without a gradient.
    """
    found: SavedBy = {}
    for fqn in modules:
        module = model.get_submodule(fqn)
        module.forward = _watched(module, stack, found.setdefault(fqn, []))
    return found


def _watched(module: nn.Module, stack: Stack, found: list[Saved]) -> Callable[..., Any]:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            whole = given_whole((args, kwargs)) | set(places(module))

        def pack(tensor: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                if not around.uncoded and is_candidate(tensor, whole):
                    found.append(Saved(stack.frames[-1][0], tuple(tensor.shape)))
            return tensor

        with within(code=pack), slot(pack):
            return inner(*args, **kwargs)

    return forward
