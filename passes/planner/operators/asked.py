"""Questions about an axis, and the layouts by which they are answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from schedlang.passes.planner.operators.graph import Dim
from schedlang.passes.planner.values import Recipe
from schedlang.passes.simulate.machine import Cluster

WHOLE, SUM = -1, -2  # as `runtime.propagation.ways` has them
ENTERED = -3  # whole, and its gradient a part
ZERO1, ZERO3 = -4, -5  # a parameter whose optimizer state, or all of it, lies in slices
NONE = (None, None)  # what no row tells of a module
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
    kept    whether results stay for the backward, and count among the bytes
    told    by modules that rows stand at: the dims that these say of the first input and the output
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
    kept: bool = True
    told: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Option:
    """One way to run a node: the layout of all that it is given, and of what it gives."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def split(self) -> bool:
        """Whether each rank does a part."""
        return any(d >= 0 or d == ANY for d in (*self.inputs, *self.outputs))
