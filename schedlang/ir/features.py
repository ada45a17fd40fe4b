"""Features: classes that a primitive derives from in place of `Primitive`, and that passes look
for.

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
    """The local copy of a model under construction: on a rank, or on the meta device."""

    @property
    def plan(self) -> Plan:
        """The plan that is built."""

    @property
    def module(self) -> Any:
        """The copy."""

    @property
    def chains(self) -> Mapping[tuple[str, ...], Any]:
        """The choices for the chains of sites of each row with a memory limit, by the sites of a
        chain."""

    def at(self, fqn: str) -> Any:
        """Return the module of this name in the copy."""


class Lowered(Primitive, feature=True):
    """A row that changes modules itself when a program is built.

    `passes/lower/build.py` orders these rows by the facets that they write.
    """

    @abstractmethod
    def lower(self, site: Any, copy: Copy) -> None:
        """Change the modules of `copy` that stand at `site`, in place; torch is imported inside."""


class Rewrite(Lowered, feature=True):
    """A row that replaces the computation of each of its modules, without knowledge of other
    modules."""

    reads = frozenset({Facet.STRUCTURE})
    writes = frozenset({Facet.STRUCTURE})

    @abstractmethod
    def rewrite(self, module: Any) -> None:
        """Change one module of the copy that is being built, in place."""

    def lower(self, site: Any, copy: Copy) -> None:
        """Rewrite the module at `site`."""
        self.rewrite(copy.at(site.fqn))


class Injected(Lowered, feature=True):
    """A row that replaces the computation of a module, or of a part of it, by a kernel."""

    @property
    def part(self) -> str:
        """The name of the part that is replaced, so that another row may replace another; "":
        everything."""
        return ""

    @property
    def waits(self) -> bool:
        """Whether the module's parameters are needed after its forward."""
        return False


class Renewing(Primitive, feature=True):
    """A row that replaces the modules at its sites: rows below act on the new ones."""


@dataclass(frozen=True)
class Trial:
    """One comparison of a trial: its error against float64, and the allowed error.

    `ran` is False where the kernel itself could not run here: it is then not proven.
    """

    name: str
    error: float
    allowed: float
    ok: bool
    ran: bool = True


class Tried(Primitive, feature=True):
    """A row whose effect float64 cannot show, and that a proof therefore runs in isolation.

    `apart` says how it runs in isolation and not within a program under proof ("compiled").
    """

    apart: ClassVar[str] = ""

    @abstractmethod
    def trial(self, site: Any, plan: Plan, calls: Mapping[str, tuple[Any, Any]]) -> Sequence[Trial]:
        """Run the row's computation, and compare.

        `calls` are positional and keyword arguments of real calls of the module: the first under
        "", the others, to be run after it, by how they differ: in values and masks, or in shape.
        """


@dataclass(frozen=True)
class Count:
    """The cost of one call on a device: kernels of forward and backward, and bytes read and
    written."""

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
    """The kernels and bytes of a module before and after a row, and the sources of generated
    kernels."""

    before: Count
    after: Count
    sources: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        """Whether there are fewer kernels or fewer bytes."""
        return self.after.kernels < self.before.kernels or self.after.bytes < self.before.bytes


class Gaining(Primitive, feature=True):
    """A row whose purpose is fewer kernels or fewer bytes."""

    @abstractmethod
    def gain(self, site: Any, plan: Plan, call: tuple[Any, Any]) -> Gain | None:
        """Return kernels and bytes before and after, counted on the meta device with meta
        arguments."""


class Budgeted(ABC):
    """A strategy that limits the bytes that modules keep on a rank for their backward.

    cuts   stages are cut so that the recomputation of this strategy is balanced
    keeps  the strategy saves activations itself, so that no other row can move them
    moves  the strategy decides itself what is offloaded to the host, and when
    """

    memory: int
    cuts: ClassVar[bool] = False
    keeps: ClassVar[bool] = False
    moves: ClassVar[bool] = False

    @abstractmethod
    def fit(self, chain: Sequence[Any], memory: int, simulate: Callable[[Any], Any]) -> Any:
        """Choose how to run modules of these costs in `memory` bytes.

        `simulate` runs the choice with a model on the meta device, and returns that model after a
        backward.
        """

    @abstractmethod
    def lower(self, chains: Sequence[tuple[tuple[str, ...], Any]], copy: Copy) -> None:
        """Apply the choices of `fit` to modules of the copy, chain by chain."""

    @abstractmethod
    def describe(self, solution: Any) -> str:
        """Describe in words what `fit` chose."""


class Recomputing(Lowered, feature=True):
    """A row by which modules run again in backward (`remat`)."""

    writes = frozenset({Facet.RECOMPUTE})

    def inseparable_groups(self, sites: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return the sites in groups that are recomputed as one; no stage cut divides a group."""
        return [(site,) for site in sites]

    @property
    def budget(self) -> Budgeted | None:
        """The strategy that fits the modules into memory; None: no limit."""
        return None

    def reruns(self, sites: tuple[str, ...], solutions: Sequence[Any]) -> Sequence[Any] | None:
        """Return the regions of the sites that run again in backward (`remat.RecomputedRegion`).

        `solutions`: the choices of the budget for the chains of the sites. None: nothing runs
        again, or only the run itself decides it.
        """
        return None


class SplittingHeads(Primitive, feature=True):
    """A row that splits a dim evenly, and can be given the number of heads in the dim."""

    @property
    @abstractmethod
    def settles_heads(self) -> bool:
        """Whether the row says how to treat heads that the ranks do not divide."""

    @abstractmethod
    def remedies(
        self, site: str, heads: int, ranks: int, blocks: bool
    ) -> tuple[Sequence[str], Facts]:
        """Return legal calls for `heads` heads at `site`, as helps, and the arguments of the first
        call.

        The arguments are by name. `blocks`: the dim may hold q, k and v.
        """


class Slicing(Primitive, feature=True):
    """A row by which ranks hold slices of the optimizer's state."""

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
        """Return the same row with the full state on every rank."""


class Checking(Primitive, feature=True):
    """A row that changes nothing and adds demands to a proof (`Check`)."""


class Located(Primitive, feature=True):
    """A row that names files beside its schedule."""

    @abstractmethod
    def located(self, folder: Path) -> Primitive:
        """Return the same call with the files read; paths are relative to the schedule's folder."""


class Resolved(Primitive, feature=True):
    """A row that names something that can be looked up without a model."""

    @abstractmethod
    def resolved(self, patterns: Mapping[str, Pattern]) -> Primitive:
        """Return the same call with its names looked up, its pattern filled in."""


class Grouping(Primitive, feature=True):
    """A row that acts on groups of its modules."""

    @abstractmethod
    def group_sites(self, sites: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return the sites in the groups that the row acts on."""


def check_called(row: Primitive, site: Site, plan: Plan) -> None:
    """Refuse (S401) a row that acts on the calls of a module, at one that has no forward.

    Lists and other holders of modules are never called: the row would do nothing, silently.
    """
    if site.has_forward:
        return
    inner, modules = f"{site}", [site]
    while modules and not any(module.has_forward for module in modules):
        inner += ".*"
        modules = [
            plan.model.sites[f"{module}.{child}"] for module in modules for child in module.children
        ]
    name = type(row).__name__
    refuse(
        "S401",
        f"`{site}` is a `{site.class_name}`: `{name}` would do nothing",
        "it has no forward, and is never called",
        helps=(f"select the modules that it holds: `{inner}  {row}`",) if modules else (),
    )


class Settled(Primitive, feature=True):
    """A row with mistakes that show only when all rows are known and the model is traced."""

    @abstractmethod
    def settled(self, site: Any, plan: Plan, traced: Any) -> None:
        """Refuse such mistakes."""


class Uniform(Primitive, feature=True):
    """A row that is checked once for all modules that are equal.

    The class promises that `check` and `transform` read of a module only: its Python class, its
    parameters and buffers (not their values), the plain attributes in `looks_at`, the same of its
    children, and the rows at it, around it and inside of it.
    """

    looks_at: ClassVar[tuple[str, ...]] = ()
