"""The forward of one stage, what it saved, and a step by which that goes to the host and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from schedlang.pipeline.timeline.table import Kind, Op
from schedlang.runtime.pipeline.flight import Bag, address, work_of
from schedlang.runtime.storage.saved import Addresses


def parked(model: nn.Module, x: Tensor) -> tuple[Tensor, Bag, Any, Op]:
    """The loss, the bag of what backward needs, a step of a rank, and its offload operation."""
    bag = Bag(Addresses(model, address, [x]))
    with bag.collecting():
        loss = model(x).square().sum()
    bag.close(())
    op = Op(Kind.OFFLOAD, 0, 0)
    step = SimpleNamespace(flights={work_of(op): SimpleNamespace(bag=bag)}, host_copies={})
    return loss, bag, step, op
