"""Placements of a graph's operators over one axis, and what they cost: a problem to be solved.

A value lies on the ranks as a dim that is split, whole, or as parts of a sum; where an operator
that is split reads a whole value, each rank has only a part of its gradient (an entered value).
Values change their layout only where the language can say so: at modules that are sharded, and
where they enter a block.  Costs: operators by their own part, crossings forward and backward,
gradients of parameters that are whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from schedlang.passes.planner.operators.graph import Dim, Edge, Graph
from schedlang.passes.planner.operators.solve import Problem
from schedlang.passes.planner.values import Recipe
from schedlang.passes.simulate.machine import Cluster

WHOLE, SUM = -1, -2  # as `runtime.propagation.ways` has them
ENTERED = -3  # whole, and its gradient a part
ZERO1, ZERO3 = -4, -5  # a parameter whose optimizer state, or all of it, lies in slices
ANY = -6  # whatever it is: what runs on some of the rows needs no rule
Mode = Literal["tensors", "rows"]


@dataclass(frozen=True)
class Asked:
    """A question about one axis.

    ranks, stride  of the axis; its ranks lie `stride` apart
    mode    `tensors`: every rank has all rows; `rows`: each has some, as data parallelism
    name    of a dim: it is split wherever it occurs, and nothing else is (Mesh-TensorFlow)
    pins    parameters, by their common names, and the dim that is split (WHOLE: none)
    tokens  whether activations may be split along a sequence, in the mode `tensors`
    zero    stage of ZeRO for what is whole, in the mode `rows`
    banned  options of modules, by their common names, that the language has refused
    kept    whether results stay for the backward, and count among the bytes
    """

    ranks: int
    costs: Cluster
    stride: int = 1
    mode: Mode = "tensors"
    recipe: Recipe = field(default_factory=Recipe)
    name: Dim | None = None
    pins: Mapping[str, int] = field(default_factory=dict)
    tokens: bool = True
    zero: Literal[0, 1, 3] = 0
    banned: frozenset[tuple[str, Option]] = frozenset()
    kept: bool = True


@dataclass(frozen=True)
class Option:
    """One way to run a node: the layout of all that it is given, and of what it gives."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def split(self) -> bool:
        """Whether each rank does a part."""
        return any(d >= 0 or d == ANY for d in (*self.inputs, *self.outputs))


@dataclass
class Placed:
    """A graph over one axis: variables with options, and the problem that they make.

    Variables are the nodes, then parameters, then values that several nodes read; options of these
    are pairs: how the value is given, and how else it is handed on, all at once.
    """

    graph: Graph
    asked: Asked

    # -- options -----------------------------------------------------------------------------------

    @cached_property
    def options(self) -> list[list[Option]]:
        """The options of every node."""
        return [self._options(at) for at in range(len(self.graph.nodes))]

    def _options(self, at: int) -> list[Option]:
        step, asked = self.graph.nodes[at].step, self.asked
        whole = Option((WHOLE,) * len(step.inputs), (WHOLE,) * len(step.outputs))
        found = [
            Option(tuple(ENTERED if d == WHOLE else d for d in way.inputs), way.outputs)
            for way in step.ways
            if self._fits(at, way.inputs, way.outputs)
        ]
        site = self.graph.nodes[at].site
        found = [one for one in found if (site, one) not in asked.banned]
        if asked.name is not None:
            return found or [whole]
        if asked.mode == "rows" and not found:
            made = (self.graph.result(at, k) for k in range(len(step.outputs)))
            if any(name in self.graph.batched for name in made):
                return [Option((ANY,) * len(step.inputs), (ANY,) * len(step.outputs))]
        return [whole, *found] if asked.mode == "tensors" else found or [whole]

    def _fits(self, at: int, inputs: Sequence[int], outputs: Sequence[int]) -> bool:
        """Return whether a way is one of those asked for, and its dims can be dealt."""
        graph, asked, given = self.graph, self.asked, self.graph.given(at)
        step = graph.nodes[at].step
        dims = [(given[p], d) for p, d in enumerate(inputs) if d >= 0 and p in given]
        if len(dims) < sum(d >= 0 for d in inputs):
            return False  # a constant of the model would have to be split
        names = {graph.name(*one) for one in dims}
        names |= {graph.name(graph.result(at, k), d) for k, d in enumerate(outputs) if d >= 0}
        by_rows = bool(names & graph.rows)
        if asked.name is not None and asked.name not in names:
            return False
        if asked.name is None and by_rows != (asked.mode == "rows"):
            return False
        if asked.name is None and not asked.tokens and names & graph.tokens:
            return False
        sums = not step.module and WHOLE in outputs
        if sums and not by_rows and "loss" not in step.name and "cross_entropy" not in step.name:
            return False  # parts of a mean of activations are no tensor of the language
        return by_rows or all(self._dealt(*one) for one in dims)

    def _dealt(self, value: str, dim: int) -> bool:
        size = self.graph.values[value].shape[dim]
        return size % self.asked.ranks == 0 or self.graph.name(value, dim) in self.graph.padded

    @cached_property
    def parameters(self) -> dict[str, list[int]]:
        """The layouts that each parameter may have."""
        found: dict[str, list[int]] = {}
        for edge in self.graph.edges:
            if self.graph.values[edge.value].kind == "parameter":
                menu = found.setdefault(edge.value, [WHOLE])
                wanted = (option.inputs[edge.place] for option in self.options[edge.target])
                menu += [d for d in dict.fromkeys(wanted) if d >= 0 and d not in menu]
        for name, menu in found.items():
            if self.asked.mode == "rows" and self.asked.zero:
                menu[0] = ZERO1 if self.asked.zero == 1 else ZERO3
            if name in self.asked.pins:
                found[name] = [d for d in menu if d == self.asked.pins[name]]
        return found

    @cached_property
    def shared(self) -> dict[str, list[tuple[int, int]]]:
        """The values that several places read, with the pairs of layouts that each may have."""
        readers: dict[str, list[Edge]] = {}
        for edge in self.graph.edges:
            if edge.source[0] >= 0:
                readers.setdefault(edge.value, []).append(edge)
        found = {}
        for name, edges in readers.items():
            if len(edges) > 1 and any(edge.boundary for edge in edges):
                node, k = edges[0].source
                given = list(dict.fromkeys(one.outputs[k] for one in self.options[node]))
                wanted = {o.inputs[e.place] for e in edges for o in self.options[e.target]}
                found[name] = [(a, b) for a in given for b in dict.fromkeys([a, *sorted(wanted)])]
        return found

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The variables of parameters and of shared values, by their names."""
        names = (*self.parameters, *self.shared)
        return {name: k for k, name in enumerate(names, len(self.graph.nodes))}

    # -- costs -------------------------------------------------------------------------------------

    def _send(self, op: str, size: float) -> float:
        return self.asked.costs.collective(op, size, self.asked.ranks, self.asked.stride)

    def operator(self, at: int, option: Option) -> float:
        """Seconds of a node's own work, forward and backward, and what it sends inside."""
        graph, step = self.graph, self.graph.nodes[at].step
        given = graph.given(at)
        made = [graph.result(at, k) for k in range(len(step.outputs))]
        share = 1 / self.asked.ranks if option.split else 1.0
        if not step.kept and step.kind == "other":
            return 0.0  # views
        rows = graph.scale if any(name in graph.batched for name in made) else 1.0
        moved = sum(map(graph.bytes, [*given.values(), *made])) * share
        kind, flops = step.kind, step.flops * rows * share
        operator = self.asked.costs.operator
        seconds = operator(kind, flops, moved)
        if any(graph.values[name].grad for name in made):
            seconds += operator(kind, 2 * flops, 2 * moved)
        return seconds + self._inside(at, option)

    def _inside(self, at: int, option: Option) -> float:
        """Seconds of what a split node sends by itself: rows to experts, edges of pictures."""
        graph, step = self.graph, self.graph.nodes[at].step
        x = graph.given(at).get(0)
        if x is None or not option.split:
            return 0.0
        if step.module == "experts" and option.inputs[0] == 0 and option.inputs[-1] == 0:
            often = max(1.0, step.flops / self._once(at))
            sent = graph.bytes(x) * often / self.asked.ranks  # by each rank
            return 4 * self._send("all_to_all", sent)
        if step.module == "convolution" and option.inputs[0] > 1:
            kernel = graph.values[graph.given(at)[1]].shape[option.inputs[0]]
            edge = graph.bytes(x) / graph.values[x].shape[option.inputs[0]] * (kernel - 1)
            return 2 * self._send("send", edge) if kernel > 1 else 0.0
        return 0.0

    def _once(self, at: int) -> float:
        """Operations of experts, had each row one of them."""
        graph, given = self.graph, self.graph.given(at)
        x = graph.values[given[0]]
        own = [graph.values[v] for v in given.values() if graph.values[v].kind == "parameter"]
        each = sum(math.prod(one.shape[1:]) for one in own)
        return 2.0 * math.prod(x.shape[:-1]) * max(1, each)

    def crossing(self, edge: Edge, a: int, c: int) -> float:
        """Seconds, forward and backward, in which a value that lies as `a` comes to lie as `c`."""
        one = self.graph.values[edge.value]
        if a == c or ANY in (a, c):
            return 0.0
        if one.kind == "parameter":
            return self._parameter(edge.value, a, c)
        if not one.grad and (self.asked.mode == "rows" or {a, c} <= {WHOLE, ENTERED}):
            return 0.0
        if edge.value in self.graph.fills and not one.grad:
            return 0.0
        size, way = self.graph.bytes(edge.value), (min(a, 0), min(c, 0))
        rooted = edge.value not in self.graph.batched
        if not (edge.boundary or (rooted and way == (WHOLE, ENTERED))):
            return math.inf
        ops = CROSSINGS.get(way)
        if ops is None or way == (0, 0) or not self._said(edge, a, c):
            return math.inf
        back = ops[1] if one.grad else ""
        return sum(self._send(op, size) for op in (ops[0], back) if op)

    def _said(self, edge: Edge, a: int, c: int) -> bool:
        """Return whether the language says such a crossing: of tokens, or at the module's end."""
        token = max(a, c)
        if token < 0 or self.graph.name(edge.value, token) in self.graph.tokens:
            return True
        nodes, maker = self.graph.nodes, edge.source[0]
        if a >= 0:  # `output=R` of a module
            return maker >= 0 and bool(nodes[maker].step.module)
        return a == WHOLE and bool(nodes[edge.target].step.module)

    def _parameter(self, name: str, a: int, c: int) -> float:
        """Seconds in which a parameter is used as `c` and its gradient summed."""
        size, grad = self.graph.bytes(name), self.graph.values[name].grad
        if a == ZERO3 and c in (WHOLE, ENTERED):
            return 2 * self._send("all_gather", size) + grad * self._send("reduce_scatter", size)
        if a in (WHOLE, ZERO1) and c == ENTERED:
            return self._send("all_reduce", size) if grad else 0.0
        return 0.0 if a == ZERO1 and c == WHOLE else math.inf

    def held(self, name: str, layout: int) -> float:
        """Bytes of a parameter, its gradient and its optimizer's state on one rank."""
        one, recipe, ranks = self.graph.values[name], self.asked.recipe, self.asked.ranks
        model, state = recipe.parameter + recipe.gradient, recipe.moments + recipe.master
        if not one.grad:
            model, state = recipe.parameter, 0
        own, beside = self.graph.slices.get(name, (1.0, 1.0))
        own /= 1 if layout in (WHOLE, ZERO1) else ranks
        beside /= 1 if layout == WHOLE else ranks
        return math.prod(one.shape) * (model * own + state * beside)

    # -- the problem -------------------------------------------------------------------------------

    @cached_property
    def problem(self) -> Problem:
        """The variables with their costs, and the pairs of them that share a value."""
        graph = self.graph
        seconds = [
            np.array([node.count * self.operator(at, one) for one in self.options[at]])
            for at, node in enumerate(graph.nodes)
        ]
        sizes = [
            np.array([node.count * self._kept(at, one) for one in self.options[at]])
            for at, node in enumerate(graph.nodes)
        ]
        for name, menu in self.parameters.items():
            seconds.append(np.zeros(len(menu)))
            sizes.append(np.array([graph.counts[name] * self.held(name, one) for one in menu]))
        ranked = sorted(graph.edges, key=lambda edge: edge.boundary)
        first = {edge.value: edge for edge in ranked}  # one that may cross, if there is any
        for name, pairs in self.shared.items():
            edge, often = first[name], graph.counts[name]
            seconds.append(np.array([often * self.crossing(edge, a, b) for a, b in pairs]))
            sizes.append(np.zeros(len(pairs)))
        costs: dict[tuple[int, int], np.ndarray] = {}
        for edge in graph.edges:
            self._edge(edge, seconds, costs)
        for name in self.shared:
            self._source(name, first[name], costs)
        return Problem(tuple(seconds), tuple(sizes), costs)

    def _kept(self, at: int, option: Option) -> float:
        graph, step = self.graph, self.graph.nodes[at].step
        if not (step.kept and self.asked.kept):
            return 0.0
        made = [graph.result(at, k) for k in range(len(step.outputs))]
        share = [1 / self.asked.ranks if d >= 0 or d == ANY else 1.0 for d in option.outputs]
        return sum(graph.bytes(m) * s for m, s in zip(made, share) if graph.values[m].grad)

    def _edge(
        self, edge: Edge, seconds: list[np.ndarray], costs: dict[tuple[int, int], np.ndarray]
    ) -> None:
        """Add what an edge costs: from who holds the value, to each layout that is wanted."""
        wanted = [one.inputs[edge.place] for one in self.options[edge.target]]
        cost, (node, k) = self.crossing, edge.source
        if edge.value in self.shared:
            told = [
                [
                    min(cost(edge, one, c) for one in (ways if edge.boundary else ways[:1]))
                    for c in wanted
                ]
                for ways in self.shared[edge.value]
            ]
            self._pair(self.numbers[edge.value], edge.target, np.array(told) * edge.count, costs)
        elif node >= 0:
            told = [[cost(edge, o.outputs[k], c) for c in wanted] for o in self.options[node]]
            if node == edge.target:
                seconds[node] = seconds[node] + np.diag(np.array(told)) * edge.count
            else:
                self._pair(node, edge.target, np.array(told) * edge.count, costs)
        elif edge.value in self.parameters:
            told = [[cost(edge, a, c) for c in wanted] for a in self.parameters[edge.value]]
            self._pair(self.numbers[edge.value], edge.target, np.array(told) * edge.count, costs)
        else:
            rows = self.asked.mode == "rows" and self.graph.values[edge.value].shape
            given = 0 if rows else WHOLE
            told = [[cost(edge, given, c) * edge.count for c in wanted]]
            if self.asked.name is None:
                seconds[edge.target] = seconds[edge.target] + np.array(told[0])

    def _source(self, name: str, edge: Edge, costs: dict[tuple[int, int], np.ndarray]) -> None:
        """Tie a shared value's first layout to what its node gives."""
        node, k = edge.source
        given = [one.outputs[k] for one in self.options[node]]
        told = [[0.0 if a == g else math.inf for a, _ in self.shared[name]] for g in given]
        self._pair(node, self.numbers[name], np.array(told), costs)

    @staticmethod
    def _pair(i: int, j: int, table: np.ndarray, costs: dict[tuple[int, int], np.ndarray]) -> None:
        table = np.where(np.isnan(table), np.inf, table)
        pair, table = ((i, j), table) if i < j else ((j, i), table.T)
        costs[pair] = costs[pair] + table if pair in costs else table


# what is sent forward and backward where a value changes its layout; 0 stands for a split dim
CROSSINGS: Mapping[tuple[int, int], tuple[str, str]] = {
    (WHOLE, ENTERED): ("", "all_reduce"),
    (WHOLE, 0): ("", "all_gather"),
    (0, WHOLE): ("all_gather", ""),
    (0, ENTERED): ("all_gather", "reduce_scatter"),
    (SUM, WHOLE): ("all_reduce", ""),
    (SUM, ENTERED): ("all_reduce", "all_reduce"),
    (SUM, 0): ("reduce_scatter", "all_gather"),
}
