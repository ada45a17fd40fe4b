"""Requests for the layout of one mesh axis, and the codes of layouts in their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from schedlang.passes.planner.operators.operator_graph import Dim
from schedlang.passes.planner.values import Recipe
from schedlang.passes.simulate.machine import Cluster

UNSPLIT, PARTIAL = -1, -2  # replicated, partial; as in `runtime.propagation.step_graph`
ENTERED = -3  # replicated, with a partial gradient
ZERO1, ZERO3 = -4, -5  # a parameter whose optimizer state, or all of it, is sharded
UNMENTIONED = (None, None)  # a module whose input and output no row mentions
ANY = -6  # any layout: an operator that runs on some of the rows needs no rule
Mode = Literal["tensors", "rows"]
# collectives forward and backward of a redistribution; 0 stands for a sharded dim
REDISTRIBUTIONS: Mapping[tuple[int, int], tuple[str, str]] = {
    (UNSPLIT, ENTERED): ("", "all_reduce"),
    (UNSPLIT, 0): ("", "all_gather"),
    (0, UNSPLIT): ("all_gather", ""),
    (0, ENTERED): ("all_gather", "reduce_scatter"),
    (PARTIAL, UNSPLIT): ("all_reduce", ""),
    (PARTIAL, ENTERED): ("all_reduce", "all_reduce"),
    (PARTIAL, 0): ("reduce_scatter", "all_gather"),
}


@dataclass(frozen=True)
class LayoutRequest:
    """A request for the layout of one axis.

    ranks, stride  of the axis; neighbouring ranks are `stride` apart
    mode           `tensors`: every rank has all rows; `rows`: each has some, as in data parallelism
    name           of a dim: it is split wherever it occurs, and nothing else is (Mesh-TensorFlow)
    pins           common names of parameters -> the dim that is split (WHOLE: none)
    tokens         whether activations may be split along a sequence, in the mode `tensors`
    zero           stage of ZeRO for replicated parameters, in the mode `rows`
    counts_saved   whether results are saved for the backward, and count among the bytes
    row_dims       modules with rows -> dims that these rows give for the first input and for the
                   output
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
    counts_saved: bool = True
    row_dims: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeLayout:
    """One layout of a node: of all its inputs, and of its outputs."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def split(self) -> bool:
        """Whether each rank does a part of the work."""
        return any(d >= 0 or d == ANY for d in (*self.inputs, *self.outputs))
