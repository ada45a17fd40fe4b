"""Megatron-Core on the CPU: the process groups of tensor parallelism, and what stands for a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[3] / "examples" / "judge" / "decoder"
PACKAGE = "megatron-core"


def groups() -> None:
    """Split over all ranks."""
    from megatron.core import parallel_state, tensor_parallel

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        dist.get_world_size(), create_gloo_process_groups=False
    )


def example(name: str) -> Any:
    """Load a file of the example whose original is a decoder of plain torch modules."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
