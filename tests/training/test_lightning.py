"""Lightning's own loop under a schedule: one argument more, and the same training."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.lightning import _Form
from tests.ranks import run_ranks

ONE = "schedule 1\n"
ZERO = "schedule 1\n\nmesh(dp=2)\n\nzero(stage=2, over=dp)\n"
TENSOR = """schedule 1

mesh(tp=2)

blocks.*.up  shard(col, over=tp)
blocks.*.down  shard(row, over=tp)
"""
STAGES = """schedule 1

mesh(dp=2, pp=2)

blocks  pipeline_split(over=pp)
zero(stage=1, over=dp)
pipeline(order="1F1B", micro=2)
"""
ADAPTED = """schedule 1

mesh(dp=2)

step "adapters" relax(model) {
  blocks.*.up  adapt(lora, rank=2)
}
zero(stage=1, over=dp)
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Net(pl.LightningModule):
    """A module as people write one: its step calls itself, logs, and looks at the global step."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("shift", torch.linspace(-1, 1, 8))
        self.heat = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x) + self.shift
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        out = self(x)
        loss = self.heat * F.cross_entropy(out, y) * (1 + 0.1 * self.global_step)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"right": (out.argmax(-1) == y).double().mean()})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("evaluated", F.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Told(pl.Callback):
    """Keeps the loss of each step, and what is logged at the end of each evaluation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.evaluated.append(float(trainer.callback_metrics["evaluated"]))


def _loader(rows: int, alone: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(0, 5, (24,), generator=generator))
    return DataLoader(data, rows, sampler=DistributedSampler(data, 1, 0) if alone else None)


def _fitted(
    rank: int,
    text: str | None,
    ranks: int,
    shares: int,
    epochs: int = 2,
    folder: Path | None = None,
    again: bool = False,
    kind: type[Net] = Net,
    **more: Any,
) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, float]]:
    """Losses, evaluations and weights of a run; without a text Lightning's own, on one rank."""
    from schedlang.lightning import ScheduleStrategy

    os.environ["LOCAL_RANK"] = str(rank)  # Lightning's own launcher tells it, too
    torch.manual_seed(0)
    told, module = Told(), kind().double()
    saving = [] if folder is None else [pl.callbacks.ModelCheckpoint(folder, save_last=True)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="auto" if text is None else ScheduleStrategy(text),
        max_epochs=epochs,
        callbacks=[told, *saving, *more.pop("callbacks", ())],
        enable_checkpointing=folder is not None,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **{"gradient_clip_val": 0.5, **more},
    )
    loaders = _loader(8 // shares, text is None), _loader(8 // shares, False)
    path = None if folder is None or not again else folder / "last.ckpt"
    try:
        trainer.fit(module, *loaders, ckpt_path=path)
    finally:
        del os.environ["LOCAL_RANK"]
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return told.losses, told.evaluated, dict(module.state_dict()), metrics


def _same(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9), (mine, theirs)
    assert found[2].keys() == expected[2].keys()
    for name, value in expected[2].items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "text, ranks, shares",
    [(ONE, 1, 1), (ZERO, 2, 2), (TENSOR, 2, 1), (STAGES, 4, 2)],
    ids=["one", "zero", "tensor", "stages"],
)
def test_training_is_that_of_lightning(text: str, ranks: int, shares: int) -> None:
    """Loss of each step, evaluations of each epoch, the trained weights, clipped and scheduled."""
    expected = _fitted(0, None, 1, 1)
    assert len(expected[0]) == len(set(expected[0])) == 6
    for found in run_ranks(ranks, _fitted, text, ranks, shares):
        _same(found, expected)
        assert found[3]["loss"] == found[0][-1] and "right" not in found[3]


def test_a_run_goes_on_from_its_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    """The file is Lightning's, with the weights; what the optimizer knows lies beside it."""
    expected = _fitted(0, None, 1, 1)
    run_ranks(2, _fitted, ZERO, 2, 2, 1, tmp_path)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["state_dict"].keys() == expected[2].keys()
    for found in run_ranks(2, _fitted, TENSOR, 2, 1, 2, tmp_path, True):
        _same(found, (expected[0][3:], expected[1][-1:], expected[2]))


class Writes(Net):
    """Its hook halves the weights of the head after each evaluation."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.head.weight.mul_(0.5)


def test_what_hooks_write_between_epochs_is_taken_over() -> None:
    """Weights that a hook changes behind an evaluation are those that the next step trains."""
    expected = _fitted(0, None, 1, 1, kind=Writes)
    for found in run_ranks(2, _fitted, ZERO, 2, 2, 2, None, False, Writes):
        _same(found, expected)


def test_adapters_of_a_row_are_trained() -> None:
    """`configure_optimizers` is asked for the parameters of a row, too, at their modules."""
    for losses, _, state, _ in run_ranks(2, _fitted, ADAPTED, 2, 2):
        assert len(losses) == 6
        torch.manual_seed(0)
        before = Net().double().state_dict()
        assert torch.equal(state["head.weight"], before["head.weight"])  # frozen, as all but them


class Pushes(Net):
    """Its loop is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Clips(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Look at gradients."""


class Heats(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        self.heat = self.heat + 1.0


class Bounds(Net):
    """Its weights are bounded after each step, as those of a critic."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)


class Counts(Net):
    """A hook counts steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counted", torch.zeros(()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.counted += 1


class Inside(Net):
    """What a hook changes is read in a comprehension."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return sum(self.heat * F.cross_entropy(self(x), y) for x, y in [batch])  # type: ignore[return-value]

    on_train_batch_end = Heats.on_train_batch_end


class Watches(pl.Callback):
    def on_after_backward(self, *_: Any) -> None:
        """Look at gradients."""


def _refused(rank: int, kind: type[Net], more: dict[str, Any]) -> str:
    with pytest.raises(Refusal) as caught:
        _fitted(rank, ONE, 1, 1, kind=kind, **more)
    assert caught.value.diagnostic.code == "S691"
    return caught.value.diagnostic.title


@pytest.mark.parametrize(
    "kind, more, names",
    [
        (Pushes, {"gradient_clip_val": None}, "automatic_optimization"),
        (Clips, {}, "Clips.on_before_optimizer_step"),
        (Heats, {}, "heat"),
        (Inside, {}, "heat"),
        (Bounds, {}, "head.weight"),
        (Counts, {}, "counted"),
        (Net, {"callbacks": (Watches(),)}, "Watches.on_after_backward"),
        (Net, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        (Net, {"precision": "bf16-mixed"}, "bf16-mixed"),
        (Net, {"gradient_clip_algorithm": "value"}, "by value"),
        (Net, {"sync_batchnorm": True}, "sync_batchnorm"),
    ],
)
def test_what_is_not_followed_is_refused(kind: type[Net], more: dict[str, Any], names: str) -> None:
    """S691 names what the program of a schedule would not do as Lightning does."""
    assert run_ranks(1, _refused, kind, more)[0].count(names) == 1


def _another_strategys(rank: int, folder: Path) -> None:
    _fitted(rank, None, 1, 1, 1, folder)
    with pytest.raises(Refusal, match="no state of a schedule"):
        _fitted(rank, ONE, 1, 1, 2, folder, True)


def test_checkpoints_of_another_strategy_are_refused(tmp_path: Path) -> None:
    """S691: their optimizer's state is not that of a program; their weights can be taken."""
    run_ranks(1, _another_strategys, tmp_path)


def test_what_lightning_says_is_not_said_twice() -> None:
    """S691 for arguments of `build` that come from Lightning."""
    from schedlang.lightning import ScheduleStrategy

    with pytest.raises(Refusal, match="gradient_clip_val") as caught:
        ScheduleStrategy(ONE, clip=1.0)
    assert caught.value.diagnostic.code == "S691"


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "batch", [{"x": 1, "y": 2}, [1, 2], (1, 2), Pair(1, 2), 3], ids=lambda one: type(one).__name__
)
def test_batches_of_every_form(batch: Any) -> None:
    """What `training_step` is given has the form that the loader gave it."""
    form = _Form.of(batch)
    again = form.batch(dict(form.keywords(batch)))
    assert again == batch and type(again) is type(batch)
