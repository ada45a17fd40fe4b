"""Record one forward: the values that flow between units, and the costs of each unit.

Costs are operations, and bytes that are saved for backward.  `record_forward` gives a
`StageGraph`, which is split into stages before there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir import pytree
from schedlang.ir.model import is_inside
from schedlang.runtime.adapters.torch_tensor import version_of
from schedlang.runtime.batch import run_forward
from schedlang.runtime.tracing.equal_units import (
    DifferentUnits,
    EqualUnits,
    ShownCall,
    UnitObserver,
)
from schedlang.runtime.tracing.meta_runs import KnownValues, LiteralsMode, meta_batch, meta_model
from schedlang.runtime.tracing.stage_graph import (
    OutputLeaf,
    Reads,
    StageGraph,
    Token,
    refusal,
    unit_labels,
)
from schedlang.runtime.tracing.units import CallHook, CallSwitch, intercept_hooks


class UnitCosts:
    """Costs of units in one forward, which may run on the meta device.

    flops  operations of each unit
    saved  bytes that each unit saves for backward; a storage counts once for each unit
    given  bytes of each unit's arguments that require a gradient
    """

    def __init__(self, units: int) -> None:
        self.flops, self.saved, self.given = [0] * units, [0] * units, [0] * units
        self._never: set[int] = set()
        self._alive: list[Any] = []  # another storage may get the address of a freed one

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Count no bytes for a tensor: a parameter or a buffer is stored anyway."""
        self._never.add(key_of(tensor))

    @contextmanager
    def counting(self, unit: int, arguments: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context in which saved tensors count for one unit; counts the unit's arguments, too."""
        seen_keys = set(self._never)
        self.given[unit] += sum(self._size(t, seen_keys) for t in arguments if t.requires_grad)
        seen_keys = set(self._never)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.count_saved(unit, tensor, self._size(tensor, seen_keys))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def count_saved(self, unit: int, tensor: torch.Tensor, size: int) -> None:
        """Count a tensor that autograd saves; `size`: bytes not counted for this call before."""
        self.saved[unit] += size

    def count_operations(self, unit: int, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Count the operations of one operator, where torch has a formula for it."""
        formula = flop_counter.flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops[unit] += int(formula(*args, **kwargs, out_val=output))

    def _size(self, tensor: torch.Tensor, seen_keys: set[int]) -> int:
        key = key_of(tensor)
        if key in seen_keys:
            return 0
        seen_keys.add(key)
        self._alive.append(tensor)
        try:
            return int(tensor.untyped_storage().nbytes())
        except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have none
            return tensor.numel() * tensor.element_size()


def operations(func: Any, args: Any, kwargs: Any, output: Any) -> float:
    """Return the operations of one operator: by torch's formula, else one per output element."""
    formula = flop_counter.flop_registry.get(func._overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=output))
    return float(sum(t.numel() for t in tree_leaves(output) if isinstance(t, torch.Tensor)))


def key_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, unique while it lives; works without a storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


@contextmanager
def counting_costs(burden: UnitCosts, model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Context in which the costs of calls of these modules are counted in `burden`.

    A call inside of another module's call counts for the inner module.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        burden.leave_out(tensor)
    mode = _Operators(burden)
    switch = CallSwitch(model, names)

    def handle(unit: int, original: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        mode.unit, outer = unit, mode.unit
        try:
            with burden.counting(unit, tensors):
                return original(*args, **kwargs)
        finally:
            mode.unit = outer

    try:
        with switch.using(handle), mode:
            yield
    finally:
        switch.remove()


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that counts every operator that runs in a unit."""

    def __init__(self, burden: UnitCosts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.burden = burden
        self.unit: int | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.unit is not None:
            self.burden.count_operations(self.unit, func, args, kwargs or {}, output)
        return output


Mark = tuple[str, Any]  # ("out", token) | ("inner", unit) | ("param", name) | ("buffer", name)
Marks = frozenset[Mark]
ONCE = "S601"
# (unit, its arguments, leaves of its output, their structure, numbers of leaves it has written to)
OnUnit = Callable[[int, Any, list[Any], Any, frozenset[int]], None]
NONE: Marks = frozenset()
HELD = ("param", "buffer")

# the result depends on the shapes of the tensor arguments, not on their values
SHAPE_ONLY = {
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
}
# the result goes to Python, or decides a shape: later code may depend on it
DECIDES = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}
CONTROL = {*DECIDES, "aten::nonzero"}


def record_forward(
    model: nn.Module,
    units: Sequence[str],
    kwargs: Mapping[str, Any],
    *,
    loss: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None = None,
    meta: bool = True,
    met: OnUnit | None = None,
    equal: Mapping[str, object] | None = None,
) -> StageGraph:
    """Run the model once, and record what each unit reads of the others.

    `kwargs` are the model's keyword arguments (real or meta tensors).  With `meta` a copy runs on
    the meta device, so weights are neither needed nor changed.  The loss is `loss(output, kwargs)`,
    else the output's `.loss`, else a scalar output.  `met` is called for each unit whose output's
    form is decided by the shapes of its arguments, and not by values or random draws.
    `equal`: unit -> its kind; two units of each kind run, and the others are imitated.
    Raises DifferentUnits if these turn out to differ; Refusal S601 if a unit is not called exactly
    once, or not in the order of `units`, and S611 if code between units reads an unknown value.
    """
    recorded = meta_model(model, {}) if meta else model
    recorder = _Recorder(recorded, units, met)
    kinds = {name: kind for name, kind in (equal or {}).items() if recorder.units.count(name) == 1}
    imitation = EqualUnits(recorded, kinds, observer=_EqualReads(recorder))
    inputs = dict(meta_batch(dict(kwargs)) if meta else kwargs)
    if meta:
        recorder.constants.store_values(kwargs, inputs)
    try:
        # the switch of the recorder is the outer one: it sees imitated units too
        with imitation.using(), _calls_recorded(recorder), torch.enable_grad():
            device = torch.device("meta") if meta else nullcontext()
            with device, recorder, LiteralsMode(recorder.constants):
                output, value = run_forward(recorded, inputs, loss)
            graph = recorder.graph(output, value)
    except Exception as error:
        if imitation.imitated or imitation.different:
            raise DifferentUnits from error
        if recorder.guessed is not None:
            raise recorder.guessed from error
        raise
    if imitation.different or graph.inner_units & {recorder.units.index(name) for name in kinds}:
        raise DifferentUnits
    return graph


@contextmanager
def _calls_recorded(recorder: _Recorder) -> Iterator[None]:
    """Context in which a recorder handles the calls of units; the generators are restored."""
    switch = CallSwitch(recorder.model, recorder.units)
    try:
        # random draws here must not change the program's later draws
        with torch.random.fork_rng(devices=[]), switch.using(recorder.call):
            yield
    finally:
        switch.remove()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that propagates marks of storages, which views, writes and detached aliases share."""

    def __init__(self, model: nn.Module, units: Sequence[str], met: OnUnit | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met = met
        self.unsure: set[int | None] = set()  # units that draw, or read values
        self.guesses: set[int] = set()  # units that read values which are not known
        self.model, self.units, self.labels = model, tuple(units), unit_labels(units)
        self.marks: dict[int, Marks] = {}
        self.owner: dict[int, Token] = {}  # storage of a returned leaf -> its token
        self.alive: list[Any] = []  # another storage may get the address of a freed one
        self.inside: int | None = None
        self.arguments: list[torch.Tensor] = []
        self.quiet = False
        self.called: list[int] = []
        self.read: list[Marks] = [NONE] * len(units)
        self.held: dict[int, Mark] = {}  # storage of a parameter or buffer -> its mark
        self.between: list[Marks] = [NONE] * (len(units) + 1)
        self.owners: dict[str, set[int]] = {}
        self.control: Marks = NONE
        self.leaves: dict[Token, OutputLeaf] = {}
        self.mutated: set[Token] = set()
        self.constants = KnownValues(on_read=self._note_read)
        # the refusal if the code behind all units fails with the sizes that it was given
        self.guessed: Refusal | None = None
        self.burden = UnitCosts(len(units))
        self.ran: list[list[Any]] = [[] for _ in range(2 * len(units) + 1)]
        for name, parameter in model.named_parameters():
            self._hold(parameter, ("param", name))
        self.buffers = dict(model.named_buffers())
        for name, buffer in self.buffers.items():
            self._hold(buffer, ("buffer", name))

    def _hold(self, tensor: torch.Tensor, mark: Mark) -> None:
        self._set(tensor, frozenset({mark}))
        self.burden.leave_out(tensor)
        storage = _storage(tensor)
        if storage is not None:
            self.held[storage] = mark

    def call(self, unit: int, original: Any, args: Any, kwargs: Any) -> Any:
        """Handle one call of a unit, and mark its outputs."""
        name = self.labels[unit]
        if torch._C._are_functorch_transforms_active():
            raise refusal(
                "S610",
                name,
                "is called inside of a transform of `torch.func`, which no stage has all of",
                "cut outside of the module that transforms",
            )
        if self.inside is not None:
            raise refusal(ONCE, name, f"is called inside `{self.labels[self.inside]}`")
        if unit in self.called:
            raise refusal(
                ONCE,
                name,
                "is called more than once in one forward: no stage can start at it",
                "cut outside the loop that calls it",
            )
        if self.called and unit < self.called[-1]:
            after = self.labels[self.called[-1]]
            raise refusal(ONCE, name, f"is called after `{after}`, against the order of the list")
        self.called.append(unit)
        self.read[unit] |= self.control
        self.inside = unit
        leaves = pytree.tree_leaves((args, kwargs))
        self.arguments = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        versions, sides = [(t, version_of(t)) for t in self.arguments], count()

        def on_hook(name: str, index: int, call: CallHook, arguments: Any, output: Any) -> Any:
            self.unsure.add(unit)  # the output does not show what hooks get
            outputs = len(pytree.tree_leaves(output))
            leaves, spec = pytree.tree_flatten((output, arguments))
            marked = [
                # whether the unit's own arguments have gradients is known
                self._return(unit, -1 - next(sides), leaf, guess=name != "" or k < outputs)
                for k, leaf in enumerate(leaves)
            ]
            output, arguments = pytree.tree_unflatten(marked, spec)
            return call(arguments, output)

        module = self.model.get_submodule(self.units[unit])
        with self.burden.counting(unit, self.arguments), intercept_hooks(module, on_hook):
            output = original(*args, **kwargs)
        self.inside = None
        self.read[unit] |= self._replaced(module.named_buffers(self.units[unit]))
        leaves, spec = pytree.tree_flatten(output)
        if self.met is not None and unit not in self.unsure:
            changed = {id(t) for t, version in versions if version_of(t) != version}
            written = frozenset(k for k, leaf in enumerate(leaves) if id(leaf) in changed)
            self.quiet = True
            self.met(unit, (args, kwargs), leaves, spec, written)
            self.quiet = False
        marked = [self._return(unit, k, leaf) for k, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(marked, spec)

    def _replaced(self, buffers: Iterable[tuple[str, torch.Tensor]]) -> Marks:
        """Return the marks of the buffers that the forward has replaced, whether it reads them or
        not: a stage that replaces one has its value."""
        replaced = (
            name for name, tensor in buffers if self.buffers.get(name, tensor) is not tensor
        )
        return frozenset(("buffer", name) for name in replaced)

    def _return(self, unit: int, index: int, leaf: Any, guess: bool = True) -> Any:
        """Return a copy of a returned tensor, whose new storage has the unit's mark.

        `guess`: it may require a gradient although it does not here, see `_with_grad`.
        """
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # an input that is passed through
        self.read[unit] |= self.marks_of(leaf) - {("inner", unit)}
        self.quiet = True
        copied = (self._with_grad(unit, leaf) if guess else leaf).clone()
        self.quiet = False
        token = (unit, index)
        self._set(copied, frozenset({("out", token)}))
        self.owner[copied.untyped_storage()._cdata] = token
        dtype = str(leaf.dtype).removeprefix("torch.")
        self.leaves[token] = OutputLeaf(tuple(leaf.shape), dtype, copied.requires_grad)
        return copied

    def _with_grad(self, unit: int, leaf: torch.Tensor) -> torch.Tensor:
        """Return an output that requires a gradient if other values may give it one.

        Values that the unit reads may choose weights that it uses: none here, some in a step.
        """
        if leaf.requires_grad or unit not in self.guesses or not leaf.is_floating_point():
            return leaf
        parameters = self.model.get_submodule(self.units[unit]).parameters()
        return leaf.detach().requires_grad_(any(p.requires_grad for p in parameters))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_decided_by_shapes(func):
            self.unsure.add(self.inside)
        output = self.constants.run(func, args, kwargs, self._unknown)
        if not self.quiet:
            self._follow(func, args, kwargs, output)
        return output

    def _note_read(self, value: Any) -> Any:
        self.unsure.add(self.inside)
        return value

    def _follow(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        read_from = {s for t in inputs if (s := _storage(t)) is not None}
        outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
        fresh = [t for t in outputs if _storage(t) not in read_from]
        segment = 2 * len(self.called) if self.inside is None else 2 * self.inside + 1
        self.ran[segment].append((id(func), *((t.shape, t.dtype) for t in outputs)))
        written = written_tensors(func, args, kwargs)
        name = func._schema.name
        if name in SHAPE_ONLY or not (fresh or written or name in CONTROL):
            read = NONE  # a view reads nothing yet
        else:
            read = NONE.union(*(self.marks_of(t) for t in inputs))
        unit = self.inside
        if unit is None:
            marks = read
            self.between[len(self.called)] |= {self.held[s] for s in read_from if s in self.held}
            if name in CONTROL:
                self.control |= read
            held = (self.held[s] for t in written if (s := _storage(t)) in self.held)
            if self.called and any(kind == "buffer" for kind, _ in held):
                self.read[self.called[-1]] |= read  # the stage that runs this code needs the values
        else:
            self.burden.count_operations(unit, func, args, kwargs, output)
            marks = frozenset({("inner", unit)})
            self.read[unit] |= read - marks
            for kind, held_name in (self.held[s] for s in read_from if s in self.held):
                if kind == "param":
                    self.owners.setdefault(held_name, set()).add(unit)
        for tensor in fresh:
            self._set(tensor, marks)
        for tensor in written:
            self._write(tensor, marks)

    def _write(self, tensor: torch.Tensor, marks: Marks) -> None:
        storage = _storage(tensor)
        if storage in self.owner:
            self.mutated.add(self.owner[storage])
        self._set(tensor, self.marks_of(tensor) | marks)

    def marks_of(self, tensor: torch.Tensor) -> Marks:
        """Return the marks of a tensor."""
        storage = _storage(tensor)
        return NONE if storage is None else self.marks.get(storage, NONE)

    def _set(self, tensor: torch.Tensor, marks: Marks) -> None:
        storage = _storage(tensor)
        if storage is not None:
            self.alive.append(tensor.untyped_storage())
            self.marks[storage] = marks

    def _unknown(self, func: Any) -> int:
        """Return 0 for a value that the model reads, and that a meta tensor does not have.

        Inside a unit the unit counts as reading all its arguments.  Between units the value decides
        what runs next: raises Refusal S611.  Behind all units a size has no effect on other stages.
        """
        if self.inside is None:
            behind = self.called[-1:] == [len(self.units) - 1]
            message = "the forward reads the value of a tensor between modules"
            helps = [
                "read shapes instead, or read values inside a module: stages are recorded"
                " without data"
            ]
            if behind:
                message = "the loss, or the end of the forward, reads the value of a tensor"
                helps.append("what a loss keeps may be a tensor: `self.mean += loss.detach()`")
            note = f"after `{self.labels[self.called[-1]]}`" if self.called else ""
            between = refusal("S611", "", message, *helps, note=note)
            if func._schema.name in DECIDES or not behind:
                raise between
            self.guessed = self.guessed or between
            return 0
        self.guesses.add(self.inside)
        for tensor in self.arguments:
            self.read[self.inside] |= self.marks_of(tensor)
        return 0

    def graph(self, output: Any, loss: torch.Tensor | None) -> StageGraph:
        """Return the recorded graph; the forward must have ended."""
        for unit, name in enumerate(self.labels):
            if unit not in self.called:
                raise refusal(ONCE, name, "is not called in this forward")
        final, partial = self.control, {}
        if loss is not None:
            final |= self.marks_of(loss)
        for mark in self._replaced(self.model.named_buffers()) - NONE.union(*self.read):
            final |= self.marks_of(self.model.get_buffer(mark[1])) | {mark}
        for path, leaf in pytree.tree_flatten_with_path(output)[0]:
            if not isinstance(leaf, torch.Tensor) or leaf is loss:
                continue
            marks = self.marks_of(leaf)
            inner = frozenset(value for kind, value in marks if kind == "inner")
            # tensors that hooks got are sent if the loss needs them, but not for an output alone
            inner |= {value[0] for kind, value in marks - final if kind == "out" and value[1] < 0}
            if inner:
                partial[pytree.keystr(path)] = inner
            else:
                final |= marks
        leaves = {
            token: OutputLeaf(leaf.shape, leaf.dtype, leaf.differentiable, token in self.mutated)
            for token, leaf in self.leaves.items()
        }
        numbers: dict[Any, int] = {}  # equal lists of operators get equal numbers
        return StageGraph(
            self.units,
            tuple(_reads(marks) for marks in self.read),
            _reads(final),
            leaves,
            tuple(_reads(marks) for marks in self.between),
            {name: frozenset(owning_units) for name, owning_units in self.owners.items()},
            partial,
            tuple(self.burden.flops),
            tuple(self.burden.saved),
            tuple(self.burden.given),
            tuple(numbers.setdefault(tuple(operators), len(numbers)) for operators in self.ran),
        )


class _EqualReads(UnitObserver):
    """Notes for imitated units what the second unit of their kind has read, and its costs."""

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder
        self.numbers = {name: unit for unit, name in enumerate(recorder.units)}
        self.argument_marks: dict[str, list[Marks]] = {}  # unit -> the marks of its arguments

    def before(self, name: str, leaves: Sequence[Any]) -> None:
        """Note the marks of the arguments of a unit."""
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.argument_marks[name] = [self.recorder.marks_of(tensor) for tensor in tensors]

    def imitated(
        self, name: str, shown: ShownCall, leaves: Sequence[Any], results: Sequence[torch.Tensor]
    ) -> None:
        """Note what a unit would read of its own arguments, parameters and buffers."""
        recorder, old, unit = self.recorder, shown.name, self.numbers[name]
        number, old_marks = self.numbers[old], self.argument_marks[old]
        self.before(name, leaves)
        new_marks, read = self.argument_marks[name], recorder.read[number]
        held = {mark for mark in read if mark[0] in HELD and is_inside(mark[1], old)}
        taken = [k for k, marks in enumerate(old_marks) if marks and marks <= read]
        owned = [param for param, units in recorder.owners.items() if number in units]
        known = read == held.union(*(old_marks[k] for k in taken))
        known = known and not recorder.control and number not in recorder.unsure
        # without hooks inside, whose arguments are sent
        known = known and (number, -1) not in recorder.leaves
        if not known or not all(is_inside(param, old) for param in owned):
            raise DifferentUnits
        for k, marks in enumerate(old_marks):
            others = NONE.union(*(old_marks[:k] + old_marks[k + 1 :]))
            if marks != new_marks[k] and (not marks or marks & others):
                raise DifferentUnits  # it is not known which of the arguments was read
        renamed = {(kind, name + param[len(old) :]) for kind, param in held}
        recorder.read[unit] = recorder.read[unit].union(renamed, *(new_marks[k] for k in taken))
        for param in owned:
            recorder.owners.setdefault(name + param[len(old) :], set()).add(unit)
        recorder.ran[2 * unit + 1] = recorder.ran[2 * number + 1]
        for costs in (recorder.burden.flops, recorder.burden.saved):
            costs[unit] = costs[number]


@cache
def is_decided_by_shapes(func: Any) -> bool:
    """Return whether shapes alone decide the form of an operator's result, without random draws."""
    tags = torch.Tag
    unsure = {tags.nondeterministic_seeded, tags.data_dependent_output, tags.dynamic_output_shape}
    return unsure.isdisjoint(func.tags)


def _reads(marks: Marks) -> Reads:
    parts = [
        frozenset(value for kind, value in marks if kind == mark_kind)
        for mark_kind in ("out", "inner", "param", "buffer")
    ]
    return Reads(*parts)


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None  # sparse and wrapper tensors have none


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensor arguments that an operator writes into, by its schema."""
    if not func._schema.is_mutable:
        return []
    values = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            values += pytree.tree_leaves(value)
    return [t for t in values if isinstance(t, torch.Tensor)]
