"""What each rule of the grammar becomes: our nodes, every one with its span."""

from __future__ import annotations

from typing import Any

from schedlang import nodes as n
from schedlang.diagnostic import Diagnostic, Label
from schedlang.lalr import Place, Reader, Token
from schedlang.source import Source, Span

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

    def made(self, start: str) -> Any:
        """The nodes of the source, read as a `start` of the grammar; Unread where it is none."""
        return self._lit(Reader(self.source.text, self).read(start))

    def _span(self, place: Place) -> Span:
        first, last = place
        return Span(self.source, first.line, first.col, last.end_line, last.end_col)

    def _place(self, token: Token) -> Span:
        return Span(self.source, token.line, token.col, token.end_line, token.end_col)

    def _lit(self, item: Any) -> Any:
        """Bare tokens stand for literals."""
        if not isinstance(item, Token):
            return item
        self._measure(item)
        return n.Lit(str(item), span=self._place(item))

    def _measure(self, token: Token) -> None:
        if token.type in ("INT", "SIGNED") and len(token.text.lstrip("-")) > LONGEST:
            title = f"this number has {len(token.text.lstrip('-'))} digits"
            label = Label(self._place(token), f"{LONGEST} are the most a number may have")
            self.problems.append(Diagnostic("S004", title, label))

    def _lits(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self._lit(item) for item in items if item is not None)

    # ---- expressions ------------------------------------------------------------------

    def _name(self, place: Place, *parts: Token) -> n.Name:
        return n.Name(tuple(map(str, parts)), span=self._span(place))

    def _call(self, place: Place, name: n.Name, *args: Any) -> n.Call:
        return n.Call(name, self._lits(args), span=self._span(place))

    def _keyword(self, place: Place, name: Token, value: Any) -> n.Keyword:
        return n.Keyword(str(name), self._lit(value), span=self._span(place))

    def _list(self, place: Place, *items: Any) -> n.List:
        return n.List(self._lits(items), span=self._span(place))

    def _group(self, place: Place, *items: Any) -> n.Group:
        return n.Group(self._lits(items), span=self._span(place))

    def _unary(self, place: Place, op: Token, operand: Any) -> n.Unary:
        return n.Unary(str(op), self._lit(operand), span=self._span(place))

    def _inv(self, place: Place, op: Token, operand: Any) -> n.Unary:
        return n.Unary("not", self._lit(operand), span=self._span(place))

    def _chain(self, place: Place, *items: Any) -> n.Chain:
        mixed = (str(x) if i % 2 else self._lit(x) for i, x in enumerate(items))
        return n.Chain(tuple(mixed), span=self._span(place))

    _expr = _conj = _sum = _term = _chain

    def _cmp(self, place: Place, left: Any, op: Token | None = None, right: Any = None) -> Any:
        return self._lit(left) if op is None else self._chain(place, left, op, right)

    def _interval(self, place: Place, low: Any, high: Any) -> n.Interval:
        return n.Interval(self._lit(low), self._lit(high), span=self._span(place))

    # ---- selectors --------------------------------------------------------------------

    def _slice(self, place: Place, *bounds: Token | None) -> n.Slice:
        for bound in _given(bounds):
            self._measure(bound)
        start, stop, step = map(_text, bounds)
        return n.Slice(start, stop, step, span=self._span(place))

    def _seg(self, place: Place, text: Token, *index: Any) -> tuple[n.Seg, ...]:
        span = self._span(place)
        self._measure(text)
        if not index:
            return (n.Seg(text.text, span=span),)
        for token in index:
            if isinstance(token, Token):
                self._measure(token)
        picked = tuple(str(i) if isinstance(i, Token) else i for i in _given(index))
        if len(picked) == 1 and isinstance(picked[0], str) and picked[0].isdigit():
            child = n.Seg(str(int(picked[0][:LONGEST])), span=self._place(index[0]))
            return n.Seg(str(text), span=self._place(text)), child  # layers[3] is layers.3
        return (n.Seg(str(text), picked, span=span),)

    def _path(self, place: Place, *parts: Any) -> n.Path:
        *segs, maybe, kind = parts
        flat = tuple(seg for group in segs for seg in group)
        return n.Path(flat, maybe is not None, _text(kind), span=self._span(place))

    # ---- statements -------------------------------------------------------------------

    def _block(self, place: Place, *body: Any) -> n.Block:
        return n.Block(_given(body), span=self._span(place))

    def _rule(self, place: Place, path: n.Path, *rest: Any) -> n.Rule:
        *more, call = rest
        return n.Rule(path, call, tuple(more), span=self._span(place))

    def _do(self, place: Place, path: n.Path, *args: Any) -> n.Do:
        span = self._span(place)
        name = n.Name(tuple(seg.text for seg in path.segs), span=path.span)
        return n.Do(path, n.Call(name, self._lits(args), span=span), span=span)

    def _where(self, place: Place, test: Any) -> Any:
        return self._lit(test)

    def _except_(self, place: Place, *paths: n.Path) -> tuple[n.Path, ...]:
        return paths

    def _at(self, place: Place, *parts: Any) -> n.At:
        *paths, where, except_, block = parts
        return n.At(tuple(paths), where, except_ or (), block, span=self._span(place))

    def _when(
        self, place: Place, test: Any, block: n.Block, orelse: n.Block | None = None
    ) -> n.When:
        return n.When(self._lit(test), block, orelse, span=self._span(place))

    def _expect(self, place: Place, test: Any, on: Token | None = None) -> n.Expect:
        return n.Expect(self._lit(test), _text(on), span=self._span(place))

    # ---- declarations -----------------------------------------------------------------

    def _start(self, place: Place, header: n.Header, *items: Any) -> n.File:
        span = Span(self.source, 1, 1, len(self.source.lines), 1)
        return n.File(header, items, span=span)

    def _header(self, place: Place, version: Token, model: Token | None = None) -> n.Header:
        return n.Header(str(version), _text(model), span=self._span(place))

    def _use(self, place: Place, path: Token, alias: Token | None = None, *args: Any) -> n.Use:
        given = self._lits(args) or None
        return n.Use(str(path)[1:-1], _text(alias), given, span=self._span(place))

    def _mesh(self, place: Place, *parts: Any) -> n.Mesh:
        *args, on = parts
        return n.Mesh(self._lits(tuple(args)), _text(on), span=self._span(place))

    def _view(self, place: Place, name: Token, size: Any, *axes: Token) -> n.View:
        return n.View(str(name), self._lit(size), tuple(map(str, axes)), span=self._span(place))

    def _knob(self, place: Place, name: Token, kind: Token, default: Any, domain: Any) -> n.Knob:
        values = self._lit(default), self._lit(domain)
        return n.Knob(str(name), str(kind), *values, span=self._span(place))

    def _require(self, place: Place, test: Any) -> n.Require:
        return n.Require(self._lit(test), span=self._span(place))

    def _params(self, place: Place, *params: n.Param | None) -> tuple[n.Param, ...]:
        return _given(params)

    def _param(self, place: Place, name: Token, kind: Token | None, default: Any) -> n.Param:
        return n.Param(str(name), _text(kind), self._lit(default), span=self._span(place))

    def _pattern(self, place: Place, name: Token, params: Any, body: Any) -> n.Pattern:
        return n.Pattern(str(name), params, self._lit(body), span=self._span(place))

    def _def(self, place: Place, name: Token, params: Any, block: n.Block) -> n.Def:
        return n.Def(str(name), params, block, span=self._span(place))

    def _relax(self, place: Place, *names: Token) -> tuple[str, ...]:
        return tuple(map(str, names))

    def _step(self, place: Place, name: Token, relax: Any, block: n.Block) -> n.Step:
        return n.Step(str(name)[1:-1], relax or (), block, span=self._span(place))

    def _override(self, place: Place, step: n.Step) -> n.Override:
        return n.Override(step, span=self._span(place))

    def _drop(self, place: Place, name: Token) -> n.Drop:
        return n.Drop(str(name)[1:-1], span=self._span(place))
