"""The model as a tree: classes, parameters with named dims, ties; repeated blocks folded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.tables import format_count
from schedlang.passes.elaborate.state import short_dtype

if TYPE_CHECKING:
    from schedlang.ir.model import ModelFacts, ParameterFact, Site


@dataclass(frozen=True)
class Tensor:
    """One parameter of a module: its shape with the names of its dims, and its tie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    tied: str
    trained: bool

    def __str__(self) -> str:
        names = self.dims or ("",) * len(self.shape)
        cells = ", ".join(f"{name} {size}".strip() for name, size in zip(names, self.shape))
        frozen = "" if self.trained else " frozen"
        tied = f" = {self.tied}" if self.tied else ""
        return f"{self.name} {short_dtype(self.dtype)}[{cells}]{frozen}{tied}"


@dataclass(frozen=True)
class Node:
    """A module, or a run of equal ones: `path` is the first one's, `name` covers all."""

    name: str
    path: str
    class_name: str
    count: int
    numel: int  # of one module and all below, each tensor once
    tensors: tuple[Tensor, ...]
    children: tuple[Node, ...]
    note: object = None  # must also be equal for modules to be folded
    truncated: bool = False  # it contains modules that are not shown

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "name": self.name,
            "path": self.path,
            "class": self.class_name,
            "count": self.count,
            "parameters": self.numel,
            "tensors": [
                asdict(t) | {"shape": list(t.shape), "dims": list(t.dims)} for t in self.tensors
            ],
            "children": [child.to_json() for child in self.children],
        }


def tree(
    facts: ModelFacts, *, each: bool = False, note: Callable[[str], object] = lambda fqn: None
) -> Node:
    """Return the tree of a model; with `each`, repeated blocks one by one.

    Only blocks with equal `note(fqn)`, of the block and of all modules below, are folded.
    """
    return _node(facts, facts.sites[""], facts.class_name, each, note)


def _node(
    facts: ModelFacts, site: Site, name: str, each: bool, note: Callable[[str], object]
) -> Node:
    prefix = f"{site.fqn}." if site.fqn else ""
    nodes = [_node(facts, facts.sites[prefix + c], c, each, note) for c in site.children]
    children = tuple(_join_only_child(child) for child in (nodes if each else _fold_runs(nodes)))
    tensors = tuple(_tensor(site, n, fact) for n, fact in site.parameters.items())
    count = facts.numel(site.fqn)
    return Node(name, site.fqn, site.class_name, 1, count, tensors, children, note(site.fqn))


def _tensor(site: Site, name: str, fact: ParameterFact) -> Tensor:
    full_name = f"{site.fqn}.{name}" if site.fqn else name
    tied = fact.name if fact.name != full_name else ""
    dims = site.dims.get(name, ())
    return Tensor(name, fact.dtype, fact.shape, dims, tied, fact.requires_grad)


def _node_key(node: Node) -> object:
    """Return a key that is equal for modules that look equal in the tree."""
    kinds = tuple((_node_key(child), child.name, child.count) for child in node.children)
    return node.class_name, node.tensors, node.note, kinds


def _fold_runs(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield the nodes, with runs of equal, consecutively numbered children folded into one."""
    run: list[Node] = []
    for node in [*nodes, None]:
        if run and node and _continues(run, node):
            run.append(node)
            continue
        if run:
            yield _fold(run)
        run = [node] if node else []


def _continues(run: Sequence[Node], node: Node) -> bool:
    numbers = run[-1].name.isdigit() and node.name.isdigit()
    return (
        numbers
        and int(node.name) == int(run[-1].name) + 1
        and _node_key(run[-1]) == _node_key(node)
    )


def _fold(run: Sequence[Node]) -> Node:
    first = run[0]
    if len(run) == 1:
        return first
    return replace(first, name=f"{first.name}..{run[-1].name}", count=len(run))


def _join_only_child(node: Node) -> Node:
    """Return a container with a run as its only child as that run: `h.0..11`."""
    if len(node.children) != 1 or node.children[0].count == 1 or node.tensors or node.count > 1:
        return node
    return replace(node.children[0], name=f"{node.name}.{node.children[0].name}")


def format_tree(root: Node, depth: int | None = None, width: int | None = None) -> str:
    """Format the tree for a terminal, `depth` levels of it; modules below are only counted.

    If a line is longer than `width`, parameters are printed below their module.
    """
    rows = list(_tree_rows(root if depth is None else _cut_depth(root, depth), "", ""))
    left = max(len(row[0]) for row in rows)
    middle = max(len(row[1]) for row in rows)
    lines = []
    for before, label, details in rows:
        line = f"{before.ljust(left)}  {label.ljust(middle)}  {details}".rstrip()
        if width is not None and len(line) > width:
            stem = before[: len(before) - len(before.lstrip("│├└─ "))]
            if before != stem:  # a module's first line, not a further parameter
                lines.append(f"{before.ljust(left)}  {label}".rstrip())
            line = f"{stem.replace('├', '│').translate({ord(c): ' ' for c in '└─'})}    {details}"
        lines.append(line)
    return "\n".join(lines)


def _cut_depth(node: Node, depth: int) -> Node:
    """Return a node without modules more than `depth` levels below it; a run counts its own
    path."""
    children = tuple(_cut_depth(child, depth - 1) for child in node.children) if depth > 0 else ()
    return replace(node, children=children, truncated=bool(node.children) and not children)


def _tree_rows(node: Node, lead: str, indent: str) -> Iterator[tuple[str, str, str]]:
    times = f" x{node.count}" if node.count > 1 else ""
    label = node.class_name + times if lead or indent else ""
    lines = [str(tensor) for tensor in node.tensors]
    if not node.tensors and (node.children or node.truncated):
        lines = [f"{format_count(node.numel)} parameters" + (" each" if times else "")]
    for index, text in enumerate(lines or [""]):
        yield (lead + node.name, label, text) if not index else (_stem(indent, node), "", text)
    for index, child in enumerate(node.children):
        last = index == len(node.children) - 1
        yield from _tree_rows(
            child, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  ")
        )


def _stem(indent: str, node: Node) -> str:
    return indent + ("│" if node.children else "")
