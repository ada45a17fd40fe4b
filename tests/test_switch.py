"""Parts of one dim become parts of another: models with two sequences, of space and of time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.passes.prepare import prepare
from schedlang.passes.static import static
from schedlang.passes.traffic import collectives
from tests.engine.threads import Threads
from tests.proofs import planned, refused
from tests.test_context import same

WIDTH, HEADS = 8, 2


class Attend(nn.Module):
    """Attention along dim 2 of [rows, frames, patches, width], or along dim 1; then an MLP."""

    def __init__(self, along: int) -> None:
        super().__init__()
        self.along, self.norm = along, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) if self.along == 2 else self.norm(x).transpose(1, 2)
        y = self.qkv(y)
        q, k, v = y.view(*y.shape[:3], 3, HEADS, -1).permute(3, 0, 1, 4, 2, 5)
        out = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3)
        return x + self.out(out if self.along == 2 else out.transpose(1, 2))


class Block(nn.Module):
    """Space, then time."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Attend(2), Attend(1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.time(self.space(x))
        return out


class Video(nn.Module):
    """Frames of patches; a number is predicted for each patch of each frame."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, video: Tensor, target: Tensor) -> Tensor:
        x = self.stem(video)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x).squeeze(-1), target)


def batch(seed: int, rows: int = 3, frames: int = 4, patches: int = 6) -> dict[str, Tensor]:
    """Drawn numbers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, frames, patches)
    video = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
    return {"video": video, "target": torch.randn(shape, generator=generator, dtype=torch.float64)}


ROWS = """
  blocks.*.space   shard(input=S(1), output=S(1), over=sp)
  blocks.0.time    shard(input=S(2), output=S(2), over=sp)
  blocks.1.time    shard(input=S(2), output=R, over=sp)
"""


def test_it_trains_as_alone(threads: Threads) -> None:
    """Frames are split while space is attended to, patches while time is: nothing else differs."""
    model = Video()
    same(threads, planned(model, ROWS, "sp=2"), model, [batch(1), batch(2, 2)])


def test_a_module_may_switch_on_its_way_out(threads: Threads) -> None:
    """`output=` names another dim than what was computed: the switch stands behind the module."""
    rows = """
  blocks.*.space  shard(input=S(1), output=S(2), over=sp)
  blocks.0.time   shard(input=S(2), output=S(1), over=sp)
  blocks.1.time   shard(input=S(2), output=R, over=sp)
"""
    model = Video()
    same(threads, planned(model, rows, "sp=2"), model, [batch(1)])


def test_what_is_sent() -> None:
    """Each switch is one all-to-all of a rank's part, M/N numbers, and one back (DSP, 2024)."""
    plan, given = planned(Video(), ROWS, "sp=2"), batch(1)
    ready = prepare(plan, given)
    found = collectives(plan, ready.traced, ready.staged, ready.holdings, given)
    sent = [one for one in found if one.kind == "all-to-all"]
    part = 3 * 4 * 6 * WIDTH // 2
    assert [(one.phase, one.fqn, one.bytes) for one in sent] == [
        (phase, fqn, part * 8)
        for phase, names in (
            ("forward", ("blocks.0.time", "blocks.1.space", "blocks.1.time")),
            ("backward", ("blocks.1.time", "blocks.1.space", "blocks.0.time")),
        )
        for fqn in names
    ]
    assert {one.what for one in sent} == {"input", "input grad"}


def test_the_static_proofs_hold() -> None:
    """Sums, gradients and messages are proven without ranks."""
    claims = static(planned(Video(), ROWS, "sp=2"), batch(1)).claims
    assert all(claim.holds for claim in claims), [c.problems for c in claims if not c.holds]


def test_what_is_refused() -> None:
    """A module that attends along the dim that is split, and has no row, is refused by name."""
    rows = ROWS.replace("blocks.0.time    shard(input=S(2), output=S(2), over=sp)", "")
    said = refused(Video(), rows, "sp=2", batch(1))
    assert "S405" in said and "blocks.0.time" in said, said


def test_a_dim_that_cannot_be_divided() -> None:
    """Six patches on four ranks: the refusal names the row's placement and the pad."""
    said = refused(Video(), ROWS, "sp=4", batch(1))
    assert "S420" in said and "S(2)" in said, said
