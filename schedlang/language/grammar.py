"""The grammar's parser (made by lark), the syntax tree that it builds, and editions of the
language.

* `TreeMaker`: the nodes for each rule of the grammar, every one with its span.
* Editions: the one that is read here, and the rewriting of a text of an older one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import cache_from_source
from math import isinf, prod
from pathlib import Path
from typing import Any

from lark import Lark, Token, v_args
from lark.lark import PostLex
from lark.tree import Meta
from lark.visitors import Transformer_NonRecursive

import schedlang
from schedlang.diagnostics.diagnostic import Diagnostic, Label
from schedlang.diagnostics.source import Source, Span
from schedlang.language import nodes as n

STARTS = ("start", "path", "expr")
MAX_DEPTH = 48  # nested brackets and signs; no handwritten text comes near
MAX_DIGITS = 18  # digits of a whole number: fits a machine word
OPENS = {"LPAR": "(", "LSQB": "[", "LBRACE": "{"}
CLOSES = ("RPAR", "RSQB", "RBRACE")
SIGNS = ("PLUS", "NOT")  # + and - share one terminal


class TooDeep(Exception):
    """A text nested deeper than walks of its tree can follow: the token, and what is nested
    there."""

    def __init__(self, token: Token, nested: str) -> None:
        super().__init__(token, nested)
        self.token: Token = token
        self.nested: str = nested


class StatementFilter(PostLex):
    """The filter between lexer and parser: newlines end statements, except inside ( ) and [ ].

    Also limits the depth of nesting (`MAX_DEPTH`).
    """

    always_accept = ("_NL",)

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        """Yield the tokens without the newlines that end no statement; raise TooDeep."""
        opened: list[tuple[str, int]] = []  # brackets, each with the signs before it
        signs: list[Token] = []  # consecutive signs
        depth, last = 0, ""
        for token in stream:
            kind = token.type
            if kind == "_NL":
                if last == "_NL" or (opened and opened[-1][0] != "LBRACE"):
                    continue
                signs = []
            elif kind in SIGNS:
                signs.append(token)
            elif kind in OPENS:
                opened.append((kind, len(signs)))
                depth, signs = depth + 1 + len(signs), []
            else:
                signs = []
                if kind in CLOSES and opened:
                    depth -= 1 + opened.pop()[1]
            if depth + len(signs) > MAX_DEPTH:
                raise _make_too_deep(token, signs, len(opened))
            last = kind
            yield token


def _make_too_deep(token: Token, signs: list[Token], brackets: int) -> TooDeep:
    if len(signs) > MAX_DEPTH:
        return TooDeep(signs[0], "signs")
    return TooDeep(token, "brackets" if brackets > MAX_DEPTH else "brackets and signs")


def span_of(source: Source, parsed: Token | Meta) -> Span:
    """Return the span of a token or of a rule's text."""
    lines = parsed.line, parsed.column, parsed.end_line, parsed.end_column
    return Span(source, *lines)  # type: ignore[arg-type]  # what was parsed has a place


def _cache_path() -> str | bool:
    """Return where lark caches the parser that it builds from the grammar; False: nowhere.

    The cache is a pickle: it is stored beside the bytecode of this file, which is trusted as much,
    and is rebuilt where grammar, lark or Python have changed.
    """
    if sys.dont_write_bytecode or sys.implementation.cache_tag is None:
        return False
    return str(Path(cache_from_source(__file__)).with_suffix(".lark"))


@cache
def parser(strict: bool = False) -> Lark:
    """Return the parser; a strict one rejects an ambiguous grammar."""
    return Lark.open(
        "sched.lark",
        rel_to=schedlang.__file__,
        parser="lalr",
        start=list(STARTS),
        strict=strict,
        cache=not strict and _cache_path(),
        postlex=StatementFilter(),
        propagate_positions=True,
    )


DIGITS = re.compile(r"\d+")
MAX_ALTERNATIVES = 1000  # names of one segment: `{a,b}_{c,d}` has four

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
# rules whose parts together are the only field of a node
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
# rules with the first part as one field and all others as the next; or with the last part alone
FIRST_AND_REST: Mapping[str, Callable[..., n.Node]] = {"call": n.Call}
REST_AND_LAST: Mapping[str, Callable[..., n.Node]] = {"rule": n.Rule}


def _plain(part: Any) -> Any:
    """Return a token as the text that nodes hold; other parts unchanged."""
    return str(part) if isinstance(part, Token) else part


@v_args(inline=True, meta=True)
class TreeMaker(Transformer_NonRecursive[Token, Any]):
    """Builds nodes from lark's tree; `problems` collects what the grammar cannot express.

    A method is named after its rule, and gets the rule's place and parts.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source: Source = source
        self.problems: list[Diagnostic] = []
        self._span: Callable[[Meta | Token], Span] = partial(span_of, source)

    def __default__(self, rule: str, parts: list[Any], meta: Meta) -> Any:
        """Make the node of a rule that has no method of its own."""
        values = tuple(map(_plain, parts))
        if rule in FIELDS:
            return FIELDS[rule](*values, span=self._span(meta))
        if rule in FIRST_AND_REST:
            return FIRST_AND_REST[rule](values[0], values[1:], span=self._span(meta))
        if rule in REST_AND_LAST:
            return REST_AND_LAST[rule](values[:-1], values[-1], span=self._span(meta))
        return ITEMS[rule](values, span=self._span(meta))

    def INT(self, token: Token) -> Token:
        """Check that a number is not too large."""
        match = DIGITS.search(token)
        digits = len(match[0]) if match else 0
        if digits > MAX_DIGITS or (token.type == "FLOAT" and isinf(float(token))):
            label = Label(self._span(token), f"a number has at most {MAX_DIGITS} digits")
            title = f"this number has {digits} digits"
            if digits <= MAX_DIGITS:
                label, title = Label(self._span(token)), "this number is too large"
            self.problems.append(Diagnostic("S004", title, label))
        return token

    def GLOB(self, token: Token) -> Token:
        """Check that a part of a selector does not stand for too many names."""
        count = prod(part.count(",") + 1 for part in re.findall(r"\{[^}]*\}", token))
        if count > MAX_ALTERNATIVES:
            label = Label(self._span(token), f"a selector has at most {MAX_ALTERNATIVES:,}")
            title = (
                f"these are {count:,} alternatives" if count < 10**9 else "too many alternatives"
            )
            self.problems.append(Diagnostic("S004", title, label))
        return token

    SIGNED = FLOAT = QUANTITY = INT

    # ---- selectors --------------------------------------------------------------------

    def seg(self, meta: Meta, text: Token, *index: Any) -> tuple[n.Seg, ...]:
        """layers, layers[2:4]; layers[3] is layers.3"""
        picked = tuple(map(_plain, index))
        if len(picked) == 1 and isinstance(picked[0], str) and picked[0].isdigit():
            child = n.Seg(str(int(picked[0][:MAX_DIGITS])), span=self._span(index[0]))
            return n.Seg(str(text), span=self._span(text)), child
        return (n.Seg(str(text), picked, span=self._span(meta)),)

    def path(self, meta: Meta, *parts: Any) -> n.Path:
        """h.*.attn?:Attention"""
        *segs, optional, kind = parts
        flat = tuple(seg for group in segs for seg in group)
        return n.Path(flat, optional is not None, _plain(kind), span=self._span(meta))

    # ---- statements -------------------------------------------------------------------

    def do(self, meta: Meta, path: n.Path, *args: Any) -> n.Do:
        """verify(forward)"""
        span = self._span(meta)
        name = n.Name(tuple(seg.text for seg in path.segs), span=path.span)
        return n.Do(path, n.Call(name, args, span=span), span=span)

    def at(self, meta: Meta, *parts: Any) -> n.At:
        """at h.* where out_features > 64 except h.0 { ... }"""
        *paths, where, except_, block = parts
        return n.At(tuple(paths), where, except_ or (), block, span=self._span(meta))

    def where(self, meta: Meta, test: Any) -> Any:
        """where out_features > 64"""
        return test

    def except_(self, meta: Meta, *paths: n.Path) -> tuple[n.Path, ...]:
        """except h.0, h.1"""
        return paths

    # ---- declarations -----------------------------------------------------------------

    def start(self, meta: Meta, header: n.Header, *items: Any) -> n.File:
        """Make the node of a whole file."""
        last = self.source.text.count("\n") + 1
        return n.File(header, items, span=Span(self.source, 1, 1, last, 1))

    def use(self, meta: Meta, path: Token, alias: Token | None, *args: Any) -> n.Use:
        """use "x.sched" as x"""
        return n.Use(str(path)[1:-1], _plain(alias), args or None, span=self._span(meta))

    def mesh(self, meta: Meta, *parts: Any) -> n.Mesh:
        """mesh(dp=2) on h100x64, mesh(dp=2) on "mine.toml\""""
        *args, on = parts
        return n.Mesh(tuple(args), on and str(on).strip('"'), span=self._span(meta))

    def view(self, meta: Meta, name: Token, size: Any, *axes: Token) -> n.View:
        """view cp of (ring, ulysses)"""
        return n.View(str(name), size, tuple(map(str, axes)), span=self._span(meta))

    def search(self, meta: Meta, kind: Token, limit: n.Keyword) -> n.Search:
        """search at least dp = 2"""
        return n.Search(" ".join(kind.split()), limit, span=self._span(meta))

    def params(self, meta: Meta, *params: n.Param) -> tuple[n.Param, ...]:
        """(over: axis, out=R)"""
        return params

    def relax(self, meta: Meta, *names: Token) -> tuple[str, ...]:
        """relax(rng, dtype)"""
        return tuple(map(str, names))

    def step(self, meta: Meta, name: Token, relax: Any, block: n.Block) -> n.Step:
        """step "x" relax(rng) { ... }"""
        return n.Step(str(name)[1:-1], relax or (), block, span=self._span(meta))

    def drop(self, meta: Meta, name: Token) -> n.Drop:
        """drop step "x" """
        return n.Drop(str(name)[1:-1], span=self._span(meta))


EDITION = 1  # the edition that this schedlang reads
FIRST_EDITION = 1  # the first edition
HEADER = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\r?\n)*[ \t]*schedule[ \t]+(\d+)")


@dataclass(frozen=True)
class EditionChange:
    """One difference of the next edition: described in a sentence, and applied by a function of
    texts."""

    description: str
    rewrite: Callable[[str], str]


# edition -> rewrites for the edition after it, in this order; there is one edition so far
CHANGES: Mapping[int, Sequence[EditionChange]] = {}


@dataclass(frozen=True)
class UpgradedSource:
    """A text in the edition that is read here, and the changes that were made to it."""

    source: Source
    changes: tuple[EditionChange, ...] = ()


def upgrade_source(source: Source) -> UpgradedSource:
    """Rewrite a text of an older edition into the current one; other texts stay unchanged."""
    match = HEADER.match(source.text)
    edition = int(match[1][:9]) if match else EDITION
    text, changes = source.text, []
    if match is None or not FIRST_EDITION <= edition < EDITION:
        return UpgradedSource(source)
    for number in range(edition, EDITION):
        for change in CHANGES.get(number, ()):
            before, text = text, change.rewrite(text)
            changes += [change] * (before != text)
    header = HEADER.match(text)
    assert header is not None, "no change takes a file's header away"
    text = f"{text[: header.start(1)]}{EDITION}{text[header.end(1) :]}"
    return UpgradedSource(Source(source.name, text), tuple(changes))


def edition_mismatch(version: str, span: Span) -> Diagnostic:
    """Return the diagnostic S006 for a header that names another edition, with what to do."""
    number = int(version[:9])
    title = f"the file is in edition {version} of the language; this schedlang reads {EDITION}"
    help_ = "install a newer schedlang"
    if number < FIRST_EDITION:
        title = f"edition {version} of the language does not exist"
        help_ = f"the first is {FIRST_EDITION}: `schedule {FIRST_EDITION}`"
    elif number < EDITION:
        help_ = f"rewrite it: `schedlang fmt --upgrade {span.source.name}`"
    return Diagnostic("S006", title, Label(span), helps=(help_,))
