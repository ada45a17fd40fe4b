"""A simulated step of one rank, unit by unit: work, saved bytes and peak of each layer of a model.

The planner's profiles use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedlang.ir import pytree
from schedlang.ir.memory import STATE
from schedlang.passes.simulate.one_rank_step import SimulatedStep, build_one_rank
from schedlang.pipeline.timeline.table import Kind

if TYPE_CHECKING:
    from torch import nn

    from schedlang.runtime.storage.footprint import Footprint, SegmentUse, SegmentWork

# -- results ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitProfile:
    """One unit in one microbatch: from its call to the next unit's call, and its backward.

    saved         bytes that its forward saves for its backward, its output included
    peak          the most bytes of forward or backward besides those saved until then
    new_inputs    bytes of inputs that get a gradient and that only the previous unit has made
    freed_inputs  those of `new_inputs` that nothing holds once the unit has run
    inputs        `new_inputs`, and inputs that earlier units have made
    outputs       bytes of outputs of its modules with parameters
    modules       modules outside of units that are first called in this unit, in call order
    """

    name: str
    forward: SegmentWork
    backward: SegmentWork
    saved: int
    peak: int
    new_inputs: int
    freed_inputs: int
    inputs: int
    outputs: int
    modules: tuple[str, ...]


FORWARD, BACKWARD = "forward", "backward"
MICRO = 2  # microbatches: the first, and one with existing gradients, which is reported
HEAD, TAIL = "", "after"


def profile_units(step: SimulatedStep, units: Sequence[str]) -> tuple[UnitProfile, ...]:
    """Simulate a step of the first rank, with one stage and MICRO microbatches, unit by unit.

    Modules called before the first of `units` are a unit, and so are modules after the last one.
    Raises what the model raises where it cannot be simulated, LookupError where a unit is not
    called exactly once in a forward.
    """
    from schedlang.passes.simulate.simulated_ranks import record_state
    from schedlang.runtime.adapters.fully_shard import on_meta_device
    from schedlang.runtime.dry_run import dry_run
    from schedlang.runtime.storage.footprint import Footprint

    footprint = Footprint("meta", True)
    with build_one_rank(step, 0, None, footprint) as (program, _):
        record_state(program, footprint, ())
        sliced = [unit for stage in program.assembly.sliced.values() for unit in stage.units]
        calls = _Calls(footprint, tuple(units))
        with on_meta_device(sliced), calls.watching(program.assembly.module):
            dry_run(program, step.prepared.staged.cut, step.batch, footprint, step.splits)
    return _seen(footprint, calls)


def _seen(footprint: Footprint, calls: _Calls) -> tuple[UnitProfile, ...]:
    """Return each unit, in call order, in the second microbatch."""
    if len(calls.order) != len(set(calls.order)) or len(calls.order) != len(calls.units):
        raise LookupError("units are not called once each, one after the other")
    segments = footprint.summarize(())
    names = (HEAD, *calls.order, *([TAIL] if calls.order else []))
    profiles: list[UnitProfile] = []
    bytes_before = {HEAD: _level(segments, (1, FORWARD, HEAD), start=True)}
    for name, next_name in zip(names, (*names[1:], None)):
        forwards = [segment for segment in segments if segment.operation == (1, FORWARD, name)]
        backwards = [segment for segment in segments if segment.operation == (1, BACKWARD, name)]
        end = _passing(forwards[-1])
        peak = max([0, *(segment.peak_transient - end for segment in (*forwards, *backwards))])
        profiles.append(
            UnitProfile(
                name,
                _add_work(forwards),
                _add_work(backwards),
                end - bytes_before[name],
                peak,
                *calls.given.get(name, UnitInputs()).sizes,
                calls.outputs[name],
                tuple(m for m, unit in calls.modules.items() if unit == name),
            )
        )
        if next_name is not None:
            bytes_before[next_name] = end
    return tuple(profiles)


def _passing(segment: SegmentUse) -> int:
    """Return the bytes besides state at the end."""
    return int(segment.end[len(STATE) :].sum())


def _level(segments: Sequence[SegmentUse], operation: object, *, start: bool) -> int:
    index = next(k for k, segment in enumerate(segments) if segment.operation == operation)
    return _passing(segments[index - start])


def _add_work(segments: Sequence[SegmentUse]) -> SegmentWork:
    """Add the work of several stretches."""
    from schedlang.runtime.storage.footprint import SegmentWork

    work = SegmentWork()
    for segment in segments:
        work.operators.update(segment.work.operators)
        work.messages.update(segment.work.messages)
    return work


# -- marks -----------------------------------------------------------------------------------------


@dataclass
class _Calls:
    """Marks in a footprint which unit runs; records the order of calls, and inputs of units.

    order    of the first microbatch; later microbatches find the last unit by it
    given    of each unit
    outputs  of each unit, bytes
    modules  outside of units -> the unit in which they are first called
    """

    footprint: Footprint
    units: tuple[str, ...]
    order: list[str] = field(default_factory=list)
    given: dict[str, UnitInputs] = field(default_factory=dict)
    outputs: Counter[str] = field(default_factory=Counter)
    modules: dict[str, str] = field(default_factory=dict)
    micro: int = -1
    now: str = HEAD

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Hook the calls of a model's modules, and replace the marks of its footprint."""
        begin_segment = self.footprint.begin_segment

        def mark(operation: Any) -> None:
            kind = getattr(operation, "kind", None)
            if kind is Kind.F:
                self.micro, self.now = self.micro + 1, HEAD
                operation = (self.micro, FORWARD, HEAD)
            elif kind is Kind.B:
                operation = (self.micro, BACKWARD, self.now)
            begin_segment(operation)

        hooks = [h for name, module in model.named_modules() for h in self._hooks(name, module)]
        vars(self.footprint)["begin_segment"] = mark
        try:
            yield
        finally:
            del vars(self.footprint)["begin_segment"]
            for hook in hooks:
                hook.remove()

    def _hooks(self, name: str, module: nn.Module) -> Iterator[Any]:
        if module._parameters:
            yield module.register_forward_hook(lambda m, args, out: self._gave(out))
        if name in self.units:
            begin = lambda m, args, kwargs: self._begins(name, args, kwargs)  # noqa: E731
            yield module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
            yield module.register_forward_hook(lambda m, args, out: self._ended(name, out))
        elif not any(name.startswith(f"{unit}.") for unit in self.units):
            yield module.register_forward_pre_hook(lambda m, args: self._runs(name))

    def _gave(self, out: Any) -> None:
        if self.micro == 0:
            tensors = [t for t in pytree.tree_leaves(out) if getattr(t, "requires_grad", False)]
            self.outputs[self.now] += sum(t.numel() * t.element_size() for t in tensors)

    def _runs(self, name: str) -> None:
        self.modules.setdefault(name, self.now)

    def _begins(self, name: str, args: Any, kwargs: Any) -> None:
        if self.micro == 0:
            self.order.append(name)
        self._enter(name, (args, kwargs))

    def _ended(self, name: str, out: Any) -> None:
        last = self.micro > 0 and name == self.order[-1]
        if last or (self.micro == 0 and len(self.order) == len(self.units)):
            self._enter(TAIL, out)

    def _enter(self, name: str, value: Any) -> None:
        """Begin the next unit, with these arguments.

        The previous unit's backward begins once these arguments have gradients.
        """
        previous, self.now = self.now, name
        tensors = [t for t in pytree.tree_leaves(value) if getattr(t, "grad_fn", None) is not None]
        previous_inputs = self.given.get(previous, UnitInputs())
        new = [t for t in tensors if id(t.untyped_storage()) not in previous_inputs.all]
        sizes = {id(t.untyped_storage()): t.numel() * t.element_size() for t in tensors}
        self.given[name] = UnitInputs(sizes, {id(t.untyped_storage()) for t in new})
        self.footprint.begin_segment((self.micro, FORWARD, name))
        if new:
            micro = self.micro
            new[0].register_hook(
                lambda _: self.footprint.begin_segment((micro, BACKWARD, previous))
            )
        previous_inputs.alive = self.footprint.alive_of(previous_inputs.made)


@dataclass
class UnitInputs:
    """Inputs of a unit that have a gradient, by storage.

    all    bytes of each
    made   those that only the previous unit has made
    alive  those of `made` that are alive once the unit has run
    """

    all: dict[int, int] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)
    alive: set[int] = field(default_factory=set)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes: of `made`, of those no longer alive, of all."""
        made, freed = (sum(self.all[key] for key in keys) for keys in (self.made, self.freed))
        return made, freed, sum(self.all.values())

    @property
    def freed(self) -> set[int]:
        """Storages that nothing holds."""
        return self.made - self.alive
