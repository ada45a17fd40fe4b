"""What each gradient is, axis by axis: whole on every rank, a part of a sum, or summed too often.

A walk over the graph that autograd made of one forward of the local model, in the order of the
backward, with the types that the forward had and the collectives that the backward was heard to
send.  A gradient is a linear function of the one behind it, so along an axis it stays what it was,
except where a tensor that is alike on all ranks meets one that varies: there it becomes a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from schedlang.runtime.adjoints.typed import MOVES, NONE, Axes, Crossed, Fault, Heard, Typed

OWN, WHOLE, PART = "own", "whole", "part"


@dataclass(frozen=True)
class Share:
    """A gradient along one axis.

    own     of a tensor that differs by rank; whole  alike on all ranks; part  to be summed.
    `times` counts how often a sum ran that was not due: the gradient is n**times too large.
    """

    kind: str
    times: int = 0


Shares = Mapping[str, Share]


@dataclass
class Gradient:
    """What reaches one parameter: its shares by axis, the stages that give it one, and users."""

    shares: dict[str, Share] = field(default_factory=dict)
    stages: frozenset[int] = frozenset()
    sites: list[str] = field(default_factory=list)


def nodes_of(root: Any) -> list[Any]:
    """The nodes of a graph, each after all that use it: the order of a backward."""
    order: list[Any] = []
    seen: set[Any] = set()
    open_: list[tuple[Any, bool]] = [(root, False)]
    while open_:
        node, left = open_.pop()
        if left:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        open_.append((node, True))
        open_ += [(n, False) for n, _ in node.next_functions if n is not None and n not in seen]
    return order[::-1]


class Adjoint:
    """The walk: `split` are the axes that split each parameter, `stage_of` a module's stages."""

    def __init__(
        self, loss: Tensor, typed: Typed, axes: tuple[str, ...],
        parameters: Mapping[int, tuple[str, Axes]],
        stage_of: Callable[[str], frozenset[int] | None],
    ) -> None:  # fmt: skip
        self.typed, self.axes, self.parameters = typed, axes, parameters
        self.stage_of = stage_of
        self.root = loss.grad_fn
        self.nodes = nodes_of(self.root)
        self.root_varies = typed.varies(loss)
        self.faults: list[Fault] = []
        self.found: dict[str, Gradient] = {}

    def run(self, last: int) -> dict[str, Gradient]:
        """The gradient of every parameter that gets one; `last` is the stage of the loss."""
        first = {a: Share(OWN if a in self.root_varies else WHOLE) for a in self.axes}
        arrived: dict[Any, list[tuple[int, Shares]]] = {self.root: [(0, first)]}
        stages: dict[Any, frozenset[int]] = {self.root: frozenset([last])}
        sites = dict(self.typed.sites)
        sites.setdefault(self.root, "")
        for node in self.nodes:
            came = arrived.pop(node, [])
            if not came:
                continue
            site = sites[node]
            shares, outputs = self._joined(came, site), frozenset(nr for nr, _ in came)
            if hasattr(node, "variable"):
                self._reached(node.variable, shares, stages[node])
                continue
            own = self.stage_of(site)
            here = stages[node] if own is None else own
            for edge in node.next_functions:
                if edge[0] is None:
                    continue
                arrived.setdefault(edge[0], []).append(
                    (edge[1], self._through(node, outputs, edge, shares, site))
                )
                stages[edge[0]] = stages.get(edge[0], frozenset()) | here
                sites.setdefault(edge[0], site)
                if hasattr(edge[0], "variable"):
                    self._used(edge[0].variable, site)
        return self.found

    def _used(self, parameter: Tensor, site: str) -> None:
        known = self.parameters.get(id(parameter))
        if known is not None:
            self.found.setdefault(known[0], Gradient()).sites.append(site)

    def _reached(self, parameter: Tensor, shares: Shares, stages: frozenset[int]) -> None:
        known = self.parameters.get(id(parameter))
        if known is not None:
            made = self.found.setdefault(known[0], Gradient())
            made.shares, made.stages = dict(shares), stages

    def _joined(self, came: list[tuple[int, Shares]], site: str) -> Shares:
        """The sum of gradients from several uses; they have to be of one kind."""
        joined = dict(came[0][1])
        for _, more in came[1:]:
            for axis, share in more.items():
                if share != joined[axis]:
                    mine = joined[axis]
                    self._fault(site, axis, f"adds a gradient that is {_said(share)} over `{axis}`"
                                f" to one that is {_said(mine)}")  # fmt: skip
                    joined[axis] = max(share, mine, key=lambda s: (s.kind == PART, s.times))
        return joined

    def _through(
        self, node: Any, outputs: frozenset[int], edge: Any, shares: Shares, site: str
    ) -> Shares:
        crossed = _crossed(node)
        out = NONE.union(*(self.typed.varies_at(node, nr) for nr in outputs))
        into = self.typed.varies_at(*edge)
        found = {}
        if crossed is not None and crossed.settles:
            shares = self._settled(crossed, shares, into, site)
            crossed = None
        for axis, share in shares.items():
            heard = [h for h in crossed.back if axis in h.axes] if crossed is not None else []
            label = next((h.label for h in heard if h.label), site)
            found[axis] = self._along(axis, share, axis in out, axis in into, heard, label)
        return found

    def _along(
        self, axis: str, share: Share, out: bool, into: bool, heard: list[Heard], site: str
    ) -> Share:
        """One step of the backward along one axis."""
        kind, times = share.kind, share.times
        if out and not into:
            kind = PART  # every rank has only what its own part of the result gives
        for one in heard:
            if one.kind in MOVES:  # each part goes back to where it came from
                continue
            if one.kind == "all-gather":
                kind = OWN if into else WHOLE
                continue
            if kind != PART:
                times += 1
            kind = WHOLE if one.kind == "all-reduce" else OWN
        if into:
            if kind == PART:
                self._fault(site, axis, f"a gradient that is a part over `{axis}` is taken for the"
                            " whole, without a sum")  # fmt: skip
            kind = OWN
        return Share(kind, times) if (kind, times) != (share.kind, share.times) else share

    def _settled(self, crossed: Crossed, shares: Shares, into: Axes, site: str) -> Shares:
        """The gradient of a factor, from a product that sums those of its factors itself."""
        found = dict(shares)
        for axis in sorted(crossed.settles):
            heard = [h for h in crossed.back if axis in h.axes and h.kind.startswith("reduce")]
            label = next((h.label for h in heard if h.label), site)
            if not heard:
                self._fault(label, axis, f"its gradients are parts over `{axis}`, and its backward"
                            " does not sum them")  # fmt: skip
            elif shares[axis].kind == WHOLE:
                self._fault(label, axis, f"its backward sums over `{axis}` what is alike on all"
                            " ranks")  # fmt: skip
            if axis in into:
                found[axis] = Share(OWN, shares[axis].times)
        return found

    def _fault(self, fqn: str, axis: str, reason: str) -> None:
        self.faults.append(Fault("sum", fqn, axis, reason))


def _crossed(node: Any) -> Crossed | None:
    found: Crossed | None = getattr(node, "schedlang", None)
    return found


def _said(share: Share) -> str:
    return share.kind if not share.times else f"{share.kind}, summed {share.times} times too often"
