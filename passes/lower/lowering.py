"""What a plan says of modules, put into the copy that is built: by kind, in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from schedlang.ir.facets import Kept, Stored
from schedlang.ir.features import Copy, Lowered
from schedlang.ir.primitive import Facet
from schedlang.passes.propagate.casts import cast_modules

if TYPE_CHECKING:
    from schedlang.passes.lower.build import Builder

# Whatever the order of rows: what modules compute; how they lie, which wraps that; casts around it,
# so that what is sent is cast already; then what is kept of all this.
ORDER = (
    Facet.STRUCTURE,
    Facet.PLACEMENT,
    Facet.DTYPE,
    Facet.RECOMPUTE,
    Facet.RESIDENCE,
    Facet.STAGE,
    Facet.STATE,
    Facet.ORDER,
)


def lower(builder: Builder, crossings: Callable[[], None]) -> None:
    """Execute the annotations of a plan, and the rows that lower themselves, facet by facet.

    `crossings` puts in place what the traced model says of activations at the edges of modules.
    """
    annotations: Mapping[Facet, Callable[[], None]] = {
        Facet.PLACEMENT: crossings,
        Facet.DTYPE: partial(cast_modules, builder.plan, builder.module),
        Facet.RESIDENCE: partial(_save, builder),
    }
    rows = builder.plan.rows_with(Lowered)
    phases = {action.row: _phase(row) for action, row in rows}
    for phase in range(len(ORDER) + 1):
        for action, row in rows:
            if phases[action.row] == phase:
                for target in builder.plan.targets(action):
                    row.lower(target, builder)
        if phase < len(ORDER) and ORDER[phase] in annotations:
            annotations[ORDER[phase]]()


def _phase(row: Lowered) -> int:
    return next((place for place, facet in enumerate(ORDER) if row.changes(facet)), len(ORDER))


def _save(builder: Builder) -> None:
    """Let modules keep less of what they save, or keep it elsewhere, in the order of rows."""
    found: Iterable[Kept | Stored] = chain(builder.plan.kept, builder.plan.stores)
    for one in sorted(found, key=lambda one: one.row):
        if isinstance(one, Kept):
            code(one, builder, builder.bits)
        elif one.what == "activations":
            _store(one, builder)


def code(one: Kept, copy: Copy, bits: Mapping[str, Any]) -> None:
    """Let a module keep what it saves in fewer bits; `bits` of single tensors, by modules."""
    from schedlang.runtime.activation_memory.quantized import Coding
    from schedlang.runtime.activation_memory.quantized import code as coded

    table = {each.number: each.bits for each in bits.get(one.fqn, ())}
    coded(copy.at(one.fqn), one.fqn, Coding(one.bits, one.block), bits=table)


def _store(one: Stored, builder: Builder) -> None:
    """Keep what a module saves off the device."""
    from schedlang.runtime.offload.saved_tensors import Store, lodge, offload
    from schedlang.runtime.storage.scratch import Scratch

    if one.tier == "peer":
        lodge(builder.at(one.fqn))
        return
    scratch = builder.shared("scratch", Scratch) if one.tier == "disk" else None
    key = ("offload", one.ahead, one.tier)
    store = builder.shared(key, lambda: Store(one.ahead, scratch=scratch))
    offload(builder.at(one.fqn), store)
