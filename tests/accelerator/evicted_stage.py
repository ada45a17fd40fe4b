"""Run a stage's forward and build the step that evicts what it saved to the host and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from schedlang.pipeline.timeline.table import Kind, Op
from schedlang.runtime.pipeline.in_flight import SavedStorages, storage_key, work_of
from schedlang.runtime.storage.saved_tensors_slot import ModuleAddresses


def run_forward(model: nn.Module, x: Tensor) -> tuple[Tensor, SavedStorages, Any, Op]:
    """Run a forward; return the loss, the saved storages, a rank's step and its offload
    operation."""
    bag = SavedStorages(ModuleAddresses(model, storage_key, [x]))
    with bag.collect():
        loss = model(x).square().sum()
    bag.close(())
    op = Op(Kind.OFFLOAD, 0, 0)
    step = SimpleNamespace(flights={work_of(op): SimpleNamespace(bag=bag)}, host_copies={})
    return loss, bag, step, op
