"""Forwards that store only their inputs, and run again before their backward (RECOMPUTE rows).

Athlur et al., Varuna, 2022; Chen et al., 2016, for a full stage. The second run uses the weights,
random numbers and inputs of the first: gradients are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.pipeline.timeline.table import Op
from schedlang.runtime.device import RestoredGenerators, default_generators, module_generators
from schedlang.runtime.forward_attributes import AttributeSnapshot
from schedlang.runtime.pipeline.in_flight import work_of
from schedlang.runtime.scope import reuse_memo
from schedlang.runtime.submodules import modules_in
from schedlang.runtime.tracing.stage_graph import Token

if TYPE_CHECKING:
    from schedlang.runtime.pipeline.step import PipelineStep


@dataclass
class RecomputeInputs:
    """The inputs of a stage's forward, for a second run of it.

    These are the received values, the states of random generators, the attributes of modules before
    the forward, and the values that the forward has stored in scope.memo.
    """

    received: Mapping[Token, Tensor]
    rng_states: RestoredGenerators
    before: AttributeSnapshot
    memo: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def capture(
        received: Mapping[Token, Tensor], model: nn.Module, device: torch.device
    ) -> RecomputeInputs:
        """Store the inputs before a forward of a stage's model, with the generators of device and
        model."""
        modules = modules_in(model)
        states = RestoredGenerators([*default_generators([device]), *module_generators(modules)])
        return RecomputeInputs(received, states, AttributeSnapshot(modules))


def recompute(step: PipelineStep, op: Op) -> None:
    """Run a forward again, now with its graph; its outputs were already sent and are not sent
    again."""
    work = work_of(op)
    inputs = step.recompute_inputs.pop(work)
    model = step.pipe.stages[work.stage].model
    buffers = _snapshot_buffers(model)
    reuse_memo(inputs.memo)
    with inputs.rng_states, inputs.before.restored():
        step.run_forward(work, inputs.received)
    _restore_statistics(model, buffers)


def _snapshot_buffers(model: nn.Module) -> dict[str, tuple[Tensor, int, Tensor | None]]:
    """Return buffers with their version counters, and copies of running statistics.

    Kernels write running statistics without a count.
    """
    buffers = {}
    for prefix, module in model.named_modules():
        counted = getattr(module, "track_running_stats", False)
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if not buffer.is_meta and not buffer.is_inference():
                buffers[name] = (buffer, buffer._version, buffer.clone() if counted else None)
    return buffers


def _restore_statistics(
    model: nn.Module, saved: Mapping[str, tuple[Tensor, int, Tensor | None]]
) -> None:
    """Put running statistics back, so that a microbatch counts once; refuse other changed
    buffers."""
    current = dict(model.named_buffers())
    for name, (buffer, version, copy) in saved.items():
        if copy is not None:
            # `.data` leaves the version counter alone: a norm may save its statistics for backward,
            # and autograd would refuse them as overwritten
            buffer.data.copy_(copy)
        elif current.get(name) is not buffer or buffer._version != version:
            raise Refusal.of(
                "S813",
                f"a forward changes the buffer `{name}`, and would change it twice",
                notes=("this order recomputes forwards before their backward",),
                helps=('use an order without recomputation, such as "1F1B"',),
            )
