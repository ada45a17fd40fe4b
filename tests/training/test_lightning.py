"""Lightning's own loop under a schedule: one more argument, and the same training."""

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

ONE_RANK = "schedule 1\n"
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
ADAPTERS = """schedule 1

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
        output: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return output


class Net(pl.LightningModule):
    """A typical module: its step calls itself, logs, and reads the global step."""

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
        logits: torch.Tensor = self.head(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        loss = self.heat * F.cross_entropy(logits, y) * (1 + 0.1 * self.global_step)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"right": (logits.argmax(-1) == y).double().mean()})
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


class Recorder(pl.Callback):
    """Records the loss of each step, and what is logged at the end of each evaluation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.evaluated.append(float(trainer.callback_metrics["evaluated"]))


def make_loader(rows: int, alone: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(0, 5, (24,), generator=generator))
    return DataLoader(data, rows, sampler=DistributedSampler(data, 1, 0) if alone else None)


def fit_on_rank(
    rank: int,
    text: str | None,
    ranks: int,
    shares: int,
    epochs: int = 2,
    folder: Path | None = None,
    resume: bool = False,
    kind: type[Net] = Net,
    **more: Any,
) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, float]]:
    """Return losses, evaluations and weights of a run; without a text Lightning's own, on one
    rank."""
    from schedlang.lightning import ScheduleStrategy

    os.environ["LOCAL_RANK"] = str(rank)  # Lightning's own launcher sets it too
    torch.manual_seed(0)
    recorder, module = Recorder(), kind().double()
    saving = [] if folder is None else [pl.callbacks.ModelCheckpoint(folder, save_last=True)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="auto" if text is None else ScheduleStrategy(text),
        max_epochs=epochs,
        callbacks=[recorder, *saving, *more.pop("callbacks", ())],
        enable_checkpointing=folder is not None,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **{"gradient_clip_val": 0.5, **more},
    )
    loaders = make_loader(8 // shares, text is None), make_loader(8 // shares, False)
    path = None if folder is None or not resume else folder / "last.ckpt"
    try:
        trainer.fit(module, *loaders, ckpt_path=path)
    finally:
        del os.environ["LOCAL_RANK"]
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return recorder.losses, recorder.evaluated, dict(module.state_dict()), metrics


def assert_same(actual: Any, expected: Any) -> None:
    for values, expected_values in zip(actual[:2], expected[:2], strict=True):
        assert values == pytest.approx(expected_values, rel=1e-9), (values, expected_values)
    assert actual[2].keys() == expected[2].keys()
    for name, value in expected[2].items():
        torch.testing.assert_close(actual[2][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "text, ranks, shares",
    [(ONE_RANK, 1, 1), (ZERO, 2, 2), (TENSOR, 2, 1), (STAGES, 4, 2)],
    ids=["one", "zero", "tensor", "stages"],
)
def test_training_is_that_of_lightning(text: str, ranks: int, shares: int) -> None:
    """Loss of each step, evaluations of each epoch, trained weights; clipped and scheduled."""
    expected = fit_on_rank(0, None, 1, 1)
    assert len(expected[0]) == len(set(expected[0])) == 6
    for result in run_ranks(ranks, fit_on_rank, text, ranks, shares):
        assert_same(result, expected)
        assert result[3]["loss"] == result[0][-1] and "right" not in result[3]


def test_a_run_goes_on_from_its_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    """The file is Lightning's, with the weights; the optimizer's state is stored beside it."""
    expected = fit_on_rank(0, None, 1, 1)
    run_ranks(2, fit_on_rank, ZERO, 2, 2, 1, tmp_path)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["state_dict"].keys() == expected[2].keys()
    for result in run_ranks(2, fit_on_rank, TENSOR, 2, 1, 2, tmp_path, True):
        assert_same(result, (expected[0][3:], expected[1][-1:], expected[2]))


class WritesWeights(Net):
    """Its hook halves the weights of the head after each evaluation."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.head.weight.mul_(0.5)


def test_what_hooks_write_between_epochs_is_taken_over() -> None:
    """The next step trains the weights that a hook changed after an evaluation."""
    expected = fit_on_rank(0, None, 1, 1, kind=WritesWeights)
    for result in run_ranks(2, fit_on_rank, ZERO, 2, 2, 2, None, False, WritesWeights):
        assert_same(result, expected)


def test_adapters_of_a_row_are_trained() -> None:
    """`configure_optimizers` receives the parameters of an adapter row too, in their modules."""
    for losses, _, state, _ in run_ranks(2, fit_on_rank, ADAPTERS, 2, 2):
        assert len(losses) == 6
        torch.manual_seed(0)
        initial = Net().double().state_dict()
        assert torch.equal(state["head.weight"], initial["head.weight"])  # frozen, unlike adapters


class ManualSteps(Net):
    """Steps its optimizer itself (manual optimization)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Clips(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Read gradients."""


class ChangesFactor(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        self.heat = self.heat + 1.0


class BoundsWeights(Net):
    """Bounds its weights after each step, as a critic's."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)


class CountsInBuffer(Net):
    """Counts steps in a buffer by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counted", torch.zeros(()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.counted += 1


class ReadsInside(Net):
    """Reads in a comprehension what a hook changes."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return sum(self.heat * F.cross_entropy(self(x), y) for x, y in [batch])  # type: ignore[return-value]

    on_train_batch_end = ChangesFactor.on_train_batch_end


class Watches(pl.Callback):
    def on_after_backward(self, *_: Any) -> None:
        """Read gradients."""


def refusal_of(rank: int, kind: type[Net], more: dict[str, Any]) -> str:
    with pytest.raises(Refusal) as caught:
        fit_on_rank(rank, ONE_RANK, 1, 1, kind=kind, **more)
    assert caught.value.diagnostic.code == "S691"
    return caught.value.diagnostic.title


@pytest.mark.parametrize(
    "kind, more, names",
    [
        (ManualSteps, {"gradient_clip_val": None}, "automatic_optimization"),
        (Clips, {}, "Clips.on_before_optimizer_step"),
        (ChangesFactor, {}, "heat"),
        (ReadsInside, {}, "heat"),
        (BoundsWeights, {}, "head.weight"),
        (CountsInBuffer, {}, "counted"),
        (Net, {"callbacks": (Watches(),)}, "Watches.on_after_backward"),
        (Net, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        (Net, {"precision": "bf16-mixed"}, "bf16-mixed"),
        (Net, {"gradient_clip_algorithm": "value"}, "by value"),
        (Net, {"sync_batchnorm": True}, "sync_batchnorm"),
    ],
)
def test_what_is_not_followed_is_refused(kind: type[Net], more: dict[str, Any], names: str) -> None:
    """S691 names what the program would not do as Lightning does."""
    assert run_ranks(1, refusal_of, kind, more)[0].count(names) == 1


def load_foreign(rank: int, folder: Path) -> None:
    fit_on_rank(rank, None, 1, 1, 1, folder)
    with pytest.raises(Refusal, match="no state of a schedule"):
        fit_on_rank(rank, ONE_RANK, 1, 1, 2, folder, True)


def test_checkpoints_of_another_strategy_are_refused(tmp_path: Path) -> None:
    """S691: their optimizer state is not a program's; their weights can be loaded."""
    run_ranks(1, load_foreign, tmp_path)


def test_what_lightning_says_is_not_said_twice() -> None:
    """S691 for arguments of `build` that come from Lightning."""
    from schedlang.lightning import ScheduleStrategy

    with pytest.raises(Refusal, match="gradient_clip_val") as caught:
        ScheduleStrategy(ONE_RANK, clip=1.0)
    assert caught.value.diagnostic.code == "S691"


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "batch", [{"x": 1, "y": 2}, [1, 2], (1, 2), Pair(1, 2), 3], ids=lambda one: type(one).__name__
)
def test_batches_of_every_form(batch: Any) -> None:
    """`training_step` gets a batch of the loader's structure."""
    form = _Form.of(batch)
    rebuilt = form.batch(dict(form.keywords(batch)))
    assert rebuilt == batch and type(rebuilt) is type(batch)
