"""Primitives: the base class of a verb, the registry of all verbs, and their conflict table."""

from __future__ import annotations

import importlib
import pkgutil
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, dataclass_transform

from schedlang.diagnostics.diagnostic import Diagnostic, Facts, Label, Refusal
from schedlang.diagnostics.source import python_span

if TYPE_CHECKING:
    from importlib import metadata

    from schedlang.ir.plan import Plan


class Facet(StrEnum):
    """A part of a plan that a row may read or write; the order of rows follows from their
    facets."""

    STRUCTURE = "structure"  # what modules compute, and by which operations
    SHAPE = "shape"
    DTYPE = "dtype"
    PLACEMENT = "placement"
    RECOMPUTE = "recompute"
    RESIDENCE = "residence"
    STAGE = "stage"
    STATE = "state"
    ORDER = "order"
    TRAINED = "trained"


FACETS = frozenset(Facet)
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
    """Refuse an action. The caller that knows the row adds its place; `also` has places of other
    rows."""
    primary = Label(text=label)
    diagnostic = Diagnostic(
        code, title, primary, tuple(also), tuple(notes), tuple(helps), facts=facts
    )
    raise Refusal(diagnostic)


def refuse_inside(row: str, fqn: str) -> None:
    """Refuse (S408) a row for the whole model that is written in the scope of a module."""
    if fqn:
        refuse(
            "S408",
            f"`{row}` is for the whole model",
            f"this row is inside `{fqn}`",
            helps=("move the row out of its `at`",),
        )


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Primitive:
    """A verb. A subclass is a primitive, its annotated fields are the arguments, an instance holds
    one call's bound arguments.

    A subclass has a docstring, `example` (a row, as documentation and for the generic tests),
    `reads` and `writes` (facets: its row and column in the conflict table) and `check`; `transform`
    returns the changed plan. `takes` says what `check` and `transform` are called with: each
    "module" of the selection, the "selection" as a tuple, or the "model" (the scope; no selector
    stands before the row). `gives_up` names the properties in which the result may differ; a
    property where they depend on the arguments. `field(kw_only=True)` makes an argument that must
    be named, and may then be required after optional ones. A `foremost` verb changes which
    parameters there are: it must stand above all other rows, at any module.

    What a single feature needs of a row is a class of `schedlang.ir.features`, from which a
    primitive derives in place of this one.
    """

    example: ClassVar[str]
    reads: ClassVar[frozenset[str]] = frozenset()
    writes: ClassVar[frozenset[str]] = frozenset()
    takes: ClassVar[str] = "module"
    foremost: ClassVar[bool] = False
    if TYPE_CHECKING:

        @property
        def gives_up(self) -> frozenset[str]:
            """The properties in which the result may differ from the original's."""

    else:
        gives_up = frozenset()

    def __init_subclass__(cls, feature: bool = False) -> None:
        if not feature:
            _check_class(cls)
            dataclass(frozen=True)(cls)
            _registry[cls.__name__] = cls

    def changes(self, *facets: Facet) -> bool:
        """Return whether the row writes one of these facets."""
        return not self.writes.isdisjoint(facets)

    @property
    def along(self) -> tuple[str, ...]:
        """The axes of the mesh in the argument `over`; () without one."""
        over: Any = vars(self).get("over") or ()
        return (over,) if isinstance(over, str) else tuple(over)

    def agree(self, axes: Collection[str]) -> None:
        """Refuse (with `refuse`) arguments that contradict each other; called before there is a
        model.

        `axes` are the names of the mesh. The default accepts all.
        """

    @abstractmethod
    def check(self, site: Any, plan: Plan) -> None:
        """Refuse (with `refuse`) what cannot be done at `site` after what `plan` already does."""

    def transform(self, site: Any, plan: Plan) -> Plan:
        """Return the plan with what follows from this row: layouts, boundaries, cuts,
        annotations."""
        return plan

    def __str__(self) -> str:
        init_fields = [f for f in fields(self) if f.init]  # type: ignore[arg-type]
        values = ((f, getattr(self, f.name)) for f in init_fields)
        arguments = (f"{f.name}={value}" for f, value in values if value != f.default)
        return f"{type(self).__name__}({', '.join(arguments)})"


def _check_class(cls: type[Primitive]) -> None:
    """Refuse (S008) an incomplete primitive, and name what it lacks."""
    name = cls.__name__
    missing = [
        method for method in dir(cls) if getattr(getattr(cls, method), "__isabstractmethod__", 0)
    ]
    if not getattr(cls, "example", "").strip():
        missing.insert(0, "example")
    if not (cls.__dict__.get("__doc__") or "").strip():
        missing.insert(0, "docstring")
    for attribute in ("reads", "writes"):
        facets = frozenset(getattr(cls, attribute))
        if facets - FACETS:
            missing.append(f"facets that exist in `{attribute}`, not {sorted(facets - FACETS)},")
        setattr(cls, attribute, frozenset(map(Facet, facets & FACETS)))
    if cls.takes not in TAKES:
        missing.append(f"`takes` among {TAKES}")
    if missing:
        helps = ("CONTRIBUTING.md shows a complete one",)
        label = Label(python_span(), f"`{name}` of {cls.__module__}")
        title = f"the primitive `{name}` has no {' and no '.join(missing)}"
        raise Refusal.of("S008", title, label, helps=helps)
    registered = _registry.get(name)
    # a module that is loaded again replaces its own primitives
    if registered is not None and registered.__module__ != cls.__module__:
        title = f"two primitives have the name `{name}`"
        notes = (f"one in {registered.__module__}, one in {cls.__module__}",)
        raise Refusal.of("S008", title, Label(python_span()), notes=notes)


def registry() -> Mapping[str, type[Primitive]]:
    """Return every imported primitive by its name."""
    return MappingProxyType(_registry)


@contextmanager
def isolated_registry(keep: Sequence[str] | None = None) -> Iterator[None]:
    """Isolate the registry during a block, for tests of primitives.

    Primitives defined inside are dropped afterwards. `keep`: the names of existing primitives that
    are known inside; None: all.
    """
    load_all()  # else a module imported inside would be dropped, and never imported again
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
    """Return the primitive of a name, imported on first use; None if there is none.

    Built-in primitives are in files of their names. Installed packages are imported only for a name
    that is neither known nor built in.
    """
    if name not in _registry and name in _builtin_names():
        importlib.import_module(f"{EXTENSIONS}.{name}")
    elif name not in _registry:
        _load_installed()
    return _registry.get(name)


@cache
def load_all() -> None:
    """Import every module of `schedlang.primitives`, and the primitives of installed packages.

    No built-in primitive imports torch. A package names the modules of its primitives as entry
    points of the group `schedlang.primitives`.
    """
    for module in _builtin_names():
        importlib.import_module(f"{EXTENSIONS}.{module}")
    _load_installed()


@cache
def _builtin_names() -> tuple[str, ...]:
    """Return the names of the built-in primitives, which are those of their files."""
    package = importlib.import_module(EXTENSIONS)
    return tuple(sorted(info.name for info in pkgutil.iter_modules(package.__path__)))


@cache
def _load_installed() -> None:
    """Import the primitives of installed packages; slow, as it reads the metadata of all
    packages."""
    from importlib import metadata

    for point in sorted(metadata.entry_points(group=EXTENSIONS), key=lambda entry: entry.name):
        _load_entry_point(point)


def _load_entry_point(point: metadata.EntryPoint) -> None:
    """Import the primitives of an installed package; refuses S009 if the import fails."""
    try:
        point.load()
    except Refusal:
        raise
    except Exception as error:  # a third-party module may raise anything
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "a package"
        raise Refusal.of(
            "S009",
            f"cannot import the primitives of {package}",
            notes=(f"`{point.value}`: {type(error).__name__}: {error}",),
            helps=("install a version of it that fits, or uninstall it",),
        ) from error


def shared_facets(
    first: Primitive | type[Primitive], then: Primitive | type[Primitive]
) -> list[str]:
    """Return the names of the facets that both write."""
    return sorted(first.writes & then.writes)


def find_overturned(
    first: Primitive | type[Primitive], then: Primitive | type[Primitive]
) -> list[str]:
    """Return the names of the facets that `then` writes and that `first` reads but does not
    write."""
    return sorted((then.writes & first.reads) - first.writes)


def relation_of(first: Primitive | type[Primitive], then: Primitive | type[Primitive]) -> Relation:
    """Return the relation of a row `then` below a row `first` at one module.

    For classes: the relation of their examples. "commute": nothing shared. "order": `then` relies
    on what `first` changed, so this order only. "clash": `then` changes what `first` relied on.
    "both": both change one facet, and the facet's own rule decides.
    """
    if first.foremost != then.foremost and (first.writes | then.writes) - {"trained"}:
        return "clash" if then.foremost else "order"
    if find_overturned(first, then):
        return "clash"
    if shared_facets(first, then):
        return "both"
    return "order" if first.writes & then.reads else "commute"


SIGNS: Mapping[Relation, str] = {"commute": "=", "order": ">", "clash": "x", "both": "2"}
LEGEND = """\
Two rows select one module. The first stands above: its verb is on the left. The second is below:

  =  they share nothing: any order
  >  the second uses what the first changes: only in this order
  x  the second changes what the first has used: refused, swap the two rows
  2  both change one facet: a rule of that facet decides
"""


def conflict_table(verbs: Mapping[str, type[Primitive]]) -> dict[str, dict[str, Relation]]:
    """Return the relation of each verb to each verb below it."""
    return {a: {b: relation_of(verbs[a], verbs[b]) for b in sorted(verbs)} for a in sorted(verbs)}


def format_conflicts(verbs: Mapping[str, type[Primitive]]) -> str:
    """Format the table; columns have the numbers of the rows."""
    table = conflict_table(verbs)
    width = max(map(len, table), default=0)
    head = " " * (width + 5) + " ".join(f"{number:>2}" for number, _ in enumerate(table, 1))
    rows = [
        f"{number:>2}  {name:<{width}} "
        + " ".join(f"{SIGNS[relation]:>2}" for relation in relations.values())
        for number, (name, relations) in enumerate(table.items(), 1)
    ]
    return "\n".join([LEGEND, head, *rows]) + "\n"
