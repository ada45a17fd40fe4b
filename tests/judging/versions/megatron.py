"""Megatron-Core on CPUs: tensor parallel process groups, and replacements for GPU calls."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXAMPLES = Path(__file__).parents[3] / "examples" / "judge" / "decoder"
PACKAGE = "megatron-core"
WITH, WITHOUT = ("0.16.1",), ()


def init_groups(split: int | None = None) -> None:
    """Initialize tensor parallelism over `split` neighbouring ranks; by default over all."""
    from megatron.core import parallel_state, tensor_parallel

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        split or dist.get_world_size(), create_gloo_process_groups=False
    )


@dataclass(frozen=True)
class RankGrid:
    """Process groups of a 2 x 2 grid of ranks, other than the global ones of neighbours."""

    split: Any  # a layer is split over every other rank
    rows: Any  # rows are split over neighbours
    alone: Any

    @classmethod
    def made(cls) -> RankGrid:
        """Create the groups, on all ranks."""
        init_groups(2)
        partitions = ([[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]])
        groups_here = []
        for parts in partitions:
            made = [dist.new_group(ranks) for ranks in parts]
            index = next(k for k, ranks in enumerate(parts) if dist.get_rank() in ranks)
            groups_here.append(made[index])
        return cls(*groups_here)

    def step(self, model: nn.Module, batch: Any, loss: Any) -> Tensor:
        """Run a step on this rank's rows; gradients are averaged over the row group."""
        local = {name: value.chunk(2)[dist.get_rank(self.rows)] for name, value in batch.items()}
        value: Tensor = loss(model(local["ids"]), local)
        value.backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad, group=self.rows)
            p.grad /= 2
        return value


def load_example(name: str) -> Any:
    """Load a file of `examples/judge/decoder` as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
