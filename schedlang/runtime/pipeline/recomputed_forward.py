"""Forwards that keep only what they received, and run again before their backward.

RECOMPUTE rows (Athlur et al., Varuna, 2022; Chen et al., 2016, for a whole stage).  The second run
sees the weights, random numbers and values of the first: gradients are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.pipeline.timeline.table import Op
from schedlang.runtime.before_forward import Before
from schedlang.runtime.device import Replayed, default_generators, own_generators
from schedlang.runtime.inside import modules_in
from schedlang.runtime.pipeline.flight import work_of
from schedlang.runtime.scope import remember
from schedlang.runtime.tracing.graph import Token

if TYPE_CHECKING:
    from schedlang.runtime.pipeline.step import Step


@dataclass
class Kept:
    """The inputs of a stage's forward, for a second run of it.

    They are what it received from other stages, where generators of random numbers stood, the
    attributes of modules before it, and what the forward has noted (scope.memo).
    """

    received: Mapping[Token, Tensor]
    drawn: Replayed
    before: Before
    noted: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def now(received: Mapping[Token, Tensor], model: nn.Module, device: torch.device) -> Kept:
        """Note the inputs before a forward of a stage's model; the device draws, or the model
        itself."""
        inside = modules_in(model)
        drawn = Replayed([*default_generators([device]), *own_generators(inside)])
        return Kept(received, drawn, Before(inside))


def recompute(step: Step, op: Op) -> None:
    """Run a forward again, now with its graph; what it sent the first time is not sent again."""
    work = work_of(op)
    kept = step.kept.pop(work)
    model = step.pipe.stages[work.stage].model
    before = _buffers(model)
    remember(kept.noted)
    with kept.drawn, kept.before.again():
        step.launch(work, kept.received)
    _restore(model, before)


def _buffers(model: nn.Module) -> dict[str, tuple[Tensor, int, Tensor | None]]:
    """Buffers with their counts of writes; copies of statistics, which kernels write unseen."""
    found = {}
    for prefix, module in model.named_modules():
        counted = getattr(module, "track_running_stats", False)
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if not buffer.is_meta and not buffer.is_inference():
                found[name] = (buffer, buffer._version, buffer.clone() if counted else None)
    return found


def _restore(model: nn.Module, before: Mapping[str, tuple[Tensor, int, Tensor | None]]) -> None:
    """Statistics count a microbatch once; other buffers may not change in a forward."""
    now = dict(model.named_buffers())
    for name, (buffer, version, copy) in before.items():
        if copy is not None:
            # beside the count of writes: a norm that reads what it has counted saves it for its
            # backward, which would take it for overwritten
            buffer.data.copy_(copy)
        elif now.get(name) is not buffer or buffer._version != version:
            raise Refusal.of(
                "S813",
                f"a forward changes the buffer `{name}`, and would change it twice",
                notes=("this order recomputes forwards before their backward",),
                helps=('use an order without recomputation, such as "1F1B"',),
            )
