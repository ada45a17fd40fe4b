"""The parser's raw tree to our nodes, every node with its span."""

from __future__ import annotations

from typing import Any

from lark import Token
from lark.tree import Meta, Tree

from schedlang import nodes as n
from schedlang.diagnostic import Diagnostic, Label
from schedlang.source import NOWHERE, Source, Span

LONGEST = 18  # digits of an integer: what fits a machine word


def _text(token: Token | None) -> str | None:
    return None if token is None else str(token)


def _given(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(item for item in items if item is not None)


class TreeMaker:
    """One method per rule of the grammar, named after it with a `_` before; it gets the place and
    what the rule's parts became.  `problems` collects what the grammar cannot say."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems: list[Diagnostic] = []

    def make(self, tree: Tree[Token] | Token) -> Any:
        """The nodes of a parsed text."""
        return self._lit(self._made(tree))

    def _made(self, part: Any) -> Any:
        if not isinstance(part, Tree):
            return part
        children = [self._made(child) for child in part.children]
        return getattr(self, f"_{part.data}")(part.meta, *children)

    def _span(self, meta: Meta) -> Span:
        if meta.empty:
            return NOWHERE
        return Span(self.source, meta.line, meta.column, meta.end_line, meta.end_column)

    def _place(self, token: Token) -> Span:
        assert token.line and token.column and token.end_line and token.end_column
        return Span(self.source, token.line, token.column, token.end_line, token.end_column)

    def _lit(self, item: Any) -> Any:
        """Bare tokens stand for literals."""
        if not isinstance(item, Token):
            return item
        self._measure(item)
        return n.Lit(str(item), span=self._place(item))

    def _measure(self, token: Token) -> None:
        if token.type in ("INT", "SIGNED") and len(token.lstrip("-")) > LONGEST:
            title = f"this number has {len(token.lstrip('-'))} digits"
            label = Label(self._place(token), f"{LONGEST} are the most a number may have")
            self.problems.append(Diagnostic("S004", title, label))

    def _lits(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self._lit(item) for item in items if item is not None)

    # ---- expressions ------------------------------------------------------------------

    def _name(self, meta: Meta, *parts: Token) -> n.Name:
        return n.Name(tuple(map(str, parts)), span=self._span(meta))

    def _call(self, meta: Meta, name: n.Name, *args: Any) -> n.Call:
        return n.Call(name, self._lits(args), span=self._span(meta))

    def _keyword(self, meta: Meta, name: Token, value: Any) -> n.Keyword:
        return n.Keyword(str(name), self._lit(value), span=self._span(meta))

    def _list(self, meta: Meta, *items: Any) -> n.List:
        return n.List(self._lits(items), span=self._span(meta))

    def _group(self, meta: Meta, *items: Any) -> n.Group:
        return n.Group(self._lits(items), span=self._span(meta))

    def _unary(self, meta: Meta, op: Token, operand: Any) -> n.Unary:
        return n.Unary(str(op), self._lit(operand), span=self._span(meta))

    def _inv(self, meta: Meta, op: Token, operand: Any) -> n.Unary:
        return n.Unary("not", self._lit(operand), span=self._span(meta))

    def _chain(self, meta: Meta, *items: Any) -> n.Chain:
        mixed = (str(x) if i % 2 else self._lit(x) for i, x in enumerate(items))
        return n.Chain(tuple(mixed), span=self._span(meta))

    _expr = _conj = _sum = _term = _chain

    def _cmp(self, meta: Meta, left: Any, op: Token | None = None, right: Any = None) -> Any:
        return self._lit(left) if op is None else self._chain(meta, left, op, right)

    def _interval(self, meta: Meta, low: Any, high: Any) -> n.Interval:
        return n.Interval(self._lit(low), self._lit(high), span=self._span(meta))

    # ---- selectors --------------------------------------------------------------------

    def _slice(self, meta: Meta, *bounds: Token | None) -> n.Slice:
        for bound in _given(bounds):
            self._measure(bound)
        start, stop, step = map(_text, bounds)
        return n.Slice(start, stop, step, span=self._span(meta))

    def _seg(self, meta: Meta, text: Token, *index: Any) -> tuple[n.Seg, ...]:
        span = self._span(meta)
        for token in (text, *index):
            if isinstance(token, Token):
                self._measure(token)
        picked = tuple(str(i) if isinstance(i, Token) else i for i in _given(index))
        if len(picked) == 1 and isinstance(picked[0], str) and picked[0].isdigit():
            child = n.Seg(str(int(picked[0][:LONGEST])), span=self._place(index[0]))
            return n.Seg(str(text), span=self._place(text)), child  # layers[3] is layers.3
        return (n.Seg(str(text), picked, span=span),)

    def _path(self, meta: Meta, *parts: Any) -> n.Path:
        *segs, maybe, kind = parts
        flat = tuple(seg for group in segs for seg in group)
        return n.Path(flat, maybe is not None, _text(kind), span=self._span(meta))

    # ---- statements -------------------------------------------------------------------

    def _block(self, meta: Meta, *body: Any) -> n.Block:
        return n.Block(_given(body), span=self._span(meta))

    def _rule(self, meta: Meta, path: n.Path, *rest: Any) -> n.Rule:
        *more, call = rest
        return n.Rule(path, call, tuple(more), span=self._span(meta))

    def _do(self, meta: Meta, path: n.Path, *args: Any) -> n.Do:
        span = self._span(meta)
        name = n.Name(tuple(seg.text for seg in path.segs), span=path.span)
        return n.Do(path, n.Call(name, self._lits(args), span=span), span=span)

    def _where(self, meta: Meta, test: Any) -> Any:
        return self._lit(test)

    def _except_(self, meta: Meta, *paths: n.Path) -> tuple[n.Path, ...]:
        return paths

    def _at(self, meta: Meta, *parts: Any) -> n.At:
        *paths, where, except_, block = parts
        return n.At(tuple(paths), where, except_ or (), block, span=self._span(meta))

    def _when(self, meta: Meta, test: Any, block: n.Block, orelse: n.Block | None = None) -> n.When:
        return n.When(self._lit(test), block, orelse, span=self._span(meta))

    def _expect(self, meta: Meta, test: Any, on: Token | None = None) -> n.Expect:
        return n.Expect(self._lit(test), _text(on), span=self._span(meta))

    # ---- declarations -----------------------------------------------------------------

    def _start(self, meta: Meta, header: n.Header, *items: Any) -> n.File:
        span = Span(self.source, 1, 1, len(self.source.lines), 1)
        return n.File(header, items, span=span)

    def _header(self, meta: Meta, version: Token, model: Token | None = None) -> n.Header:
        return n.Header(str(version), _text(model), span=self._span(meta))

    def _use(self, meta: Meta, path: Token, alias: Token | None = None, *args: Any) -> n.Use:
        given = self._lits(args) or None
        return n.Use(str(path)[1:-1], _text(alias), given, span=self._span(meta))

    def _mesh(self, meta: Meta, *parts: Any) -> n.Mesh:
        *args, on = parts
        return n.Mesh(self._lits(tuple(args)), _text(on), span=self._span(meta))

    def _view(self, meta: Meta, name: Token, size: Any, *axes: Token) -> n.View:
        return n.View(str(name), self._lit(size), tuple(map(str, axes)), span=self._span(meta))

    def _knob(self, meta: Meta, name: Token, kind: Token, default: Any, domain: Any) -> n.Knob:
        values = self._lit(default), self._lit(domain)
        return n.Knob(str(name), str(kind), *values, span=self._span(meta))

    def _require(self, meta: Meta, test: Any) -> n.Require:
        return n.Require(self._lit(test), span=self._span(meta))

    def _params(self, meta: Meta, *params: n.Param | None) -> tuple[n.Param, ...]:
        return _given(params)

    def _param(self, meta: Meta, name: Token, kind: Token | None, default: Any) -> n.Param:
        return n.Param(str(name), _text(kind), self._lit(default), span=self._span(meta))

    def _pattern(self, meta: Meta, name: Token, params: Any, body: Any) -> n.Pattern:
        return n.Pattern(str(name), params, self._lit(body), span=self._span(meta))

    def _def(self, meta: Meta, name: Token, params: Any, block: n.Block) -> n.Def:
        return n.Def(str(name), params, block, span=self._span(meta))

    def _relax(self, meta: Meta, *names: Token) -> tuple[str, ...]:
        return tuple(map(str, names))

    def _step(self, meta: Meta, name: Token, relax: Any, block: n.Block) -> n.Step:
        return n.Step(str(name)[1:-1], relax or (), block, span=self._span(meta))

    def _override(self, meta: Meta, step: n.Step) -> n.Override:
        return n.Override(step, span=self._span(meta))

    def _drop(self, meta: Meta, name: Token) -> n.Drop:
        return n.Drop(str(name)[1:-1], span=self._span(meta))
