"""The syntax tree of a schedule: frozen nodes whose equality ignores their spans.

Also rewrites recorded schedules: drops the last row, folds rows of one kind into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeAlias, Union

from schedlang.diagnostics.source import NOWHERE, Span


@dataclass(frozen=True)
class Node:
    """A node with its span, which takes no part in equality."""

    span: Span = field(default=NOWHERE, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class CommentedNode(Node):
    """A node with comments of its own, if it was made and not parsed.

    The comments of a row end its line, those of a mesh stand above it, those of a file below all.
    They take no part in equality.
    """

    remarks: tuple[str, ...] = field(default=(), compare=False, repr=False, kw_only=True)


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
    """a op b op c on one level of precedence; `items` has the operators' names between the
    operands."""

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
    """One segment of a path, and the indices that pick children below it."""

    text: str
    index: tuple[str | Slice, ...] = ()


@dataclass(frozen=True)
class Path(Node):
    """A selector: transformer.h.*.mlp?:Conv1D"""

    segs: tuple[Seg, ...]
    optional: bool = False
    type: str | None = None


# ---- statements -----------------------------------------------------------------------


@dataclass(frozen=True)
class Block(Node):
    """Statements between braces."""

    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class Rule(CommentedNode):
    """A row: path, path  primitive(arguments)"""

    paths: tuple[Path, ...]
    call: Call


@dataclass(frozen=True)
class Do(CommentedNode):
    """A call on the whole scope: primitive(arguments). `path` is the call's name as parsed."""

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
class Mesh(CommentedNode):
    """mesh(dp=_, tp=2) on machine; a file of one stands in quotes"""

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
class Search(Node):
    """search pin tp = 4, search forbid order = GPipe, search at least dp = 2"""

    how: str
    limit: Keyword


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
    Use, Mesh, View, Knob, Require, Search, Pattern, Def, Step, Override, Drop, Stmt
]


@dataclass(frozen=True)
class Header(Node):
    """schedule 1 for Class"""

    version: str
    model: str | None


@dataclass(frozen=True)
class Comment:
    """A comment with its `#`, and its span."""

    text: str
    span: Span


@dataclass(frozen=True)
class File(CommentedNode):
    """A whole schedule; comments are part of the text, not of the tree, and are not compared."""

    header: Header
    items: tuple[Item, ...]
    comments: tuple[Comment, ...] = field(default=(), compare=False, repr=False)

    @property
    def text(self) -> str:
        """The text that the file was parsed from."""
        return self.span.source.text


def walk(node: object) -> Iterator[Node]:
    """Yield a node and all nodes below it, in the order of the text."""
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if isinstance(current, tuple):
            waiting.extend(reversed(current))
        elif isinstance(current, Node):
            yield current
            kind = type(current)
            if kind not in _NODE_FIELDS:
                field_names = [f.name for f in reversed(fields(kind)) if f.type not in _TEXT_TYPES]
                _NODE_FIELDS[kind] = tuple(
                    name for name in field_names if name not in ("span", "comments")
                )
            waiting.extend(getattr(current, name) for name in _NODE_FIELDS[kind])


_TEXT_TYPES = ("str", "str | None", "tuple[str, ...]", "bool")
_NODE_FIELDS: dict[type[Node], tuple[str, ...]] = {}  # fields that may hold nodes, last first


def with_spans(node: Any, span: Span, spans: Mapping[int, Span] = MappingProxyType({})) -> Any:
    """Return the same tree with all spans set to `span`.

    A node whose `id` is in `spans` gets that span, and so do the nodes below it.
    """
    if isinstance(node, tuple):
        return tuple(with_spans(item, span, spans) for item in node)
    if not isinstance(node, Node):
        return node
    span = spans.get(id(node), span)
    dropped = ("span", "remarks") if spans else ("span",)  # the printed text has them as comments
    field_names = (f.name for f in fields(node) if f.name not in dropped)
    parts = {name: with_spans(getattr(node, name), span, spans) for name in field_names}
    return type(node)(**parts, span=span)


FoldableStatement: TypeAlias = Rule | At  # statements that may name one module after the other
# a statement without one number, and the number's place
StatementFamily: TypeAlias = tuple[Any, int]


def drop_last_row(items: Sequence[Any]) -> list[Any]:
    """Return the items without the last row; a step or scope that becomes empty is dropped too."""
    *rest, last = items or (None,)
    if isinstance(last, Step | At) and last.block.body:
        body = drop_last_row(last.block.body)
        if body:
            rest.append(replace(last, block=replace(last.block, body=tuple(body))))
    return rest


def fold_rows(items: Sequence[Any], unchanged: Callable[[Sequence[Any]], bool]) -> list[Any]:
    """Fold rows for `h.0` to `h.11` into one for `h[:12]`, wherever `unchanged` returns true for
    the result.

    Folding may move rows past rows of the same kind: `unchanged` decides whether that changes
    anything.
    """
    folded = list(items)
    for index in range(len(folded)):
        if isinstance(folded[index], Step | At):
            inner = _fold_body(folded, index, unchanged)
            folded[index] = replace(folded[index], block=replace(folded[index].block, body=inner))
    tried: set[StatementFamily] = set()
    while (family := next((f for f in _find_families(folded) if f not in tried), None)) is not None:
        tried.add(family)
        candidate = _fold_family(folded, family)
        folded = candidate if unchanged(candidate) else folded
    return folded


def _fold_body(
    items: Sequence[Any], index: int, unchanged: Callable[[Sequence[Any]], bool]
) -> tuple[Any, ...]:
    """Fold the body of a step or a scope as far as `unchanged` allows for all items."""
    outer = items[index]

    def still(body: Sequence[Any]) -> bool:
        inner = replace(outer, block=replace(outer.block, body=tuple(body)))
        return unchanged([*items[:index], inner, *items[index + 1 :]])

    return tuple(fold_rows(outer.block.body, still))


def _find_families(items: Sequence[Any]) -> Iterator[StatementFamily]:
    """Yield the forms that at least two statements share, except for one number that rises
    evenly."""
    seen: dict[StatementFamily, list[int]] = {}
    for item in items:
        for index, number in _find_numbers(item):
            seen.setdefault((_without_number(item, index), index), []).append(number)
    for family, numbers in seen.items():
        steps = {b - a for a, b in zip(numbers, numbers[1:])}
        if len(steps) == 1 and min(steps) > 0:
            yield family


def _find_numbers(item: Any) -> Iterator[tuple[int, int]]:
    """Yield place and value of each number in the only path of a statement: h.3.mlp has 3, at 1."""
    paths = item.paths if isinstance(item, Rule | At) else ()
    for index, seg in enumerate(paths[0].segs) if len(paths) == 1 else ():
        before = paths[0].segs[index - 1] if index else None
        if seg.text.isdigit() and not seg.index and before is not None and not before.index:
            yield index, int(seg.text)


def _without_number(item: FoldableStatement, index: int) -> FoldableStatement:
    path = item.paths[0]
    segs = (*path.segs[:index], replace(path.segs[index], text=""), *path.segs[index + 1 :])
    return replace(item, paths=(replace(path, segs=segs),))


def _fold_family(items: Sequence[Any], family: StatementFamily) -> list[Any]:
    """Replace the statements of a family by one, at the place of the first."""
    template, index = family
    members = [
        (item, dict(_find_numbers(item))[index])
        for item in items
        if index in dict(_find_numbers(item)) and _without_number(item, index) == template
    ]
    numbers = [number for _, number in members]
    step = numbers[1] - numbers[0]
    bounds = Slice(
        str(numbers[0]) if numbers[0] else None,
        str(numbers[-1] + 1),
        str(step) if step > 1 else None,
    )
    first = members[0][0]
    path = first.paths[0]
    head = replace(path.segs[index - 1], index=(bounds,))
    segs = (*path.segs[: index - 1], head, *path.segs[index + 1 :])
    folded = replace(first, paths=(replace(path, segs=segs),))
    folded_ids = {id(item) for item, _ in members[1:]}
    return [folded if item is first else item for item in items if id(item) not in folded_ids]
