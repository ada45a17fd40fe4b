"""Losses that are sums of means, each over labels of its own: weighted one by one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan
from tests.zoo_models.written import Written, hand_text, judge

WORDS, WIDTH = 11, 8
DP = "dp=2\n  zero(stage=1, over=dp)"
ZERO = "dp=3\n  zero(stage=3, over=dp)"
PP = 'pp=2\n  blocks  pipeline_split(over=pp)\n  pipeline(order="1F1B", micro=3)'
BOTH = PP.replace("pp=2", "dp=2, pp=2", 1) + "\n  zero(stage=2, over=dp)"


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    """Return rows with very different numbers of labels, of tokens and of rows."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (rows, 6), generator=g)
    hidden = torch.rand(rows, 6, generator=g) < torch.linspace(0.1, 0.9, rows)[:, None]
    kind = torch.randint(0, 2, (rows,), generator=g)
    kind[rows - 2 :] = -100
    words = ids.masked_fill(hidden, -100)
    words[0, 0] = 1
    return {"ids": ids, "words": words, "kind": kind, "y": torch.randn(rows, generator=g)}


class Block(nn.Module):
    """A layer with a loss of its own, as in deep supervision, which it keeps."""

    def __init__(self, supervised: bool) -> None:
        super().__init__()
        self.up, self.exit = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2) if supervised else None

    def forward(self, h: Tensor, kind: Tensor | None = None) -> tuple[Tensor, Tensor | float]:
        h = h + torch.tanh(self.up(h))
        if self.exit is None or kind is None:
            return h, 0.0
        return h, F.cross_entropy(self.exit(h.mean(1)), kind)


class Several(nn.Module):
    """A model with a loss over words, one over rows that have a kind, and one over all rows."""

    def __init__(self, form: str, supervised: bool = False) -> None:
        super().__init__()
        self.form = form
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(supervised) for _ in range(2))
        self.head, self.kinds = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 2)
        self.value, self.log = nn.Linear(WIDTH, 1), nn.Parameter(torch.tensor(0.3))

    def forward(self, ids: Tensor, words: Tensor, kind: Tensor | None, y: Tensor) -> Any:
        h, exits = self.emb(ids), []
        for block in self.blocks:
            h, loss = block(h, kind)
            exits.append(loss)
        scores, of_row = self.head(h).flatten(0, 1), self.kinds(h.mean(1))
        value = self.value(h.mean(1))[:, 0]
        if self.form == "outside":
            return scores, of_row, value
        return self.joined(F.mse_loss(value, y), sum(exits), scores, of_row, words, kind)

    def joined(self, loss: Tensor, exits: Any, scores: Tensor, of_row: Any, *labels: Any) -> Any:
        """Return the loss, joined from its terms in some form."""
        words, kind = labels
        classes = torch.arange(1.0, WORDS + 1)
        if self.form == "drawn":  # stochastic depth that keeps all
            of_row = of_row * (torch.rand(()) < 2.0).float()
        second = 0.0 if kind is None else F.cross_entropy(of_row, kind)
        if self.form == "divided":
            total = F.cross_entropy(scores, words.flatten(), reduction="sum")
            first = total / (words != -100).sum().clamp(min=1)
        elif self.form == "recomputed":
            first = checkpoint(F.cross_entropy, scores, words.flatten(), use_reentrant=False)
        else:
            first = F.cross_entropy(scores, words.flatten())
        if self.form == "weighted":
            return F.cross_entropy(scores, words.flatten(), classes)
        if self.form == "both weighted":
            return F.cross_entropy(scores, words.flatten(), classes) + second
        if self.form == "sum":  # the means are not in the loss
            total = F.cross_entropy(scores, words.flatten(), reduction="sum")
            return {"loss": total / (words != -100).sum(), "first": first}
        if self.form == "product":
            return loss + first * second
        if self.form == "normed":
            return first / first.detach() + second
        if self.form == "uncertain":
            return torch.exp(-self.log) * first + self.log + second
        if self.form == "measured":
            return {"loss": loss + first, "kind": second}
        return {"loss": loss + first + 0.5 * second + exits, "first": first, "second": second}


class OneLoss(Several):
    """The same without the loss over rows that have a kind."""

    def joined(self, loss: Tensor, exits: Any, scores: Tensor, of_row: Any, *labels: Any) -> Any:
        """Return the loss over words alone."""
        return super().joined(loss, exits, scores, of_row, labels[0], None)


class OneWeighted(OneLoss):
    """A model whose only loss divides by class weights."""

    def __init__(self) -> None:
        super().__init__("weighted")

    def joined(self, loss: Tensor, exits: Any, scores: Tensor, of_row: Any, *labels: Any) -> Any:
        """Return the loss over words alone, without a mean beside it."""
        return F.cross_entropy(scores, labels[0].flatten(), torch.arange(1.0, WORDS + 1))


def outside(output: Any, batch: Mapping[str, Any]) -> Tensor:
    """Return the same loss outside of the model."""
    scores, of_row, value = output
    first = F.cross_entropy(scores, batch["words"].flatten())
    return first + F.cross_entropy(of_row, batch["kind"]) + F.mse_loss(value, batch["y"])


def written(form: str, supervised: bool = False) -> Written:
    """Return a model of some form, as the judge takes it."""
    loss = outside if form == "outside" else None
    return Written(partial(Several, form, supervised), batch, loss)


@pytest.mark.parametrize("form", ["added", "divided", "uncertain", "measured", "outside"])
@pytest.mark.parametrize("rows", [DP, ZERO, PP, BOTH], ids=["dp", "zero", "pp", "dp, pp"])
def test_trains_as_the_plain_loop(form: str, rows: str, threads: Threads) -> None:
    """Losses, gradients, state and outputs are those of the whole batch."""
    assert judge(written(form), hand_text(rows), threads) == ""


@pytest.mark.parametrize("rows", [DP, PP], ids=["dp", "pp"])
def test_losses_inside_of_modules(rows: str, threads: Threads) -> None:
    """Each layer has a loss of its own, also where stages have different ones."""
    assert judge(written("added", True), hand_text(rows), threads) == ""


def test_is_proven(threads: Threads) -> None:
    """`verify` holds, with microbatches on each rank; variants have parts without any label."""
    rows = 'zero(stage=2, over=dp)\npipeline(order="GPipe", micro=2)'
    torch.manual_seed(0)
    plan = make_plan(Several("added"), rows, "dp=2")
    assert_proven(threads, plan, [batch(8, 0), batch(9, 1)])


@pytest.mark.parametrize("rows", [DP, PP], ids=["dp", "pp"])
def test_forwards_that_draw(rows: str, threads: Threads) -> None:
    """A mode that follows draws inside functions leaves losses to the modes beneath it."""
    assert judge(written("drawn"), hand_text(rows), threads) == ""


def test_class_weights(threads: Threads) -> None:
    """One mean that divides by class weights is refused (S621), and taken with a weight."""
    torch.manual_seed(0)
    plan, full = make_plan(OneWeighted(), "zero(stage=0, over=dp)", "dp=2"), batch(8, 0)
    with pytest.raises(Refusal, match="S621"):
        threads.run(build, 2, plan, full)

    def weight(part: Mapping[str, Tensor]) -> float:
        counted = part["words"][part["words"] != -100]
        return float((counted + 1.0).sum())

    assert_proven(threads, plan, [full], weight=weight)


class Rewriting(nn.Module):
    """A mean over labels that the forward changes in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.table, self.head = way, nn.Embedding(7, 4), nn.Linear(4, 7)
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the mean."""
        logits, padding = self.head(self.table(x).tanh()), x == 0
        if self.way == "written":
            labels = labels.clone()
            labels[padding] = -100
        elif self.way == "filled":
            labels = labels.masked_fill(padding, -100)
        elif self.way == "chosen":
            labels = torch.where(padding, -100, labels)
        elif self.way == "shifted":
            made = torch.full((len(x), x.shape[1]), -100)
            made[:, :-1] = labels[:, 1:]
            labels = made
        elif self.way == "selected":
            logits, labels = logits[~padding], labels[~padding]
        elif self.way == "beside":
            others = torch.where(padding, -100, x)
            return F.cross_entropy(logits.flatten(0, -2), others.flatten()) + F.cross_entropy(
                logits.flatten(0, -2), labels.flatten()
            )
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


@pytest.mark.parametrize(
    "way", ["written", "filled", "chosen", "shifted", "selected", "beside", "none"]
)
def test_labels_that_the_forward_changes(way: str, threads: Threads) -> None:
    """No weight of a part is known for them: refused (S621), and right with a weight."""
    x = torch.arange(48).view(8, 6) % 7
    x[:4, :2] = 0
    full = {"x": x, "labels": (x + 2) % 7}
    plan = make_plan(Rewriting(way), "zero(stage=0, over=dp)", "dp=2")

    def weight(part: Mapping[str, Tensor]) -> float:
        return float(len(part["x"]) * 5 if way == "shifted" else (part["x"] != 0).sum())

    def step(weight: Any) -> dict[str, Tensor]:
        program = build(plan, full, weight=weight)
        program.train_step(full)
        return program.gradients()

    if way != "none":
        with pytest.raises(Refusal, match="S621"):
            threads.run(step, 2, None)
    if way != "beside":
        model = plan.model.model
        model(**full).backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        for found in threads.run(step, 2, None if way == "none" else weight):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_weights_that_draw(threads: Threads) -> None:
    """A weight with random numbers is refused by its name (S621): ranks would draw apart."""
    torch.manual_seed(0)
    plan = make_plan(OneWeighted(), "zero(stage=0, over=dp)", "dp=2")

    def weight(part: Mapping[str, Tensor]) -> float:
        return len(part["words"]) + float(torch.rand(()))

    with pytest.raises(Refusal, match="`weight` draws random numbers") as caught:
        assert_proven(threads, plan, [batch(8, 0)], weight=weight)
    assert caught.value.diagnostic.code == "S621"


def test_means_beside_the_loss(threads: Threads) -> None:
    """Parts are not weighted by the labels of a mean that is only a metric."""
    torch.manual_seed(0)
    plan = make_plan(OneLoss("sum"), "zero(stage=1, over=dp)", "dp=2")
    assert_proven(threads, plan, [batch(8, 0)])


@pytest.mark.parametrize("form", ["product", "normed", "weighted", "both weighted"])
def test_other_functions_of_means(form: str, threads: Threads) -> None:
    """A loss that is no weighted sum of its means is refused (S621)."""
    with pytest.raises(Refusal, match="S621"):
        judge(written(form), hand_text(DP), threads)


def _train_local(plan: Plan, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    program = build(plan, batches[0], optimizer=_sgd)
    rows = (slice(0, 3), slice(3, 8))[torch.distributed.get_rank()]
    losses = []
    for full in batches:
        own = {name: value[rows] for name, value in full.items()}
        losses.append(program.train_step(own, local=True).clone())
    return [*losses, *(p.clone() for p in program.state_dict().values())]


def _sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def test_rows_of_each_rank(threads: Threads) -> None:
    """Ranks with other numbers of rows and labels of their own gather all counts."""
    torch.manual_seed(0)
    model = Several("added")
    plan = make_plan(model, "zero(stage=0, over=dp)", "dp=2")
    batches = [batch(8, seed) for seed in (0, 1)]
    by_rank = threads.run(_train_local, 2, plan, batches)
    optimizer, expected = _sgd(model.named_parameters()), []
    for full in batches:
        optimizer.zero_grad()
        loss = model(**full)["loss"]
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    expected += [*model.state_dict().values()]
    for actual in by_rank:
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def _train_without(plan: Plan, name: str, full: dict[str, Tensor]) -> float:
    return float(build(plan, full).train_step({**full, name: None}))


def test_a_batch_without_some_labels(threads: Threads) -> None:
    """A batch that lacks the labels of one mean is refused (S669): calls are known by number."""
    plan = make_plan(Several("added"), "zero(stage=0, over=dp)", "dp=2")
    with pytest.raises(Refusal, match="S669"):
        threads.run(_train_without, 2, plan, "kind", batch(8, 0))


@pytest.mark.parametrize("form, supervised", [("recomputed", False), ("added", True)])
def test_losses_that_are_recomputed(form: str, supervised: bool, threads: Threads) -> None:
    """A mean in a checkpoint, of the model or by a row, has the weight of its forward."""
    rows = "dp=2\n  blocks.*  checkpoint()\n  zero(stage=1, over=dp)"
    assert judge(written(form, supervised), hand_text(rows), threads) == ""
