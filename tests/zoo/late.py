"""Injected bugs that are visible only if communication completes late, as on GPUs."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.runtime import program
from schedlang.runtime.grad_reduction import gradient
from schedlang.runtime.pipeline import p2p
from tests.zoo.bug import ALIAS, REDUCTION, Patch, Site, bug


@bug("P16", "pipeline_split", ALIAS, "pp", row="pipeline", late=True, credit="Megatron-LM#4047")
def sent_from_one_buffer(patch: Patch, site: Site) -> None:
    """The memory of a message is reused for the next one before it has been read."""
    original, wire_tensor = p2p.PeerChannel.send, p2p._wire_tensor
    sending: list[int] = []
    slots: dict[Any, Tensor] = {}

    def send(self: Any, *args: Any, **kwargs: Any) -> None:
        sending.append(self.rank)
        try:
            original(self, *args, **kwargs)
        finally:
            sending.pop()

    def of(tensor: Tensor) -> Tensor:
        wire = wire_tensor(tensor)
        if not sending or tensor.dtype == torch.int64:  # a header, which says sizes
            return wire
        with torch._C.DisableTorchFunction():
            slot = slots.setdefault((sending[-1], wire.numel()), wire.clone())
            slot.copy_(wire)
        return slot

    patch.setattr(p2p.PeerChannel, "send", send)
    patch.setattr(p2p, "_wire_tensor", of)


@bug("D10", "zero", REDUCTION, "dp", late=True, credit="DeepSpeed#5545, #6351; gpt-neox#1004")
def read_before_the_sum(patch: Patch, site: Site) -> None:
    """The step reads sums over replicas that are not finished."""
    pending = _PendingSums()

    class Hasty:
        @staticmethod
        def all_reduce(x: Tensor, group: Any, wait: bool) -> None:
            pending.begun.append(dist.all_reduce(x, group=group, async_op=True))

    original = program.Program._step_weights

    def step(self: Any) -> None:
        original(self)
        while pending.begun:
            pending.begun.pop().wait()

    patch.setattr(gradient, "world", Hasty)
    patch.setattr(program.Program, "_step_weights", step)


class _PendingSums(threading.local):
    """Sums that a rank has started and not waited for."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
