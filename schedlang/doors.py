"""The doors of schedlang, in the order in which a schedule goes through them.

Open this file first. Each door is one function: its arguments, its result, and its module. A result
is an immutable value, and all that the next doors read; `docs/architecture.md` shows the doors as a
picture. A test compares every line with the function itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Door:
    """One function on the way from a text to a report: its name, module, arguments and result."""

    name: str
    module: str
    takes: tuple[str, ...]
    gives: str
    about: str

    def function(self) -> Callable[..., Any]:
        """Import the module and return the function."""
        function: Callable[..., Any] = getattr(
            importlib.import_module(f"schedlang.{self.module}"), self.name
        )
        return function


MAIN_DOORS = (
    Door("read", "language.syntax", ("path",), "Source", "the text of a schedule, and its name"),
    Door("parse", "language.syntax", ("source",), "File", "the syntax tree; every node has a span"),
    Door(
        "expand",
        "passes.elaborate.expand",
        ("file", "facts", "settings"),
        "State",
        "statements executed in order; `State.plan` is the plan: rows, bound to modules",
    ),
    Door(
        "propagate",
        "passes.propagate.propagate",
        ("plan", "batch", "loss"),
        "Traced",
        "the model recorded on the meta device: layouts and redistributions of its activations",
    ),
    Door(
        "stages_of",
        "passes.partition.staging",
        ("plan", "traced", "batch", "loss"),
        "Staged",
        "units assigned to stages, and the timeline of the pipeline",
    ),
    Door(
        "prepare",
        "passes.analyze.prepare",
        ("plan", "sample", "loss"),
        "Prepared",
        "calls `propagate` and `stages_of`, and finds what else is known before there are ranks:"
        " who holds what, which gradients are partial, which rows do not go together",
    ),
    Door(
        "build",
        "passes.lower.build",
        ("plan", "batch", "options"),
        "Program",
        "on each rank: the executable module; calls `prepare` if that was not done",
    ),
    Door(
        "prove",
        "passes.prove",
        ("case",),
        "Report",
        "programs on local ranks against the untouched original; on failure the rows to blame",
    ),
)

# without ranks, from the same values
SIDE_DOORS = (
    Door(
        "static",
        "passes.static_checks.static",
        ("plan", "batch", "loss"),
        "Static",
        "proofs from shapes and types alone: sums, owners, weights, matching collectives",
    ),
    Door(
        "simulate_ranks",
        "passes.simulate.simulated_ranks",
        ("plan", "batch", "loss", "prepared"),
        "SimulatedRanks",
        "a step of each kind of rank on the meta device: work and bytes alive",
    ),
    Door(
        "account",
        "passes.simulate.account",
        ("plan", "batch", "loss"),
        "Account",
        "what a plan costs: bytes per rank, and each collective of a step",
    ),
    Door(
        "judge",
        "passes.judge.judge",
        ("task",),
        "Report",
        "a program that was written elsewhere on local ranks against the untouched original",
    ),
)

# the steps of one row, `shard(col, over=tp)`, on this way: module, function, description
ROW_STEPS = (
    (
        "primitives.shard",
        "shard.transform",
        "annotates the plan: a `Layout` of each parameter, a `Boundary` of the module",
    ),
    (
        "passes.propagate.propagate",
        "propagate",
        "finds on the meta device how tensors arrive at the module (`Traced.edges`), and whose"
        " gradients will be parts of a sum (`Traced.partial`)",
    ),
    (
        "passes.analyze.holdings",
        "reductions",
        "lists the sums of gradients: over parts, over ties, over replicas",
    ),
    ("passes.lower.build", "_local_copy", "copies the model with this rank's part of the weight"),
    (
        "passes.partition.staging",
        "shard_modules",
        "puts a layer around the module's forward (`runtime.sharding.sharded_layer.ShardedLayer`)",
    ),
    (
        "runtime.sharding.edges",
        "projection",
        "runs in each step: enters, multiplies, leaves; entering sums the input's gradient in"
        " backward (`collectives.enter`)",
    ),
    (
        "runtime.grad_reduction.gradient",
        "sum_gradients",
        "sums gradients after the last backward; of ZeRO's slices `fully_shard` does",
    ),
)
