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

        def root(dim: Dim) -> Dim:
            while parent.setdefault(dim, dim) != dim:
                dim = parent[dim]
            return dim

        for i, node in enumerate(self.nodes):
            names = self.inputs_of(i)
            for split in node.step.splits:
                dims = [(names[p], d) for p, d in enumerate(split.inputs) if d >= 0 and p in names]
                dims += [(self.result_name(i, k), d) for k, d in enumerate(split.outputs) if d >= 0]
                if node.step.module == "experts":
                    dims = [dim for dim in dims if self.values[dim[0]].kind != "parameter"]
                for dim in dims[1:]:
                    parent[root(dim)] = root(dims[0])
        return {dim: root(dim) for dim in list(parent)}

    def dim_name(self, value: str, dim: int) -> Dim:
        """Return the common name of all dims that are split together with this one."""
        return self.dim_classes.get((value, dim), (value, dim))

    @cached_property
    def _given(self) -> list[dict[int, str]]:
        inputs: list[dict[int, str]] = [{} for _ in self.nodes]
        for edge in self.edges:
            inputs[edge.target].setdefault(edge.input_index, edge.value)
        return inputs

    def inputs_of(self, node: int) -> Mapping[int, str]:
        """Return the inputs of a node, by their indices."""
        return self._given[node]

    def result_name(self, node: int, result: int) -> str:
        """Return the name of one of a node's results."""
        return ":".join(map(str, (*self.nodes[node].key, result)))

    @cached_property
    def tied(self) -> frozenset[str]:
        """Parameters that several modules read."""
        readers: dict[str, set[str]] = {}
        for edge in self.edges:
            if self.values[edge.value].kind == "parameter":
                readers.setdefault(edge.value, set()).add(self.nodes[edge.target].site)
        return frozenset(name for name, sites in readers.items() if len(sites) > 1)

    @cached_property
    def first_reads(self) -> Mapping[str, tuple[int, int]]:
        """First reader of each parameter, as (node, input): there its gradient is reduced, once."""
        reads: dict[str, tuple[int, int]] = {}
        for edge in self.edges:
            reads.setdefault(edge.value, (edge.target, edge.input_index))
        return reads

    @cached_property
    def row_dims(self) -> frozenset[Dim]:
        """Names of dims that hold rows of the batch."""
        inputs = [n for n, v in self.values.items() if v.kind == "input" and v.shape]
        return frozenset(self.dim_name(name, 0) for name in inputs)

    @cached_property
    def token_dims(self) -> frozenset[Dim]:
        """Names of dims that hold tokens of a sequence: of inputs, and of inputs of embedding
        tables."""
        inputs = [n for n, v in self.values.items() if v.kind == "input" and len(v.shape) > 1]
        tables = (index for index, one in enumerate(self.nodes) if one.step.module == "table")
        table_inputs = [names[0] for names in map(self.inputs_of, tables) if 0 in names]
        inputs += [one for one in table_inputs if len(self.values[one].shape) == 2]
        return frozenset(self.dim_name(one, 1) for one in inputs) - self.row_dims

    @cached_property
    def vocabulary_weights(self) -> Mapping[str, str]:
        """Vocabulary tables outside of blocks, and projections to as many outputs: module ->
        weight."""
        outside = [k for k, one in enumerate(self.nodes) if "*" not in one.site]
        weights: dict[str, str] = {}
        for kind in ("table", "linear"):
            for index in outside:
                node = self.nodes[index]
                if node.step.module == kind:
                    weight = self.inputs_of(index)[1]
                    weights[node.site] = weight
        sizes = [
            self.values[weights[self.nodes[k].site]].shape[0]
            for k in outside
            if self.nodes[k].step.module == "table"
        ]
        largest = max(sizes, default=0)
        return {site: one for site, one in weights.items() if self.values[one].shape[0] == largest}

    @cached_property
    def paddable_dims(self) -> frozenset[Dim]:
        """Names of dims that may be padded: vocabularies."""
        return frozenset(self.dim_name(weight, 0) for weight in self.vocabulary_weights.values())

    @cached_property
    def batch_values(self) -> frozenset[str]:
        """Values that depend on the batch, and not on parameters and constants alone."""
        names = {name for name, value in self.values.items() if value.kind == "input"}
        for _ in range(2):  # the second time includes values from one block to the next
            for edge in self.edges:
                if edge.value in names:
                    count = len(self.nodes[edge.target].step.outputs)
                    names |= {self.result_name(edge.target, k) for k in range(count)}
        return frozenset(names)

    @cached_property
    def constant_fills(self) -> frozenset[str]:
        """Values that are constant everywhere, so that each rank makes its own part."""
        names: set[str] = set()
        for index, node in enumerate(self.nodes):
            inputs = self.inputs_of(index)
            is_constant = node.step.fills or bool(inputs) and names.issuperset(inputs.values())
            if is_constant and len(inputs) == len(node.step.inputs):
                names |= {self.result_name(index, k) for k in range(len(node.step.outputs))}
        return frozenset(names)

    def bytes(self, name: str) -> float:
        """Return the bytes of a value of the full batch."""
        value = self.values[name]
        return value.bytes * (self.scale if name in self.batch_values else 1.0)


def operator_kinds(blocks: Blocks) -> dict[str, str]:
    """Map modules that are split as one operator to their kinds."""
    facts, kinds = blocks.facts, {}
    experts = {fqn for name in experts_of(blocks) for fqn in blocks.modules_by_name[name]}
    for fqn, site in facts.sites.items():
        leaf = leaf_kind(site)
        if fqn in experts:
            kinds[fqn] = "experts"
        elif leaf:
            kinds[fqn] = "table" if leaf in TABLES else "conv1d" if leaf == "Conv1D" else "linear"
        elif any(site.is_a(kind) for kind in CONVOLUTIONS):
            kinds[fqn] = "convolution" if can_split_module(facts, fqn) else "grouped"
        elif site.parameters and not site.children:
            flat = all(len(fact.shape) == 1 for fact in site.parameters.values())
            norm = any("Norm" in name for name in site.classes)
            if flat and norm and "Batch" not in site.class_name and "Group" not in site.class_name:
                kinds[fqn] = "norm"
    return {fqn: kind for fqn, kind in kinds.items() if kind != "grouped"}


def build_graph(trial: RowTrial, dtype: str = "") -> Graph:
    """Build the graph of the model that rows are tried on; raises what its forward raises.

    dtype  in which all is computed, as `cast(bf16, params=true)` has it; "" for the stored dtype
    """
    from schedlang.runtime.batch import row_count
    from schedlang.runtime.propagation.step_graph import record_graph
    from schedlang.runtime.tracing.meta_runs import meta_model

    blocks = trial.with_fewer_blocks(2) if trial.is_shortened else trial.full_blocks
    model = meta_model(blocks.facts.model, {})
    stored = {name: parameter.element_size() for name, parameter in model.named_parameters()}
    record = record_graph(model, trial.sample, operator_kinds(blocks), trial.loss, dtype)
    graph = _graph(
        record, trial.full_blocks, blocks, row_count(trial.batch) / row_count(trial.sample)
    )
    if dtype:
        graph.grad_ratio = max(stored.values(), default=4) / 2
    return graph


def _graph(record: StepGraph, full: Blocks, blocks: Blocks, scale: float) -> Graph:
    """Merge steps of equal blocks into one node, and count how often each edge occurs."""
    graph, num, makers = Graph(scale=scale), {}, {}
    instances: dict[int, list[str]] = {}
    for step in record.steps:
        key = _key(record, blocks, step)
        block = blocks.enclosing_block(step.site)
        if key not in num:
            num[key] = len(graph.nodes)
            count = len(full.modules_by_name.get(key[0], ("",)))
            graph.nodes.append(Node(key, step, count, step.kernels))
        node = num[key]
        instances.setdefault(node, []).append(block)
        for k, value in enumerate(step.outputs):
            makers[value] = node, k, block
            graph.values.setdefault(graph.result_name(node, k), record.values[value])
    site_counts: Counter[str] = Counter(blocks.common_name(fqn) for fqn in blocks.facts.sites)
    for node, names in instances.items():
        merged = graph.nodes[node]
        if len(names) < site_counts[merged.site]:  # a step of only some blocks is not repeated
            graph.nodes[node] = replace(merged, count=len(names))
    graph.counts = {
        graph.result_name(num, k): node.count
        for num, node in enumerate(graph.nodes)
        for k in range(len(node.step.outputs))
    }
    crossed: dict[tuple[str, tuple[int, int], int, int], list[tuple[str, str]]] = {}
    for step in record.steps:
        key = _key(record, blocks, step)
        block = blocks.enclosing_block(step.site)
        for slot, value in enumerate(step.inputs):
            node, k, source_block = makers.get(value, (-1, 0, ""))
            recorded = record.values[value]
            if node < 0 and recorded.kind == "constant":
                continue
            name = graph.result_name(node, k) if node >= 0 else blocks.common_name(recorded.name)
            if recorded.kind == "parameter":
                source_block = blocks.enclosing_block(recorded.name)
            if node < 0:
                graph.values.setdefault(name, recorded)
                owner = name.rpartition(".")[0]
                graph.counts.setdefault(name, len(full.modules_by_name.get(owner, ("",))))
            crossed.setdefault((name, (node, k), num[key], slot), []).append((source_block, block))
    for (name, source, target, slot), block_pairs in crossed.items():
        count = _crossings(block_pairs, graph.nodes[target].count, set(instances[target]))
        maker = graph.nodes[source[0]].step.module if source[0] >= 0 else ""
        enters = source[0] >= 0 and any(not a and b for a, b in block_pairs)
        boundary = bool(maker or graph.nodes[target].step.module or enters)
        graph.edges.append(Edge(name, source, target, slot, count, boundary))
    return graph


def _key(record: StepGraph, blocks: Blocks, step: Step) -> Key:
    """Return a key that is equal for steps of equal blocks."""
    shapes = ",".join(str(list(record.values[value].shape)) for value in step.inputs)
    return blocks.common_name(step.site), step.turn, step.place, f"{step.name}({shapes})"


def block_prefix(name: str) -> str:
    """Return the blocks that contain a parameter, as a prefix of its common name; "" outside of
    all."""
    return name.rpartition("*")[0]


def _crossings(block_pairs: list[tuple[str, str]], count: int, targets: set[str]) -> int:
    """Count the occurrences of an edge in the full model, given the blocks at both of its ends."""
    if all(a == b for a, b in block_pairs):
        return count
    if any(a and a != b for a, b in block_pairs) and len(targets) > 1:
        return max(1, count - 1)
    return count if {b for _, b in block_pairs} >= targets else 1
