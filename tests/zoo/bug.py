"""A bug of the zoo as a value: what is wrong, where, and on which programs it must be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import pytest

from schedlang.ir.primitive import load_all, registry
from tests.zoo.remembered import forget

Patch = pytest.MonkeyPatch


class Operator(Enum):
    """The ten ways in which a right program is made wrong."""

    ADJOINT = "swap an adjoint"
    REDUCTION = "skip, repeat or re-order a reduction"
    GROUP = "wrong group or divisor"
    SLICE = "wrong slice, permutation or offset"
    DETACH = "detach"
    ALIAS = "alias instead of a clone"
    ARGUMENT = "drop an argument, or fail to split it"
    FREEZE = "keep a value of the first time"
    CONSTANT = "change a constant"
    SKIP = "skip one object"


ADJOINT, REDUCTION, GROUP, SLICE, DETACH, ALIAS, ARGUMENT, FREEZE, CONSTANT, SKIP = Operator


class Site(str):
    """The name of the module, parameter or stage where a bug is injected; "" is everywhere."""

    def covers(self, name: str) -> bool:
        """Is this name, or what is inside it, the place of the bug?"""
        return not self or name == self or name.startswith(f"{self}.")


Mutation = Callable[[Patch, Site], None]


@dataclass(frozen=True)
class Bug:
    """One entry of the zoo.

    primitive  whose bug it is, as registered; "" for what every program has (state, optimizer)
    scenes     names of the programs on each of which it must be found
    row        what stands in the guilty row of the schedule; "" where no row can be guilty
    site       where it is injected unless told otherwise
    here       why it is injected as it is, where this runtime has no such mechanism
    planning   it is in a pass that runs before there are ranks, or when one rank loads
    late       it shows only where communication completes late: hunted on the engine of threads
    dies       what the run says in which it is found by dying; any other death is a bad mutation
    mutation   None: cannot be written before its primitive is
    """

    id: str
    what: str
    credit: str
    primitive: str
    operator: Operator
    scenes: tuple[str, ...]
    row: str
    mutation: Mutation | None
    site: str = ""
    here: str = ""
    planning: bool = False
    late: bool = False
    dies: str = ""

    @property
    def applies(self) -> bool:
        """Whether there can be such a bug: its primitive is registered."""
        load_all()
        return not self.primitive or self.primitive in registry()

    @property
    def __name__(self) -> str:  # type: ignore[override]
        return getattr(self.mutation, "__name__", self.id)

    def __call__(self, patch: Patch, site: str | None = None) -> None:
        """Inject it for as long as the patch holds."""
        assert self.mutation is not None, f"{self.id} has no mutation yet"
        self.mutation(patch, Site(self.site if site is None else site))


ZOO: dict[str, Bug] = {}


def bug(
    name: str,
    primitive: str,
    operator: Operator,
    *scenes: str,
    row: str = "",
    credit: str = "",
    site: str = "",
    here: str = "",
    planning: bool = False,
    late: bool = False,
    dies: str = "",
) -> Callable[[Mutation], Bug]:
    """Enter a mutation into the zoo; its docstring says what is wrong."""

    def enter(mutation: Mutation) -> Bug:
        what = " ".join((mutation.__doc__ or "").split())
        return _entered(
            Bug(
                name,
                what,
                credit,
                primitive,
                operator,
                scenes,
                _row(row, primitive),
                mutation,
                site,
                here,
                planning,
                late,
                dies,
            )
        )

    return enter


def _row(row: str, primitive: str) -> str:
    """What the guilty row holds: its primitive unless told otherwise; "none": no row is guilty."""
    if row == "none" or not (row or primitive):
        return ""
    return row or f"{primitive}("


def absent(name: str, primitive: str, operator: Operator, what: str, credit: str = "") -> Bug:
    """Enter a bug of a primitive that is not written yet."""
    return _entered(Bug(name, what, credit, primitive, operator, (), primitive, None))


def _entered(made: Bug) -> Bug:
    assert made.id not in ZOO, f"there are two bugs {made.id}"
    ZOO[made.id] = made
    return made


def found(spec: str) -> tuple[Bug, str | None]:
    """The bug of a name such as `T02` or `T02@blocks.1`, and the site named."""
    name, at, site = spec.partition("@")
    return ZOO[name], site if at else None


@contextmanager
def patched() -> Iterator[Patch]:
    """A place for mutations, into and out of which nothing remembered is carried."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            forget()
            yield patch
    finally:
        forget()


@contextmanager
def mutate(spec: str) -> Iterator[Bug]:
    """Inject a bug in this process: `with mutate("T02@blocks.1"): ...`."""
    made, site = found(spec)
    with patched() as patch:
        made(patch, site)
        yield made
