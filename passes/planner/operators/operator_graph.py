"""A model as a graph of operators: each layer once, however often it is repeated.

The forward is recorded on the meta device, with as few blocks as show all kinds.  Steps of equal
blocks are one node, whose cost counts for all of them; an edge has the number of its repetitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from schedlang.passes.autoshard.propose import experts_of
from schedlang.passes.reduce_model.blocks import (
    CONVOLUTIONS,
    TABLES,
    Blocks,
    can_split_module,
    leaf_kind,
)

if TYPE_CHECKING:
    from schedlang.passes.complete.proposed_rows import RowTrial
    from schedlang.runtime.propagation.step_graph import Step, StepGraph, Value

Key = tuple[str, int, int, str]
Dim = tuple[str, int]  # the name of a value, and the index of one of its dims


@dataclass(frozen=True)
class Node:
    """Steps of equal blocks; `count` of them in the full model.

    kernels        number of operators; 0 where another node's kernel does its work
    inside_kernel  values that stay inside a kernel: neither moved nor saved
    recomputed     whether its forward is recomputed in the backward
    not_saved      its results that are not saved until then
    """

    key: Key
    step: Step
    count: int
    kernels: int = 1
    inside_kernel: frozenset[str] = frozenset()
    recomputed: bool = False
    not_saved: frozenset[str] = frozenset()

    @property
    def site(self) -> str:
        """The common name of the module."""
        return self.key[0]


@dataclass(frozen=True)
class Edge:
    """A value from its producer to one input of a node; `count` of them in the full model.

    source    index of the producing node and of its result; (-1, 0) for parameters and inputs
    boundary  whether the value may change its layout on the way: at a sharded module, or where it
              enters a block
    """

    value: str
    source: tuple[int, int]
    target: int
    input_index: int
    count: int
    boundary: bool


@dataclass
class Graph:
    """Nodes in the order of the forward, edges, and their values.

    values      by name: of a parameter or input its own, else that of the node with the result's
                number
    scale       rows of the full batch for each recorded row
    grad_ratio  bytes of a reduced gradient for each byte of a parameter in the compute dtype
    """

    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    scale: float = 1.0
    grad_ratio: float = 1.0

    @cached_property
    def dim_classes(self) -> Mapping[Dim, Dim]:
        """Dims that have one name: every layout splits them together (dims of Mesh-TensorFlow)."""
        parent: dict[Dim, Dim] = {}

        def root(one: Dim) -> Dim:
            while parent.setdefault(one, one) != one:
                one = parent[one]
            return one

        for at, node in enumerate(self.nodes):
            names = self.inputs_of(at)
            for way in node.step.splits:
                dims = [(names[p], d) for p, d in enumerate(way.inputs) if d >= 0 and p in names]
                dims += [(self.result_name(at, k), d) for k, d in enumerate(way.outputs) if d >= 0]
                if node.step.module == "experts":
                    dims = [one for one in dims if self.values[one[0]].kind != "parameter"]
                for one in dims[1:]:
                    parent[root(one)] = root(dims[0])
        return {one: root(one) for one in list(parent)}

    def dim_name(self, value: str, dim: int) -> Dim:
        """Return the common name of all dims that are split together with this one."""
        return self.dim_classes.get((value, dim), (value, dim))

    @cached_property
    def _given(self) -> list[dict[int, str]]:
        found: list[dict[int, str]] = [{} for _ in self.nodes]
        for edge in self.edges:
            found[edge.target].setdefault(edge.input_index, edge.value)
        return found

    def inputs_of(self, node: int) -> Mapping[int, str]:
        """Return the inputs of a node, by their indices."""
        return self._given[node]

    def result_name(self, node: int, place: int) -> str:
        """Return the name of one of a node's results."""
        return ":".join(map(str, (*self.nodes[node].key, place)))

    @cached_property
    def tied(self) -> frozenset[str]:
        """Parameters that several modules read."""
        found: dict[str, set[str]] = {}
        for edge in self.edges:
            if self.values[edge.value].kind == "parameter":
                found.setdefault(edge.value, set()).add(self.nodes[edge.target].site)
        return frozenset(name for name, sites in found.items() if len(sites) > 1)

    @cached_property
    def first_reads(self) -> Mapping[str, tuple[int, int]]:
        """First reader of each parameter, as (node, input): there its gradient is reduced, once."""
        found: dict[str, tuple[int, int]] = {}
        for edge in self.edges:
            found.setdefault(edge.value, (edge.target, edge.input_index))
        return found

    @cached_property
    def row_dims(self) -> frozenset[Dim]:
        """Names of dims that hold rows of the batch."""
        inputs = [n for n, v in self.values.items() if v.kind == "input" and v.shape]
        return frozenset(self.dim_name(one, 0) for one in inputs)

    @cached_property
    def token_dims(self) -> frozenset[Dim]:
        """Names of dims that hold tokens of a sequence: of inputs, and of inputs of embedding
        tables."""
        inputs = [n for n, v in self.values.items() if v.kind == "input" and len(v.shape) > 1]
        tables = (at for at, one in enumerate(self.nodes) if one.step.module == "table")
        read = [given[0] for given in map(self.inputs_of, tables) if 0 in given]
        inputs += [one for one in read if len(self.values[one].shape) == 2]
        return frozenset(self.dim_name(one, 1) for one in inputs) - self.row_dims

    @cached_property
    def vocabulary_weights(self) -> Mapping[str, str]:
        """Vocabulary tables outside of blocks, and projections to as many outputs: module ->
        weight."""
        outside = [k for k, one in enumerate(self.nodes) if "*" not in one.site]
        found: dict[str, str] = {}
        for kind in ("table", "linear"):
            for at in outside:
                node = self.nodes[at]
                if node.step.module == kind:
                    weight = self.inputs_of(at)[1]
                    found[node.site] = weight
        words = [
            self.values[found[self.nodes[k].site]].shape[0]
            for k in outside
            if self.nodes[k].step.module == "table"
        ]
        most = max(words, default=0)
        return {site: one for site, one in found.items() if self.values[one].shape[0] == most}

    @cached_property
    def paddable_dims(self) -> frozenset[Dim]:
        """Names of dims that may be padded: vocabularies."""
        return frozenset(self.dim_name(one, 0) for one in self.vocabulary_weights.values())

    @cached_property
    def batch_values(self) -> frozenset[str]:
        """Values that depend on the batch, and not on parameters and constants alone."""
        found = {name for name, one in self.values.items() if one.kind == "input"}
        for _ in range(2):  # the second time includes values from one block to the next
            for edge in self.edges:
                if edge.value in found:
                    count = len(self.nodes[edge.target].step.outputs)
                    found |= {self.result_name(edge.target, k) for k in range(count)}
        return frozenset(found)

    @cached_property
    def constant_fills(self) -> frozenset[str]:
        """Values that are constant everywhere, so that each rank makes its own part."""
        found: set[str] = set()
        for at, node in enumerate(self.nodes):
            given = self.inputs_of(at)
            made = node.step.fills or bool(given) and found.issuperset(given.values())
            if made and len(given) == len(node.step.inputs):
                found |= {self.result_name(at, k) for k in range(len(node.step.outputs))}
        return frozenset(found)

    def bytes(self, name: str) -> float:
        """Return the bytes of a value of the full batch."""
        one = self.values[name]
        return one.bytes * (self.scale if name in self.batch_values else 1.0)


def operator_kinds(blocks: Blocks) -> dict[str, str]:
    """Map modules that are split as one operator to their kinds."""
    facts, found = blocks.facts, {}
    experts = {fqn for name in experts_of(blocks) for fqn in blocks.modules_by_name[name]}
    for fqn, site in facts.sites.items():
        leaf = leaf_kind(site)
        if fqn in experts:
            found[fqn] = "experts"
        elif leaf:
            found[fqn] = "table" if leaf in TABLES else "conv1d" if leaf == "Conv1D" else "linear"
        elif any(site.is_a(kind) for kind in CONVOLUTIONS):
            found[fqn] = "convolution" if can_split_module(facts, fqn) else "grouped"
        elif site.parameters and not site.children:
            plain = all(len(fact.shape) == 1 for fact in site.parameters.values())
            norm = any("Norm" in name for name in site.classes)
            if plain and norm and "Batch" not in site.class_name and "Group" not in site.class_name:
                found[fqn] = "norm"
    return {fqn: kind for fqn, kind in found.items() if kind != "grouped"}


def build_graph(trial: RowTrial, dtype: str = "") -> Graph:
    """Build the graph of the model that rows are tried on; raises what its forward raises.

    dtype  in which all is computed, as `cast(bf16, params=true)` has it; "" for the stored dtype
    """
    from schedlang.runtime.batch import row_count
    from schedlang.runtime.propagation.step_graph import record_graph
    from schedlang.runtime.tracing.meta_runs import meta_model

    blocks = trial.with_fewer_blocks(2) if trial.is_shortened else trial.full_blocks
    model = meta_model(blocks.facts.model, {})
    stored = {name: one.element_size() for name, one in model.named_parameters()}
    found = record_graph(model, trial.sample, operator_kinds(blocks), trial.loss, dtype)
    graph = _graph(
        found, trial.full_blocks, blocks, row_count(trial.batch) / row_count(trial.sample)
    )
    if dtype:
        graph.grad_ratio = max(stored.values(), default=4) / 2
    return graph


def _graph(found: StepGraph, whole: Blocks, blocks: Blocks, scale: float) -> Graph:
    """Merge steps of equal blocks into one node, and count how often each edge occurs."""
    graph, at, makers = Graph(scale=scale), {}, {}
    instances: dict[int, list[str]] = {}
    for step in found.steps:
        key = _key(found, blocks, step)
        block = blocks.enclosing_block(step.site)
        if key not in at:
            at[key] = len(graph.nodes)
            count = len(whole.modules_by_name.get(key[0], ("",)))
            graph.nodes.append(Node(key, step, count, step.kernels))
        node = at[key]
        instances.setdefault(node, []).append(block)
        for k, value in enumerate(step.outputs):
            makers[value] = node, k, block
            graph.values.setdefault(graph.result_name(node, k), found.values[value])
    short: Counter[str] = Counter(blocks.common_name(fqn) for fqn in blocks.facts.sites)
    for node, those in instances.items():
        known = graph.nodes[node]
        if len(those) < short[known.site]:  # a step of only some blocks is not repeated
            graph.nodes[node] = replace(known, count=len(those))
    graph.counts = {
        graph.result_name(at, k): node.count
        for at, node in enumerate(graph.nodes)
        for k in range(len(node.step.outputs))
    }
    crossed: dict[tuple[str, tuple[int, int], int, int], list[tuple[str, str]]] = {}
    for step in found.steps:
        key = _key(found, blocks, step)
        block = blocks.enclosing_block(step.site)
        for place, value in enumerate(step.inputs):
            node, k, source_block = makers.get(value, (-1, 0, ""))
            one = found.values[value]
            if node < 0 and one.kind == "constant":
                continue
            name = graph.result_name(node, k) if node >= 0 else blocks.common_name(one.name)
            if one.kind == "parameter":
                source_block = blocks.enclosing_block(one.name)
            if node < 0:
                graph.values.setdefault(name, one)
                owner = name.rpartition(".")[0]
                graph.counts.setdefault(name, len(whole.modules_by_name.get(owner, ("",))))
            crossed.setdefault((name, (node, k), at[key], place), []).append((source_block, block))
    for (name, source, target, place), ways in crossed.items():
        count = _crossings(ways, graph.nodes[target].count, set(instances[target]))
        maker = graph.nodes[source[0]].step.module if source[0] >= 0 else ""
        enters = source[0] >= 0 and any(not a and b for a, b in ways)
        boundary = bool(maker or graph.nodes[target].step.module or enters)
        graph.edges.append(Edge(name, source, target, place, count, boundary))
    return graph


def _key(found: StepGraph, blocks: Blocks, step: Step) -> Key:
    """Return a key that is equal for steps of equal blocks."""
    shapes = ",".join(str(list(found.values[one].shape)) for one in step.inputs)
    return blocks.common_name(step.site), step.turn, step.place, f"{step.name}({shapes})"


def block_prefix(name: str) -> str:
    """Return the blocks that contain a parameter, as a prefix of its common name; "" outside of
    all."""
    return name.rpartition("*")[0]


def _crossings(ways: list[tuple[str, str]], count: int, targets: set[str]) -> int:
    """Count the occurrences of an edge in the full model, given the blocks at both of its ends."""
    if all(a == b for a, b in ways):
        return count
    if any(a and a != b for a, b in ways) and len(targets) > 1:
        return max(1, count - 1)
    return count if {b for _, b in ways} >= targets else 1
