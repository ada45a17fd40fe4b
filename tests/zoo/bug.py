"""An injected bug: its mutation, its place, and the programs on which it must be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import pytest

from schedlang.ir.primitive import load_all, registry
from tests.zoo.clear_caches import clear_caches

Patch = pytest.MonkeyPatch


class Operator(Enum):
    """The ten kinds of mutation that make a right program wrong."""

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
        """Whether this name, or a module that contains it, is the place of the bug."""
        return not self or name == self or name.startswith(f"{self}.")


Mutation = Callable[[Patch, Site], None]


@dataclass(frozen=True)
class Bug:
    """One entry of the zoo.

    primitive  registered primitive with the bug; "" for code of every program (state, optimizer)
    scenes     programs on each of which the bug must be found
    row        text of the guilty row of the schedule; "" where no row is guilty
    site       default place of injection
    here       why it is injected like this, where this runtime has no such mechanism
    planning   it is injected into a pass that runs before ranks start, or when one rank loads
    late       visible only if communication completes late: hunted on the thread engine
    dies       error text of a run that finds it by failing; another failure is a bad mutation
    mutation   None if its primitive is not written yet
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
        """Whether the bug can exist: its primitive is registered."""
        load_all()
        return not self.primitive or self.primitive in registry()

    @property
    def __name__(self) -> str:  # type: ignore[override]
        return getattr(self.mutation, "__name__", self.id)

    def __call__(self, patch: Patch, site: str | None = None) -> None:
        """Inject the bug until the patch is undone."""
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
    """Return a decorator that registers a mutation; its docstring describes the bug."""

    def enter(mutation: Mutation) -> Bug:
        description = " ".join((mutation.__doc__ or "").split())
        return _register(
            Bug(
                name,
                description,
                credit,
                primitive,
                operator,
                scenes,
                _guilty_row(row, primitive),
                mutation,
                site,
                here,
                planning,
                late,
                dies,
            )
        )

    return enter


def _guilty_row(row: str, primitive: str) -> str:
    """Return the text of the guilty row: by default its primitive; "none": no row is guilty."""
    if row == "none" or not (row or primitive):
        return ""
    return row or f"{primitive}("


def unwritten_bug(
    name: str, primitive: str, operator: Operator, description: str, credit: str = ""
) -> Bug:
    """Register a bug of a primitive that is not written yet."""
    return _register(Bug(name, description, credit, primitive, operator, (), primitive, None))


def _register(new_bug: Bug) -> Bug:
    assert new_bug.id not in ZOO, f"there are two bugs {new_bug.id}"
    ZOO[new_bug.id] = new_bug
    return new_bug


def parse_spec(spec: str) -> tuple[Bug, str | None]:
    """Return the bug and the site of a spec such as `T02` or `T02@blocks.1`."""
    name, separator, site = spec.partition("@")
    return ZOO[name], site if separator else None


@contextmanager
def patched() -> Iterator[Patch]:
    """Yield a patch for mutations; caches are cleared before and after."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            clear_caches()
            yield patch
    finally:
        clear_caches()


@contextmanager
def mutate(spec: str) -> Iterator[Bug]:
    """Inject a bug in this process: `with mutate("T02@blocks.1"): ...`."""
    injected, site = parse_spec(spec)
    with patched() as patch:
        injected(patch, site)
        yield injected
