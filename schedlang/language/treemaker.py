"""What each rule of the grammar becomes: our nodes, every one with its span."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isinf, prod
from typing import Any

from lark import Token, v_args
from lark.tree import Meta
from lark.visitors import Transformer_NonRecursive

from schedlang.diagnostics.diagnostic import Diagnostic, Label
from schedlang.diagnostics.source import Source, Span
from schedlang.language import nodes as n
from schedlang.language.grammar import LONGEST, span_of

WHOLE = re.compile(r"\d+")
MOST = 1000  # names that a segment may stand for, `{a,b}_{c,d}` for four

# rules whose parts are the fields of a node, in order
FIELDS: Mapping[str, Callable[..., n.Node]] = {
    "literal": n.Lit,
    "unary": n.Unary,
    "inv": n.Unary,
    "keyword": n.Keyword,
    "interval": n.Interval,
    "slice": n.Slice,
    "when": n.When,
    "expect": n.Expect,
    "header": n.Header,
    "knob": n.Knob,
    "require": n.Require,
    "param": n.Param,
    "pattern": n.Pattern,
    "def": n.Def,
    "override": n.Override,
}
# rules whose parts are, all together, the one field of a node
ITEMS: Mapping[str, Callable[..., n.Node]] = {
    "name": n.Name,
    "list": n.List,
    "group": n.Group,
    "block": n.Block,
    "expr": n.Chain,
    "conj": n.Chain,
    "cmp": n.Chain,
    "sum": n.Chain,
    "term": n.Chain,
}


def _plain(part: Any) -> Any:
    """A token as the text that nodes hold."""
    return str(part) if isinstance(part, Token) else part


@v_args(inline=True, meta=True)
class TreeMaker(Transformer_NonRecursive[Token, Any]):
    """Makes nodes of lark's tree; `problems` collects what the grammar cannot say.

    A method is named after the rule that it is for, and gets its place and its parts.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source: Source = source
        self.problems: list[Diagnostic] = []

    def _span(self, at: Meta | Token) -> Span:
        return span_of(self.source, at)

    def __default__(self, rule: str, parts: list[Any], at: Meta) -> Any:
        """What most rules become."""
        made = map(_plain, parts)
        if rule in FIELDS:
            return FIELDS[rule](*made, span=self._span(at))
        return ITEMS[rule](tuple(made), span=self._span(at))

    def INT(self, token: Token) -> Token:
        """A number, which is not too large to be counted with."""
        whole = WHOLE.search(token)
        digits = len(whole[0]) if whole else 0
        if digits > LONGEST or (token.type == "FLOAT" and isinf(float(token))):
            label = Label(self._span(token), f"a number has at most {LONGEST} digits")
            title = f"this number has {digits} digits"
            if digits <= LONGEST:
                label, title = Label(self._span(token)), "this number is too large"
            self.problems.append(Diagnostic("S004", title, label))
        return token

    def GLOB(self, token: Token) -> Token:
        """A part of a selector, which stands for no more names than can be looked for."""
        many = prod(part.count(",") + 1 for part in re.findall(r"\{[^}]*\}", token))
        if many > MOST:
            label = Label(self._span(token), f"a selector has at most {MOST:,}")
            title = f"these are {many:,} alternatives" if many < 10**9 else "too many alternatives"
            self.problems.append(Diagnostic("S004", title, label))
        return token

    SIGNED = FLOAT = QUANTITY = INT

    def call(self, at: Meta, name: n.Name, *args: Any) -> n.Call:
        """shard(col, over=tp)"""
        return n.Call(name, args, span=self._span(at))

    # ---- selectors --------------------------------------------------------------------

    def seg(self, at: Meta, text: Token, *index: Any) -> tuple[n.Seg, ...]:
        """layers, layers[2:4]; layers[3] is layers.3"""
        picked = tuple(map(_plain, index))
        if len(picked) == 1 and isinstance(picked[0], str) and picked[0].isdigit():
            child = n.Seg(str(int(picked[0][:LONGEST])), span=self._span(index[0]))
            return n.Seg(str(text), span=self._span(text)), child
        return (n.Seg(str(text), picked, span=self._span(at)),)

    def path(self, at: Meta, *parts: Any) -> n.Path:
        """h.*.attn?:Attention"""
        *segs, maybe, kind = parts
        flat = tuple(seg for group in segs for seg in group)
        return n.Path(flat, maybe is not None, _plain(kind), span=self._span(at))

    # ---- statements -------------------------------------------------------------------

    def rule(self, at: Meta, path: n.Path, *rest: Any) -> n.Rule:
        """h.*, g.*  checkpoint()"""
        *more, call = rest
        return n.Rule(path, call, tuple(more), span=self._span(at))

    def do(self, at: Meta, path: n.Path, *args: Any) -> n.Do:
        """verify(forward)"""
        span = self._span(at)
        name = n.Name(tuple(seg.text for seg in path.segs), span=path.span)
        return n.Do(path, n.Call(name, args, span=span), span=span)

    def at(self, at: Meta, *parts: Any) -> n.At:
        """at h.* where out_features > 64 except h.0 { ... }"""
        *paths, where, except_, block = parts
        return n.At(tuple(paths), where, except_ or (), block, span=self._span(at))

    def where(self, at: Meta, test: Any) -> Any:
        """where out_features > 64"""
        return test

    def except_(self, at: Meta, *paths: n.Path) -> tuple[n.Path, ...]:
        """except h.0, h.1"""
        return paths

    # ---- declarations -----------------------------------------------------------------

    def start(self, at: Meta, header: n.Header, *items: Any) -> n.File:
        """A whole file."""
        return n.File(header, items, span=Span(self.source, 1, 1, len(self.source.lines), 1))

    def use(self, at: Meta, path: Token, alias: Token | None, *args: Any) -> n.Use:
        """use "x.sched" as x"""
        return n.Use(str(path)[1:-1], _plain(alias), args or None, span=self._span(at))

    def mesh(self, at: Meta, *parts: Any) -> n.Mesh:
        """mesh(dp=2) on h100x64"""
        *args, on = parts
        return n.Mesh(tuple(args), _plain(on), span=self._span(at))

    def view(self, at: Meta, name: Token, size: Any, *axes: Token) -> n.View:
        """view cp of (ring, ulysses)"""
        return n.View(str(name), size, tuple(map(str, axes)), span=self._span(at))

    def params(self, at: Meta, *params: n.Param) -> tuple[n.Param, ...]:
        """(over: axis, out=R)"""
        return params

    def relax(self, at: Meta, *names: Token) -> tuple[str, ...]:
        """relax(rng, dtype)"""
        return tuple(map(str, names))

    def step(self, at: Meta, name: Token, relax: Any, block: n.Block) -> n.Step:
        """step "x" relax(rng) { ... }"""
        return n.Step(str(name)[1:-1], relax or (), block, span=self._span(at))

    def drop(self, at: Meta, name: Token) -> n.Drop:
        """drop step "x" """
        return n.Drop(str(name)[1:-1], span=self._span(at))
