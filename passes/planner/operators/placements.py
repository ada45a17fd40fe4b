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
        return [self._options(index) for index in range(len(self.graph.nodes))]

    def _options(self, index: int) -> list[NodeLayout]:
        step, request = self.graph.nodes[index].step, self.asked
        replicated = NodeLayout((UNSPLIT,) * len(step.inputs), (UNSPLIT,) * len(step.outputs))
        layouts = [
            NodeLayout(
                # a bias is added after the reduction
                tuple(
                    ENTERED if d == UNSPLIT and (slot < 2 or PARTIAL not in split.outputs) else d
                    for slot, d in enumerate(split.inputs)
                ),
                split.outputs,
            )
            for split in step.splits
            if self._fits(index, split.inputs, split.outputs)
        ]
        site = self.graph.nodes[index].site
        input_dim, output_dim = request.row_dims.get(site, (None, None))
        if step.module and input_dim is not None and 0 <= input_dim == output_dim:
            return [layout for layout in layouts if layout.inputs[0] == input_dim]
        if request.name is not None:
            return layouts or [replicated]
        if request.mode == "rows" and not layouts:
            results = (self.graph.result_name(index, k) for k in range(len(step.outputs)))
            if any(name in self.graph.batch_values for name in results):
                return [NodeLayout((ANY,) * len(step.inputs), (ANY,) * len(step.outputs))]
        return [replicated, *layouts] if request.mode == "tensors" else layouts or [replicated]

    def _fits(self, index: int, inputs: Sequence[int], outputs: Sequence[int]) -> bool:
        """Return whether a layout belongs to the request, and its dims can be divided."""
        graph, request, input_names = self.graph, self.asked, self.graph.inputs_of(index)
        step = graph.nodes[index].step
        dims = [(input_names[p], d) for p, d in enumerate(inputs) if d >= 0 and p in input_names]
        if len(dims) < sum(d >= 0 for d in inputs):
            return False  # a constant of the model would have to be split
        names = {graph.dim_name(*dim) for dim in dims}
        names |= {
            graph.dim_name(graph.result_name(index, k), d) for k, d in enumerate(outputs) if d >= 0
        }
        by_rows = bool(names & graph.row_dims)
        if request.name is not None and request.name not in names:
            return False
        if request.name is None and by_rows != (request.mode == "rows"):
            return False
        if request.name is None and not request.tokens and names & graph.token_dims:
            return False
        sums = not step.module and UNSPLIT in outputs
        if sums and not by_rows and "loss" not in step.name and "cross_entropy" not in step.name:
            return False  # the language cannot express partial means of activations
        return by_rows or all(self._divides(*dim) for dim in dims)

    def _divides(self, value: str, dim_index: int) -> bool:
        size = self.graph.values[value].shape[dim_index]
        paddable = self.graph.paddable_dims
        return size % self.asked.ranks == 0 or self.graph.dim_name(value, dim_index) in paddable

    @cached_property
    def parameters(self) -> dict[str, list[int]]:
        """The layouts that each parameter may have."""
        menus: dict[str, list[int]] = {}
        for edge in self.graph.edges:
            if self.graph.values[edge.value].kind == "parameter":
                menu = menus.setdefault(edge.value, [UNSPLIT])
                layouts = (option.inputs[edge.input_index] for option in self.options[edge.target])
                menu += [d for d in dict.fromkeys(layouts) if d >= 0 and d not in menu]
        for name, menu in menus.items():
            if self.asked.mode == "rows" and self.asked.zero:
                menu[0] = ZERO1 if self.asked.zero == 1 else ZERO3
            if name in self.asked.pins:
                menus[name] = [d for d in menu if d == self.asked.pins[name]]
        return menus

    @cached_property
    def shared(self) -> dict[str, list[tuple[int, int]]]:
        """Values with several readers, with the pairs of layouts that each may have."""
        readers: dict[str, list[Edge]] = {}
        for edge in self.graph.edges:
            if edge.source[0] >= 0:
                readers.setdefault(edge.value, []).append(edge)
        pairs = {}
        for name, edges in readers.items():
            if len(edges) > 1 and any(edge.boundary for edge in edges):
                node, k = edges[0].source
                produced = list(dict.fromkeys(option.outputs[k] for option in self.options[node]))
                read = {o.inputs[e.input_index] for e in edges for o in self.options[e.target]}
                pairs[name] = [(a, b) for a in produced for b in dict.fromkeys([a, *sorted(read)])]
        return pairs

    @cached_property
    def variable_index(self) -> dict[str, int]:
        """Indices of the variables of parameters and of shared values, by name."""
        names = (*self.parameters, *self.shared)
        return {name: k for k, name in enumerate(names, len(self.graph.nodes))}

    def decided(self, choice: Sequence[int]) -> AxisPlacement:
        """Return a copy with all variables decided, for the next axis."""
        placement = AxisPlacement(self.graph, self.asked)
        placement.options = [[node_options[k]] for node_options, k in zip(self.options, choice)]
        other_choices = choice[len(self.graph.nodes) :]
        menus = self.parameters.items()
        placement.parameters = {name: [menu[k]] for (name, menu), k in zip(menus, other_choices)}
        pairs = zip(self.shared.items(), other_choices[len(self.parameters) :])
        placement.shared = {name: [menu[k]] for (name, menu), k in pairs}
        return placement

    # -- costs -------------------------------------------------------------------------------------

    def share(self, layout: int) -> float:
        """Return the share of a value that one rank has."""
        return 1 / self.asked.ranks if layout >= 0 or layout == ANY else 1.0

    def _send(self, op: str, size: float) -> float:
        return self.asked.costs.collective_seconds(op, size, self.asked.ranks, self.asked.stride)

    def inner_send_seconds(self, index: int, option: NodeLayout, share: float) -> float:
        """Seconds of communication inside a split node: rows to experts, halos of convolutions.

        `share` is the share of the node that other axes leave.
        """
        graph, step = self.graph, self.graph.nodes[index].step
        x = graph.inputs_of(index).get(0)
        if x is None or not option.split:
            return 0.0
        if step.module == "experts" and option.inputs[0] == 0 and option.inputs[-1] == 0:
            experts_per_row = max(1.0, step.flops / self._once(index))
            sent = graph.bytes(x) * experts_per_row / self.asked.ranks * share  # by each rank
            return 4 * self._send("all_to_all", sent)
        if step.module == "convolution" and option.inputs[0] > 1:
            kernel = graph.values[graph.inputs_of(index)[1]].shape[option.inputs[0]]
            edge = graph.bytes(x) / graph.values[x].shape[option.inputs[0]] * (kernel - 1)
            return 2 * self._send("send", edge * share) if kernel > 1 else 0.0
        if step.name == "cross_entropy" and option.inputs[0] > 0 and option.outputs == (UNSPLIT,):
            size = graph.bytes(x) / graph.values[x].shape[option.inputs[0]] * share
            classes = graph.dim_name(x, option.inputs[0]) not in graph.row_dims | graph.token_dims
            return classes * (self._send("all_reduce", size) + self._send("all_reduce", 2 * size))
        return 0.0

    def _once(self, index: int) -> float:
        """Operations of experts if each row used one expert."""
        graph, inputs = self.graph, self.graph.inputs_of(index)
        x = graph.values[inputs[0]]
        weights = [graph.values[v] for v in inputs.values() if graph.values[v].kind == "parameter"]
        row_numel = sum(math.prod(weight.shape[1:]) for weight in weights)
        return 2.0 * math.prod(x.shape[:-1]) * max(1, row_numel)

    def redistribution_seconds(self, edge: Edge, a: int, c: int, share: float = 1.0) -> float:
        """Seconds, forward and backward, of redistributing a value from layout `a` to layout `c`.

        `share` is the share of the value that other axes leave.  Infinite where the language cannot
        express the redistribution.
        """
        value = self.graph.values[edge.value]
        if value.kind == "parameter":
            return self._parameter(edge, a, c, share)
        if a == c or ANY in (a, c):
            return 0.0
        if not value.grad and (self.asked.mode == "rows" or {a, c} <= {UNSPLIT, ENTERED}):
            return 0.0
        if edge.value in self.graph.constant_fills and not value.grad:
            return 0.0
        size, change = self.graph.bytes(edge.value) * share, (min(a, 0), min(c, 0))
        rooted = edge.value not in self.graph.batch_values
        if rooted and self.asked.mode == "rows" and a == UNSPLIT:
            return 0.0  # each rank computes its own rows
        if not (edge.boundary or (rooted and change == (UNSPLIT, ENTERED))):
            return math.inf
        ops = REDISTRIBUTIONS.get(change)
        nodes, maker = self.graph.nodes, edge.source[0]
        if ops is None or change == (0, 0) or not self._expressible(edge, a, c):
            return math.inf
        backward = ops[1] if value.grad else ""
        twice = maker >= 0 and nodes[maker].recomputed and nodes[edge.target].recomputed
        recompute = ops[0] if twice else ""
        return sum(self._send(op, size) for op in (ops[0], backward, recompute) if op)

    def rows_permit(self, edge: Edge, a: int, c: int) -> bool:
        """Return whether rows permit that a value goes from `a` to `c`.

        Rows may say how a value leaves a module and enters one.  Modules gather and split their
        inputs by themselves.
        """
        nodes, row_dims = self.graph.nodes, self.asked.row_dims
        row = row_dims.get(nodes[edge.source[0]].site) if edge.source[0] >= 0 else None
        target = nodes[edge.target].site
        entered = row_dims.get(target, UNMENTIONED)[0] if edge.input_index == 0 else None
        a, c = (UNSPLIT if layout == ENTERED else layout for layout in (a, c))
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
            gathers = (1 + bool(block_prefix(name))) * once
            gathered = gathers * self._portion("all_gather", name, unit, share)
            scattered = sums * self._portion("reduce_scatter", name, unit, share, graph.grad_ratio)
            return gathered + scattered
        if a == UNSPLIT and c == ENTERED:
            if name in graph.tied and not rows:
                return math.inf  # the gradient by the other module is not partial
            bucket = min(self.reduced_together.get("*", 0.0), BUCKET / graph.grad_ratio)
            return sums * self._portion("all_reduce", name, bucket, share, graph.grad_ratio)
        if a == ZERO1 and c == ENTERED:
            scattered = sums * self._portion("reduce_scatter", name, unit, share, graph.grad_ratio)
            return scattered + sums * self._portion("all_gather", name, unit, share)
        return math.inf

    @cached_property
    def reduced_together(self) -> Mapping[str, float]:
        """Bytes of replicated parameters whose gradients reduce together, by blocks; "*": all."""
        sizes: dict[str, float] = {}
        for name, menu in self.parameters.items():
            size = self.graph.bytes(name) * self.graph.values[name].grad
            if self.asked.mode == "tensors" or len(menu) == 1:  # else experts, as a rule
                sizes[block_prefix(name)] = sizes.get(block_prefix(name), 0.0) + size
                sizes["*"] = sizes.get("*", 0.0) + size * self.graph.counts[name]
        return sizes

    def _portion(
        self, op: str, name: str, together: float, share: float, scale: float = 1.0
    ) -> float:
        """Seconds of a parameter's share of one message of `together` bytes."""
        size = self.graph.bytes(name)
        together = max(size, together)
        return self._send(op, together * share * scale) * size / together

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
        return [self._options(index) for index in range(len(self.graph.nodes))]

    def _options(self, index: int) -> list[tuple[NodeLayout, ...]]:
        inputs = self.graph.inputs_of(index)

        def dealt(layouts: tuple[NodeLayout, ...]) -> bool:
            for position, value in inputs.items():
                dims = [option.inputs[position] for option in layouts]
                for dim in {d for d in dims if d >= 0 and dims.count(d) > 1}:
                    ranks = (p.asked.ranks for p, d in zip(self.axes, dims) if d == dim)
                    if self.graph.values[value].shape[dim] % math.prod(ranks):
                        return False
            return True

        combinations = itertools.product(*(part.options[index] for part in self.axes))
        return [option for option in combinations if dealt(option)]

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
        part, other_choices = self.axes[axis], choice[len(self.graph.nodes) :]
        node_choices = [
            part.options[index].index(self.options[index][choice[index]][axis])
            for index in range(len(self.graph.nodes))
        ]
        variables: tuple[Any, ...] = (*self.parameters.items(), *self.shared.items())
        decided = zip(variables, other_choices)
        menus: dict[str, Any] = {**part.parameters, **part.shared}
        return (*node_choices, *(menus[name].index(menu[k][axis]) for (name, menu), k in decided))

    # -- costs -------------------------------------------------------------------------------------

    def _shares(self, layouts: Sequence[int]) -> list[float]:
        return [part.share(layout) for part, layout in zip(self.axes, layouts)]

    def operator_seconds(self, index: int, options: Sequence[NodeLayout]) -> float:
        """Seconds of a node's own work, forward and backward, with its own communication."""
        graph, step = self.graph, self.graph.nodes[index].step
        inputs = graph.inputs_of(index)
        results = [graph.result_name(index, k) for k in range(len(step.outputs))]
        if not step.allocates and step.kind == "other":
            return 0.0  # views
        shares = [1 / p.asked.ranks if o.split else 1.0 for p, o in zip(self.axes, options)]
        share, node = math.prod(shares), graph.nodes[index]
        rows = graph.scale if any(name in graph.batch_values for name in results) else 1.0
        touched = [*inputs.values(), *results]
        moved = sum(graph.bytes(value) for value in touched if value not in node.inside_kernel)
        if node.kernels > 1:
            moved += step.inside * rows
        width = max((graph.values[name].width for name in results), default=HALF_BYTES) / HALF_BYTES
        kind, flops = step.kind, step.flops * rows * share * width
        operator = self.axes[0].asked.costs.operator_seconds
        starts = (node.kernels - 1) * operator(kind, 0.0, 0.0)
        forward = operator(kind, flops, moved * share) + starts
        seconds = forward
        if any(graph.values[name].grad for name in results):
            backward = operator(kind, 2 * flops, 2 * moved * share) + starts
            seconds += backward + forward * node.recomputed
        inside = zip(self.axes, options, shares)
        sent = sum(part.inner_send_seconds(index, o, share / ratio) for part, o, ratio in inside)
        return seconds + sent * (1.5 if node.recomputed else 1.0)

    def redistribution_seconds(self, edge: Edge, a: Sequence[int], c: Sequence[int]) -> float:
        """Seconds, forward and backward, of redistributing a value on all axes."""
        before, after = self._shares(a), self._shares(c)
        if not all(part.rows_permit(edge, *layouts) for part, *layouts in zip(self.axes, a, c)):
            return math.inf
        rows = self.graph.values[edge.value].kind == "parameter"  # every use has a reduction
        modes = [part.asked.mode for part in self.axes]
        move = [k for k, mode in enumerate(modes) if a[k] != c[k] or (rows and mode == "rows")]
        best = math.inf if move else 0.0
        for order in itertools.permutations(move):
            shares, seconds = list(before), 0.0
            for k in order:
                other_share = math.prod(shares) / shares[k]
                seconds += self.axes[k].redistribution_seconds(edge, a[k], c[k], other_share)
                shares[k] = after[k]
            best = min(best, seconds)
        return best

    def update_seconds(self, name: str, layouts: Sequence[int]) -> float:
        """Seconds of the optimizer: state is read and written, gradients read, parameters written.

        All parameters of a rank are one operator, whose start does not depend on layouts.
        """
        value, recipe = self.graph.values[name], self.axes[0].asked.recipe
        number_bytes = 2 * (recipe.moments + recipe.master) + recipe.gradient + recipe.parameter
        ranks = (p.asked.ranks for p, d in zip(self.axes, layouts) if d != UNSPLIT)
        operator = self.axes[0].asked.costs.operator_seconds
        moved_bytes = number_bytes * math.prod(value.shape) / math.prod(ranks) * value.grad
        return operator("other", 0.0, moved_bytes) - operator("other", 0.0, 0.0)

    def state_bytes(self, name: str, layouts: Sequence[int]) -> float:
        """Bytes of a parameter, its gradient and its optimizer state on one rank."""
        value, recipe = self.graph.values[name], self.axes[0].asked.recipe
        model, state = recipe.parameter + recipe.gradient, recipe.moments + recipe.master
        if not value.grad:
            model, state = recipe.parameter, 0
        ranks = [part.asked.ranks for part in self.axes]
        model_shards = math.prod(r for r, d in zip(ranks, layouts) if d not in (UNSPLIT, ZERO1))
        state_shards = math.prod(r for r, d in zip(ranks, layouts) if d != UNSPLIT)
        return math.prod(value.shape) * (model / model_shards + state / state_shards)

    def saved_bytes(self, index: int, options: Sequence[NodeLayout]) -> float:
        """Bytes of a node's results that are saved for the backward, in the full model.

        Recomputed results exist for one block at a time.
        """
        graph, node = self.graph, self.graph.nodes[index]
        if not (node.step.allocates and self.axes[0].asked.counts_saved):
            return 0.0
        total = 0.0
        for k in range(len(node.step.outputs)):
            name = graph.result_name(index, k)
            if graph.values[name].grad and name not in node.inside_kernel:
                shares = self._shares([option.outputs[k] for option in options])
                count = 1 if name in node.not_saved else node.count
                total += count * graph.bytes(name) * math.prod(shares)
        return total

    # -- the problem -------------------------------------------------------------------------------

    def with_graph(self, graph: Graph) -> MeshPlacement:
        """Return a copy for a graph in which some nodes are computed in another way."""
        placement = copy(self)
        placement.axes = tuple(copy(part) for part in self.axes)
        for part in placement.axes:
            part.graph = graph
        stale = ["graph", "problem"]
        if [n.recomputed for n in graph.nodes] != [n.recomputed for n in self.graph.nodes]:
            stale.append("_beside")
        for name in stale:
            placement.__dict__.pop(name, None)
        return placement

    @cached_property
    def problem(self) -> Problem:
        """The variables with their costs, and the pairs of them that share a value."""
        seconds, sizes, costs = self._beside
        seconds, sizes = [*seconds], [*sizes]
        for index in range(len(self.graph.nodes)):
            own_seconds, sizes[index] = self._own(index)
            seconds[index] = seconds[index] + own_seconds
        return Problem(tuple(seconds), tuple(sizes), costs, len(self.graph.nodes))

    def _own(self, i: int) -> tuple[Costs, Costs]:
        """Seconds and bytes of a node by itself, for each of its options."""
        node = self.graph.nodes[i]
        if (i, node) not in self._known:
            seconds = [node.count * self.operator_seconds(i, option) for option in self.options[i]]
            sizes = [self.saved_bytes(i, option) for option in self.options[i]]
            self._known[i, node] = np.array(seconds), np.array(sizes)
        return self._known[i, node]

    def max_saving(self, earlier: MeshPlacement) -> float:
        """Upper bound of the seconds that the best gains by the changes of nodes since
        `earlier`."""
        pairs = enumerate(zip(self.graph.nodes, earlier.graph.nodes))
        changed = [index for index, (node, previous) in pairs if node != previous]
        return sum(max(0.0, float((earlier._own(k)[0] - self._own(k)[0]).max())) for k in changed)

    @cached_property
    def _beside(self) -> tuple[list[Costs], list[Costs], dict[tuple[int, int], Costs]]:
        """All costs except those of nodes by themselves."""
        graph = self.graph
        seconds = [np.zeros(len(options)) for options in self.options]
        sizes = [*seconds]
        for name, menu in self.parameters.items():
            count = graph.counts[name]
            seconds.append(np.array([count * self.update_seconds(name, item) for item in menu]))
            sizes.append(np.array([count * self.state_bytes(name, item) for item in menu]))
        ranked = sorted(graph.edges, key=lambda edge: edge.boundary)
        main_edges = {edge.value: edge for edge in ranked}  # a boundary, if there is one
        for name, pairs in self.shared.items():
            ways = (tuple(zip(*item)) for item in pairs)
            outer_edge = replace(main_edges[name], input_index=-1)  # before it enters a module
            times = [self.redistribution_seconds(outer_edge, a, b) for a, b in ways]
            counts = [item.count for item in graph.edges if item.value == name and item.boundary]
            seconds.append(max(graph.counts[name], *counts) * np.array(times))
            sizes.append(np.zeros(len(pairs)))
        costs: dict[tuple[int, int], Costs] = {}
        for edge in graph.edges:
            self._edge(edge, seconds, costs)
        for name in self.shared:
            self._source(name, main_edges[name], costs)
        return seconds, sizes, costs

    def _table(
        self, edge: Edge, sources: Sequence[tuple[int, ...]], targets: Sequence[tuple[int, ...]]
    ) -> Costs:
        """Costs of an edge from each layout to each, computed once for each pair that differs."""
        rows, columns = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
        costs = np.array([[self.redistribution_seconds(edge, a, c) for c in columns] for a in rows])
        indices = [rows.index(a) for a in sources], [columns.index(c) for c in targets]
        table: Costs = costs.reshape(len(rows), len(columns))[np.ix_(*indices)]
        return table

    def _edge(self, edge: Edge, seconds: list[Costs], costs: dict[tuple[int, int], Costs]) -> None:
        """Add an edge's costs: from its source's layout to each layout that the target reads."""
        options, (node, k), target = self.options, edge.source, edge.target
        targets = [tuple(o.inputs[edge.input_index] for o in combo) for combo in options[target]]
        if edge.value in self.shared:
            choices = itertools.product((0, 1) if edge.boundary else (0,), repeat=len(self.axes))
            tables = []
            for sides in choices:
                pairs = self.shared[edge.value]
                sources = [tuple(pair[k] for pair, k in zip(o, sides)) for o in pairs]
                tables.append(self._table(edge, sources, targets))
            table = np.minimum.reduce(tables)
            self._pair(self.variable_index[edge.value], target, table * edge.count, costs)
        elif node >= 0:
            sources = [tuple(o.outputs[k] for o in combo) for combo in options[node]]
            table = self._table(edge, sources, targets) * edge.count
            if node == target:
                seconds[node] = seconds[node] + np.diag(table)
            else:
                self._pair(node, target, table, costs)
        elif edge.value in self.parameters:
            table = self._table(edge, self.parameters[edge.value], targets) * edge.count
            self._pair(self.variable_index[edge.value], target, table, costs)
        elif all(part.asked.name is None for part in self.axes):
            shaped = bool(self.graph.values[edge.value].shape)
            modes = (part.asked.mode for part in self.axes)
            layout = tuple(0 if shaped and mode == "rows" else UNSPLIT for mode in modes)
            seconds[target] = seconds[target] + self._table(edge, [layout], targets)[0] * edge.count

    def _source(self, name: str, edge: Edge, costs: dict[tuple[int, int], Costs]) -> None:
        """Constrain the first layout of a shared value to its producer's output."""
        node, k = edge.source
        outputs = [tuple(option.outputs[k] for option in combo) for combo in self.options[node]]
        produced = [tuple(a for a, _ in pairs) for pairs in self.shared[name]]
        table = np.array([[0.0 if a == g else math.inf for a in produced] for g in outputs])
        self._pair(node, self.variable_index[name], table, costs)

    @staticmethod
    def _pair(i: int, j: int, table: Costs, costs: dict[tuple[int, int], Costs]) -> None:
        table = np.where(np.isnan(table), np.inf, table)
        pair, table = ((i, j), table) if i < j else ((j, i), table.T)
        costs[pair] = costs[pair] + table if pair in costs else table
