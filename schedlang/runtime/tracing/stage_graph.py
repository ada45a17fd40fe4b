"""The graph of a recorded forward: units in call order, and the values that flow between them.

A value without tensors; `split_graph` splits it into stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from schedlang.diagnostics.diagnostic import Facts, Refusal

# (unit, leaf of its output), or (unit, -1 - k) for the k-th leaf that is passed to hooks inside it
Token = tuple[int, int]


def refusal(
    code: str, site: str, reason: str, *helps: str, note: str = "", facts: Facts = ()
) -> Refusal:
    """Return the refusal of a model that cannot be cut: where (`site`), why, and what helps."""
    message = f"`{site}` {reason}" if site else reason
    notes = (note,) if note else ()
    return Refusal.of(code, message, notes=notes, helps=helps, facts=facts)


@dataclass(frozen=True)
class OutputLeaf:
    """A tensor in the recorded output of a unit.

    `mutated`: the model writes into the tensor after the unit has returned it.
    """

    shape: tuple[int, ...]
    dtype: str
    differentiable: bool
    mutated: bool = False


@dataclass(frozen=True)
class Reads:
    """The values that a unit, and the code between units that feeds it, read from outside.

    `tokens` are outputs of units.  `inner` are units that compute a value which they do not return,
    and which is read.
    """

    tokens: frozenset[Token] = frozenset()
    inner: frozenset[int] = frozenset()
    params: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()


def unit_labels(units: Sequence[str]) -> tuple[str, ...]:
    """Return the units' names in messages: `name#k` for the k-th call of a repeated module."""
    counts, call_counts = Counter(units), Counter[str]()
    labels = []
    for name in units:
        labels.append(f"{name}#{call_counts[name]}" if counts[name] > 1 else name)
        call_counts[name] += 1
    return tuple(labels)


@dataclass(frozen=True)
class StageGraph:
    """The units of a model in call order, and the values between them; a value without tensors.

    units             modules; a module whose calls are units of their own appears once for each
                      call
    reads             what each unit reads
    final             what the loss and the outputs read
    leaves            the tensors that units return
    between           at k: the parameters and buffers that the code before unit k uses (last: after
                      all)
    owners            parameter -> the units that read it themselves; none if only code between
                      units does
    partial           output (by path) -> the units that compute its values without returning them
    flops             floating-point operations of each unit's forward
    saved_bytes       bytes that each unit saves for backward, without parameters
    argument_bytes    bytes of each unit's tensor arguments
    operator_classes  equal numbers mark equal operators with results of equal sizes; entries
                      alternate: the code before the first unit, the first unit, the code behind it,
                      and so on
    """

    units: tuple[str, ...]
    reads: tuple[Reads, ...]
    final: Reads
    leaves: Mapping[Token, OutputLeaf]
    between: tuple[Reads, ...]
    owners: Mapping[str, frozenset[int]]
    partial: Mapping[str, frozenset[int]] = field(default_factory=dict)
    flops: tuple[int, ...] = field(default=(), compare=False)
    saved_bytes: tuple[int, ...] = field(default=(), compare=False)
    argument_bytes: tuple[int, ...] = field(default=(), compare=False)
    operator_classes: tuple[int, ...] = field(default=(), compare=False)

    def run_key(self, units: range) -> tuple[object, ...]:
        """Return a key that is equal for runs of units with equal computation and saved bytes.

        The code around each unit is included.
        """
        begin, end = units.start, units.stop
        return (
            self.operator_classes[2 * begin : 2 * end + 1],
            self.saved_bytes[begin:end],
            self.argument_bytes[begin:end],
        )

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The units' names in messages."""
        return unit_labels(self.units)

    @property
    def inner_units(self) -> frozenset[int]:
        """The units of which a value is read that they do not return."""
        inner = (reads.inner for reads in (*self.reads, self.final, *self.between))
        return frozenset().union(*inner, *self.partial.values())

    @property
    def glue_parameters(self) -> tuple[str, ...]:
        """Parameters that only code between units reads: of containers, or of repeated modules."""
        used = set(self.final.params).union(*(r.params for r in self.reads))
        return tuple(sorted(n for n in used if not self.owners.get(n)))


@dataclass(frozen=True)
class StageSplit:
    """A graph that is split into stages: `stage_of[unit]`, ascending in call order."""

    graph: StageGraph
    stage_of: tuple[int, ...]

    @cached_property
    def stages(self) -> int:
        """The number of stages."""
        return self.stage_of[-1] + 1

    def units(self, stage: int) -> range:
        """Return the units of a stage: a range in call order."""
        begin = self.stage_of.index(stage)
        return range(begin, begin + self.stage_of.count(stage))

    @cached_property
    def routes(self) -> Mapping[tuple[int, int], tuple[Token, ...]]:
        """(from stage, to stage) -> the unit outputs that are sent, in the order of sending."""
        by_edge: dict[tuple[int, int], set[Token]] = {}
        for stage in range(self.stages) if self.stages > 1 else ():
            for token in self._reads(stage).tokens:
                source = self.stage_of[token[0]]
                if source != stage:
                    by_edge.setdefault((source, stage), set()).add(token)
        return {edge: tuple(sorted(tokens)) for edge, tokens in sorted(by_edge.items())}

    @property
    def sends_constants(self) -> bool:
        """Whether a float tensor without a gradient is sent to another stage."""
        sent = (self.graph.leaves[token] for tokens in self.routes.values() for token in tokens)
        return any("float" in leaf.dtype and not leaf.differentiable for leaf in sent)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The transfers between stages, for a timeline."""
        return tuple(self.routes)

    def parameters(self, stage: int) -> frozenset[str]:
        """Return the first names of the parameters that a stage must hold."""
        return self._reads(stage).params

    def buffers(self, stage: int) -> frozenset[str]:
        """Return the names of the buffers that a stage must hold."""
        return self._reads(stage).buffers

    @cached_property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """Parameter -> the stages that hold it, if several: their gradients must be summed."""
        holders: dict[str, list[int]] = {}
        for stage in range(self.stages):
            for name in self.parameters(stage):
                holders.setdefault(name, []).append(stage)
        return {name: tuple(s) for name, s in sorted(holders.items()) if len(s) > 1}

    def _reads(self, stage: int) -> Reads:
        # a stage replays the code between units up to the first unit of the next stage, even if it
        # does not need the results: the parameters and buffers of that code must be there
        parts = [*self.graph.between[: self.units(stage).stop + 1]]
        parts += [self.graph.reads[u] for u in self.units(stage)]
        if stage == self.stages - 1:
            parts.append(self.graph.final)
        return Reads(
            frozenset().union(*(p.tokens for p in parts)),
            frozenset().union(*(p.inner for p in parts)),
            frozenset().union(*(p.params for p in parts)),
            frozenset().union(*(p.buffers for p in parts)),
        )

    @cached_property
    def missing_outputs(self) -> tuple[str, ...]:
        """Outputs (by path) that the last stage does not have, such as caches of earlier units."""
        last = self.stages - 1
        return tuple(
            path
            for path, units in self.graph.partial.items()
            if any(self.stage_of[u] != last for u in units)
        )


def split_graph(graph: StageGraph, stage_of: Sequence[int]) -> StageSplit:
    """Split a graph into stages; `stage_of` has each unit's stage: 0, 0, .., 1, .. in call order.

    Raises Refusal S610 if a stage would read a value from inside a unit of another stage, and S613
    if `stage_of` is not such a list.
    """
    rising = all(b - a in (0, 1) for a, b in zip(stage_of, stage_of[1:]))
    if len(stage_of) != len(graph.units) or not stage_of or stage_of[0] != 0 or not rising:
        n = len(graph.units)
        raise refusal("S613", "", f"stages {list(stage_of)} are not runs of the {n} units")
    split = StageSplit(graph, tuple(stage_of))
    readers = [*zip(graph.labels, graph.reads, stage_of), ("loss", graph.final, stage_of[-1])]
    for name, reads, stage in readers:
        foreign = sorted(u for u in reads.inner if stage_of[u] != stage)
        if foreign:
            unit = graph.labels[foreign[0]]
            raise refusal(
                "S610",
                name,
                f"reads a value inside `{unit}` that `{unit}` does not return",
                f"keep `{unit}` and the module that reads it in one stage",
                note=f"stage {stage} would need it from stage {stage_of[foreign[0]]}",
            )
    return split


# the full model as one stage
UNSPLIT = StageSplit(StageGraph(("",), (Reads(),), Reads(), {}, (Reads(), Reads()), {}), (0,))
