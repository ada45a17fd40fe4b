"""A program that is built at its first batch, which gives the shapes that building needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from schedlang.diagnostics.diagnostic import Label, Refusal, refuse_methods_at_caller
from schedlang.diagnostics.source import python_span
from schedlang.diagnostics.tables import html_table
from schedlang.runtime.batch import Batch, check_batch
from schedlang.runtime.comm.collectives import RankGroups
from schedlang.runtime.program import Program

# from a batch, and whether it has only this rank's rows
BuildFunction = Callable[[Batch, bool], Program]
_OWN = ("_make", "_program", "_ranks", "_row_axes")
# what is needed before the first step, and why
_NEEDS = {"optimizer": "an LR scheduler and `load` need the optimizer, which needs the parameters"}


@refuse_methods_at_caller
class UnbuiltProgram:
    """A `Program` to be built by the first `train_step` or `eval_step`; then it acts as the
    program.

    All ranks run their first step together, so they build together. This rank's place in the mesh
    is known before; every other attribute of a program is refused until then (S616).
    """

    _make: BuildFunction
    _program: Program | None

    def __init__(self, make: BuildFunction, ranks: RankGroups, row_axes: tuple[str, ...]) -> None:
        self._make, self._program, self._ranks, self._row_axes = make, None, ranks, row_axes

    @property
    def dp_size(self) -> int:
        """See `Program.dp_size`: a sampler needs it before there is a batch."""
        return self._ranks.mesh.size(self._row_axes)

    @property
    def dp_rank(self) -> int:
        """See `Program.dp_rank`."""
        return self._ranks.mesh.index(self._ranks.rank, self._row_axes)

    def rank_of(self, axis: str) -> int:
        """See `Program.rank_of`."""
        return self._ranks.coordinate(axis)

    def train_step(self, batch: Batch, *, local: bool = False) -> Tensor:
        """See `Program.train_step`."""
        return self._built(batch, local).train_step(batch, local=local)

    def eval_step(self, batch: Batch, *, local: bool = False) -> Any:
        """See `Program.eval_step`."""
        return self._built(batch, local).eval_step(batch, local=local)

    def _built(self, batch: Batch, local: bool) -> Program:
        if self._program is None:
            check_batch(batch)
            self._program = self._make(batch, local)
        return self._program

    def __getattr__(self, name: str) -> Any:
        if self._program is None:
            self._refuse(name)
        return getattr(self._program, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
            return
        if self._program is None:
            self._refuse(name)
        setattr(self._program, name, value)

    def __dir__(self) -> list[str]:
        return [*dir(Program), *getattr(Program, "__dataclass_fields__", ())]

    def __repr__(self) -> str:
        return (
            "<Program to be built at its first batch: give one to build it now, "
            "`sch.build(batch=batch, ...)`>"
            if self._program is None
            else repr(self._program)
        )

    def _repr_html_(self) -> str:
        """See `Program._repr_html_`; before the first batch only the text."""
        if self._program is None:
            return html_table(repr(self), ())
        return self._program._repr_html_()

    def _refuse(self, name: str) -> None:
        """Raise AttributeError if no program has the attribute, else a refusal that says how to get
        it."""
        if name.startswith("_") or name not in dir(self):
            raise AttributeError(f"a program has no `{name}`")
        raise Refusal.of(
            "S616",
            f"no `{name}` yet: the program is built at its first batch",
            Label(python_span()),
            notes=(
                "shapes are known from a batch, and `build` got none",
                *([_NEEDS[name]] if name in _NEEDS else []),
            ),
            helps=(
                "give a batch (only its shapes are used): `sch.build(batch=batch, ...)`",
                f"or use `{name}` after the first `train_step` or `eval_step`",
            ),
        )
