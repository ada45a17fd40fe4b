"""For the page of long sequences: a model of two sequences, frames of patches."""

from __future__ import annotations

from torch import nn

from tests.spacetime import Video
from tests.spacetime import batch as batch


def model() -> nn.Module:
    """Two blocks, attended to along patches, then along frames."""
    return Video()
