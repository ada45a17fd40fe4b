"""Model file for the page on long sequences: a model of two sequences, frames of patches."""

from __future__ import annotations

from torch import nn

from tests.spacetime import Video
from tests.spacetime import batch as batch


def model() -> nn.Module:
    """Return two blocks, with attention along patches, then along frames."""
    return Video()
