"""DeepSpeed's engine as a judged program: its calls write parameters and read gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class Engine:
    """ZeRO of one stage around a model; `whole` is an unsplit copy that gets its gradients."""

    def __init__(self, model: nn.Module, stage: int, accumulated: int = 1) -> None:
        import deepspeed

        # a C++ operator for inference, which would take a minute to build
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # otherwise ZeRO 3 refuses float64 on CPUs that have float16
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
        """Copy the parameters, which an optimizer has stepped, into the engine."""
        import deepspeed

        with deepspeed.zero.GatheredParameters([p for p, _ in self.pairs], modifier_rank=0):
            for p, copy_param in self.pairs:
                p.data.copy_(copy_param.data)

    def read(self) -> None:
        """Copy the engine's gradients into the unsplit copy."""
        from deepspeed.utils import safe_get_full_grad

        for p, copy_param in self.pairs:
            grad = safe_get_full_grad(p) if copy_param.requires_grad else None
            copy_param.grad = None if grad is None else grad.to(copy_param.dtype)
