"""Injected bugs of quantized activations: block scales, rounding, random draws, weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.runtime.activation_memory import quantized
from schedlang.runtime.activation_memory.quantized import Quantization, QuantizedTensor
from tests.zoo.bug import CONSTANT, FREEZE, GROUP, SKIP, SLICE, Patch, Site, bug

ROW = "compress("


@bug("F40", "compress", SLICE, "rounded", row=ROW)
def steps_of_another_block(patch: Patch, site: Site) -> None:
    """Each quantized block is dequantized with the step of the block before it."""
    original = quantized.quantize

    def wrong(*args: Any) -> QuantizedTensor:
        result = original(*args)
        return replace(result, step=result.step.roll(1))

    patch.setattr(quantized, "quantize", wrong)


@bug("F41", "compress", CONSTANT, "rounded", row=ROW, credit="Chen et al. 2021")
def rounded_to_nearest(patch: Patch, site: Site) -> None:
    """Values are rounded to nearest instead of stochastically, so that errors add up."""
    patch.setattr(quantized, "_random_numbers", lambda tensor, *args: torch.full_like(tensor, 0.5))


@bug("F42", "compress", FREEZE, "rounded", row=ROW)
def draws_of_the_first_step(patch: Patch, site: Site) -> None:
    """Every step rounds with the draws of the first, so that the mean over steps is biased."""
    original = quantized._call_identity

    def words(layer: Any) -> tuple[object, ...]:
        fqn, call, _, samples = original(layer)
        return fqn, call, 0, samples

    patch.setattr(quantized, "_call_identity", words)


@bug("F43", "compress", SKIP, "rounded", row=ROW)
def weights_are_rounded(patch: Patch, site: Site) -> None:
    """Weights that are saved for backward are quantized, too."""

    patch.setattr(quantized, "ModuleAddresses", lambda module: frozenset())


@bug("F44", "compress", SLICE, "rounded", row=ROW)
def halves_of_bytes_swapped(patch: Patch, site: Site) -> None:
    """The two values in a byte are swapped."""
    original = quantized._unpack_bits

    def unpacked(codes: Tensor, coding: Quantization) -> Tensor:
        return original((codes >> 4) | (codes << 4), coding)

    patch.setattr(quantized, "_unpack_bits", unpacked)


@bug("F45", "compress", GROUP, "rounded", row=ROW)
def replicas_share_draws(patch: Patch, site: Site) -> None:
    """All replicas and microbatches round with the same draws, and their errors add up."""
    original = quantized._call_identity
    patch.setattr(quantized, "_call_identity", lambda layer: original(layer)[:3])


@bug("F46", "compress", GROUP, "rounded parts", row=ROW)
def replicas_rounded_differently(patch: Patch, site: Site) -> None:
    """Tensor-parallel ranks round replicated activations with different draws, so that replicas of
    later results differ."""
    original = quantized._call_identity
    patch.setattr(quantized, "_call_identity", lambda layer: (*original(layer), dist.get_rank()))
