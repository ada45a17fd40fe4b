"""The rows of a proposed schedule as text: blocks folded, names that differ in a part in braces."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from schedlang.diagnostics.source import Source
from schedlang.language import printer
from schedlang.passes.elaborate.rows import pattern
from schedlang.passes.reduce_model.blocks import Blocks

PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|\*")


@dataclass(frozen=True)
class Row:
    """One primitive at the modules of one or several common names; none: at the model itself."""

    names: tuple[str, ...]
    call: str
    comment: str = ""

    def with_argument(self, argument: str) -> Row:
        """The row with one more argument, before the axis, or with another value of it."""
        key = argument.partition("=")[0]
        if re.search(rf"\b{key}=", self.call):
            return self
        before, over, after = self.call.partition("over=")
        return replace(self, call=f"{before}{argument}, {over}{after}")


Place = tuple[str, str, Row]  # the blocks where a row stands, and its path inside them


def canonical(text: str) -> str:
    """The text as `fmt` writes it."""
    return printer.fmt(Source("proposed", text))


def rows_text(rows: Sequence[Row], blocks: Blocks) -> str:
    """Rows folded: one block for each list of blocks, one row for names that are done the same."""
    lines: list[str] = []
    opened = ""
    for head, tail, row in _together(_placed(_folded(rows), blocks)):
        if head != opened:
            lines += ["}"] * bool(opened) + [f"at {head} {{"] * bool(head)
            opened = head
        said = f"  # {row.comment}" if row.comment else ""
        lines.append(f"{tail}  {row.call}{said}".strip())
    return "\n".join([*lines, *["}"] * bool(opened)])


def _placed(rows: Sequence[Row], blocks: Blocks) -> Iterator[Place]:
    """Each row with the blocks where it stands and its path inside them."""
    for row in rows:
        name = row.names[0] if row.names else ""
        for head in heads(name, blocks):
            tail = _tail(row.names)
            alone = sum(head in heads(r.names[0], blocks) for r in rows if r.names) == 1
            if not head or alone:
                yield "", ".".join(filter(None, (head, tail))), row
            else:
                yield head, tail, row


def _together(placed: Iterable[Place]) -> Iterator[Place]:
    """The same rows; among consecutive rows in blocks, those of one list side by side."""
    run: list[Place] = []
    for one in [*placed, None]:
        if one is not None and any("*" in name for name in one[2].names):
            run.append(one)
            continue
        order = list(dict.fromkeys(head for head, _, _ in run))
        yield from sorted(run, key=lambda place: order.index(place[0]))
        run = []
        if one is not None:
            yield one


def heads(name: str, blocks: Blocks) -> tuple[str, ...]:
    """The blocks in which modules of a common name stand, as patterns; "" where it is in none."""
    root, star, _ = name.rpartition("*")
    if not star:
        return ("",)
    depth = name[: len(root)].count(".")
    everyone = blocks.named.get(root + star, ())
    held = dict.fromkeys(
        ".".join(fqn.split(".")[: depth + 1]) for fqn in blocks.named.get(name, ())
    )
    found = tuple(held)
    if len(found) == len(everyone):  # numbers beside those of blocks stay: `up.1.blocks.*`
        return (quoted(root + star),)
    one = pattern(found, everyone)
    return (quoted(one),) if " and " not in one else tuple(quoted(fqn) for fqn in found)


def _tail(names: Sequence[str]) -> str:
    """The path of one or several common names below their blocks, as one selector."""
    below = [name.rpartition("*")[2].lstrip(".") for name in names]
    if len(below) == 1:
        return quoted(below[0])
    parent = below[0].rpartition(".")[0]
    if parent and all(name.rpartition(".")[2].isdigit() for name in below):
        return quoted(pattern(below, ()))
    return ".".join(filter(None, (quoted(parent), braces([b.rpartition(".")[2] for b in below]))))


def braces(names: Sequence[str]) -> str:
    """`{q,k,v}_proj`: what names have in common at a `_` stands once."""
    front = os.path.commonprefix(list(names))
    front = front[: front.rfind("_") + 1]
    back = os.path.commonprefix([name[len(front) :][::-1] for name in names])[::-1]
    back = back[back.find("_") :] if "_" in back else ""
    middle = (name[len(front) : len(name) - len(back)] for name in names)
    return f"{front}{{{','.join(middle)}}}{back}"


def names_text(names: Sequence[str]) -> str:
    """Common names in few words: those of one parent in braces."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return ", ".join(
        ".".join(filter(None, (parent, braces([n.rpartition(".")[2] for n in group]))))
        if len(group) > 1
        else group[0]
        for parent, group in groups.items()
    )


def wrapped(text: str, width: int = 88) -> str:
    """A comment on lines of its own."""
    lines = textwrap.wrap(text, width - 4, break_long_words=False, break_on_hyphens=False)
    return "".join(f"#{'  ' if number else ''} {line}\n" for number, line in enumerate(lines))


def quoted(path: str) -> str:
    """A path with backquotes where a name is none of the language's."""
    parts = re.split(r"\.(?![^\[]*\])", path)
    return ".".join(
        part if PLAIN.fullmatch(part.partition("[")[0]) else f"`{part}`" for part in parts if part
    )


def _folded(rows: Sequence[Row]) -> list[Row]:
    """Rows of one parent and one call that follow each other, as one row."""
    out: list[Row] = []
    before: object = None
    for row in rows:
        parent, _, last = row.names[0].rpartition(".") if row.names else ("", "", "")
        foldable = PLAIN.fullmatch(last) is not None and bool(parent or not last.isdigit())
        key = (parent, row.call, row.comment, last.isdigit()) if foldable else None
        if key is not None and key == before:
            out[-1] = replace(out[-1], names=(*out[-1].names, *row.names))
        else:
            out.append(row)
        before = key
    return out


def mesh_text(mesh: Mapping[str, int]) -> str:
    """The declaration of a mesh."""
    return f"mesh({', '.join(f'{name}={size}' for name, size in mesh.items())})"
