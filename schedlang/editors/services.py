"""Completion, hovers and definitions at a cursor, in a text that need not parse.

* `Outline`: a model from the output of `tree --each --json`, for selectors, without importing it.
* `context_at`, `find_declarations`: the syntax around a cursor, and the names that the text
  declares.
* `complete_at`: completions at a cursor, with module paths of the model.
* `hover_text`, `find_definition`: a verb's manual, a declaration and its line, the modules of a
  selector.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from schedlang.diagnostics import codes
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import NOWHERE, read_utf8
from schedlang.editors.rules import declarations, terminal_pattern, verbs
from schedlang.ir.primitive import load_all, registry
from schedlang.language import manual
from schedlang.language.kinds import Axes, Axis, signature_of
from schedlang.language.selector import Selector
from schedlang.language.syntax import DECLARATIONS, STATEMENTS, parse_path
from schedlang.language.value import Names

# -- asking the command line in a process ----------------------------------------------------------


async def run_verb(verb: str, file: Path, *options: str) -> Mapping[str, Any] | None:
    """Run a verb on a file in a process, and return its JSON; None if it prints none.

    The process imports the model file, which may take long, fail or crash without affecting the
    server.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schedlang", verb, str(file), *options, "--json"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        out, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    try:
        answer = json.loads(out)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def rows_by_line(plan: Mapping[str, Any] | None) -> dict[int, list[Mapping[str, Any]]]:
    """Return the rows of a plan by their line in the file."""
    by_line: dict[int, list[Mapping[str, Any]]] = {}
    for step in (plan or {}).get("steps", ()):
        for row in step["lines"]:
            if row.get("from"):
                by_line.setdefault(row["from"][1], []).append(row)
    return by_line


# -- the model, without importing it ---------------------------------------------------------------


@dataclass(frozen=True)
class ParameterType:
    """A parameter, as far as selectors read it."""

    dtype: str


class Outline:
    """The modules of a model by name; has the methods of a selector's `Tree`."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.nodes = {node["path"]: node for node in _flatten(tree)}

    def children(self, fqn: str) -> Sequence[str]:
        """Return the names of the direct children of a module."""
        return [child["path"].rpartition(".")[2] for child in self.nodes[fqn]["children"]]

    def class_names(self, fqn: str) -> tuple[str, ...]:
        """Return the name of a module's class; its base classes are unknown."""
        return (self.nodes[fqn]["class"],)

    def attribute(self, fqn: str, name: str) -> object:
        """Raise AttributeError: attributes are unknown."""
        raise AttributeError(name)

    def attributes(self, fqn: str) -> Sequence[str]:
        """Return (): attributes are unknown."""
        return ()

    def numel(self, fqn: str) -> int:
        """Return the number of elements of a module's parameters."""
        return int(self.nodes[fqn]["parameters"])

    def parameters_below(self, fqn: str) -> Sequence[ParameterType]:
        """Return the parameters of a module and its children."""
        return [
            ParameterType(t["dtype"]) for node in _flatten(self.nodes[fqn]) for t in node["tensors"]
        ]

    def describe(self, fqn: str) -> str:
        """Describe a module's class and the shapes of its own parameters: Linear, weight [8, 4]."""
        node = self.nodes[fqn]
        tensors = [f"{t['name']} {t['dtype']}{t['shape']}" for t in node["tensors"]]
        return ", ".join([node["class"], *tensors])

    @cached_property
    def selector(self) -> Selector:
        """A selector over these modules."""
        return Selector(self)

    def select(self, path: str, roots: Sequence[str]) -> tuple[str, ...]:
        """Return the modules that a selector names; an index selects all children, as it may hold
        knobs."""
        read = parse_path(re.sub(r"\[[^\]]*\]", ".*", path), NOWHERE)
        return self.selector.select(read, roots, Names())


def _flatten(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [node, *(deep for child in node["children"] for deep in _flatten(child))]


# -- the context of a cursor, in a text that need not parse ----------------------------------------


TOKEN = re.compile(
    "|".join(
        (
            r"(?P<skip>"
            + "|".join(terminal_pattern(t) for t in ("COMMENT", "STRING", "QUOTED"))
            + ")",
            rf"(?P<glob>{terminal_pattern('GLOB')})",
            r"(?P<open>[({\[])",
            r"(?P<close>[)}\]])",
            r"(?P<end>\n)",
            r"(?P<word>[A-Za-z_][\w.]*)",
        )
    )
)
PATH = r"[\w.*{},`\[\]:?-]*"


@dataclass(frozen=True)
class OpenBracket:
    """An open bracket around the cursor, and the text before it, from `start` on."""

    bracket: str
    before: str
    start: int


@dataclass(frozen=True)
class CursorContext:
    """The brackets around a cursor, outermost first, and the unfinished statement before it."""

    around: tuple[OpenBracket, ...]
    statement: str

    @property
    def scopes(self) -> tuple[str, ...]:
        """The heads of the blocks around the cursor: `step "x"`, `at h.*`."""
        return tuple(bracket.before for bracket in self.around if bracket.bracket == "{")

    @property
    def call(self) -> str:
        """The name of the call whose arguments are being written; "" outside of a call."""
        inner = next((bracket for bracket in reversed(self.around) if bracket.bracket != "["), None)
        match = re.search(r"([A-Za-z_][\w.]*)$", inner.before) if inner else None
        return match[1] if match and inner and inner.bracket == "(" else ""

    @property
    def argument(self) -> str:
        """The keyword whose value is being written; "" if there is none."""
        match = re.search(r"(\w+)\s*=\s*\[?[\w.,\s]*$", self.statement)
        return match[1] if match and self.call else ""

    @property
    def path(self) -> str | None:
        """The selector that is being written; None where no selector may stand."""
        if self.call:
            return None
        heads = rf"(?:(?:at|except)\s+|.*\b(?:except)\s+)?(?:{PATH}\s*,\s*)*({PATH})"
        match = re.fullmatch(heads, self.statement)
        return match[1] if match else None

    @property
    def awaits_verb(self) -> bool:
        """Whether the selectors are complete and a verb comes next."""
        heads = rf"{PATH}(\s*,\s*{PATH})*(?<!,)\s+\w*"
        first = self.statement.split(maxsplit=1)[:1]
        keyword = bool(first) and first[0] in declarations()
        complete = re.fullmatch(heads, self.statement) is not None
        return not self.call and complete and not keyword and not self.statement.endswith(",")


def context_at(text: str, offset: int) -> CursorContext:
    """Return the context of the character at `offset`."""
    around: list[OpenBracket] = []
    start = 0
    for token in TOKEN.finditer(text, 0, offset):
        kind, position = token.lastgroup, token.start()
        if kind == "open":
            around.append(OpenBracket(token[0], text[start:position].strip(), token.end()))
        elif kind == "close" and around:
            around.pop()
        block = not around or around[-1].bracket == "{"
        braces = token[0] in "{}" and kind in ("open", "close")
        if braces or (kind == "end" and block):
            start = token.end()
    return CursorContext(tuple(around), text[start:offset].lstrip())


# -- declarations, in a text that need not parse ---------------------------------------------------


DECLARATION = re.compile(
    r'^[ \t]*(?:(?P<kind>knob|view|def|pattern)\s+(?P<name>\w+)|use\s+(?P<file>"[^"\n]*")'
    r'(?:\s+as\s+(?P<alias>\w+))?|(?P<step>step)\s+"(?P<title>[^"\n]*)"|(?P<mesh>mesh)\s*\()',
    re.M,
)
AXIS = re.compile(r"(\w+)\s*=")


@dataclass(frozen=True)
class Declaration:
    """A declared name, its kind (knob, view, def, pattern, axis, use, step), its offset and its
    line."""

    name: str
    kind: str
    offset: int
    line: str


def find_declarations(text: str) -> list[Declaration]:
    """Return every declaration of a text, in order."""
    result = []
    for match in DECLARATION.finditer(text):
        line = text[match.start() : _line_end(text, match.start())].strip()
        if match["mesh"]:
            until = text.find(")", match.end())
            inside = text[: until if until >= 0 else len(text)]
            for axis in AXIS.finditer(inside, match.end()):
                result.append(Declaration(axis[1], "axis", axis.start(1), line))
        elif match["file"]:
            name = match["alias"] or match["file"].strip('"')
            result.append(Declaration(name, "use", match.start("file"), line))
        elif match["step"]:
            result.append(Declaration(match["title"], "step", match.start("title"), line))
        else:
            result.append(Declaration(match["name"], match["kind"], match.start("name"), line))
    return result


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def used_file(text: str, alias: str) -> str | None:
    """Return the file that `use "file" as alias` names."""
    match = re.search(rf'^[ \t]*use\s+"([^"\n]*)"\s+as\s+{re.escape(alias)}\b', text, re.M)
    return match[1] if match else None


TOP = ("schedule", *DECLARATIONS, *STATEMENTS)


@dataclass(frozen=True)
class Completion:
    """A completion: its text, kind (module, verb, argument, value, name, keyword), a line and a
    page."""

    text: str
    kind: str
    detail: str = ""
    page: str = ""


def complete_at(text: str, offset: int, outline: Outline | None = None) -> list[Completion]:
    """Return the completions at `offset`; with modules if the model is known."""
    load_all()
    context, names = context_at(text, offset), find_declarations(text)
    if context.call:
        offers = [*_offer_arguments(context, names)]
    elif re.fullmatch(r"schedule\s+\d+\s+for\s+\w*", context.statement):
        offers = [Completion(outline.nodes[""]["class"], "name", "the model")] if outline else []
    elif context.awaits_verb:
        offers = [*_offer_verbs(names)]
    elif context.path is not None:
        offers = [*_offer_modules(context, outline)]
        if context.path == context.statement and "." not in context.path:
            keywords = STATEMENTS if context.scopes else TOP
            offers += [
                *_offer_verbs(names),
                *(Completion(keyword, "keyword") for keyword in keywords),
            ]
    else:
        offers = [*_offer_names(names, ("knob", "axis", "view"))]
    return list({offer.text: offer for offer in offers}.values())


def _offer_verbs(names: list[Declaration]) -> Iterator[Completion]:
    for name in verbs():
        kind = registry()[name]
        yield Completion(name, "verb", manual.signature(kind), manual.explain(kind))
    yield from _offer_names(names, ("def",))


def _offer_names(names: list[Declaration], kinds: tuple[str, ...]) -> Iterator[Completion]:
    for entry in names:
        if entry.kind in kinds:
            yield Completion(entry.name, "verb" if entry.kind == "def" else "name", entry.line)


def _offer_arguments(context: CursorContext, names: list[Declaration]) -> Iterator[Completion]:
    """Yield values of the argument that is being written, and names of others."""
    kind = registry().get(context.call)
    if kind is None:
        yield from _offer_names(names, ("knob", "axis", "view", "pattern"))
        return
    signature = signature_of(kind)
    if context.argument:
        yield from _offer_values(signature.types.get(context.argument), names)
        return
    for name in signature.positional:
        yield from _offer_values(signature.types[name], names)
    for name in signature.keywords:
        if f"{name}=" not in context.statement:
            yield Completion(f"{name}=", "argument", dict(manual.argument_rows(kind))[name])


def _offer_values(kind: Any, names: list[Declaration]) -> Iterator[Completion]:
    """Yield completions for an argument of this type."""
    if kind is Axis or kind == Axes:
        yield from _offer_names(names, ("axis", "view"))
        return
    if typing.get_origin(kind) is Literal:
        yield from (Completion(str(value), "value") for value in typing.get_args(kind))
    elif kind is bool:
        yield from (Completion(value, "value") for value in ("true", "false"))
    elif kind is str:
        yield from _offer_names(names, ("pattern",))
    else:
        for inner in typing.get_args(kind):
            yield from _offer_values(inner, names) if inner is not type(None) else ()
    yield from _offer_names(names, ("knob",))


def _offer_modules(context: CursorContext, outline: Outline | None) -> Iterator[Completion]:
    """Yield the children of the path written so far; numbered ones also as `*`."""
    if outline is None or context.path is None:
        return
    parent = context.path.rpartition(".")[0]
    roots = roots_of(context, outline)
    try:
        modules = outline.select(parent, roots) if parent else roots
    except Refusal:
        return
    for module in modules:
        children = outline.children(module)
        if any(child.isdigit() for child in children):
            yield Completion("*", "module", f"all {len(children)} of them")
        for child in children:
            fqn = f"{module}.{child}" if module else child
            yield Completion(child, "module", outline.describe(fqn))


def roots_of(context: CursorContext, outline: Outline) -> tuple[str, ...]:
    """Return the modules from which selectors at a place start; () inside a `def`."""
    roots: tuple[str, ...] = ("",)
    for head in context.scopes:
        if head.startswith("def"):
            return ()
        match = re.search(rf"\bat\s+((?:{PATH}\s*,\s*)*{PATH})", head)
        if match:
            paths = [path for path in re.split(r"\s*,\s*(?![^{]*\})", match[1]) if path]
            try:
                roots = tuple(m for path in paths for m in outline.select(path, roots))
            except Refusal:
                return ()
    return roots


# -- definition ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A place in a file: its path (None: the same file), its offset and the file's text."""

    file: Path | None
    offset: int
    text: str


def find_definition(text: str, offset: int, file: Path) -> Target | None:
    """Find the declaration of the name at `offset` of `file`; None if there is none."""
    line = text[text.rfind("\n", 0, offset) + 1 :].split("\n", 1)[0]
    use = re.match(r'\s*use\s+"([^"]*)"', line)
    if use:
        return _find_in_file(file.parent / use[1], "")
    before = re.search(r"[\w.]*$", text[:offset])
    after = re.match(r"\w*", text[offset:])
    word = (before[0] if before else "") + (after[0] if after else "")
    alias, dot, name = word.rpartition(".")
    path = used_file(text, alias) if dot else None
    if path is not None:
        return _find_in_file(file.parent / path, name)
    for entry in find_declarations(text):
        if entry.name == word and entry.kind != "step":
            return Target(None, entry.offset, text)
    return None


def _find_in_file(path: Path, name: str) -> Target | None:
    """Find a declaration in another file; the file's start for the name ""."""
    try:
        text = read_utf8(path)
    except (OSError, UnicodeDecodeError):
        return None
    if not name:
        return Target(path, 0, text)
    entry = next(
        (candidate for candidate in find_declarations(text) if candidate.name == name), None
    )
    return Target(path, entry.offset, text) if entry else None


# -- hover -----------------------------------------------------------------------------------------


MOST = 6  # modules listed one by one
Rows = Sequence[Mapping[str, Any]]  # the rows of `plan --json` on the cursor's line


def hover_text(text: str, offset: int, outline: Outline | None = None, rows: Rows = ()) -> str:
    """Describe the word at `offset`, as Markdown; "" for an unknown word."""
    load_all()
    start, end = _word_bounds(text, offset, PATH.removesuffix("*"))
    word = text[start:end]
    name = re.search(r"\w*$", text[:offset])
    bare = (name[0] if name else "") + re.match(r"\w*", text[offset:])[0]  # type: ignore[index]
    context = context_at(text, start)
    if text[end : end + 1] == "(" and bare in registry():
        page = manual.explain(registry()[bare])
        return f"```text\n{page.rstrip()}\n```" + _describe_plan_rows(rows)
    if bare.upper() in codes.CODES:
        return codes.explain(bare.upper())
    selected = outline is not None and not context.call and _may_begin_selector(context)
    if outline is not None and selected and _describe_selection(word, context, outline):
        return _describe_selection(word, context, outline) + _describe_plan_rows(rows)
    for entry in find_declarations(text):
        if entry.name == bare and entry.kind != "step":
            return f"```sched\n{entry.line}\n```"
    return ""


def _word_bounds(text: str, offset: int, chars: str) -> tuple[int, int]:
    """Return the bounds of the longest run of `chars` around an offset."""
    start = end = offset
    while start > 0 and re.fullmatch(chars, text[start - 1]):
        start -= 1
    while end < len(text) and re.fullmatch(chars, text[end]):
        end += 1
    return start, end


def _may_begin_selector(cursor: CursorContext) -> bool:
    """Return whether a selector may begin at a place."""
    return (
        cursor.statement == ""
        or re.search(r"(?:,|\bat|\bexcept)\s*$", cursor.statement) is not None
    )


def _describe_selection(selector: str, context: CursorContext, outline: Outline) -> str:
    """Describe the modules of a selector."""
    try:
        fqns = outline.select(selector.strip(","), roots_of(context, outline))
    except Refusal:
        return ""
    listed = [f"- `{fqn or 'the model'}`: {outline.describe(fqn)}" for fqn in fqns[:MOST]]
    suffix = [f"- and {len(fqns) - MOST} more"] if len(fqns) > MOST else []
    number = f"{len(fqns)} modules" if len(fqns) != 1 else "1 module"
    return "\n".join([f"**{number}**", "", *listed, *suffix]) if fqns else ""


def _describe_plan_rows(rows: Rows) -> str:
    """Describe layouts and collectives of rows in the plan."""
    lines = []
    for row in rows:
        sent = [
            f"{c['count']} {c['kind']} over {', '.join(c['axes'])} ({c['what']})"
            for c in row["collectives"]
        ]
        effects = "; ".join([*([f"`{row['said']}`"] if row["said"] else []), *sent])
        lines.append(f"- `{row['pattern']}` {row['do']}: {effects or 'planned'}")
    return "\n\n**In the plan**\n\n" + "\n".join(lines) if lines else ""
