"""Injected bugs of selective checkpointing: by operator plan, and by a memory budget at runtime."""

from __future__ import annotations

from typing import Any

from schedlang.runtime.activation_memory import dynamic
from schedlang.runtime.activation_memory.selective import SelectiveModes
from tests.zoo.bug import ALIAS, FREEZE, SLICE, Patch, Site, bug


@bug("C16", "checkpoint", ALIAS, "chosen", row="checkpoint(plan=pareto", dies="ran differently")
def one_store_for_all_microbatches(patch: Patch, site: Site) -> None:
    """The kept result of an operator is overwritten by the next microbatch."""
    store: dict[Any, Any] = {}
    original = SelectiveModes.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.store = store

    patch.setattr(SelectiveModes, "__init__", init)


@bug("C17", "checkpoint", SLICE, "chosen", row="checkpoint(plan=pareto")
def results_of_other_calls(patch: Patch, site: Site) -> None:
    """The recomputation gets the result of another call of the same operator."""
    original = SelectiveModes._run_second

    def given(self: Any, *call: Any) -> Any:
        swapped = dict(self.store)
        same_kind: dict[Any, Any] = {}
        for key, value in self.store.items():
            kind = (key[0], getattr(getattr(value, "saved", None), "shape", None))
            other_key = same_kind.setdefault(kind, key)
            swapped[key], swapped[other_key] = self.store[other_key], value
        old_store, self.store = self.store, swapped
        try:
            return original(self, *call)
        finally:
            self.store = old_store

    patch.setattr(SelectiveModes, "_run_second", given)


@bug("C18", "checkpoint", SLICE, "budget", row="checkpoint(plan=dtr")
def views_without_offset(patch: Patch, site: Site) -> None:
    """A view of a recomputed tensor is taken from offset 0."""
    patch.setattr(
        dynamic.TensorRef, "view_of", lambda self, base: base.as_strided(self.shape, self.stride, 0)
    )


@bug(
    "C19",
    "checkpoint",
    FREEZE,
    "budget, written after",
    row="checkpoint(plan=dtr",
    planning=True,
    here="torch's count of writes would tell; nobody looks at it",
)
def recomputed_from_overwritten(patch: Patch, site: Site) -> None:
    """A recomputation reads a tensor that the model has changed in place since."""
    original = dynamic.BudgetPool.materialize

    def bring(self: Any, block: Any) -> Any:
        if block.tensor is not None:
            block.version = block.tensor._version
        return original(self, block)

    patch.setattr(dynamic.BudgetPool, "materialize", bring)
