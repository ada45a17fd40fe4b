"""Bugs of activations in fewer bits: other steps, unfair rounding, draws again, weights rounded."""

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
    """Each block of whole numbers is read with the step of the block before it."""
    plain = quantized.quantize

    def wrong(*given: Any) -> QuantizedTensor:
        made = plain(*given)
        return replace(made, step=made.step.roll(1))

    patch.setattr(quantized, "quantize", wrong)


@bug("F41", "compress", CONSTANT, "rounded", row=ROW, credit="Chen et al. 2021")
def rounded_to_nearest(patch: Patch, site: Site) -> None:
    """Numbers are rounded to the nearest, always the same way, so that errors add up."""
    patch.setattr(quantized, "_random_numbers", lambda like, *given: torch.full_like(like, 0.5))


@bug("F42", "compress", FREEZE, "rounded", row=ROW)
def draws_of_the_first_step(patch: Patch, site: Site) -> None:
    """Every step rounds as the first did, so that the mean over steps is off."""
    plain = quantized._call_identity

    def words(layer: Any) -> tuple[object, ...]:
        fqn, call, _, samples = plain(layer)
        return fqn, call, 0, samples

    patch.setattr(quantized, "_call_identity", words)


@bug("F43", "compress", SKIP, "rounded", row=ROW)
def weights_are_rounded(patch: Patch, site: Site) -> None:
    """Weights that are saved for backward are rounded with everything else."""

    patch.setattr(quantized, "ModuleAddresses", lambda module: frozenset())


@bug("F44", "compress", SLICE, "rounded", row=ROW)
def halves_of_bytes_swapped(patch: Patch, site: Site) -> None:
    """Of two numbers in a byte each is taken for the other."""
    plain = quantized._unpack_bits

    def unpacked(codes: Tensor, coding: Quantization) -> Tensor:
        return plain((codes >> 4) | (codes << 4), coding)

    patch.setattr(quantized, "_unpack_bits", unpacked)


@bug("F45", "compress", GROUP, "rounded", row=ROW)
def replicas_draw_alike(patch: Patch, site: Site) -> None:
    """All replicas and microbatches round with the same draws, and their errors add up."""
    plain = quantized._call_identity
    patch.setattr(quantized, "_call_identity", lambda layer: plain(layer)[:3])


@bug("F46", "compress", GROUP, "rounded parts", row=ROW)
def copies_are_rounded_apart(patch: Patch, site: Site) -> None:
    """Ranks that split weights round with draws of their own what all of them have, and copies of
    what is computed from it part."""
    plain = quantized._call_identity
    patch.setattr(quantized, "_call_identity", lambda layer: (*plain(layer), dist.get_rank()))
