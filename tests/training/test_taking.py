"""Keys of a batch: which the forward, the loss and the weight receive, and refusals of the
others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.autoshard.propose import propose
from schedlang.passes.prove import Case, prove
from schedlang.passes.simulate.account import account
from schedlang.passes.static_checks.static import static
from schedlang.runtime.batch import accepted_inputs
from schedlang.runtime.launch.pool import Pool
from tests.proofs import assert_proven, make_plan


class Net(nn.Module):
    """Predicts without labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        logits: Tensor = self.head(x) * scale
        return logits


class OpenNet(Net):
    """Takes any keyword."""

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        assert "click" in others
        return super().forward(x)


def _batch(seed: int, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    click, share = torch.randint(3, (8,), generator=generator), torch.rand(8, generator=generator)
    return {"x": torch.randn(8, 6, generator=generator), "click": click, "share": share, **more}


def click_loss(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Return a loss of two keys that the forward does not take, one of them read by `get`."""
    share = batch.get("share")
    assert share is not None
    lost = F.cross_entropy(output, batch["click"], reduction="none")
    return (lost * share).mean()


def share_weight(batch: Mapping[str, Any]) -> float:
    """Return the weight of a part: the sum of one of its keys."""
    return float(len(batch["share"]))


ROWS = {
    "dp=2": "zero(stage=1, over=dp)",
    "pp=2": 'blocks  pipeline_split(over=pp)\npipeline(order="1F1B", micro=4)',
    "tp=2": "head  shard(row, over=tp)",
}


def test_a_forward_is_given_what_it_names() -> None:
    """The named keys, or all with `**`; a wrapper takes what its class takes."""
    batch = _batch(0)
    assert list(accepted_inputs(Net(), batch)) == ["x"]
    assert list(accepted_inputs(OpenNet(), batch)) == list(batch)
    net: Any = Net()
    inner = net.forward
    net.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    assert list(accepted_inputs(net, batch)) == ["x"]


@pytest.mark.parametrize("kind", [Net, OpenNet])
@pytest.mark.parametrize("mesh", ROWS)
def test_labels_that_only_the_loss_reads(pool: Pool, kind: type[Net], mesh: str) -> None:
    """They are split with the rows, reach the loss on its rank, and get their gradient."""
    plan = make_plan(kind(), ROWS[mesh], mesh)
    report = assert_proven(pool, plan, [_batch(1), _batch(2)], loss=click_loss, weight=share_weight)
    names = {row.name for row in report.rows if row.kind == "input gradients"}
    assert names == {"x", "share"}, names


def test_a_key_that_nobody_takes_is_refused_alike(pool: Pool) -> None:
    """Planning, checking, verifying and proposing refuse it equally."""
    batch, plan = _batch(1, names=torch.arange(8)), make_plan(Net(), ROWS["dp=2"], "dp=2")
    calls = {
        "plan": lambda: account(plan, batch, click_loss, weight=share_weight),
        "check": lambda: static(plan, batch, click_loss, share_weight),
        "verify": lambda: prove(Case(plan, (batch,), click_loss, share_weight), pool=pool),
        "init": lambda: propose(Net(), batch, {"dp": 2}, click_loss, share_weight),
        "build": lambda: prepare(plan, batch, click_loss, share_weight, trains=False),
    }
    for name, call in calls.items():
        with pytest.raises(Refusal) as refused:
            call()
        assert refused.value.diagnostic.code == "S910", name
        assert "`names`" in refused.value.diagnostic.title


def test_what_the_weight_reads_is_taken() -> None:
    """A key for the weight only is not refused."""
    plan = make_plan(Net(), ROWS["dp=2"], "dp=2")
    batch = {**_batch(1), "count": torch.ones(8)}

    def loss(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
        return F.cross_entropy(output, batch["click"]) * dict(batch)["share"].mean()

    prepare(plan, batch, loss, lambda part: float(part["count"].sum()))
    with pytest.raises(Refusal):
        prepare(make_plan(Net(), ROWS["dp=2"], "dp=2"), batch, click_loss, share_weight)


def test_a_missing_loss_is_said_alike(pool: Pool) -> None:
    """The refusal has the two lines to paste; only evaluation needs no loss."""
    batch = {"x": _batch(1)["x"]}
    plan = make_plan(Net(), ROWS["dp=2"], "dp=2")
    calls = {
        "plan": lambda: account(plan, batch),
        "check": lambda: static(plan, batch),
        "verify": lambda: prove(Case(plan, (batch,)), pool=pool),
        "init": lambda: propose(Net(), batch, {"dp": 2}),
    }
    for name, call in calls.items():
        with pytest.raises(Refusal) as refused:
            call()
        assert refused.value.diagnostic.code == "S615", name
    prepare(plan, batch, trains=False)


class HiddenLoss(Net):
    """Returns its loss in a place that is not searched."""

    def forward(self, x: Tensor, click: Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(x)
        return {"logits": logits, "parts": (F.cross_entropy(logits, click), 3)}


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (Net(), 'return torch.nn.functional.cross_entropy(output, batch["click"])'),
        (HiddenLoss(), 'return output["parts"][0]'),
    ],
)
def test_the_lines_to_paste(model: nn.Module, line: str) -> None:
    """They fit what this model returns and this batch has, and they run."""
    batch = {key: value for key, value in _batch(1).items() if key != "share"}
    with pytest.raises(Refusal) as refused:
        prepare(make_plan(model, ROWS["dp=2"], "dp=2"), {"x": batch["x"], "click": batch["click"]})
    help_text = next(h for h in refused.value.diagnostic.helps if "def loss" in h)
    assert help_text.endswith(line), help_text
    namespace: dict[str, Any] = {"torch": torch}
    exec("\n".join(text[6:] for text in help_text.splitlines()[1:]), namespace)
    prepare(make_plan(model, ROWS["dp=2"], "dp=2"), batch, namespace["loss"])


class PackedNet(nn.Module):
    """Packs its sequences, for which torch needs their lengths on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.out(self.rnn(packed)[1][0]).square().mean()


@pytest.mark.parametrize(
    "model, batch, told",
    [
        (
            PackedNet(),
            {"x": torch.rand(4, 3, 4), "lengths": torch.tensor([3, 1, 2, 3])},
            r"S612.*`test_taking.py:\d+` reads the value of a tensor",
        ),
        (
            PackedNet(),
            {"x": torch.rand(4, 3, 4), "lengths": [3, 1]},
            r"S604.*\n.*it raised\s+`.*`, at\s+test_taking.py:\d+",
        ),
    ],
    ids=["lengths", "too few"],
)
def test_the_line_at_which_a_model_cannot_be_followed(
    model: nn.Module, batch: dict[str, Any], told: str
) -> None:
    """Reading values is not the batch's mistake; either way the refusal names the model's line."""
    with pytest.raises(Refusal, match=told):
        propose(model, batch, {"dp": 2})


class GridNet(nn.Module):
    """Reads grids and kinds of its batch in Python numbers, texts and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleDict({f"way{k}": nn.Linear(4, 4) for k in range(2)})

    def forward(self, x: Tensor, grid: Tensor, kind: Tensor) -> Tensor:
        times = torch.repeat_interleave(grid[:, 0], grid[:, 1])
        sizes = [height * width for height, width in grid.tolist()]
        assert len(times) == 3 * len(grid) and sizes == [6] * len(grid)
        return self.ways[f"way{kind[0]}"](x).square().mean()


def test_what_a_batch_says_is_read_without_data() -> None:
    """Numbers that follow from the batch alone are known, however a model reads them."""
    grid, kind = torch.tensor([[2, 3]] * 4), torch.ones(4, dtype=torch.long)
    proposal = propose(GridNet(), {"x": torch.rand(4, 4), "grid": grid, "kind": kind}, {"dp": 2})
    assert "zero(stage=1, over=dp)" in proposal.text


class WeightDriven(nn.Module):
    """Reads in Python what follows from its weights."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        choice = self.one(x).argmax(-1)
        if self.how == "list":
            assert len(choice.tolist()) == len(x)
        else:
            x = x.repeat_interleave(choice, dim=0)
        return self.one(x).square().mean()


def test_what_weights_say_is_not_known_without_data() -> None:
    """A model that needs it is refused for that reason, and not for its batch."""
    batch = {"x": torch.rand(4, 4)}
    assert "zero(stage=1, over=dp)" in propose(WeightDriven("list"), batch, {"dp": 2}).text
    with pytest.raises(Refusal, match="S612.*reads the value of a tensor"):
        propose(WeightDriven("sizes"), batch, {"dp": 2})


class PatchNet(nn.Module):
    """Takes the patches of all images as rows of one tensor, and pools those of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, patches: Tensor) -> Tensor:
        pooled = self.one(patches.view(3, len(patches) // 3, 4)).mean(0)
        return self.two(pooled + x[:, :1]).square().mean()


def test_a_batch_with_several_entries_for_a_row() -> None:
    """The refusal says that such a tensor is not split."""
    batch = {"x": torch.rand(4, 4), "patches": torch.rand(12, 4)}
    assert PatchNet()(**batch).isfinite()
    part = {**batch, "x": batch["x"][:2]}
    with pytest.raises(Refusal, match="S604") as refused:
        prepare(make_plan(PatchNet(), ROWS["dp=2"], "dp=2"), part)
    diagnostic = refused.value.diagnostic
    assert "`patches` has 12 entries in dim 0 where the batch has 2 rows" in diagnostic.notes[-1]
    assert any("or do not split the batch" in help_ for help_ in diagnostic.helps)
