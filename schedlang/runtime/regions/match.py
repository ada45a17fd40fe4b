"""Where a pattern stands in a data flow: along the edges between calls, never by their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from schedlang.patterns import COMMUTES, Const, Op, Pattern, Term, Var
from schedlang.runtime.regions.ops import operation, shown, writes


@dataclass(frozen=True)
class Match:
    """One place: its calls in the order of the flow, and what each parameter is."""

    nodes: tuple[fx.Node, ...]
    bound: Mapping[str, Any]
    several: tuple[fx.Node, ...] = ()  # results, where they are more than the last call's

    @property
    def root(self) -> fx.Node:
        """The call that gives the result."""
        return self.nodes[-1]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """What it gives."""
        return self.several or (self.root,)


@dataclass
class Miss:
    """The attempt that came furthest: how many calls fitted, and why no more did."""

    fitted: int = -1
    reason: str = "none of its calls is in the pattern"
    bias: str = ""  # a projection whose bias would have fitted, if it stood apart

    def note(self, fitted: int, reason: str, bias: str = "") -> None:
        """Remember a reason if it comes later than the one known."""
        if fitted > self.fitted:
            self.fitted, self.reason, self.bias = fitted, reason, bias


@dataclass
class _Try:
    """One attempt at one place; `nodes` and `bound` are taken back where a branch fails."""

    root: nn.Module
    miss: Miss
    nodes: list[fx.Node] = field(default_factory=list)
    bound: dict[str, Any] = field(default_factory=dict)

    def fits(self, term: Term, value: Any) -> bool:
        """Whether a value of the flow is what a piece of the pattern says."""
        match term:
            case Var(name):
                if name in self.bound and self.bound[name] is not value:
                    return self._no(f"`{name}` is two different values")
                self.bound[name] = value
                return True
            case Const(wanted):
                return _equal(wanted, value) or self._no(
                    f"the pattern has {wanted} where the model has {_said(value, self.root)}"
                )
            case Op():
                return self._call(term, value)

    def _no(self, reason: str, bias: str = "") -> bool:
        self.miss.note(len(self.nodes), reason, bias)
        return False

    def _call(self, term: Op, value: Any) -> bool:
        if not isinstance(value, fx.Node):
            return self._no(f"the pattern has `{term}` where the model has {value!r}")
        found = operation(value, self.root)
        if found is None or found[0] != term.name:
            said = shown(value, self.root)
            return self._no(
                f"the pattern has `{term}` where the model has {said}", _bias(term, value)
            )
        if value in self.nodes:
            return self._no(f"{shown(value, self.root)} is matched by two calls of the pattern")
        self.nodes.append(value)
        for given in _orders(term):
            before = len(self.nodes), dict(self.bound)
            if all(self.fits(inner, found[1].get(name)) for name, inner in given):
                return True
            del self.nodes[before[0] :]
            self.bound = before[1]
        self.nodes.remove(value)
        return False


def _orders(term: Op) -> Iterator[tuple[tuple[str, Term], ...]]:
    yield term.given
    if term.name in COMMUTES and len(term.given) == 2:
        (a, left), (b, right) = term.given
        yield (a, right), (b, left)


def _bias(term: Op, value: fx.Node) -> str:
    """The projection that stands where the pattern has a sum: its bias may be meant."""
    return str(value.target) if term.name == "add" and value.op == "call_module" else ""


def _equal(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, bool) or isinstance(value, bool):
        return wanted is value
    if isinstance(value, fx.Node):
        return False
    return bool(str(wanted) == str(value) or wanted == value)


def _said(value: Any, root: nn.Module) -> str:
    return shown(value, root) if isinstance(value, fx.Node) else str(value)


def matches(pattern: Pattern, graph: fx.Graph, root: nn.Module) -> tuple[list[Match], Miss]:
    """All places of a pattern that share no call, the last first found; and the nearest miss."""
    miss, taken = Miss(), set[fx.Node]()
    found: list[Match] = []
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        attempt = _Try(root, miss)
        if node in taken or not attempt.fits(pattern.body, node):
            continue
        nodes = tuple(sorted(attempt.nodes, key=order.__getitem__))
        wrong = _apart(nodes, graph, root)
        if taken & set(nodes):
            wrong = "two matches share a call"
        if wrong:
            miss.note(len(nodes), wrong)
            continue
        taken |= set(nodes)
        found.append(Match(nodes, attempt.bound))
    return found[::-1], miss


def _apart(nodes: tuple[fx.Node, ...], graph: fx.Graph, root: nn.Module) -> str:
    """Why these calls cannot run as one: others need what is inside, or write what goes in."""
    inside = set(nodes)
    for node in nodes[:-1]:
        other = next((user for user in node.users if user not in inside), None)
        if other is not None:
            return f"{shown(other, root)} uses what {shown(node, root)} gives, too"
    between = False
    for node in graph.nodes:
        between = between or node is nodes[0]
        if between and node not in inside and writes(node):
            return f"{shown(node, root)} writes in place between its calls"
        if node is nodes[-1]:
            break
    return ""
