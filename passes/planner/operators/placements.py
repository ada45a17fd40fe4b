"""Placements of a graph's operators over mesh axes, and their costs: a problem for the solver.

A value is sharded along a dim, replicated, or partial.  Where a sharded operator reads a
replicated value, each rank has only a part of the value's gradient (an "entered" value).  Values
change their layout only where the language can say so: at modules that are sharded, and where they
enter a block.  Costs: each rank's share of operators, redistributions forward and backward,
gradient reductions of replicated parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from schedlang.passes.planner.operators.layout_requests import (
    ANY,
    ENTERED,
    PARTIAL,
    REDISTRIBUTIONS,
    UNMENTIONED,
    UNSPLIT,
    ZERO1,
    ZERO3,
    LayoutRequest,
    NodeLayout,
)
from schedlang.passes.planner.operators.operator_graph import Edge, Graph, Node, block_prefix
from schedlang.passes.planner.operators.solver import Costs, Problem

BUCKET = 25 * 2**20  # bytes of gradients that are reduced at once, as in the runtime
HALF_BYTES = 2  # bytes of a number of 16 bits: operations are counted as 16-bit ones


@dataclass
class AxisPlacement:
    """A graph over one axis: variables with options, and costs of changing a layout.

    Variables are the nodes, then parameters, then values that several nodes read.  An option of
    such a value is a pair of layouts: as produced, and as redistributed for its readers at once.
    """

    graph: Graph
    asked: LayoutRequest

    # -- options -----------------------------------------------------------------------------------

    @cached_property
    def options(self) -> list[list[NodeLayout]]:
        """The options of every node."""
        return [self._options(at) for at in range(len(self.graph.nodes))]

    def _options(self, at: int) -> list[NodeLayout]:
        step, asked = self.graph.nodes[at].step, self.asked
        whole = NodeLayout((UNSPLIT,) * len(step.inputs), (UNSPLIT,) * len(step.outputs))
        found = [
            NodeLayout(
                # a bias is added after the reduction
                tuple(
                    ENTERED if d == UNSPLIT and (place < 2 or PARTIAL not in way.outputs) else d
                    for place, d in enumerate(way.inputs)
                ),
                way.outputs,
            )
            for way in step.splits
            if self._fits(at, way.inputs, way.outputs)
        ]
        site = self.graph.nodes[at].site
        entered, left = asked.row_dims.get(site, (None, None))
        if step.module and entered is not None and 0 <= entered == left:
            return [one for one in found if one.inputs[0] == entered]
        if asked.name is not None:
            return found or [whole]
        if asked.mode == "rows" and not found:
            made = (self.graph.result_name(at, k) for k in range(len(step.outputs)))
            if any(name in self.graph.batch_values for name in made):
                return [NodeLayout((ANY,) * len(step.inputs), (ANY,) * len(step.outputs))]
        return [whole, *found] if asked.mode == "tensors" else found or [whole]

    def _fits(self, at: int, inputs: Sequence[int], outputs: Sequence[int]) -> bool:
        """Return whether a layout belongs to the request, and its dims can be divided."""
        graph, asked, given = self.graph, self.asked, self.graph.inputs_of(at)
        step = graph.nodes[at].step
        dims = [(given[p], d) for p, d in enumerate(inputs) if d >= 0 and p in given]
        if len(dims) < sum(d >= 0 for d in inputs):
            return False  # a constant of the model would have to be split
        names = {graph.dim_name(*one) for one in dims}
        names |= {
            graph.dim_name(graph.result_name(at, k), d) for k, d in enumerate(outputs) if d >= 0
        }
        by_rows = bool(names & graph.row_dims)
        if asked.name is not None and asked.name not in names:
            return False
        if asked.name is None and by_rows != (asked.mode == "rows"):
            return False
        if asked.name is None and not asked.tokens and names & graph.token_dims:
            return False
        sums = not step.module and UNSPLIT in outputs
        if sums and not by_rows and "loss" not in step.name and "cross_entropy" not in step.name:
            return False  # the language cannot express partial means of activations
        return by_rows or all(self._divides(*one) for one in dims)

    def _divides(self, value: str, dim: int) -> bool:
        size = self.graph.values[value].shape[dim]
        paddable = self.graph.paddable_dims
        return size % self.asked.ranks == 0 or self.graph.dim_name(value, dim) in paddable

    @cached_property
    def parameters(self) -> dict[str, list[int]]:
        """The layouts that each parameter may have."""
        found: dict[str, list[int]] = {}
        for edge in self.graph.edges:
            if self.graph.values[edge.value].kind == "parameter":
                menu = found.setdefault(edge.value, [UNSPLIT])
                wanted = (option.inputs[edge.input_index] for option in self.options[edge.target])
                menu += [d for d in dict.fromkeys(wanted) if d >= 0 and d not in menu]
        for name, menu in found.items():
            if self.asked.mode == "rows" and self.asked.zero:
                menu[0] = ZERO1 if self.asked.zero == 1 else ZERO3
            if name in self.asked.pins:
                found[name] = [d for d in menu if d == self.asked.pins[name]]
        return found

    @cached_property
    def shared(self) -> dict[str, list[tuple[int, int]]]:
        """Values with several readers, with the pairs of layouts that each may have."""
        readers: dict[str, list[Edge]] = {}
        for edge in self.graph.edges:
            if edge.source[0] >= 0:
                readers.setdefault(edge.value, []).append(edge)
        found = {}
        for name, edges in readers.items():
            if len(edges) > 1 and any(edge.boundary for edge in edges):
                node, k = edges[0].source
                given = list(dict.fromkeys(one.outputs[k] for one in self.options[node]))
                wanted = {o.inputs[e.input_index] for e in edges for o in self.options[e.target]}
                found[name] = [(a, b) for a in given for b in dict.fromkeys([a, *sorted(wanted)])]
        return found

    @cached_property
    def variable_index(self) -> dict[str, int]:
        """Indices of the variables of parameters and of shared values, by name."""
        names = (*self.parameters, *self.shared)
        return {name: k for k, name in enumerate(names, len(self.graph.nodes))}

    def decided(self, choice: Sequence[int]) -> AxisPlacement:
        """Return a copy with all variables decided, for the next axis."""
        made = AxisPlacement(self.graph, self.asked)
        made.options = [[one[k]] for one, k in zip(self.options, choice)]
        rest = choice[len(self.graph.nodes) :]
        whole = self.parameters.items()
        made.parameters = {name: [menu[k]] for (name, menu), k in zip(whole, rest)}
        pairs = zip(self.shared.items(), rest[len(self.parameters) :])
        made.shared = {name: [menu[k]] for (name, menu), k in pairs}
        return made

    # -- costs -------------------------------------------------------------------------------------

    def share(self, layout: int) -> float:
        """Return the share of a value that one rank has."""
        return 1 / self.asked.ranks if layout >= 0 or layout == ANY else 1.0

    def _send(self, op: str, size: float) -> float:
        return self.asked.costs.collective_seconds(op, size, self.asked.ranks, self.asked.stride)

    def inner_send_seconds(self, at: int, option: NodeLayout, share: float) -> float:
        """Seconds of communication inside a split node: rows to experts, halos of convolutions.

        `share` is the share of the node that other axes leave.
        """
        graph, step = self.graph, self.graph.nodes[at].step
        x = graph.inputs_of(at).get(0)
        if x is None or not option.split:
            return 0.0
        if step.module == "experts" and option.inputs[0] == 0 and option.inputs[-1] == 0:
            often = max(1.0, step.flops / self._once(at))
            sent = graph.bytes(x) * often / self.asked.ranks * share  # by each rank
            return 4 * self._send("all_to_all", sent)
        if step.module == "convolution" and option.inputs[0] > 1:
            kernel = graph.values[graph.inputs_of(at)[1]].shape[option.inputs[0]]
            edge = graph.bytes(x) / graph.values[x].shape[option.inputs[0]] * (kernel - 1)
            return 2 * self._send("send", edge * share) if kernel > 1 else 0.0
        if step.name == "cross_entropy" and option.inputs[0] > 0 and option.outputs == (UNSPLIT,):
            each = graph.bytes(x) / graph.values[x].shape[option.inputs[0]] * share
            classes = graph.dim_name(x, option.inputs[0]) not in graph.row_dims | graph.token_dims
            return classes * (self._send("all_reduce", each) + self._send("all_reduce", 2 * each))
        return 0.0

    def _once(self, at: int) -> float:
        """Operations of experts if each row used one expert."""
        graph, given = self.graph, self.graph.inputs_of(at)
        x = graph.values[given[0]]
        own = [graph.values[v] for v in given.values() if graph.values[v].kind == "parameter"]
        each = sum(math.prod(one.shape[1:]) for one in own)
        return 2.0 * math.prod(x.shape[:-1]) * max(1, each)

    def redistribution_seconds(self, edge: Edge, a: int, c: int, share: float = 1.0) -> float:
        """Seconds, forward and backward, of redistributing a value from layout `a` to layout `c`.

        `share` is the share of the value that other axes leave.  Infinite where the language cannot
        express the redistribution.
        """
        one = self.graph.values[edge.value]
        if one.kind == "parameter":
            return self._parameter(edge, a, c, share)
        if a == c or ANY in (a, c):
            return 0.0
        if not one.grad and (self.asked.mode == "rows" or {a, c} <= {UNSPLIT, ENTERED}):
            return 0.0
        if edge.value in self.graph.constant_fills and not one.grad:
            return 0.0
        size, way = self.graph.bytes(edge.value) * share, (min(a, 0), min(c, 0))
        rooted = edge.value not in self.graph.batch_values
        if rooted and self.asked.mode == "rows" and a == UNSPLIT:
            return 0.0  # each rank computes its own rows
        if not (edge.boundary or (rooted and way == (UNSPLIT, ENTERED))):
            return math.inf
        ops = REDISTRIBUTIONS.get(way)
        nodes, maker = self.graph.nodes, edge.source[0]
        if ops is None or way == (0, 0) or not self._expressible(edge, a, c):
            return math.inf
        back = ops[1] if one.grad else ""
        twice = maker >= 0 and nodes[maker].recomputed and nodes[edge.target].recomputed
        again = ops[0] if twice else ""
        return sum(self._send(op, size) for op in (ops[0], back, again) if op)

    def rows_permit(self, edge: Edge, a: int, c: int) -> bool:
        """Return whether rows permit that a value goes from `a` to `c`.

        Rows may say how a value leaves a module and enters one.  Modules gather and split their
        inputs by themselves.
        """
        nodes, told = self.graph.nodes, self.asked.row_dims
        row = told.get(nodes[edge.source[0]].site) if edge.source[0] >= 0 else None
        target = nodes[edge.target].site
        entered = told.get(target, UNMENTIONED)[0] if edge.input_index == 0 else None
        a, c = (UNSPLIT if one == ENTERED else one for one in (a, c))
        if entered not in (None, a, c):
            return False
        if row is None or row[1] == UNSPLIT:
            return row is None or c == UNSPLIT
        if row[1] is None:  # the value keeps the layout of the module's result
            token = a >= 0 and self.graph.dim_name(edge.value, a) in self.graph.token_dims
            return a in (c, UNSPLIT) or token or (a, c) == (PARTIAL, UNSPLIT)
        handed = edge.input_index >= 0 and edge.value in self.shared  # redistributed already
        return handed or row[1] in (a, c)

    def _expressible(self, edge: Edge, a: int, c: int) -> bool:
        """Return whether a redistribution can be written: of tokens, or at a module's end."""
        token = max(a, c)
        if token < 0 or self.graph.dim_name(edge.value, token) in self.graph.token_dims:
            return True
        nodes, maker = self.graph.nodes, edge.source[0]
        if a >= 0:  # `output=R` of a module
            return maker >= 0 and bool(nodes[maker].step.module)
        return a == UNSPLIT and bool(nodes[edge.target].step.module)

    def _parameter(self, edge: Edge, a: int, c: int, share: float) -> float:
        """Seconds of gathering a parameter for use as `c`, and of reducing its gradient.

        Parameters of one block are sent together, gradients of replicated ones all together;
        parameters outside of blocks stay gathered for the backward.
        """
        name, graph, rows = edge.value, self.graph, self.asked.mode == "rows"
        once = graph.first_reads[name] == (edge.target, edge.input_index)
        sums = graph.values[name].grad and once
        if rows and c in (UNSPLIT, ANY):
            c = ENTERED  # each rank uses it with rows of its own
        if a == c or c == ANY:
            return 0.0
        unit = self.reduced_together.get(block_prefix(name), 0.0)
        if a == ZERO3 and c == ENTERED:
            often = (1 + bool(block_prefix(name))) * once
            gathered = often * self._portion("all_gather", name, unit, share)
            back = sums * self._portion("reduce_scatter", name, unit, share, graph.grad_ratio)
            return gathered + back
        if a == UNSPLIT and c == ENTERED:
            if name in graph.tied and not rows:
                return math.inf  # the gradient by the other module is not partial
            bucket = min(self.reduced_together.get("*", 0.0), BUCKET / graph.grad_ratio)
            return sums * self._portion("all_reduce", name, bucket, share, graph.grad_ratio)
        if a == ZERO1 and c == ENTERED:
            back = sums * self._portion("reduce_scatter", name, unit, share, graph.grad_ratio)
            return back + sums * self._portion("all_gather", name, unit, share)
        return math.inf

    @cached_property
    def reduced_together(self) -> Mapping[str, float]:
        """Bytes of replicated parameters whose gradients reduce together, by blocks; "*": all."""
        found: dict[str, float] = {}
        for name, menu in self.parameters.items():
            size = self.graph.bytes(name) * self.graph.values[name].grad
            if self.asked.mode == "tensors" or len(menu) == 1:  # else experts, as a rule
                found[block_prefix(name)] = found.get(block_prefix(name), 0.0) + size
                found["*"] = found.get("*", 0.0) + size * self.graph.counts[name]
        return found

    def _portion(
        self, op: str, name: str, together: float, share: float, wide: float = 1.0
    ) -> float:
        """Seconds of a parameter's share of one message of `together` bytes."""
        size = self.graph.bytes(name)
        together = max(size, together)
        return self._send(op, together * share * wide) * size / together

    @property
    def problem(self) -> Problem:
        """The problem of this axis alone."""
        return MeshPlacement((self,)).problem


@dataclass
class MeshPlacement:
    """A graph over several axes at once: an option has one layout for each axis.

    An axis sends the share of a value that other axes leave, before or after their own
    redistribution; axes redistribute one after the other, in the cheapest order.
    """

    axes: tuple[AxisPlacement, ...]
    _known: dict[tuple[int, Node], tuple[Costs, Costs]] = field(default_factory=dict)

    @cached_property
    def graph(self) -> Graph:
        """The graph of all axes."""
        return self.axes[0].graph

    # -- variables ---------------------------------------------------------------------------------

    @cached_property
    def options(self) -> list[list[tuple[NodeLayout, ...]]]:
        """The options of every node on all axes."""
        return [self._options(at) for at in range(len(self.graph.nodes))]

    def _options(self, at: int) -> list[tuple[NodeLayout, ...]]:
        given = self.graph.inputs_of(at)

        def dealt(several: tuple[NodeLayout, ...]) -> bool:
            for place, value in given.items():
                dims = [one.inputs[place] for one in several]
                for dim in {d for d in dims if d >= 0 and dims.count(d) > 1}:
                    ranks = (p.asked.ranks for p, d in zip(self.axes, dims) if d == dim)
                    if self.graph.values[value].shape[dim] % math.prod(ranks):
                        return False
            return True

        every = itertools.product(*(part.options[at] for part in self.axes))
        return [one for one in every if dealt(one)]

    @cached_property
    def parameters(self) -> dict[str, list[tuple[int, ...]]]:
        """The layouts that each parameter may have."""
        return {
            name: list(itertools.product(*(part.parameters[name] for part in self.axes)))
            for name in self.axes[0].parameters
        }

    @cached_property
    def shared(self) -> dict[str, list[tuple[tuple[int, int], ...]]]:
        """Values with several readers, with the pairs of layouts that each may have."""
        return {
            name: list(itertools.product(*(part.shared[name] for part in self.axes)))
            for name in self.axes[0].shared
        }

    @cached_property
    def variable_index(self) -> dict[str, int]:
        """Indices of the variables of parameters and of shared values, by name."""
        return self.axes[0].variable_index

    def choice_on_axis(self, choice: Sequence[int], axis: int) -> tuple[int, ...]:
        """Return the choice for one axis, as indices into the options of its `AxisPlacement`."""
        part, rest = self.axes[axis], choice[len(self.graph.nodes) :]
        found = [
            part.options[at].index(self.options[at][choice[at]][axis])
            for at in range(len(self.graph.nodes))
        ]
        every: tuple[Any, ...] = (*self.parameters.items(), *self.shared.items())
        own = zip(every, rest)
        menus: dict[str, Any] = {**part.parameters, **part.shared}
        return (*found, *(menus[name].index(menu[k][axis]) for (name, menu), k in own))

    # -- costs -------------------------------------------------------------------------------------

    def _shares(self, layouts: Sequence[int]) -> list[float]:
        return [part.share(one) for part, one in zip(self.axes, layouts)]

    def operator_seconds(self, at: int, options: Sequence[NodeLayout]) -> float:
        """Seconds of a node's own work, forward and backward, with its own communication."""
        graph, step = self.graph, self.graph.nodes[at].step
        given = graph.inputs_of(at)
        made = [graph.result_name(at, k) for k in range(len(step.outputs))]
        if not step.allocates and step.kind == "other":
            return 0.0  # views
        shares = [1 / p.asked.ranks if o.split else 1.0 for p, o in zip(self.axes, options)]
        share, node = math.prod(shares), graph.nodes[at]
        rows = graph.scale if any(name in graph.batch_values for name in made) else 1.0
        touched = [*given.values(), *made]
        moved = sum(graph.bytes(one) for one in touched if one not in node.inside_kernel)
        if node.kernels > 1:
            moved += step.inside * rows
        wide = max((graph.values[name].width for name in made), default=HALF_BYTES) / HALF_BYTES
        kind, flops = step.kind, step.flops * rows * share * wide
        operator = self.axes[0].asked.costs.operator_seconds
        starts = (node.kernels - 1) * operator(kind, 0.0, 0.0)
        forward = operator(kind, flops, moved * share) + starts
        seconds = forward
        if any(graph.values[name].grad for name in made):
            backward = operator(kind, 2 * flops, 2 * moved * share) + starts
            seconds += backward + forward * node.recomputed
        inside = zip(self.axes, options, shares)
        sent = sum(part.inner_send_seconds(at, o, share / own) for part, o, own in inside)
        return seconds + sent * (1.5 if node.recomputed else 1.0)

    def redistribution_seconds(self, edge: Edge, a: Sequence[int], c: Sequence[int]) -> float:
        """Seconds, forward and backward, of redistributing a value on all axes."""
        before, after = self._shares(a), self._shares(c)
        if not all(part.rows_permit(edge, *both) for part, *both in zip(self.axes, a, c)):
            return math.inf
        rows = self.graph.values[edge.value].kind == "parameter"  # every use has a reduction
        modes = [part.asked.mode for part in self.axes]
        move = [k for k, mode in enumerate(modes) if a[k] != c[k] or (rows and mode == "rows")]
        best = math.inf if move else 0.0
        for order in itertools.permutations(move):
            shares, took = list(before), 0.0
            for k in order:
                rest = math.prod(shares) / shares[k]
                took += self.axes[k].redistribution_seconds(edge, a[k], c[k], rest)
                shares[k] = after[k]
            best = min(best, took)
        return best

    def update_seconds(self, name: str, layouts: Sequence[int]) -> float:
        """Seconds of the optimizer: state is read and written, gradients read, parameters written.

        All parameters of a rank are one operator, whose start does not depend on layouts.
        """
        one, recipe = self.graph.values[name], self.axes[0].asked.recipe
        each = 2 * (recipe.moments + recipe.master) + recipe.gradient + recipe.parameter
        ranks = (p.asked.ranks for p, d in zip(self.axes, layouts) if d != UNSPLIT)
        operator = self.axes[0].asked.costs.operator_seconds
        moved = each * math.prod(one.shape) / math.prod(ranks) * one.grad
        return operator("other", 0.0, moved) - operator("other", 0.0, 0.0)

    def state_bytes(self, name: str, layouts: Sequence[int]) -> float:
        """Bytes of a parameter, its gradient and its optimizer state on one rank."""
        one, recipe = self.graph.values[name], self.axes[0].asked.recipe
        model, state = recipe.parameter + recipe.gradient, recipe.moments + recipe.master
        if not one.grad:
            model, state = recipe.parameter, 0
        ranks = [part.asked.ranks for part in self.axes]
        own = math.prod(r for r, d in zip(ranks, layouts) if d not in (UNSPLIT, ZERO1))
        beside = math.prod(r for r, d in zip(ranks, layouts) if d != UNSPLIT)
        return math.prod(one.shape) * (model / own + state / beside)

    def saved_bytes(self, at: int, options: Sequence[NodeLayout]) -> float:
        """Bytes of a node's results that are saved for the backward, in the full model.

        Recomputed results exist for one block at a time.
        """
        graph, node = self.graph, self.graph.nodes[at]
        if not (node.step.allocates and self.axes[0].asked.counts_saved):
            return 0.0
        found = 0.0
        for k in range(len(node.step.outputs)):
            name = graph.result_name(at, k)
            if graph.values[name].grad and name not in node.inside_kernel:
                shares = self._shares([one.outputs[k] for one in options])
                count = 1 if name in node.not_saved else node.count
                found += count * graph.bytes(name) * math.prod(shares)
        return found

    # -- the problem -------------------------------------------------------------------------------

    def with_graph(self, graph: Graph) -> MeshPlacement:
        """Return a copy for a graph in which some nodes are computed in another way."""
        made = copy(self)
        made.axes = tuple(copy(part) for part in self.axes)
        for part in made.axes:
            part.graph = graph
        gone = ["graph", "problem"]
        if [one.recomputed for one in graph.nodes] != [one.recomputed for one in self.graph.nodes]:
            gone.append("_beside")
        for name in gone:
            made.__dict__.pop(name, None)
        return made

    @cached_property
    def problem(self) -> Problem:
        """The variables with their costs, and the pairs of them that share a value."""
        seconds, sizes, costs = self._beside
        seconds, sizes = [*seconds], [*sizes]
        for at in range(len(self.graph.nodes)):
            own, sizes[at] = self._own(at)
            seconds[at] = seconds[at] + own
        return Problem(tuple(seconds), tuple(sizes), costs, len(self.graph.nodes))

    def _own(self, at: int) -> tuple[Costs, Costs]:
        """Seconds and bytes of a node by itself, for each of its options."""
        node = self.graph.nodes[at]
        if (at, node) not in self._known:
            took = [node.count * self.operator_seconds(at, one) for one in self.options[at]]
            held = [self.saved_bytes(at, one) for one in self.options[at]]
            self._known[at, node] = np.array(took), np.array(held)
        return self._known[at, node]

    def max_saving(self, before: MeshPlacement) -> float:
        """Upper bound of the seconds that the best gains by the changes of nodes since `before`."""
        pairs = enumerate(zip(self.graph.nodes, before.graph.nodes))
        changed = [at for at, (node, other) in pairs if node != other]
        return sum(max(0.0, float((before._own(k)[0] - self._own(k)[0]).max())) for k in changed)

    @cached_property
    def _beside(self) -> tuple[list[Costs], list[Costs], dict[tuple[int, int], Costs]]:
        """All costs except those of nodes by themselves."""
        graph = self.graph
        seconds = [np.zeros(len(some)) for some in self.options]
        sizes = [*seconds]
        for name, menu in self.parameters.items():
            often = graph.counts[name]
            seconds.append(np.array([often * self.update_seconds(name, one) for one in menu]))
            sizes.append(np.array([often * self.state_bytes(name, one) for one in menu]))
        ranked = sorted(graph.edges, key=lambda edge: edge.boundary)
        first = {edge.value: edge for edge in ranked}  # a boundary, if there is one
        for name, pairs in self.shared.items():
            ways = (tuple(zip(*one)) for one in pairs)
            own = replace(first[name], input_index=-1)  # before it enters a module
            took = [self.redistribution_seconds(own, a, b) for a, b in ways]
            read = [one.count for one in graph.edges if one.value == name and one.boundary]
            seconds.append(max(graph.counts[name], *read) * np.array(took))
            sizes.append(np.zeros(len(pairs)))
        costs: dict[tuple[int, int], Costs] = {}
        for edge in graph.edges:
            self._edge(edge, seconds, costs)
        for name in self.shared:
            self._source(name, first[name], costs)
        return seconds, sizes, costs

    def _table(
        self, edge: Edge, given: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]]
    ) -> Costs:
        """Costs of an edge from each layout to each, computed once for each pair that differs."""
        rows, columns = list(dict.fromkeys(given)), list(dict.fromkeys(wanted))
        costs = np.array([[self.redistribution_seconds(edge, a, c) for c in columns] for a in rows])
        at = [rows.index(a) for a in given], [columns.index(c) for c in wanted]
        found: Costs = costs.reshape(len(rows), len(columns))[np.ix_(*at)]
        return found

    def _edge(self, edge: Edge, seconds: list[Costs], costs: dict[tuple[int, int], Costs]) -> None:
        """Add an edge's costs: from its source's layout to each layout that the target reads."""
        options, (node, k), target = self.options, edge.source, edge.target
        wanted = [tuple(one.inputs[edge.input_index] for one in some) for some in options[target]]
        if edge.value in self.shared:
            ways = itertools.product((0, 1) if edge.boundary else (0,), repeat=len(self.axes))
            tables = []
            for way in ways:
                pairs = self.shared[edge.value]
                given = [tuple(pair[k] for pair, k in zip(one, way)) for one in pairs]
                tables.append(self._table(edge, given, wanted))
            table = np.minimum.reduce(tables)
            self._pair(self.variable_index[edge.value], target, table * edge.count, costs)
        elif node >= 0:
            given = [tuple(one.outputs[k] for one in some) for some in options[node]]
            table = self._table(edge, given, wanted) * edge.count
            if node == target:
                seconds[node] = seconds[node] + np.diag(table)
            else:
                self._pair(node, target, table, costs)
        elif edge.value in self.parameters:
            table = self._table(edge, self.parameters[edge.value], wanted) * edge.count
            self._pair(self.variable_index[edge.value], target, table, costs)
        elif all(part.asked.name is None for part in self.axes):
            shaped = bool(self.graph.values[edge.value].shape)
            modes = (part.asked.mode for part in self.axes)
            layout = tuple(0 if shaped and mode == "rows" else UNSPLIT for mode in modes)
            seconds[target] = seconds[target] + self._table(edge, [layout], wanted)[0] * edge.count

    def _source(self, name: str, edge: Edge, costs: dict[tuple[int, int], Costs]) -> None:
        """Constrain the first layout of a shared value to its producer's output."""
        node, k = edge.source
        given = [tuple(one.outputs[k] for one in some) for some in self.options[node]]
        first = [tuple(a for a, _ in pairs) for pairs in self.shared[name]]
        table = np.array([[0.0 if a == g else math.inf for a in first] for g in given])
        self._pair(node, self.variable_index[name], table, costs)

    @staticmethod
    def _pair(i: int, j: int, table: Costs, costs: dict[tuple[int, int], Costs]) -> None:
        table = np.where(np.isnan(table), np.inf, table)
        pair, table = ((i, j), table) if i < j else ((j, i), table.T)
        costs[pair] = costs[pair] + table if pair in costs else table
