"""Protocols of single features: a primitive derives from them, and their passes look for them.

* Lowering: rows that change modules of the copy that is built.
* Kernel injection.
* Recomputation.
* Placement and state.
* How a row is read, selects and is checked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from schedlang.ir.primitive import Facet, Primitive, refuse

if TYPE_CHECKING:
    from schedlang.diagnostics.diagnostic import Facts
    from schedlang.ir.model import Site
    from schedlang.ir.plan import Plan
    from schedlang.language.patterns import Pattern


class Copy(Protocol):
    """The local copy of a model that is being built: on a rank, or on the meta device."""

    @property
    def plan(self) -> Plan:
        """The plan that is built."""

    @property
    def module(self) -> Any:
        """The copy."""

    @property
    def chains(self) -> Mapping[tuple[str, ...], Any]:
        """The choices for the sites of each row with a limit of memory."""

    def at(self, fqn: str) -> Any:
        """The module of this name in the copy."""


class Lowered(Primitive, feature=True):
    """A row that changes modules itself when a program is built, after and before others as the
    facets say that it writes (`passes/lower/build.py`)."""

    @abstractmethod
    def lower(self, site: Any, copy: Copy) -> None:
        """Change the modules of `copy` that stand at `site`, in place; torch is imported inside."""


class Rewrite(Lowered, feature=True):
    """A row that lets each of its modules compute in another way, from the module alone."""

    reads = frozenset({Facet.STRUCTURE})
    writes = frozenset({Facet.STRUCTURE})

    @abstractmethod
    def rewrite(self, module: Any) -> None:
        """Change one module of the copy that is being built, in place."""

    def lower(self, site: Any, copy: Copy) -> None:
        """Rewrite the module at `site`."""
        self.rewrite(copy.at(site.fqn))


class Injected(Lowered, feature=True):
    """A row that puts a kernel in the place of a module's computation, or of a part of it."""

    @property
    def part(self) -> str:
        """The part that is replaced, so that another row may replace another; "": all of it."""
        return ""

    @property
    def waits(self) -> bool:
        """Whether the module's parameters are needed after its forward."""
        return False


class Renewing(Primitive, feature=True):
    """A row whose sites are other modules afterwards, for the rows below it."""


@dataclass(frozen=True)
class Trial:
    """One comparison of a trial: its error against float64, and how large it may be.

    `ran` is False where the thing itself could not be run here: then it is not proven.
    """

    name: str
    error: float
    allowed: float
    ok: bool
    ran: bool = True


class Tried(Primitive, feature=True):
    """A row with something that float64 cannot show, and that is run by itself for a proof.

    `apart` says how it runs there and not within a program under proof ("compiled").
    """

    apart: ClassVar[str] = ""

    @abstractmethod
    def trial(self, site: Any, plan: Plan, calls: Mapping[str, tuple[Any, Any]]) -> Sequence[Trial]:
        """Run it, and compare.

        `calls` are arguments and keyword arguments of real calls of the module, the first under
        "", the others, to be made after it, by how they differ: in values and masks, in shape.
        """


@dataclass(frozen=True)
class Count:
    """The cost of one call on a device: kernels of its forward and of its backward, and the bytes
    that both read and write."""

    forward: int
    backward: int
    bytes: int

    @property
    def kernels(self) -> int:
        """The kernels of forward and backward together."""
        return self.forward + self.backward

    def __add__(self, other: Count) -> Count:
        return Count(
            self.forward + other.forward, self.backward + other.backward, self.bytes + other.bytes
        )


@dataclass(frozen=True)
class Gain:
    """The kernels and bytes of a module before and after a row, and the text of kernels made for
    it."""

    before: Count
    after: Count
    sources: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        """Whether there are fewer kernels, or fewer bytes."""
        return self.after.kernels < self.before.kernels or self.after.bytes < self.before.bytes


class Gaining(Primitive, feature=True):
    """A row that is there for fewer kernels, or fewer bytes."""

    @abstractmethod
    def gain(self, site: Any, plan: Plan, call: tuple[Any, Any]) -> Gain | None:
        """Kernels and bytes before and after, counted on the meta device for arguments that lie
        there."""


class Budgeted(ABC):
    """A plan by which modules keep at most so many bytes on a rank for their backwards.

    cuts   stages begin where what the plan repeats leaves them in balance
    keeps  it keeps by itself what a backward needs, so that nothing else can move it
    moves  it says by itself what of its modules is moved to the host, and when
    """

    memory: int
    cuts: ClassVar[bool] = False
    keeps: ClassVar[bool] = False
    moves: ClassVar[bool] = False

    @abstractmethod
    def fit(self, chain: Sequence[Any], memory: int, play: Callable[[Any], Any]) -> Any:
        """Choose what is done with modules of these costs, in `memory` bytes.

        `play` does it with a model without values, which it gives back after a backward.
        """

    @abstractmethod
    def lower(self, chains: Sequence[tuple[tuple[str, ...], Any]], copy: Copy) -> None:
        """Do with modules of the copy, by chains, what `fit` found for them."""

    @abstractmethod
    def said(self, found: Any) -> str:
        """Say in words what `fit` found."""


class Recomputing(Lowered, feature=True):
    """A row that lets modules run again in backward (`remat`)."""

    writes = frozenset({Facet.RECOMPUTE})

    def together(self, sites: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The sites in the groups that are computed as one, which no cut divides."""
        return [(site,) for site in sites]

    @property
    def budget(self) -> Budgeted | None:
        """The plan that fits its modules into memory; None: they keep as much as they do."""
        return None

    def reruns(self, sites: tuple[str, ...], found: Sequence[Any]) -> Sequence[Any] | None:
        """Return the regions of the sites that run again in backward (`remat.Again`).

        `found` is what the budget found for the chains of the sites. None: nothing runs again, or
        only the run itself decides it.
        """
        return None


class SplittingHeads(Primitive, feature=True):
    """A row that splits a dim evenly, and can be told of how many heads it consists."""

    @property
    @abstractmethod
    def settles_heads(self) -> bool:
        """Whether it says what becomes of heads that the ranks do not divide."""

    @abstractmethod
    def remedies(
        self, site: str, heads: int, ranks: int, blocks: bool
    ) -> tuple[Sequence[str], Facts]:
        """Calls that are legal for `heads` heads at `site`, as helps; the arguments that the first
        of them gives the row, by name.  `blocks`: they may be q, k and v."""


class Slicing(Primitive, feature=True):
    """A row by which ranks keep slices of the optimizer's state."""

    @property
    @abstractmethod
    def slices(self) -> bool:
        """Whether something is sliced."""

    @property
    @abstractmethod
    def each_microbatch(self) -> bool:
        """Whether gradients are reduced after each microbatch."""

    @abstractmethod
    def unsliced(self) -> Primitive:
        """The same row, by which ranks keep all of the state."""


class Checking(Primitive, feature=True):
    """A row that changes nothing and asks for more of a proof (`Check`)."""


class Located(Primitive, feature=True):
    """A row that names files beside its schedule."""

    @abstractmethod
    def located(self, folder: Path) -> Primitive:
        """The same call with the files read; paths start at the schedule's folder."""


class Resolved(Primitive, feature=True):
    """A row that names something that is known without a model."""

    @abstractmethod
    def resolved(self, patterns: Mapping[str, Pattern]) -> Primitive:
        """The same call with what it names looked up, its pattern filled in."""


class Grouping(Primitive, feature=True):
    """A row that takes some of its modules at a time."""

    @abstractmethod
    def taken(self, sites: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The sites in the groups that it takes at a time."""


def check_called(row: Primitive, site: Site, plan: Plan) -> None:
    """Refuse (S401) a row that acts on the calls of a module, at one that has no forward.

    Lists and other holders of modules are never called: the row would do nothing, silently.
    """
    if site.has_forward:
        return
    inner, below = f"{site}", [site]
    while below and not any(one.has_forward for one in below):
        inner += ".*"
        below = [plan.model.sites[f"{one}.{child}"] for one in below for child in one.children]
    name = type(row).__name__
    refuse(
        "S401",
        f"`{site}` is a `{site.class_name}`: `{name}` would do nothing",
        "it has no forward, and is never called",
        helps=(f"select the modules that it holds: `{inner}  {row}`",) if below else (),
    )


class Settled(Primitive, feature=True):
    """A row of which some mistakes show only when all rows stand and the model is traced."""

    @abstractmethod
    def settled(self, site: Any, plan: Plan, traced: Any) -> None:
        """Refuse them."""


class Uniform(Primitive, feature=True):
    """A row that is checked once for all modules that are equal.

    It promises that `check` and `transform` see nothing of a module but its Python class, its
    parameters and buffers (not their values), the plain attributes that `looks_at` names, what it
    holds likewise, and what rows do to it, around it and inside of it.
    """

    looks_at: ClassVar[tuple[str, ...]] = ()
