"""The conflict table: how one verb may stand below another, from what both declare."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, dataclass_transform

from schedlang.diagnostics.diagnostic import Diagnostic, Facts, Label, Refusal
from schedlang.diagnostics.source import python_span

if TYPE_CHECKING:
    from importlib import metadata

    from schedlang.ir.plan import Plan
    from schedlang.language.patterns import Pattern

# ---- Primitive: one verb of the language, its arguments, rules and effects; the registry of all.


FACETS = frozenset(
    ("structure", "shape", "dtype", "placement", "recompute")
    + ("residence", "stage", "state", "order", "trained")
)
TAKES = ("module", "selection", "model")
Relation = Literal["commute", "order", "clash", "both"]

EXTENSIONS = "schedlang.primitives"  # our package, and the group of entry points
_registry: dict[str, type[Primitive]] = {}


def refuse(
    code: str,
    title: str,
    label: str = "",
    notes: Sequence[str] = (),
    helps: Sequence[str] = (),
    also: Sequence[Label] = (),
    facts: Facts = (),
) -> NoReturn:
    """Refuse an action; whoever knows the row attaches its place, `also` has those of others."""
    place = Label(text=label)
    told = Diagnostic(code, title, place, tuple(also), tuple(notes), tuple(helps), facts=facts)
    raise Refusal(told)


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


@dataclass(frozen=True)
class Count:
    """What one call costs a device: kernels of its forward and of its backward, bytes that both
    read and write."""

    forward: int
    backward: int
    bytes: int

    @property
    def kernels(self) -> int:
        """Of both."""
        return self.forward + self.backward

    def __add__(self, other: Count) -> Count:
        return Count(
            self.forward + other.forward, self.backward + other.backward, self.bytes + other.bytes
        )


@dataclass(frozen=True)
class Gain:
    """What a row makes of its module's kernels and bytes; the text of kernels made for it."""

    before: Count
    after: Count
    sources: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        """Whether there are fewer kernels, or fewer bytes."""
        return self.after.kernels < self.before.kernels or self.after.bytes < self.before.bytes


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Primitive:
    """A verb.  A subclass is a primitive, its annotated fields are the arguments, an instance is
    one call's bound arguments.

    A subclass has a docstring, `example` (a row, as documentation and for the generic tests),
    `reads` and `writes` (facets: its row and column in the conflict table), `check` and `apply`.
    `takes` says what it is given: each "module" of the selection, the "selection" as a tuple, or
    the "model" (the scope; no selector stands before it).  `gives_up` names what the result may
    differ in; a property where it depends on the arguments.  `field(kw_only=True)` makes an
    argument that must be named, and may then be required after optional ones.  A `foremost` verb
    changes which parameters there are: it stands above whatever else is done, wherever that is.

    `alike` promises that `check` and `effect` see nothing of a module but its Python class, its
    parameters and buffers (not their values), the plain attributes that it names, what it holds
    likewise, and what rows do to it, around it and inside of it.  They are then asked once for all
    modules that are equal in that.  None: they are asked for each module.

    `apart` says of what `trial` runs how it is there and is not within a proof ("compiled").
    """

    example: ClassVar[str]
    reads: ClassVar[frozenset[str]] = frozenset()
    writes: ClassVar[frozenset[str]] = frozenset()
    takes: ClassVar[str] = "module"
    foremost: ClassVar[bool] = False
    anew: ClassVar[bool] = False  # its sites are other modules afterwards, for rows below
    alike: ClassVar[tuple[str, ...] | None] = None
    apart: ClassVar[str] = ""
    if TYPE_CHECKING:

        @property
        def gives_up(self) -> frozenset[str]:
            """What the result may differ in from the original's."""

    else:
        gives_up = frozenset()

    def __init_subclass__(cls) -> None:
        _accept(cls)
        dataclass(frozen=True)(cls)
        _registry[cls.__name__] = cls

    def agree(self, axes: Collection[str]) -> None:
        """Refuse (with `refuse`) arguments that do not go together: no model is there yet.

        `axes` are the names of the mesh.  Default: all do.
        """

    def check(self, site: Any, plan: Plan) -> None:
        """Refuse (with `refuse`) what cannot be done at `site` after what `plan` already does."""
        raise NotImplementedError

    def located(self, folder: Path) -> Primitive:
        """The same call with what it names in files read; paths start at the schedule's folder."""
        return self

    def resolved(self, patterns: Mapping[str, Pattern]) -> Primitive:
        """The same call with what it names looked up, its pattern filled in; needs no model."""
        return self

    def taken(self, sites: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The sites of a row in the groups that it takes at a time."""
        return [(site,) for site in sites] if self.takes == "module" else [sites]

    def together(self, sites: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The sites of a row in the groups that are computed as one, which no cut divides."""
        return [(site,) for site in sites]

    @property
    def limit(self) -> int | None:
        """The bytes that the modules of a row may keep on a rank, which then `fit` is asked about;
        None: as many as they do."""
        return None

    @property
    def cuts(self) -> bool:
        """Whether stages begin where what a row with a limit repeats leaves them in balance."""
        return False

    @property
    def keeps(self) -> bool:
        """Whether a row keeps by itself what a backward needs, so that nothing else can move it."""
        return False

    def reruns(self, sites: tuple[str, ...], found: Sequence[Any]) -> Sequence[Any] | None:
        """What of a row runs again in backward (remat/again.py), `found` being what `fit` found
        for its chains; None where nothing does, or where it is told only while it runs."""
        return None

    @property
    def moves(self) -> bool:
        """Whether a row says by itself what of its modules is moved to the host, and when."""
        return False

    @property
    def part(self) -> str:
        """Which part of a module's computation a row replaces, so that another row may replace
        another part; "": all of it."""
        return ""

    def fit(self, chain: Sequence[Any], memory: int, play: Callable[[Any], Any]) -> Any:
        """What is done with modules of these costs, in `memory` bytes; `apply` finds it again.

        `play` does it with a model without values, which it gives back after a backward.
        """
        raise NotImplementedError

    def said(self, found: Any) -> str:
        """What `fit` found, in words."""
        raise NotImplementedError

    def effect(self, site: Any, plan: Plan) -> Plan:
        """The plan with what follows from this action: layouts, boundaries, cuts."""
        return plan

    def settled(self, site: Any, plan: Plan, traced: Any) -> None:
        """Refuse what shows only when all rows stand and the model is traced.  Default: nothing."""

    def apply(self, site: Any, build: Any) -> None:
        """Change the module that is being built."""
        raise NotImplementedError

    def trial(self, site: Any, plan: Plan, calls: Mapping[str, tuple[Any, Any]]) -> Sequence[Trial]:
        """What float64 cannot show, run by itself: a kernel, a compiled region.  Default: nothing.

        `calls` are arguments and keyword arguments of real calls of the module, the first under
        "", the others, to be made after it, by how they differ: in values and masks, in shape.
        """
        return ()

    def gain(self, site: Any, plan: Plan, call: tuple[Any, Any]) -> Gain | None:
        """Kernels and bytes before and after, where a row is there for them; counted on the meta
        device, for arguments that lie there.  Default: it is not."""
        return None

    def __str__(self) -> str:
        own = [f for f in fields(self) if f.init]  # type: ignore[arg-type]
        given = ((f, getattr(self, f.name)) for f in own)
        said = (f"{f.name}={value}" for f, value in given if value != f.default)
        return f"{type(self).__name__}({', '.join(said)})"


def _accept(cls: type[Primitive]) -> None:
    """Refuse a primitive that is not whole, naming what it lacks (S008)."""
    name = cls.__name__
    lacks = [what for what in ("check", "apply") if getattr(cls, what) is getattr(Primitive, what)]
    if not getattr(cls, "example", "").strip():
        lacks.insert(0, "example")
    if not (cls.__dict__.get("__doc__") or "").strip():
        lacks.insert(0, "docstring")
    for attribute in ("reads", "writes"):
        facets = frozenset(getattr(cls, attribute))
        setattr(cls, attribute, facets)
        if facets - FACETS:
            lacks.append(f"facets that exist in `{attribute}`, not {sorted(facets - FACETS)},")
    if cls.takes not in TAKES:
        lacks.append(f"`takes` among {TAKES}")
    if lacks:
        helps = ("CONTRIBUTING.md shows a complete one",)
        label = Label(python_span(), f"`{name}` of {cls.__module__}")
        title = f"the primitive `{name}` has no {' and no '.join(lacks)}"
        raise Refusal(Diagnostic("S008", title, label, helps=helps))
    known = _registry.get(name)
    # a module that is loaded again replaces its own
    if known is not None and known.__module__ != cls.__module__:
        title = f"two primitives have the name `{name}`"
        notes = (f"one in {known.__module__}, one in {cls.__module__}",)
        raise Refusal(Diagnostic("S008", title, Label(python_span()), notes=notes))


def registry() -> Mapping[str, type[Primitive]]:
    """Every primitive by its name."""
    return MappingProxyType(_registry)


@contextmanager
def scratch(keep: Sequence[str] | None = None) -> Iterator[None]:
    """Primitives defined inside are forgotten afterwards; of those outside, `keep` are known."""
    load_all()  # a module imported inside would be forgotten, and never imported again
    before = dict(_registry)
    for name in before if keep is not None else ():
        if name not in (keep or ()):
            del _registry[name]
    try:
        yield
    finally:
        _registry.clear()
        _registry.update(before)


def find(name: str) -> type[Primitive] | None:
    """The primitive of a name, imported when it is first asked for; None if there is none.

    Ours stand in files of their names.  What installed packages add is imported when a name is
    neither known nor ours.
    """
    if name not in _registry and name in _ours():
        importlib.import_module(f"{EXTENSIONS}.{name}")
    elif name not in _registry:
        _load_installed()
    return _registry.get(name)


@cache
def load_all() -> None:
    """Import every module of `schedlang.primitives`, and what installed packages add to them.

    None of ours imports torch.  A package names the modules of its primitives as entry points of
    the group `schedlang.primitives`.
    """
    for module in _ours():
        importlib.import_module(f"{EXTENSIONS}.{module}")
    _load_installed()


@cache
def _ours() -> tuple[str, ...]:
    """The names of our primitives, which are those of their files."""
    package = importlib.import_module(EXTENSIONS)
    return tuple(sorted(info.name for info in pkgutil.iter_modules(package.__path__)))


@cache
def _load_installed() -> None:
    """Import the primitives of installed packages; reading what is installed takes its time."""
    from importlib import metadata

    for point in sorted(metadata.entry_points(group=EXTENSIONS), key=lambda found: found.name):
        _load(point)


def _load(point: metadata.EntryPoint) -> None:
    """Import the primitives of an installed package; refuses S009 one that cannot be imported."""
    try:
        point.load()
    except Refusal:
        raise
    except Exception as error:  # whatever a stranger's module raises
        holder = f"{point.dist.name} {point.dist.version}" if point.dist else "a package"
        raise Refusal(
            Diagnostic(
                "S009",
                f"cannot import the primitives of {holder}",
                notes=(f"`{point.value}`: {type(error).__name__}: {error}",),
                helps=("install a version of it that fits, or uninstall it",),
            )
        ) from error


def conflicts(first: Primitive | type[Primitive], then: Primitive | type[Primitive]) -> Relation:
    """How `then` stands below `first` where both touch one module; of classes: as their examples.

    "commute": nothing shared.  "order": `then` relies on what `first` changed, so this order only.
    "clash": `then` changes what `first` relied on.  "both": both change one facet, whose own rule
    decides.
    """
    if first.foremost != then.foremost and (first.writes | then.writes) - {"trained"}:
        return "clash" if then.foremost else "order"
    both = first.writes & then.writes
    if (then.writes & first.reads) - both:
        return "clash"
    if both:
        return "both"
    return "order" if first.writes & then.reads else "commute"


# ---- The conflict table: how one verb may stand below another, from what both declare.


SIGNS: Mapping[Relation, str] = {"commute": "=", "order": ">", "clash": "x", "both": "2"}
LEGEND = """\
The verb of the row stands above, that of the column below, where both touch one module:

  =  nothing in common: any order
  >  what stands below relies on what stands above: in this order only
  x  what stands below changes what the one above relied on: refused, turn them round
  2  both change one facet: the facet's own rule decides
"""


def table(known: Mapping[str, type[Primitive]]) -> dict[str, dict[str, Relation]]:
    """For each verb, and each verb below it, how they stand."""
    return {a: {b: conflicts(known[a], known[b]) for b in sorted(known)} for a in sorted(known)}


def text(known: Mapping[str, type[Primitive]]) -> str:
    """The table as it is printed; columns have the numbers of the rows."""
    found = table(known)
    width = max(map(len, found), default=0)
    head = " " * (width + 5) + " ".join(f"{at:>2}" for at, _ in enumerate(found, 1))
    rows = [
        f"{at:>2}  {name:<{width}} " + " ".join(f"{SIGNS[how]:>2}" for how in below.values())
        for at, (name, below) in enumerate(found.items(), 1)
    ]
    return "\n".join([LEGEND, head, *rows]) + "\n"
