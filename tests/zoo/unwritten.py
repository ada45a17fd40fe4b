"""Bugs of primitives that are not written yet: they apply on the day these are registered."""

from __future__ import annotations

from tests.zoo.bug import Operator, absent

CP = "context_parallel"
OPS = Operator

absent("X02", CP, OPS.SLICE, "Positions of shape [3, batch, seq] are cut along another dim.",
       "NeMo-Automodel#1482; Megatron-LM#1612")  # fmt: skip
absent("X04", CP, OPS.SLICE, "Labels are shifted within each chunk of the sequence.")
absent("X05", CP, OPS.GROUP, "The loss is a mean over each rank's own tokens.",
       "Megatron-LM#673, #906, #7513")  # fmt: skip
absent("X06", CP, OPS.REDUCTION, "Partial attentions are added without rescaling.")
absent("X07", CP, OPS.ADJOINT, "Gradients of keys and values are not sent back to their owner.")
absent("X08", CP, OPS.SLICE, "Data, positions and labels are ordered differently.")
