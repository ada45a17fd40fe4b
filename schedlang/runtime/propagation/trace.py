"""Data-flow analysis of a forward without values: the mode `Trace`, and the lattices that it calls.

* `Trace` calls lattices before and after every call of torch.  A lattice stores its value of a
  tensor in an attribute of the tensor, and joins the values of a call's inputs into its outputs.
* `RecordedForward` records the original's forward: each call by module and turn, its labels and
  draws.
* `run_with_prime_rows` runs a forward with a number of rows that divides no other size: then dims
  of rows can be recognised by their size.
* `Note`, `Tag`, `Mismatch` and `Hoist` are the values and the errors of layout propagation.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import pytree
from schedlang.ir.placement import EVEN, Uneven, positions
from schedlang.runtime import mixed_precision as mixed_precision  # autocast on the meta device
from schedlang.runtime.batch import named_tensors, row_count
from schedlang.runtime.modes import LOSSES
from schedlang.runtime.propagation.label_flow import LabelFlow
from schedlang.runtime.propagation.parameter_access import BACKWARDS, ParameterAccess, idle_modules
from schedlang.runtime.rng.logical_functions import draws_logically, mask_shapes
from schedlang.runtime.row_lists import is_row_list, take_rows
from schedlang.runtime.sharding.module_sizes import factors_of
from schedlang.runtime.tracing.meta_runs import (
    MetaMode,
    meta_model,
    name_of,
    tensors_in,
    without_values,
)
from schedlang.runtime.tracing.model_lines import model_line

Frame = tuple[str, int]  # a module, and the number of its call, from 0


@dataclass(frozen=True)
class Call:
    """A recorded call that returned tensors: its name, shapes in and out, its integer arguments.

    factors  numbers by which arithmetic changes a tensor: they are the same for its shards
    """

    name: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    integers: tuple[int, ...]
    factors: tuple[float, ...] = ()


@dataclass
class RunningCall:
    """A call of torch while it runs: its frame, its arguments, and afterwards its results."""

    frame: Frame
    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    out: Any = None
    outputs: list[Tensor] = field(default_factory=list)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by its position or its name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


class Lattice:
    """A property that is propagated from tensor to tensor through a forward.

    mark     the attribute of a tensor that holds the lattice's value
    nothing  the value of a tensor without that attribute
    """

    mark = ""
    nothing: Any = None

    @classmethod
    def of(cls, tensor: Tensor) -> Any:
        """Return the lattice's value of a tensor."""
        return tensor.__dict__.get(cls.mark, cls.nothing)

    @classmethod
    def put(cls, tensor: Tensor, value: Any) -> None:
        """Store the lattice's value of a tensor."""
        tensor.__dict__[cls.mark] = value

    def before_call(self, call: RunningCall) -> None:
        """Observe a call that is about to run: it may write into its arguments."""

    def after_call(self, call: RunningCall) -> None:
        """Join the values of `call.inputs` into the values of `call.outputs`."""

    def on_failure(self, call: RunningCall, error: Exception) -> None:
        """Observe a call that has raised; may raise an error that explains more."""


ANSWERS: Mapping[Any, bool] = {Tensor.__bool__: False, torch._is_all_true: True}


class Trace(TorchFunctionMode):
    """The mode that runs every call, and calls its lattices before and after it.

    `row_arguments`: `bool(tensor)` gives the tensor's value, as far as the batch decides it.
    Otherwise the answer is the same in every run: False, but True for checks of distributions.
    `other`: the answer is True for both, to see what the model does then.
    """

    def __init__(
        self, stack: ModuleStack, *lattices: Lattice, asked: bool = False, other: bool = False
    ) -> None:
        super().__init__()
        self.stack, self.lattices, self.asked, self.other = stack, lattices, asked, other
        self.answered = False  # whether the model has called `bool(tensor)`

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ANSWERS and not self.asked:
            self.answered = True
            return self.other or ANSWERS[func]
        kwargs = dict(kwargs or {})
        frame, inputs = self.stack.frames[-1], tensors_in((args, kwargs))
        call = RunningCall(frame, name_of(func), func, args, kwargs, inputs)
        for lattice in self.lattices:
            lattice.before_call(call)
        try:
            call.out = func(*args, **kwargs)
        except Exception as error:
            for lattice in self.lattices:
                lattice.on_failure(call, error)
            raise
        call.outputs = tensors_in(call.out)
        if func is Tensor.__setitem__:  # returns None, and changes its first argument
            call.outputs = inputs[:1]
        for lattice in self.lattices:
            lattice.after_call(call)
        return call.out


@dataclass(eq=False)
class ModuleStack:
    """The stack of running modules; `watch` wraps the forwards of a throwaway copy.

    mains         the main tensor among the arguments of each frame
    turns         modules in the order of their first call, and how often each was called
    outside       (module, enclosing module) where the module is called while the enclosing one is
                  idle
    overwrites    modules that write into a tensor among their arguments
    access        records parameters that are read, replaced or written outside their modules, or
                  None
    muted         above 0 in opaque modules: nothing is recorded
    observer      called with each call's frame and arguments, then with its frame and results
    failed_frame  the innermost call that has raised
    """

    frames: list[Frame] = field(default_factory=lambda: [("", 0)])
    mains: list[Tensor | None] = field(default_factory=lambda: [None])
    turns: dict[str, int] = field(default_factory=dict)
    outside: set[tuple[str, str]] = field(default_factory=set)
    overwrites: set[str] = field(default_factory=set)
    access: ParameterAccess | None = None
    muted: int = 0
    observer: Callable[[Frame, Any], None] | None = None
    failed_frame: Frame = ("", 0)

    def watch(self, model: nn.Module, opaque: Container[str] = ()) -> None:
        """Wrap every forward of the throwaway copy; inside opaque modules nothing is recorded."""
        if self.access is not None:
            self.access.watch(model)
        for fqn, module in model.named_modules():
            if fqn:
                module.forward = partial(self._run, fqn, module.forward, fqn in opaque)

    def _run(
        self, fqn: str, inner: Callable[..., Any], opaque: bool, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the forward of a module, with its frame on the stack."""
        if self.access is not None:
            self.access.begin(fqn, bool(self.muted))
        if self.muted:
            return inner(*args, **kwargs)
        call_number = self.turns.get(fqn, 0)
        self.turns[fqn] = call_number + 1
        if "." in fqn:
            running = [name for name, _ in self.frames]
            self.outside.update((fqn, around) for around in idle_modules(fqn, running))
        self.frames.append((fqn, call_number))
        inputs = list(tensors_in((args, kwargs)))
        with torch._C.DisableTorchFunction():  # not seen by function modes
            versions = [0 if t.is_inference() else t._version for t in inputs]
            self.mains.append(next((t for t in inputs if t.is_floating_point()), None))
        if self.observer is not None:
            self.observer(self.frames[-1], (args, kwargs))
        self.muted += opaque
        try:
            output = inner(*args, **kwargs)
        except Exception:
            self.failed_frame = self.failed_frame if self.failed_frame[0] else self.frames[-1]
            raise
        finally:
            self.muted -= opaque
            frame = self.frames.pop()
            self.mains.pop()
        with torch._C.DisableTorchFunction():
            if [0 if t.is_inference() else t._version for t in inputs] != versions:
                self.overwrites.add(fqn)
        if self.observer is not None:
            self.observer(frame, output)
        return output


def integers_in(tree: Any) -> tuple[int, ...]:
    """Return the plain integers of a pytree, in order, with the bounds of slices."""
    integers: list[int] = []
    for leaf in pytree.tree_leaves(tree):
        bounds = (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
        integers += [n for n in bounds if isinstance(n, int) and not isinstance(n, bool)]
    return tuple(integers)


SELECTING = {
    *("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "mode", "multinomial", "nonzero"),
    *("searchsorted", "bucketize", "histc"),
}


class RecordedForward(Lattice):
    """A recorded forward; the lattice's value: whether a tensor is computed from the batch.

    frames      calls by module and turn, without those in opaque modules; only if `calls`
    labels      how losses read their labels
    drawn       (module, turn) of each random mask -> its full shape, () if unknown; only if `draws`
    sourceless  the keys of `drawn` whose masks depend on no tensor of the batch
    """

    mark, nothing = "_schedlang_batched", False

    def __init__(
        self,
        stack: ModuleStack,
        inputs: Mapping[str, Any],
        values: MetaMode | None = None,
        draws: bool = False,
        calls: bool = True,
    ) -> None:
        self.stack, self.draws, self.calls = stack, draws, calls
        self.frames: dict[Frame, list[Call]] = {}
        self.labels = LabelFlow(values)
        self.drawn: dict[Frame, tuple[int, ...]] = {}
        self.sourceless: set[Frame] = set()
        self.takes_gradient = False  # whether the forward runs a backward
        self._batched = False  # whether an input of the running call is computed from the batch
        for name, value in named_tensors(inputs).items():
            self.put(value, True)
            if not value.is_floating_point():
                self.labels.lineage[id(value)] = value, name, ()

    @property
    def choices(self) -> dict[str, str]:
        """The modules that select by values (a top-k, a sort), and the first such call of each."""
        calls = (
            (fqn, call) for (fqn, _), listed in self.frames.items() for call in reversed(listed)
        )
        return {fqn: call.name for fqn, call in calls if call.name in SELECTING}

    def before_call(self, call: RunningCall) -> None:
        """Note whether an input is computed from the batch, and count the labels of a loss."""
        self._batched = any(map(self.of, call.inputs))
        if call.func in LOSSES:
            self.labels.before_call(call)

    def after_call(self, call: RunningCall) -> None:
        """Record the call."""
        for tensor in call.outputs if self._batched else ():
            self.put(tensor, True)
        if call.outputs and self.calls and not self.stack.muted:
            with torch._C.DisableTorchFunction():  # not seen by function modes
                input_shapes, output_shapes = (
                    tuple(tuple(t.shape) for t in group) for group in (call.inputs, call.outputs)
                )
            numbers = integers_in((call.args, call.kwargs)), factors_of(call.name, call.args)
            recorded = Call(call.name, input_shapes, output_shapes, *numbers)
            self.frames.setdefault(call.frame, []).append(recorded)
        if self.stack.access is not None and not self.stack.muted:
            self.stack.access.after(call, [name for name, _ in self.stack.frames])
        if call.outputs and self.draws:  # inside of opaque modules too
            self._note_draw(call)
        if self.labels.lineage or call.func in LOSSES:
            self.labels.after_call(call)
        self.takes_gradient |= call.name in ("grad", "backward") and call.func in BACKWARDS

    def _note_draw(self, call: RunningCall) -> None:
        """Note a call's random draws; for torch's multi-head attention the shape is unknown."""
        func, args, kwargs = call.func, call.args, call.kwargs
        inside = func is F.multi_head_attention_forward and call.argument(10, "dropout_p", 0.0) > 0
        if inside and kwargs.get("training", True):
            shapes: list[tuple[int, ...]] = [()]
        else:
            shapes = (
                mask_shapes(func, args, kwargs)[:1] if draws_logically(func, args, kwargs) else []
            )
        site, drawn = call.frame[0], self.drawn
        for shape in shapes:
            draw_frame = site, sum(drawn_site == site for drawn_site, _ in drawn)
            drawn[draw_frame] = shape
            if not self._batched:
                self.sourceless.add(draw_frame)


def find_reached_parameters(
    model: nn.Module, loss: Tensor | None, original: nn.Module, computes: object
) -> tuple[frozenset[str], bool, dict[str, bool]]:
    """Find the parameters to which a backward from `loss` would give gradients.

    Returns the first names of the model's parameters; whether the backward would run a reentrant
    checkpoint; and the names of parameters that are not the model's: True for parameters of the
    `original` (the model is its copy), False for parameters of the module that `computes` the
    loss.  Parameters inside reentrant checkpoints are not found.
    """
    names: dict[int, tuple[str, bool | None]] = {}
    holder = getattr(computes, "__self__", computes)
    for owner, native in ((holder, False), (original, True), (model, None)):
        if isinstance(owner, nn.Module):
            names |= {id(parameter): (name, native) for name, parameter in owner.named_parameters()}
    todo: list[Any] = [loss.grad_fn] if loss is not None else []
    visited: set[Any] = {None}
    reached: set[tuple[str, bool | None]] = set()
    reenters = False
    while todo:
        node = todo.pop()
        if node in visited:
            continue
        visited.add(node)
        entry = names.get(id(getattr(node, "variable", None)))
        reached |= {entry} if entry is not None else set()
        reenters |= node.name() == "CheckpointFunctionBackward"
        todo += [following for following, _ in node.next_functions]
    foreign = {name: native for name, native in sorted(reached, key=str) if native is not None}
    return frozenset(name for name, native in reached if native is None), reenters, foreign


Result = TypeVar("Result")
PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167)


def run_with_prime_rows(
    model: nn.Module,
    batch: Mapping[str, Any],
    function: Callable[[nn.Module, dict[str, Any], ModuleStack, int], Result],
) -> Result | None:
    """Return `run(bare model, inputs, stack, rows)`; None if the model accepts no other batch.

    `rows` is a prime: the dims of rows are its multiples, and no dim of a parameter is.
    """
    sizes = {n for p in model.parameters() for n in p.shape}
    sizes |= {n for t in tensors_in(dict(batch)) for n in t.shape[1:]}
    rows = next((p for p in PRIMES if all(n % p for n in sizes)), None)
    if rows is None:
        return None
    bare, stack = meta_model(model, {}), ModuleStack()
    bare.train()
    stack.watch(bare)
    try:
        with without_values(repeat_rows(batch, rows)) as (inputs, _):
            return function(bare, inputs, stack, rows)
    except Exception:  # the model's own code rejects the number of rows
        return None


def repeat_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the batch with its rows repeated until there are `rows` rows."""
    count = row_count(batch)
    index = torch.arange(rows) % count

    def repeat(value: Any) -> Any:
        if is_row_list(value, count):
            return take_rows(value, index)
        has_rows = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == count
        return value[index.to(value.device)] if has_rows else value

    repeated: dict[str, Any] = pytree.tree_map(
        repeat, dict(batch), lambda value: is_row_list(value, count)
    )
    return repeated


@dataclass(frozen=True)
class Tag:
    """A tensor dim that is split over an axis, with the sizes of its concatenated blocks.

    `along`: for a tensor whose shards several ranks hold, the dim along which its values are equal:
    the dim into which each key-value head is repeated for its query heads.
    """

    dim: int
    blocks: tuple[int, ...]  # of the full dim
    by: str = field(default="", compare=False)  # the sharded module that split it
    uneven: Uneven = EVEN
    along: int | None = None

    def positions(self, size: int, parts: int, rank: int) -> list[int]:
        """Return the indices of a dim of `size` that a rank holds, in order.

        `rank` is the rank among `parts` ranks; indices of `size` and above stand for zeros.
        """
        total = sum(self.blocks)
        sizes = [block * size // total for block in self.blocks]
        return positions(sizes, self.uneven, parts, rank)


@dataclass
class Note:
    """The layout of a tensor: its splits by axis, and where its gradient is partial.

    `entered` are axes over which the value is full and the gradient partial; the gradient is summed
    where the tensor entered the sharded region. Over `pending` axes the value is a partial sum, and
    the gradient full; the sum is taken at the region's end. `learns`: it was computed from a tensor
    that needs a gradient, in the forward of an `autograd.Function`, where torch builds no graph.
    """

    tags: Mapping[str, Tag] = field(default_factory=dict)
    roots: frozenset[str] = frozenset()  # parameters, if the tensor is computed from them alone
    data: bool = False  # computed from the batch
    entered: frozenset[str] = frozenset()
    learns: bool = False
    pending: frozenset[str] = frozenset()


class Hoist(Exception):
    """Raised to gather a tensor at the input of an enclosing module instead of deeper inside."""

    def __init__(self, fqn: str, axis: str) -> None:
        super().__init__(fqn, axis)
        self.fqn, self.axis = fqn, axis


class Mismatch(Exception):
    """Raised if the sharded model's shapes do not agree with the original's.

    `integers` are arguments of the original call that should have been divided by the ranks of
    `axis`; empty if no division can help.  `position` counts the calls that agreed before.
    """

    def __init__(
        self,
        frame: Frame,
        reason: str,
        axis: str | None,
        integers: tuple[int, ...],
        position: int,
        helps: tuple[str, ...] = (),
    ) -> None:
        super().__init__(reason)
        self.frame, self.reason, self.axis = frame, reason, axis
        self.integers, self.place, self.helps = integers, position, helps
        # arguments (name, value) with which the row would be legal
        self.row_arguments: tuple[tuple[str, str], ...] = ()
        self.line = model_line()  # the running line of the model
        self.call = ""  # the function that the line called
        self.by = ""  # the sharded module that split the failing tensor
        self.counted: tuple[int, ...] = ()  # the sizes (heads first) into which a view splits a dim
        self.raw = False  # the reason is a message of torch
        self.mixed = False  # the call's tensors are split by different rules
        # parameters of the full tensors beside a split tensor, and the size of the split dim
        self.made: tuple[frozenset[str], int] = (frozenset(), 0)
        self.unit = 0  # heads of a split tensor beside a full one; 0: no such pair


def is_model_error(error: Exception) -> bool:
    """Return whether a check of shapes in the model's own Python code has raised `error`.

    Precondition: the same forward has run without shards before.
    """
    if isinstance(error, Refusal) or not isinstance(
        error, (RuntimeError, ValueError, IndexError, AssertionError)
    ):
        return False
    *_, last = traceback.walk_tb(error.__traceback__)
    return not str(last[0].f_globals.get("__name__", "")).startswith("schedlang")
