"""3-D convolutions in a pipeline that is balanced by time (LAMP, Zhu et al. 2020)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.ir.memory import find_heaviest
from schedlang.passes.simulate.account import account
from tests.engine.threads import Threads
from tests.proofs import assert_proven, make_plan

ROWS = 'down, up  pipeline_split(over=pp, balance=time)\npipeline(order="GPipe", micro=2)'


class Level(nn.Module):
    """A convolution with a norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """x[rows, inputs, depth, height, width] -> as many outputs"""
        return F.silu(self.norm(self.conv(x)))


class Volumes(nn.Module):
    """A 3-D U-Net with skip connections."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Conv3d(1, width, 1)
        self.down = nn.ModuleList(Level(width, width) for _ in range(2))
        self.up = nn.ModuleList(Level(2 * width, width) for _ in range(2))
        self.leave = nn.Conv3d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x[rows, 1, depth, height, width] -> the mean square of the output"""
        h, skips = self.enter(x), []
        for level in self.down:
            h = level(h)
            skips.append(h)
            h = F.avg_pool3d(h, 2)
        for level in self.up:
            h = F.interpolate(h, skips[-1].shape[-3:])
            h = level(torch.cat([h, skips.pop()], 1))
        return self.leave(h).square().mean()


def batch(seed: int = 0, side: int = 8) -> dict[str, Tensor]:
    """Four volumes."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 1, side, side, side, generator=generator)}


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_a_net_of_volumes_is_proven(stages: int, threads: Threads) -> None:
    """The proof holds for a pipeline with skip connections."""
    plan = make_plan(Volumes(), ROWS, f"pp={stages}")
    assert_proven(threads, plan, [batch(), batch(1)])


def test_a_whole_volume_fits_where_one_rank_is_too_small() -> None:
    """The peak on four ranks is less than two thirds of that on one rank."""

    def peak(mesh: str) -> int:
        costs = account(make_plan(Volumes(), ROWS, mesh), batch(side=32), memory=True)
        assert costs.memory
        return find_heaviest(costs.memory).peak

    assert peak("pp=4") < peak("pp=1") * 2 / 3
