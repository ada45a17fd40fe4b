"""The batch of a step and the optimizer's settings, compared among ranks before the step runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from schedlang.diagnostic import Diagnostic, Refusal
from schedlang.runtime.assembly import Assembly
from schedlang.runtime.collectives import comm
from schedlang.runtime.collectives.agreement import Item, differences
from schedlang.runtime.collectives.checksum import checksum
from schedlang.runtime.parts import Batch

_HELPS = (
    "pass the same full batch on every rank: use the same seed for samplers and shuffling",
    "or, if each rank has its own rows, write `train_step(batch, local=True)`",
)


@dataclass(frozen=True)
class Comparing:
    """Raises the same Refusal (S652) on all ranks where their steps would differ.

    `settings` gives the optimizer's, which a scheduler may have changed.
    """

    settings: Callable[[], list[Item]]

    def check(self, a: Assembly, batch: Batch, local: bool, step: int) -> None:
        """One small collective, of digests; under `local` ranks of the same rows are compared."""
        kinds = Item("batch", {name: _kind(value) for name, value in batch.items()}, helps=_HELPS)
        values = Item(
            "batch", {name: _value(value) for name, value in batch.items()}, shown=False,
            helps=_HELPS,
        )  # fmt: skip
        (settings,) = self.settings()
        shapes = {} if local else {name: _shape(value) for name, value in batch.items()}
        rows = a.ranks.mesh.index(a.ranks.rank, a.replicas) if local else 0
        parts = [dict(kinds.parts), shapes, dict(values.parts), dict(settings.parts)]
        everyone = comm.gathered((rows, parts))
        items = (kinds, Item("batch", shapes, helps=_HELPS), values, settings)
        for place, item in enumerate(items):
            for ranks in _compared(everyone, apart=item is values):
                _check(item, {rank: everyone[rank][1][place] for rank in ranks}, step)


def _compared(everyone: list[tuple[int, Any]], apart: bool) -> list[list[int]]:
    """All ranks, or those that were given the same rows."""
    rows: dict[int, list[int]] = {}
    for rank, (own, _) in enumerate(everyone):
        rows.setdefault(own if apart else 0, []).append(rank)
    return list(rows.values())


def _check(item: Item, said: Mapping[int, Mapping[str, str]], step: int) -> None:
    title, notes = differences(item, said)
    if notes:
        raise Refusal(
            Diagnostic("S652", f"{title} in step {step}", notes=tuple(notes), helps=item.helps)
        )


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} in {value.dim()} dims"


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else ""


def _value(value: object) -> str:
    if isinstance(value, Tensor):
        return checksum(value)
    return repr(value) if isinstance(value, bool | int | float | str) else ""
