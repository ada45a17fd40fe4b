"""Bugs of plans that choose what is kept: by operator, and while it runs."""

from __future__ import annotations

from typing import Any

from schedlang.runtime.activation_memory import dynamic
from schedlang.runtime.activation_memory.selective import SelectiveModes
from tests.zoo.bug import ALIAS, FREEZE, SLICE, Patch, Site, bug


@bug("C16", "checkpoint", ALIAS, "chosen", row="checkpoint(plan=pareto", dies="ran differently")
def one_store_for_all_microbatches(patch: Patch, site: Site) -> None:
    """What a microbatch keeps of an operator is overwritten by the next one's."""
    store: dict[Any, Any] = {}
    plain = SelectiveModes.__init__

    def init(self: Any, *given: Any) -> None:
        plain(self, *given)
        self.store = store

    patch.setattr(SelectiveModes, "__init__", init)


@bug("C17", "checkpoint", SLICE, "chosen", row="checkpoint(plan=pareto")
def results_of_other_calls(patch: Patch, site: Site) -> None:
    """A second run is given the result that another call of the operator left."""
    plain = SelectiveModes._run_second

    def given(self: Any, *call: Any) -> Any:
        swapped = dict(self.store)
        alike: dict[Any, Any] = {}
        for key, held in self.store.items():
            kind = (key[0], getattr(getattr(held, "saved", None), "shape", None))
            other = alike.setdefault(kind, key)
            swapped[key], swapped[other] = self.store[other], held
        before, self.store = self.store, swapped
        try:
            return plain(self, *call)
        finally:
            self.store = before

    patch.setattr(SelectiveModes, "_run_second", given)


@bug("C18", "checkpoint", SLICE, "budget", row="checkpoint(plan=dtr")
def views_without_their_place(patch: Patch, site: Site) -> None:
    """A part of a tensor that is made again is taken from its beginning."""
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
def made_of_what_was_written_into(patch: Patch, site: Site) -> None:
    """What is made again is made of a tensor that the model has written into since."""
    plain = dynamic.BudgetPool.materialize

    def bring(self: Any, block: Any) -> Any:
        if block.tensor is not None:
            block.version = block.tensor._version
        return plain(self, block)

    patch.setattr(dynamic.BudgetPool, "materialize", bring)
