"""Bugs of primitives that are not written yet: they apply on the day these are registered."""

from __future__ import annotations

from tests.zoo.bug import Operator, absent

EP = "expert_parallel"
OPS = Operator

absent("E02", EP, OPS.GROUP, "Gradients of experts are divided by the data-parallel ranks.",
       "DeepSpeed#5259")  # fmt: skip
absent("E04", EP, OPS.DETACH, "The router gets no gradient, or a wrong one.", "transformers#48687")
absent("E07", EP, OPS.SLICE, "Capacity is counted by each rank for itself.")
absent("E08", EP, OPS.SLICE, "Tokens come back in another order than they went.")
