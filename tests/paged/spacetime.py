"""Frames of patches, attended to along one dim, then along the other."""

from torch import Tensor

from tests import spacetime


def model() -> spacetime.Video:
    return spacetime.Video()


def batch(seed: int) -> dict[str, Tensor]:
    return spacetime.batch(seed)
