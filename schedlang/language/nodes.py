"""The syntax tree of a schedule: frozen nodes whose equality ignores where they stand."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, Union

from schedlang.diagnostics.source import NOWHERE, Span


@dataclass(frozen=True)
class Node:
    """A piece of a schedule and its place, which takes no part in equality."""

    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


# ---- expressions ----------------------------------------------------------------------


@dataclass(frozen=True)
class Lit(Node):
    """A literal as written: 4, 1e-5, 40GiB, "x", true."""

    text: str


@dataclass(frozen=True)
class Name(Node):
    """A dotted name: tp, model.config.n_head."""

    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        """The name as written."""
        return ".".join(self.parts)


@dataclass(frozen=True)
class Keyword(Node):
    """An argument with a name: over=tp."""

    name: str
    value: Expr


@dataclass(frozen=True)
class Call(Node):
    """A name applied to arguments: shard(col, over=tp), S(out, blocks=3)."""

    name: Name
    args: tuple[Expr | Keyword, ...]


@dataclass(frozen=True)
class List(Node):
    """[a, b]"""

    items: tuple[Expr, ...]


@dataclass(frozen=True)
class Group(Node):
    """(a, b), or (a) around one expression."""

    items: tuple[Expr, ...]


@dataclass(frozen=True)
class Unary(Node):
    """-x, +x, not x."""

    op: str
    operand: Expr


@dataclass(frozen=True)
class Chain(Node):
    """a op b op c on one level of precedence; names of operators stand between the operands."""

    items: tuple[Expr | str, ...]


Expr: TypeAlias = Union[Lit, Name, Call, List, Group, Unary, Chain]  # noqa: UP007


@dataclass(frozen=True)
class Interval(Node):
    """low..high, both included."""

    low: Expr
    high: Expr


# ---- selectors ------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice(Node):
    """start:stop:step; a bound is a number or the name of a knob, or None."""

    start: str | None
    stop: str | None
    step: str | None


@dataclass(frozen=True)
class Seg(Node):
    """One segment of a path and the children picked below it."""

    text: str
    index: tuple[str | Slice, ...] = ()


@dataclass(frozen=True)
class Path(Node):
    """A selector: transformer.h.*.mlp?:Conv1D"""

    segs: tuple[Seg, ...]
    maybe: bool = False
    type: str | None = None


# ---- statements -----------------------------------------------------------------------


@dataclass(frozen=True)
class Block(Node):
    """Statements between braces."""

    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class Rule(Node):
    """A row: path, path  primitive(arguments); mostly of one path, `more` are the others."""

    path: Path
    call: Call
    more: tuple[Path, ...] = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """All its paths."""
        return (self.path, *self.more)


@dataclass(frozen=True)
class Do(Node):
    """A call on the whole scope: primitive(arguments).  `path` is the call's name as parsed."""

    path: Path
    call: Call


@dataclass(frozen=True)
class At(Node):
    """at paths where test except paths { ... }"""

    paths: tuple[Path, ...]
    where: Expr | None
    except_: tuple[Path, ...]
    block: Block


@dataclass(frozen=True)
class When(Node):
    """when test { ... } else { ... }"""

    test: Expr
    block: Block
    orelse: Block | None


@dataclass(frozen=True)
class Expect(Node):
    """expect test on machine"""

    test: Expr
    on: str | None


# ---- declarations ---------------------------------------------------------------------


@dataclass(frozen=True)
class Use(Node):
    """use "file" as alias (knob=value)"""

    path: str
    alias: str | None
    args: tuple[Expr | Keyword, ...] | None


@dataclass(frozen=True)
class Mesh(Node):
    """mesh(dp=_, tp=2) on machine"""

    args: tuple[Expr | Keyword, ...]
    on: str | None


@dataclass(frozen=True)
class View(Node):
    """view name = size of (axis, axis)"""

    name: str
    size: Expr | None
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Knob(Node):
    """knob name: type = default in domain"""

    name: str
    type: str
    default: Expr | None
    domain: Expr | Interval | None


@dataclass(frozen=True)
class Require(Node):
    """require test"""

    test: Expr


@dataclass(frozen=True)
class Param(Node):
    """A parameter of a def or a pattern."""

    name: str
    type: str | None
    default: Expr | None


@dataclass(frozen=True)
class Pattern(Node):
    """pattern name(a, b) { expression }"""

    name: str
    params: tuple[Param, ...]
    body: Expr


@dataclass(frozen=True)
class Def(Node):
    """def name(parameters) { statements }"""

    name: str
    params: tuple[Param, ...]
    block: Block


@dataclass(frozen=True)
class Step(Node):
    """step "name" relax(names) { statements }"""

    name: str
    relax: tuple[str, ...]
    block: Block


@dataclass(frozen=True)
class Override(Node):
    """override step "name" { statements }"""

    step: Step


@dataclass(frozen=True)
class Drop(Node):
    """drop step "name" """

    name: str


Stmt: TypeAlias = Union[Rule, Do, At, When, Expect]  # noqa: UP007
Item: TypeAlias = Union[  # noqa: UP007
    Use, Mesh, View, Knob, Require, Pattern, Def, Step, Override, Drop, Stmt
]


@dataclass(frozen=True)
class Header(Node):
    """schedule 1 for Class"""

    version: str
    model: str | None


@dataclass(frozen=True)
class Comment:
    """A comment with its sign, at its place."""

    text: str
    span: Span


@dataclass(frozen=True)
class File(Node):
    """A whole schedule; comments belong to the text, not to the tree, and are not compared."""

    header: Header
    items: tuple[Item, ...]
    comments: tuple[Comment, ...] = field(default=(), compare=False, repr=False)


def placed(node: Any, span: Span) -> Any:
    """The same tree with every node standing at `span`."""
    if isinstance(node, tuple):
        return tuple(placed(item, span) for item in node)
    if not isinstance(node, Node):
        return node
    parts = {f.name: placed(getattr(node, f.name), span) for f in fields(node) if f.name != "span"}
    return type(node)(**parts, span=span)
