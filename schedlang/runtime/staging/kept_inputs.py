"""What a forward without a graph leaves behind, so that it can be run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from schedlang.runtime.recording.graph import Token


@dataclass
class Kept:
    """What it received from other stages, and where generators of random numbers stood."""

    received: Mapping[Token, Tensor]
    cpu: Tensor
    cuda: Tensor | None

    @staticmethod
    def now(received: Mapping[Token, Tensor], device: torch.device) -> Kept:
        """Before the forward."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return Kept(received, torch.get_rng_state(), cuda)
