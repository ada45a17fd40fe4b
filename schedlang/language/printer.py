"""Printer: a syntax tree as canonical text (`schedlang fmt`, `to_sched`).

* Expressions, selectors and heads of statements on one line.
* Whole files: two spaces of indent, aligned columns for runs of rules, comments kept.
* `with_printed_spans`: a tree that was made, not read, with spans in its own canonical text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from schedlang.diagnostics.source import Source, Span
from schedlang.language import nodes as n
from schedlang.language.syntax import parse


def expr(node: n.Node | str) -> str:
    """Print an expression, an argument or an operator."""
    match node:
        case str():
            return node
        case n.Lit(text):
            return text
        case n.Name():
            return node.text
        case n.Keyword(name, value):
            return f"{name}={expr(value)}"
        case n.Call(name, nodes):
            return name.text + args(nodes)
        case n.List(items):
            return f"[{', '.join(map(expr, items))}]"
        case n.Group(items):
            return f"({', '.join(map(expr, items))})"
        case n.Unary("not", operand):
            return f"not {expr(operand)}"
        case n.Unary(op, operand):
            return op + expr(operand)
        case n.Chain(items):
            return " ".join(map(expr, items))
        case n.Interval(low, high):
            return f"{expr(low)}..{expr(high)}"
    raise AssertionError(node)


def args(nodes: Sequence[n.Node]) -> str:
    """Print arguments in their parentheses."""
    return f"({', '.join(map(expr, nodes))})"


def index(item: str | n.Slice) -> str:
    """Print one index of a selector."""
    if isinstance(item, str):
        return item
    text = f"{item.start or ''}:{item.stop or ''}"
    return text if item.step is None else f"{text}:{item.step}"


def seg(node: n.Seg) -> str:
    """Print one segment of a selector with its indices."""
    return node.text + (f"[{', '.join(map(index, node.index))}]" if node.index else "")


def path(node: n.Path) -> str:
    """Print a selector."""
    kind = f":{node.type}" if node.type else ""
    return ".".join(map(seg, node.segs)) + "?" * node.optional + kind


def params(nodes: Sequence[n.Param]) -> str:
    """Print the parameters of a def or a pattern."""
    return f"({', '.join(map(param, nodes))})"


def param(node: n.Param) -> str:
    """Print a parameter: `name: type = default`, or `name=default`."""
    kind = f": {node.type}" if node.type else ""
    equals = " = " if node.type else "="
    return node.name + kind + (equals + expr(node.default) if node.default is not None else "")


def head(node: n.Node) -> str:
    """Print a declaration on one line, or the part of a statement before its brace."""
    match node:
        case n.Header(version, model):
            return f"schedule {version}" + _prefix_text(" for ", model)
        case n.Use(file, alias, nodes):
            return (
                f'use "{file}"' + _prefix_text(" as ", alias) + (f" {args(nodes)}" if nodes else "")
            )
        case n.Mesh(nodes, on):
            name = on if on is None or on.isidentifier() else f'"{on}"'
            return f"mesh{args(nodes)}" + _prefix_text(" on ", name)
        case n.View(name, size, axes):
            return f"view {name}" + _prefix_expr(" = ", size) + f" of ({', '.join(axes)})"
        case n.Knob(name, kind, default, domain):
            return (
                f"knob {name}: {kind}" + _prefix_expr(" = ", default) + _prefix_expr(" in ", domain)
            )
        case n.Require(test):
            return f"require {expr(test)}"
        case n.Search(mode, limit):
            return f"search {mode} {limit.name} = {expr(limit.value)}"
        case n.Expect(test, on):
            return f"expect {expr(test)}" + _prefix_text(" on ", on)
        case n.Drop(name):
            return f'drop step "{name}"'
        case n.Pattern(name, nodes, body):
            return f"pattern {name}{params(nodes)} {{ {expr(body)} }}"
    return _block_head(node)


def _block_head(node: n.Node) -> str:
    match node:
        case n.Def(name, parameters, _):
            return f"def {name}{params(parameters)}"
        case n.Step(name, relax, _):
            return f'step "{name}"' + (f" relax({', '.join(relax)})" if relax else "")
        case n.Override(step):
            return f"override {_block_head(step)}"
        case n.At(paths, where, except_, _):
            text = "at " + ", ".join(map(path, paths)) + _prefix_expr(" where ", where)
            return text + (" except " + ", ".join(map(path, except_)) if except_ else "")
        case n.When(test, _, _):
            return f"when {expr(test)}"
    raise AssertionError(node)


def statement(node: n.Rule | n.Do) -> str:
    """Print a row on one line."""
    if isinstance(node, n.Do):
        return path(node.path) + args(node.call.args)
    return f"{paths(node.paths)}  {expr(node.call)}"


def paths(paths_: Sequence[n.Path]) -> str:
    """Print several selectors, separated by commas."""
    return ", ".join(map(path, paths_))


def _prefix_text(before: str, text: str | None) -> str:
    return before + text if text else ""


def _prefix_expr(before: str, node: n.Node | None) -> str:
    return before + expr(node) if node is not None else ""


INDENT = "  "


@dataclass
class OutputLine:
    """One line of output; `right` is set for a rule: the column that is aligned within a run of
    rules."""

    depth: int
    left: str
    right: str | None = None
    comment: str | None = None

    @property
    def statement(self) -> str:
        """The statement of the line: for a rule, the call after its paths."""
        return self.left if self.right is None else self.right

    def start_column(self, line: str) -> int:
        """Return the column, from 1, at which the statement begins in the printed line `line`."""
        before = len(INDENT) * self.depth + len(self.left) * (self.right is not None)
        return line.index(self.statement, before) + 1

    @property
    def opens_block(self) -> bool:
        """Whether the line opens a block."""
        return self.left.endswith("{") and not self.left.startswith("#")


def format_lines(rows: list[OutputLine]) -> str:
    """Return the text of all rows, each line ended."""
    return "".join(line.rstrip() + "\n" for run in _rule_runs(rows) for line in _align_run(run))


def _rule_runs(rows: list[OutputLine]) -> Iterator[list[OutputLine]]:
    """Yield maximal runs of rules at one depth; every other row is a run of its own."""
    run: list[OutputLine] = []
    for row in rows:
        joins = run and row.right is not None and run[-1].right is not None
        if joins and row.depth == run[-1].depth:
            run.append(row)
            continue
        if run:
            yield run
        run = [row]
    if run:
        yield run


def _align_run(run: list[OutputLine]) -> list[str]:
    width = max(len(row.left) for row in run)
    texts = []
    for row in run:
        text = row.left if row.right is None else f"{row.left:<{width}}  {row.right}"
        texts.append(INDENT * row.depth + text)
    column = max((len(t) for t, row in zip(texts, run) if row.comment), default=0)
    return [f"{t:<{column}}  {row.comment}" if row.comment else t for t, row in zip(texts, run)]


WIDTH = 88


def fmt(source: Source) -> str:
    """Return the canonical form of a schedule; knows no primitive."""
    return to_text(parse(source))


def to_text(file: n.File) -> str:
    """Print a tree as canonical text. Nodes whose spans are outside `file`'s own text may be mixed
    in."""
    return Printer(file).print()


def with_printed_spans(file: n.File, name: str) -> n.File:
    """Print a tree, and return it with spans in its printed text, a source named `name`."""
    printer = Printer(file)
    source = Source(name, printer.print())
    lines = {id(row): k for k, row in enumerate(printer.rows, 1)}

    def span(first: OutputLine, last: OutputLine) -> Span:
        start, end = lines[id(first)], lines[id(last)]
        columns = (
            first.start_column(source.line(start)),
            last.start_column(source.line(end)) + len(last.statement),
        )
        return Span(source, start, columns[0], end, columns[1])

    spans = {node: span(*rows) for node, rows in printer.places.items()}
    texts = ((row.comment or row.left, row) for row in printer.rows)
    comments = (n.Comment(text, span(row, row)) for text, row in texts if text.startswith("#"))
    file_span = Span(source, 1, 1, len(source.lines), 1)
    placed: n.File = n.with_spans(file, file_span, spans)
    return replace(placed, comments=tuple(comments))


class Printer:
    """Walks a file once, and takes each comment from the queue when the walk has passed its
    line."""

    def __init__(self, file: n.File) -> None:
        self.file = file
        self.rows: list[OutputLine] = []
        self.comments = list(file.comments)
        self.depth = 0
        self.last = 0  # the line of the original that was printed last; 0 for none
        # the first and last row of statements, blocks
        self.places: dict[int, tuple[OutputLine, OutputLine]] = {}

    def print(self) -> str:
        """Print the whole file."""
        header = self.file.header
        self._put_leading(header)
        self._put(head(header))
        self.places[id(header)] = self.rows[-1], self.rows[-1]
        self._attach_comment(self._start_line(header))
        before: n.Item | None = None
        for item in self.file.items:
            self._put_leading(item, apart=_needs_blank_line(before, item))
            self._statement(item)
            before = item
        self._put_comments_before(10**9)
        for text in ("", *self.file.remarks) if self.file.remarks else ():
            self._put(text)
        return format_lines(self.rows)

    # ---- lines of the original ----------------------------------------------------------

    def _start_line(self, node: n.Node) -> int:
        """Return the line on which the node begins; 0 for a node of another text."""
        return node.span.line if node.span.source is self.file.span.source else 0

    def _end_line(self, node: n.Node) -> int:
        return node.span.end_line if node.span.source is self.file.span.source else 0

    def _put(self, left: str, right: str | None = None) -> None:
        self.rows.append(OutputLine(self.depth, left, right))

    def _keep_blank_line(self, line: int) -> bool:
        """Keep one of the author's blank lines, unless it stands directly inside a brace."""
        kept = bool(
            self.last and line > self.last + 1 and self.rows and not self.rows[-1].opens_block
        )
        if kept:
            self.rows.append(OutputLine(0, ""))
        self.last = line
        return kept

    def _put_comments_before(self, line: int) -> bool:
        """Put the comments above `line` on lines of their own; return whether a blank line was
        kept."""
        blank = False
        while self.comments and self.comments[0].span.line < line:
            comment = self.comments.pop(0)
            blank |= self._keep_blank_line(comment.span.line)
            self._put(comment.text)
        return blank

    def _put_leading(self, node: n.Node, apart: bool = False) -> None:
        """Put the comments and blank lines above a node; `apart` demands at least one blank
        line."""
        line, start = self._start_line(node), len(self.rows)
        if line:
            inside = self._head_end(node)
            blank = self._put_comments_before(inside)
            self.last = min(self.last, line)
            blank |= self._keep_blank_line(line) if self.last < line else False
            self.last = line
            apart = apart and not blank
        if apart and self.rows:
            self.rows.insert(start, OutputLine(0, ""))

    def _head_end(self, node: n.Node) -> int:
        """Return the first line whose comments do not belong above the node."""
        block = _first_block(node)
        return max(self._start_line(node), block.span.line if block else self._end_line(node))

    def _attach_comment(self, line: int) -> None:
        """Attach the comment at the end of line `line` of the original to the row just printed."""
        if line and self.comments and self.comments[0].span.line == line and self.rows:
            self.rows[-1].comment = self.comments.pop(0).text
        self.last = max(self.last, line)

    # ---- statements ---------------------------------------------------------------------

    def _statement(self, node: n.Node) -> None:
        for text in node.remarks if isinstance(node, n.Mesh) else ():
            self._put(text)
        start = len(self.rows)
        match node:
            case n.Rule(call=call):
                self._call(paths(node.paths), call.name.text, call.args)
            case n.Do(name, call):
                self._call("", path(name), call.args)
            case n.At(block=block):
                self._at(node, block)
            case n.When(_, block, orelse):
                self._when(node, block, orelse)
            case n.Def(block=block) | n.Step(block=block) | n.Override(n.Step(block=block)):
                self._block(head(node), block)
            case _:
                self._put(head(node))
        self.places[id(node)] = self.rows[start], self.rows[-1]
        if isinstance(node, n.Rule | n.Do) and node.remarks:
            self.rows[-1].comment = " ".join(node.remarks)
        self._attach_comment(self._end_line(node))

    def _call(self, left: str, name: str, nodes: Sequence[n.Node]) -> None:
        """Put a row; one argument per line where the row would be too long."""
        text = name + args(nodes)
        size = len(INDENT) * self.depth + len(left) + len("  ") * bool(left) + len(text)
        first = text if size <= WIDTH or not nodes else name + "("
        self._put(left or first, first if left else None)
        if first is not text:
            for arg in nodes:
                self._put(f"{INDENT}{expr(arg)},")
            self._put(")")

    def _at(self, node: n.At, block: n.Block) -> None:
        """Put an `at`: on one line if it holds one call, has no comment and fits."""
        start = head(node)
        if len(block.body) == 1 and isinstance(block.body[0], n.Do):
            line = f"{start} {{ {statement(block.body[0])} }}"
            has_comment = block.body[0].remarks or self._holds_comment(block)
            if len(INDENT) * self.depth + len(line) <= WIDTH and not has_comment:
                self._put(line)
                return
        self._block(start, block)

    def _holds_comment(self, block: n.Block) -> bool:
        """Return whether a comment stands between the braces."""
        return bool(self.comments) and self.comments[0].span.line < self._end_line(block)

    def _block(self, start: str, block: n.Block) -> None:
        if not block.body and not self._holds_comment(block):
            self._put(start + " {}")
        else:
            self._put(start + " {")
            self._body(block)

    def _when(self, node: n.When, block: n.Block, orelse: n.Block | None) -> None:
        start = head(node)
        if orelse is None:
            self._block(start, block)
            return
        self._put(start + " {")
        self._body(block, "} else {")
        if orelse.body or self._holds_comment(orelse):
            self._body(orelse)
        else:
            self.rows[-1].left = "} else {}"
            self.places[id(orelse)] = self.rows[-1], self.rows[-1]

    def _body(self, block: n.Block, close: str = "}") -> None:
        opened, line = self.rows[-1], self._start_line(block)
        first = next(filter(None, map(self._start_line, block.body)), 0)
        if line and first != line:
            self._attach_comment(line)
        self.depth += 1
        for node in block.body:
            self._put_leading(node)
            self._statement(node)
        self._put_comments_before(self._end_line(block))
        self.depth -= 1
        self._put(close)
        self.places[id(block)] = opened, self.rows[-1]
        self.last = max(self.last, self._end_line(block))


def _first_block(node: n.Node) -> n.Block | None:
    match node:
        case n.At(block=block) | n.When(block=block) | n.Def(block=block) | n.Step(block=block):
            return block
        case n.Override(step):
            return step.block
    return None


def _needs_blank_line(before: n.Item | None, item: n.Item) -> bool:
    """Return whether a blank line must stand between two items at the top of a file."""
    blocks = n.Step | n.Def | n.Override
    same_kind = type(before) is type(item)
    return not same_kind or isinstance(item, blocks) or isinstance(before, blocks)
