"""Equal units of a model: a first forward shows them; in later ones two of each kind run.

The first forward runs in full, and records each unit.  Units are equal if their modules, the rows
of the schedule at these, and their records are equal.  Later forwards note for each imitated unit
what the second unit of its kind has left, and run again in full where units turn out to differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedlang.ir.module_attributes import module_kind, modules_below
from schedlang.ir.plan import Plan
from schedlang.ir.sharing import parents_of

if TYPE_CHECKING:
    from torch import nn

    from schedlang.passes.propagate.propagate import Traced
    from schedlang.runtime.propagation.trace import Call, ModuleStack, Trace
    from schedlang.runtime.tracing.meta_runs import MetaMode
    from schedlang.runtime.tracing.unit_records import UnitRecorder

MIN_EQUAL = 6  # units of a kind: to record fewer takes as long as to run them again
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# -- which units are equal -------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedUnits:
    """The units of a model that may be equal, and the recorder of a forward.

    `kinds`: unit -> a key that is equal where modules and rows are.
    """

    kinds: Mapping[str, object]
    recorder: UnitRecorder

    def recording(self, values: MetaMode, trace: Trace) -> AbstractContextManager[None]:
        """Context in which units are recorded, under two modes of a forward."""
        return self.recorder.recording(values, trace)

    def equal_units(
        self, results: Any, frames: Mapping[tuple[str, int], Sequence[Call]], stack: ModuleStack
    ) -> dict[str, int]:
        """Return the equal units of the recorded forward: unit -> the number of its kind.

        `results` are those of the forward, `frames` the recorded calls of its modules.
        """
        calls: dict[str, list[object]] = {name: [] for name in self.kinds}
        for (fqn, turn), recorded in frames.items():
            if (unit := _unit_around(fqn, calls)) is not None:
                calls[unit].append((fqn[len(unit) :], turn, tuple(recorded)))
        for fqn, count in stack.turns.items():
            if (unit := _unit_around(fqn, calls)) is not None:
                calls[unit].append((fqn[len(unit) :], count))
        # modules of a unit that are called while it does not run
        outside = {_unit_around(around, calls) for _, around in stack.outside}
        keys = {
            name: (self.kinds[name], record, tuple(calls[name]))
            for name, record in self.recorder.records(results).items()
            if name not in outside
        }
        counts = Counter(keys.values())
        numbers: dict[object, int] = {}
        return {
            name: numbers.setdefault(key, len(numbers))
            for name, key in keys.items()
            if counts[key] >= MIN_EQUAL
        }


def units_to_record(plan: Plan, model: nn.Module) -> RecordedUnits | None:
    """Return the elements of module lists that may be equal units of a copy of the plan's model.

    They have equal modules with equal rows, no hooks, and no tied parameters; None if there are
    none.
    """
    from torch.nn import ModuleList

    from schedlang.runtime.tracing.unit_records import UnitRecorder

    sites, rows = plan.model.sites, plan.rows_by_module()
    tied = {name for names in plan.model.ties for name in names}
    kinds: dict[str, object] = {}
    for path, module in plan.model.model.named_modules():
        if not isinstance(module, ModuleList) or len(module) < MIN_EQUAL:
            continue
        if _unit_around(path, kinds) is not None:
            continue
        for name in (f"{path}.{child}" if path else child for child in module._modules):
            if name in sites and not _has_hooks(plan.model.model.get_submodule(name)):
                of_rows = tuple(tuple(rows.get(n, ())) for n in modules_below(plan.model, name))
                kinds[name] = module_kind(plan.model, name), of_rows
    counts = Counter(kinds.values())
    tied_units = {_unit_around(name, kinds) for name in tied}
    kinds = {
        name: kind
        for name, kind in kinds.items()
        if counts[kind] >= MIN_EQUAL and name not in tied_units
    }
    return RecordedUnits(kinds, UnitRecorder(model, tuple(kinds))) if kinds else None


def _unit_around(fqn: str, units: Mapping[str, object]) -> str | None:
    """Return the unit that is, or holds, a module or a parameter; None if there is none."""
    return next((name for name in (fqn, *parents_of(fqn)) if name in units), None)


def _has_hooks(unit: nn.Module) -> bool:
    return any(getattr(module, name, None) for module in unit.modules() for name in HOOKS)


def equally_sharded_units(traced: Traced) -> dict[str, object]:
    """Return the equal units (unit -> its kind) whose modules are sharded equally as well."""
    from schedlang.runtime.propagation.imitated_units import labelled

    units = traced.equal_units
    layouts: dict[str, list[object]] = {name: [] for name in units}
    for fqn, edges in traced.edges.items() if units else ():
        if (unit := _unit_around(fqn, units)) is not None:
            path, is_sharing = fqn[len(unit) :], fqn in traced.sharing_modules
            plain = tuple(labelled(edge, "") for edge in edges)
            layouts[unit].append((path, plain, traced.kinds[fqn], is_sharing))
    for fqn, attribute, value in traced.local_numbers if units else ():
        if (unit := _unit_around(fqn, units)) is not None:
            layouts[unit].append((fqn[len(unit) :], attribute, value))
    for fqn in (*traced.counted_sizes, *traced.narrowed_arguments, *traced.uncalled):
        if units and (unit := _unit_around(fqn, units)) is not None:
            layouts[unit].append(unit)  # equal to no other
    return {name: (kind, tuple(layouts[name])) for name, kind in units.items()}
