"""Inductor for one region: a function of tensors, one graph for each set of shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIMIT = 16  # sets of shapes of one region; those beyond are compiled for any shape, or refused


def compiled(plain: Callable[..., Any], count: Callable[[], None], rounding: str) -> Any:
    """The function compiled; `count` is called for each graph.

    rounding "eager": intermediate results are rounded to the working type as they are eagerly;
    "fp32": they stay in float32 until they leave the region.
    """

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        import torch._inductor.config as inductor
        from torch._inductor.compile_fx import compile_fx

        count()
        with inductor.patch(emulate_precision_casts=rounding == "eager"):
            return compile_fx(graph, inputs)

    return torch.compile(plain, fullgraph=True, backend=backend)
