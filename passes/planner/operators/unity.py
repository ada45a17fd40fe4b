"""Substitutions of operators, chosen together with their layouts.

Unity (Unger et al., OSDI 2022), after TASO (Jia et al. 2019): best-first search over the graphs
that substitutions make, each priced by its best layouts, which the solver finds.  Substitutions
are rows of the language: kernels, fused modules, merged products, recomputed blocks.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from schedlang.ir.primitive import registry
from schedlang.passes.complete.proposed_rows import ProposedRow, make_call
from schedlang.passes.planner.operators.solver import solve

if TYPE_CHECKING:
    from schedlang.passes.complete.proposed_rows import RowTrial
    from schedlang.passes.planner.operators.operator_graph import Graph, Node
    from schedlang.passes.planner.operators.placements import MeshPlacement

UNITY = (
    "substitutions and parallelization at once (Unger et al., OSDI 2022)",
    "pipelines; of substitutions it has those that are rows; a module it lays out on all ranks",
)
ALPHA = 1.05  # graphs that cost more than this factor times the best are not expanded (paper)
MAX_GRAPHS = 64  # maximal number of graphs that are priced


@dataclass(frozen=True)
class Substitution:
    """A row that preserves the results, and the nodes that it affects.

    recompute  whether the nodes are recomputed for the backward; else one kernel replaces all of
               them
    """

    row: ProposedRow
    nodes: frozenset[int]
    recompute: bool = False

    def clashes(self, other: Substitution) -> bool:
        """Return whether both would replace one node."""
        return self.recompute == other.recompute and bool(self.nodes & other.nodes)


# -- substitutions as rows -------------------------------------------------------------------------


def find_substitutions(trial: RowTrial, graph: Graph) -> list[Substitution]:
    """List the substitutions of a graph that the language accepts; of equal ones the first."""
    substitutions: dict[tuple[frozenset[int], bool], Substitution] = {}
    generators = (
        _kernels(trial, graph),
        _rotated(graph),
        _added(graph),
        _merged(graph),
        _recomputed(graph),
    )
    for rule in itertools.chain(*generators):
        seen = (rule.nodes, rule.recompute) in substitutions
        if rule.nodes and not seen and trial.find_refusal([rule.row], "dp", 1) is None:
            substitutions[rule.nodes, rule.recompute] = rule
    return list(substitutions.values())


def _kernels(trial: RowTrial, graph: Graph) -> Iterator[Substitution]:
    works = [
        k for k, one in enumerate(graph.nodes) if one.step.allocates or one.step.kind != "other"
    ]
    bare = [k for k in works if not graph.nodes[k].step.module]
    for site in dict.fromkeys(one.site for one in graph.nodes):
        site_nodes = frozenset(k for k in works if graph.nodes[k].site == site)
        modules = [k for k in site_nodes if graph.nodes[k].step.module]
        inner = frozenset(k for k in bare if f"{graph.nodes[k].site}.".startswith(f"{site}."))
        if any(graph.nodes[k].kernels > 1 for k in modules):
            yield from (Substitution(ProposedRow((site,), one), site_nodes) for one in NORM_ROWS)
        elif site in graph.vocabulary_weights and any(
            graph.nodes[k].step.module == "linear" for k in site_nodes
        ):
            loss = frozenset(k for k in works if k >= min(site_nodes))
            yield Substitution(ProposedRow((site,), LOSS_KERNEL), loss)
        elif site and not modules and len(inner) > 1:
            yield from (Substitution(ProposedRow((site,), one), inner) for one in POINTWISE_ROWS)


NORM_ROWS = (
    make_call("replace_kernel", "rms_norm"),
    make_call("replace_kernel", "layer_norm"),
    make_call("fuse", backend="rowwise"),
)
LOSS_KERNEL = make_call("replace_kernel", "linear_cross_entropy")
POINTWISE_ROWS = make_call("replace_kernel", "gated"), make_call("fuse", backend="rowwise")


def _rotated(graph: Graph) -> Iterator[Substitution]:
    """Rotary embeddings: from the first product of an attention module to the last sum before
    attention.

    Where this is no rotation, the language refuses the row.
    """
    for end, node in enumerate(graph.nodes):
        body = [k for k in range(end) if graph.nodes[k].site == node.site]
        nodes_by_name = {
            name: [k for k in body if graph.nodes[k].step.name == name] for name in ROTARY_OPERATORS
        }
        if node.step.kind == "attention" and all(nodes_by_name.values()):
            rotation = range(nodes_by_name["mul"][0], nodes_by_name["add"][-1] + 1)
            works = frozenset(k for k in body if k in rotation and graph.nodes[k].step.allocates)
            yield Substitution(
                ProposedRow((node.site,), make_call("replace_kernel", "rope")), works
            )


ROTARY_OPERATORS = "mul", "add"


def _added(graph: Graph) -> Iterator[Substitution]:
    """A sum in a module and the norm after it in the same module, if there is exactly one of
    each."""
    pairs_by_module: dict[str, list[frozenset[int]]] = defaultdict(list)
    for edge in graph.edges:
        (maker, _), norm = edge.source, graph.nodes[edge.target]
        parent = norm.site.rpartition(".")[0]
        if maker >= 0 and norm.step.module == "norm" and edge.input_index == 0:
            producer = graph.nodes[maker]
            if producer.step.name == "add" and producer.site == parent and maker < edge.target:
                pairs_by_module[parent].append(frozenset((maker, edge.target)))
    for parent, pairs in pairs_by_module.items():
        if len(pairs) == 1:  # each of several would be a kernel of its own
            yield Substitution(
                ProposedRow((parent,), make_call("replace_kernel", "add_norm")), pairs[0]
            )


def _merged(graph: Graph) -> Iterator[Substitution]:
    """Merge products of one input; the verb is registered only by an example."""
    if "merge_products" not in registry():
        return
    readers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        if node.step.module == "linear" and 0 in graph.inputs_of(index):
            readers[node.site.rpartition(".")[0], graph.inputs_of(index)[0]].append(index)
    for (parent, _), products in readers.items():
        names = [graph.nodes[index].site.rpartition(".")[2] for index in products]
        if parent and len(products) > 1:
            yield Substitution(
                ProposedRow((parent,), make_call("merge_products", *names)), frozenset(products)
            )


def _recomputed(graph: Graph) -> Iterator[Substitution]:
    heads = dict.fromkeys(
        head + star for head, star, _ in (node.site.partition("*") for node in graph.nodes) if star
    )
    for head in heads:
        nodes = (k for k, node in enumerate(graph.nodes) if f"{node.site}.".startswith(f"{head}."))
        yield Substitution(
            ProposedRow((head,), make_call("checkpoint")), frozenset(nodes), recompute=True
        )


# -- the graph after substitutions -----------------------------------------------------------------


def apply_substitutions(graph: Graph, substitutions: Iterable[Substitution]) -> Graph:
    """Apply substitutions: the same nodes, some of which are computed in another way."""
    new_graph = copy(graph)
    new_graph.nodes = list(graph.nodes)
    for substitution in substitutions:
        change = _recomputed_nodes if substitution.recompute else _fused
        for index, node in change(new_graph, substitution.nodes):
            new_graph.nodes[index] = node
    return new_graph


def _fused(graph: Graph, nodes: frozenset[int]) -> Iterator[tuple[int, Node]]:
    """One kernel: values inside it are neither moved nor saved, and every input is read once."""
    read: set[str] = set()
    first = min(nodes)
    for i in sorted(nodes):
        inputs = {*graph.inputs_of(i).values()}
        within = _inside(graph, i, nodes) | (inputs & read)
        read |= inputs | {graph.result_name(i, k) for k in range(len(graph.nodes[i].step.outputs))}
        yield (
            i,
            replace(graph.nodes[i], kernels=int(i == first), inside_kernel=frozenset(within)),
        )


def _inside(graph: Graph, i: int, nodes: frozenset[int]) -> set[str]:
    """Return the results of a node that neither other nodes nor other blocks read."""
    read = [edge for edge in graph.edges if edge.source[0] == i]
    out = {e.value for e in read if e.target not in nodes or e.count != graph.nodes[e.target].count}
    return {edge.value for edge in read} - out


def _recomputed_nodes(graph: Graph, nodes: frozenset[int]) -> Iterator[tuple[int, Node]]:
    for index in nodes:
        not_saved = frozenset(_inside(graph, index, nodes))
        yield index, replace(graph.nodes[index], recomputed=True, not_saved=not_saved)


# -- the search ------------------------------------------------------------------------------------


SubstitutionSet = frozenset[int]


@dataclass(frozen=True)
class SubstitutionPrice:
    """Price of a set of substitutions: the quickest of several problems within `limit` bytes.

    Problems whose upper bound of savings is too small are not solved.
    """

    joints: Sequence[MeshPlacement]
    rules: Sequence[Substitution]
    limit: float = math.inf

    def problems_after(self, state: SubstitutionSet) -> list[MeshPlacement]:
        """Return the problems after substitutions."""
        after = apply_substitutions(self.joints[0].graph, [self.rules[k] for k in sorted(state)])
        return [joint.with_graph(after) for joint in self.joints]

    @cached_property
    def unlimited_seconds(self) -> Sequence[float]:
        """Seconds of the best of each problem without substitutions and without a limit."""
        solutions = [solve(joint.problem) for joint in self.joints]
        return [solution.seconds if solution else math.inf for solution in solutions]

    def __call__(self, state: SubstitutionSet) -> float:
        """Return the seconds of the quickest."""
        best = math.inf
        after = zip(self.unlimited_seconds, self.joints, self.problems_after(state))
        for free, original, joint in sorted(after, key=lambda entry: entry[0]):
            if free - joint.max_saving(original) < best:
                solution = solve(joint.problem, self.limit)
                best = min(best, solution.seconds if solution else math.inf)
        return best


def search_substitutions(
    rules: Sequence[Substitution],
    price: Callable[[SubstitutionSet], float],
    alpha: float = ALPHA,
    budget: int = MAX_GRAPHS,
) -> list[tuple[float, SubstitutionSet]]:
    """Price sets of substitutions, and return them with their seconds, the quickest first.

    Expands the best set so far by one substitution at a time.  With infinite `alpha` and an
    unlimited budget all sets are priced.
    """
    counter, start = itertools.count(), SubstitutionSet()
    prices = {start: price(start)}
    heap = [(prices[start], next(counter), start)]
    best = prices[start]
    while heap and len(prices) < budget:
        seconds, _, state = heapq.heappop(heap)
        if seconds > alpha * best:
            break
        for k, rule in enumerate(rules):
            extended = state | {k}
            if extended in prices or any(rule.clashes(rules[one]) for one in state):
                continue
            prices[extended] = price(extended)
            best = min(best, prices[extended])
            if prices[extended] <= alpha * best:
                heapq.heappush(heap, (prices[extended], next(counter), extended))
    ranked = sorted((seconds, len(one), sorted(one)) for one, seconds in prices.items())
    return [(seconds, SubstitutionSet(one)) for seconds, _, one in ranked if seconds < math.inf]
