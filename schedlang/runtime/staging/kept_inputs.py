"""What a forward without a graph leaves behind, so that it can be run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from schedlang.runtime.device import Replayed, default_generators, own_generators
from schedlang.runtime.recording.graph import Token


@dataclass
class Kept:
    """What it received from other stages, where generators of random numbers stood, and what the
    forward has noted (scope.memo)."""

    received: Mapping[Token, Tensor]
    drawn: Replayed
    noted: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def now(received: Mapping[Token, Tensor], model: nn.Module, device: torch.device) -> Kept:
        """Before the forward of a stage's model, whose device draws, or the model itself."""
        drawn = Replayed([*default_generators([device]), *own_generators(model)])
        return Kept(received, drawn)
