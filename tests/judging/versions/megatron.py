"""Megatron-Core on the CPU: the process groups of tensor parallelism, and what stands for a GPU."""

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


def groups(split: int | None = None) -> None:
    """Split over so many neighbours; by default over all ranks."""
    from megatron.core import parallel_state, tensor_parallel

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        split or dist.get_world_size(), create_gloo_process_groups=False
    )


@dataclass(frozen=True)
class Square:
    """Groups of four ranks that are not the global ones: these are of neighbours."""

    split: Any  # over which a layer is split: every other rank
    rows: Any  # over which rows are: neighbours
    alone: Any

    @classmethod
    def made(cls) -> Square:
        """Make them, on all ranks alike."""
        groups(2)
        each = ([[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]])
        found = []
        for parts in each:
            made = [dist.new_group(ranks) for ranks in parts]
            here = next(k for k, ranks in enumerate(parts) if dist.get_rank() in ranks)
            found.append(made[here])
        return cls(*found)

    def step(self, model: nn.Module, batch: Any, loss: Any) -> Tensor:
        """Train a model on this rank's rows; gradients are averaged over those that have others."""
        mine = {name: value.chunk(2)[dist.get_rank(self.rows)] for name, value in batch.items()}
        value: Tensor = loss(model(mine["ids"]), mine)
        value.backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad, group=self.rows)
            p.grad /= 2
        return value


def example(name: str) -> Any:
    """Load a file of the example whose original is a decoder of plain torch modules."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
