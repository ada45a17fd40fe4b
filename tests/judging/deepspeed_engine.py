"""An engine of DeepSpeed as a judged program: its calls write parameters and read gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class Engine:
    """ZeRO of one stage around a model; `whole` is a copy that has its gradients, unsplit."""

    def __init__(self, model: nn.Module, stage: int, accumulated: int = 1) -> None:
        import deepspeed

        # an operator in C++ for inference, which would be built for a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # or ZeRO 3 refuses float64 on CPUs that have float16
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: False
        self.whole = copy.deepcopy(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(trained, lr=0.0),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": accumulated,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            },
        )
        pairs = zip(self.engine.module.parameters(), self.whole.parameters(), strict=True)
        self.pairs: list[tuple[Any, nn.Parameter]] = list(pairs)

    def write(self) -> None:
        """Give the engine the parameters of the copy, which an optimizer has stepped."""
        import deepspeed

        with deepspeed.zero.GatheredParameters([p for p, _ in self.pairs], modifier_rank=0):
            for p, read in self.pairs:
                p.data.copy_(read.data)

    def read(self) -> None:
        """Give the copy the gradients of the engine."""
        from deepspeed.utils import safe_get_full_grad

        for p, read in self.pairs:
            found = safe_get_full_grad(p) if read.requires_grad else None
            read.grad = None if found is None else found.to(read.dtype)
