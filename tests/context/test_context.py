"""Context parallelism: unmodified models train as they do alone, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import OwnError, Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.runtime.context_parallel import probe
from schedlang.runtime.context_parallel.local_tokens import TokenSplit
from tests import models
from tests.causal import Causal, Mixer
from tests.engine.threads import Threads
from tests.proofs import (
    adamw,
    assert_near,
    make_plan,
    refusal_text,
    static_holds,
    train_on_ranks,
    train_sequential,
)
from tests.properties.engine import check
from tests.properties.models import Block, Config
from tests.properties.schedules import Drawn, context_parallel

LLAMA = "model.layers.*.self_attn  context_parallel({})"
GPT2 = "transformer.h.*.attn  context_parallel({})"
BERT = "bert.encoder.layer.*.attention  context_parallel({})"
OWN = "blocks.*  context_parallel({})"
HEADS = """
  model.layers.*.self_attn.{q,k,v}_proj  shard(col, over=tp)
  model.layers.*.self_attn.o_proj        shard(row, over=tp)
"""
SEED = 5


def batches(mask: bool = True) -> list[dict[str, Tensor]]:
    """Two steps; eleven and eight tokens, some rows padded."""
    return [models.tokens(5, 11, mask, 1), models.tokens(4, 8, mask, 2)]


def assert_same_training(
    threads: Threads, plan: Plan, model: Any, given: Any, **options: Any
) -> None:
    """Assert that steps of AdamW equal the plain loop's: losses, gradients, norms, state."""
    options = {"seed": SEED, **options}
    observed = train_on_ranks(threads, plan, given, adamw, **options)
    assert_near(
        observed, train_sequential(model, given, adamw, loss=options.get("loss"), seed=SEED)
    )


def token_split(
    model: nn.Module, row: str, batch: Any, mesh: str = "cp=2", loss: Any = None
) -> Any:
    """The split of tokens that the probe finds for a model."""
    return prepare(make_plan(model, row, mesh), batch, loss).tokens


CASES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "llama, gather": (lambda: models.llama(2), LLAMA.format("gather, over=cp"), "cp=2"),
    "llama, striped ring of three": (
        lambda: models.llama(2, keys=1),
        LLAMA.format("ring, over=cp, layout=striped"),
        "cp=3",
    ),
    "gpt2 with dropout, zigzag ring": (
        lambda: models.gpt2(2, dropout=0.2),
        GPT2.format("ring, over=cp, layout=zigzag"),
        "cp=2",
    ),
    "bert, ring": (models.bert, BERT.format("ring, over=cp, layout=zigzag"), "cp=2"),
    "gemma2, windows and caps": (
        lambda: models.gemma2(2),
        LLAMA.format("ring, over=cp, layout=zigzag"),
        "cp=2",
    ),
    "llama, rings in a ring": (
        lambda: models.llama(2),
        LLAMA.format("double_ring, over=(a, b)"),
        "a=2, b=2",
    ),
    "llama, ring with data": (
        lambda: models.llama(2),
        LLAMA.format("ring, over=cp, layout=zigzag") + "\nzero(stage=3, over=(dp, cp))",
        "dp=2, cp=2",
    ),
    "llama, ulysses in a ring": (
        lambda: models.llama(2),
        LLAMA.format("ulysses, over=b") + "\n" + LLAMA.format("ring, over=a, layout=zigzag"),
        "a=2, b=2",
    ),
    "llama, heads split": (
        lambda: models.llama(2),
        HEADS + LLAMA.format("ulysses, over=cp"),
        "cp=2, tp=2",
    ),
    "llama, pipeline": (
        lambda: models.llama(2),
        LLAMA.format("ring, over=cp, layout=zigzag") + "\nmodel.layers.*  checkpoint()\n"
        'model.layers  pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)',
        "cp=2, pp=2",
    ),
    "llama, products kept": (
        lambda: models.llama(2),
        LLAMA.format("ring, over=cp") + "\nmodel.layers.*  checkpoint(save=[linear])",
        "cp=2",
    ),
    "llama, teams in a ring": (
        lambda: models.llama(2),
        LLAMA.format("nbody, over=(a, b), layout=zigzag"),
        "a=2, b=2",
    ),
    "llama, one team": (lambda: models.llama(2), LLAMA.format("nbody, over=(a, b)"), "a=1, b=2"),
    "llama, teams of one": (
        lambda: models.llama(2),
        LLAMA.format("nbody, over=(a, b)"),
        "a=3, b=1",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_alone(name: str, threads: Threads) -> None:
    """Eleven tokens on two to four ranks, padded rows: training equals the plain loop."""
    make, rows, mesh = CASES[name]
    model = make()
    assert_same_training(threads, make_plan(model, rows, mesh), model, batches())


@pytest.mark.parametrize("positions", ["arange", "table"])
def test_a_model_of_ones_own(positions: str, threads: Threads) -> None:
    """A user's model with positions from shapes, shifted labels and dropout."""
    model = Causal(positions=positions, dropout=0.2, layers=2)
    row = OWN.format("ring, over=cp, layout=zigzag")
    assert_same_training(threads, make_plan(model, row, "cp=2"), model, batches(mask=False))


def test_scores_that_are_scaled_in_place_and_chosen_second(threads: Threads) -> None:
    """`scores /= 2`, and `torch.where(hidden, low, scores)`."""
    model = Causal("where", layers=2)
    plan = make_plan(model, OWN.format("ring, over=cp"), "cp=2")
    assert_same_training(threads, plan, model, batches(mask=False))


def test_a_model_that_sees_both_ways(threads: Threads) -> None:
    """Bidirectional attention sees all keys in any layout."""
    model = Causal("full", shift=False, layers=2)
    plan = make_plan(model, OWN.format("ulysses, over=cp, layout=striped"), "cp=2")
    assert_same_training(threads, plan, model, batches(mask=False))


def test_packed_documents(threads: Threads) -> None:
    """Positions that restart separate documents, also if a rank has parts of several."""
    model = models.llama(2)
    model.config.use_cache = False
    packed = []
    for batch in batches(mask=False):
        length = batch["input_ids"].shape[1]
        places = torch.cat([torch.arange(5), torch.arange(length - 5)])
        packed.append(batch | {"position_ids": places.expand(len(batch["labels"]), -1)})
    row = LLAMA.format("ring, over=cp, layout=zigzag")
    assert token_split(model, row, packed[0]).documents
    assert_same_training(threads, make_plan(model, row, "cp=2"), model, packed)


def test_a_mean_over_tokens_without_labels(threads: Threads) -> None:
    """Five tokens on two ranks, no labels: parts weigh by tokens; float inputs get gradients."""
    block = Block("attention", heads=2, groups=1, size=3, flag=True)
    config = Config((block, Block("mlp")), width=5, side=True, returns="dict")
    for row in context_parallel(config, {"cp": 2}, 5)[:2]:
        check(Drawn(config, (("cp", 2),), (row,), 1, 5), threads)


class Logits(Causal):
    """Gives logits, for a loss beside the model."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return 2 * logits


def cut_by_one(output: Tensor, batch: Any) -> Tensor:
    """A loss beside the model, which predicts the next token."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def test_a_loss_of_the_users_own(threads: Threads) -> None:
    """A loss beside the model, which cuts logits and labels by one, counts each label once."""
    model = Logits(layers=2)
    plan = make_plan(model, OWN.format("ring, over=cp, layout=zigzag"), "cp=2")
    assert_same_training(threads, plan, model, batches(mask=False), loss=cut_by_one)


def run_eval(plan: Plan, batch: Any) -> Any:
    """On a rank: what the program gives for a batch."""
    program = build(plan, batch)
    return program.eval_step(batch).logits, program.train_step(batch)


def test_outputs_are_in_order(threads: Threads) -> None:
    """Logits of all tokens stand where they do alone, on every rank, and so does the loss."""
    model, batch = models.llama(2), batches()[0]
    plan = make_plan(model, LLAMA.format("ring, over=cp, layout=striped"), "cp=3")
    with torch.no_grad():
        expected = model(**batch)
    for logits, loss in threads.run(run_eval, 3, plan, batch):
        present = batch["attention_mask"].bool()
        assert torch.allclose(logits[present], expected.logits[present], rtol=1e-12)
        assert torch.allclose(loss, expected.loss.to(loss.dtype))


@pytest.mark.parametrize("name", ["llama, heads split", "llama, pipeline"])
def test_the_static_proofs_hold(name: str) -> None:
    """Sums, types, weights and messages of every rank are proven without running one."""
    _, rows, mesh = CASES[name]
    static_holds(make_plan(models.llama(2), rows, mesh), batches()[0])


# -- refusals ------------------------------------------------------------------------------------


class Pooled(Causal):
    """Adds the mean of all tokens to each."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits + logits.mean(1, keepdim=True), labels)


class Penalised(Causal):
    """Adds a mean over all tokens to that over the labels that count."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().loss(logits, labels)
        return loss + logits.logsumexp(-1).pow(2).mean()


class Balanced(Causal):
    """Adds a load-balancing loss: of all tokens of the batch, of each row, or of each token."""

    def __init__(self, over: str = "batch") -> None:
        super().__init__(layers=2, shift=False)
        self.over = over

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().loss(logits, labels)
        chosen = F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        dims = {"batch": (0, 1), "rows": 1, "tokens": 0}[self.over]
        return loss + 9 * (chosen.mean(dims) * logits.softmax(-1).mean(dims)).sum(-1).mean()


@pytest.mark.parametrize("mesh", ["cp=2", "dp=2, cp=2"])
@pytest.mark.parametrize("make", [Balanced, lambda: Penalised(shift=False, layers=2)])
def test_sums_over_all_tokens_in_the_loss(
    make: Callable[[], Causal], mesh: str, threads: Threads
) -> None:
    """Ranks share them: a load-balancing loss, and a z-loss of all tokens beside counted labels."""
    model, row = make(), OWN.format("ring, over=cp, layout=zigzag")
    rows = row + "\nzero(stage=2, over=(dp, cp))" if "dp" in mesh else row
    assert_same_training(threads, make_plan(model, rows, mesh), model, batches(mask=False))
    static_holds(make_plan(model, rows, mesh), batches(mask=False)[0])


def test_sums_that_ranks_do_not_share(threads: Threads) -> None:
    """In several microbatches a rank cannot share them: the sum is named."""
    rows = OWN.format("ring, over=cp") + '\npipeline(order="GPipe", micro=2)'
    plan = make_plan(Penalised(shift=False, layers=2), rows, "cp=2")
    with pytest.raises(Refusal) as caught:
        prepare(plan, batches(mask=False)[0], None)
    text = caught.value.render()
    assert "S659" in text and "that ranks do not" in text and "takes a mean, " in text, text


class Numbered(Causal):
    """Counts positions by a list."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Any = None) -> Tensor:
        x = self.words(input_ids) + self.places(torch.tensor(list(range(input_ids.shape[1]))))
        for block in self.blocks:
            x = block(x, None)
        return self.loss(self.head(x), labels)


class Summing(nn.Module):
    """Attention by einsum, which is not followed."""

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        weights = torch.einsum("btd,bsd->bts", x, x).softmax(-1)
        return x + torch.einsum("bts,bsd->btd", weights, x)


class Einsum(Causal):
    """Two blocks of such."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Summing() for _ in range(2))


REFUSED = {
    "convolution": (lambda: Causal("conv", layers=2), "S659", "`blocks.0"),
    "positions by a list": (lambda: Numbered(layers=2), "S659", "`blocks.0.norm` computes a token"),
    "attention by sums": (lambda: Einsum(), "S659", "`blocks.0"),
    "a mean over tokens": (lambda: Pooled(layers=2), "S659", "loss"),
    "statistics of each row": (lambda: Balanced("rows"), "S659", "has statistics that are not"),
    "statistics of each token": (lambda: Balanced("tokens"), "S659", "has statistics that are not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_tokens_elsewhere_is_named(name: str) -> None:
    """The refusal names the row, and the first module that mixes tokens."""
    make, code, expected_text = REFUSED[name]
    with pytest.raises(Refusal) as error:
        token_split(make(), OWN.format("ring, over=cp, layout=zigzag"), models.tokens(3, 9, False))
    message = error.value.render()
    assert code in message and expected_text in message and "rows.sched" in message, message


class Plain(Causal):
    """Gives logits; its loss is a function."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x, None)
        logits: Tensor = self.head(x)
        return logits


def next_token_loss(logits: Tensor, batch: Any) -> Tensor:
    """Cross-entropy of the next token of the input."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def test_labels_that_are_the_input() -> None:
    """A loss that takes its labels from the input is refused, with the key that the batch needs."""
    batch = {"input_ids": models.tokens(3, 9, False)["input_ids"]}
    with pytest.raises(Refusal) as error:
        token_split(Plain(layers=2), OWN.format("gather, over=cp"), batch, loss=next_token_loss)
    assert error.value.diagnostic.code == "S659"
    assert error.value.diagnostic.helps == (
        'let the batch have both: `{"input_ids": ids, "labels": ids}`',
    )


@pytest.mark.parametrize("rowed", [(0, 1, 2), (1, 2, 3), (0, 1, 3), (1,), (3,)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attentions_without_rows_are_named(rowed: tuple[int, ...], dropout: float) -> None:
    """An attention without a row would see the keys of one rank only: refused by name."""
    rows = "\n".join(f"blocks.{k}  context_parallel(ring, over=cp)" for k in rowed)
    batch = models.tokens(3, 9, False)
    with pytest.raises(Refusal) as error:
        token_split(Causal(dropout=dropout), rows, batch)
    message = error.value.render()
    missing = min({0, 1, 2, 3} - {*rowed})
    assert "S659" in message and f"`blocks.{missing}" in message and "rows.sched" in message, (
        message
    )


class Pictures(nn.Module):
    """Patches of images, and a class token before them, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, 16))
        self.blocks = nn.ModuleList([Mixer("full", 0.0)])
        self.head = nn.Linear(16, 5)
        self.double()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).mT
        x = self.blocks[0](torch.cat([self.first.expand(len(x), -1, -1), x], 1), None)
        return F.cross_entropy(self.head(x[:, 0]), labels)


class Sounds(Pictures):
    """Frames of sounds: a convolution first."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv1d(4, 16, 3, padding=1).double()


def test_tokens_that_arise_inside() -> None:
    """Images have no tokens to split: the refusal offers rows that split something else."""
    batch = {"pixel_values": torch.randn(4, 3, 8, 8).double(), "labels": torch.arange(4)}
    with pytest.raises(Refusal) as error:
        token_split(Pictures(), OWN.format("ring, over=cp"), batch)
    message = error.value.render()
    for expected_text in (
        "S674",
        "`pixel_values` is [4, 3, 8, 8]",
        "zero(stage=0, over=cp)",
        "rows.sched",
    ):
        assert expected_text in message, message


def test_a_convolution_in_front() -> None:
    """The refusal names the convolution that mixes neighbouring tokens."""
    batch = {"pixel_values": torch.randn(4, 4, 12).double(), "labels": torch.arange(4)}
    with pytest.raises(Refusal) as error:
        token_split(Sounds(), OWN.format("ring, over=cp"), batch)
    message = error.value.render()
    assert "S659" in message and "`patches` is a `Conv1d`: it mixes neighbouring" in message, (
        message
    )


def test_an_attention_without_a_row() -> None:
    """One attention without a row is refused by name."""
    row = LLAMA.format("gather, over=cp").replace("*", "0")
    with pytest.raises(Refusal, match="`model.layers.1.self_attn` is an attention that no"):
        token_split(models.llama(2), row, models.tokens(3, 9))


def test_masks_of_queries_and_keys() -> None:
    """A mask of [queries, keys] is refused, with the legal form."""
    batch = models.tokens(3, 9, mask=False)
    batch["attention_mask"] = torch.zeros(3, 1, 9, 9, dtype=torch.float64)
    with pytest.raises(Refusal, match="S656.*attention_mask|attention_mask.*tokens"):
        token_split(models.llama(2), LLAMA.format("gather, over=cp"), batch)


TWICE = LLAMA.format("ring, over=cp") + "\n"
ROWS = {
    "an axis that splits heads": (HEADS + LLAMA.format("ring, over=tp"), "tp=2", "S504"),
    "twice": (TWICE + LLAMA.format("ring, over=tp"), "cp=2, tp=2", "S501"),
    "two layouts": (
        LLAMA.format("ulysses, over=cp, layout=zigzag")
        + "\n"
        + LLAMA.format("ring, over=tp, layout=striped"),
        "cp=2, tp=2",
        "S504",
    ),
    "one level of two": (LLAMA.format("usp, over=cp"), "cp=2", "S303"),
    "teams without a ring": (LLAMA.format("nbody, over=cp"), "cp=2", "S303"),
    "levels the wrong way round": (LLAMA.format("usp, over=(b, a)"), "a=2, b=2", "S504"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_do_not_fit(name: str) -> None:
    """Axes with other work, two ways to split, methods of two levels over one."""
    rows, mesh, code = ROWS[name]
    assert code in refusal_text(models.llama(2), rows, mesh)


def test_slices_of_split_sequences() -> None:
    """Pipeline slices and context parallelism together are refused."""
    rows = LLAMA.format("ring, over=cp") + (
        '\nmodel.layers  pipeline_split(over=pp)\npipeline(order="Seq1F1B", micro=2, slices=2)'
    )
    with pytest.raises(Refusal, match="S662|and into slices as well"):
        prepare(make_plan(models.llama(2), rows, "cp=2, pp=2"), models.tokens(4, 12))


def test_modules_on_different_axes() -> None:
    """Every attention meets the keys of all ranks, or is named."""
    rows = LLAMA.format("ring, over=a").replace("*", "0") + "\n"
    rows += LLAMA.format("ring, over=b").replace("*", "1")
    with pytest.raises(Refusal, match="does not attend to the keys of all ranks"):
        prepare(make_plan(models.llama(2), rows, "a=2, b=2"), models.tokens(4, 12))


def test_too_few_tokens() -> None:
    """Every rank needs a token."""
    with pytest.raises(Refusal, match="S680|tokens"):
        token_split(models.llama(2), LLAMA.format("ring, over=cp"), models.tokens(4, 3), "cp=4")


def test_a_wrong_way_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong split is an error of schedlang: the model differs in the trial, but not alone."""
    wrong_split = TokenSplit("contiguous", 2, labels="labels", shift="given")
    monkeypatch.setattr(probe, "list_candidates", lambda trial, kind, ranks: [wrong_split])
    with pytest.raises(OwnError, match="computes a token differently"):
        token_split(models.llama(2), LLAMA.format("gather, over=cp"), models.tokens(3, 9))


def module_refusal(plan: Plan, batch: Any) -> str:
    """On a rank: the refusal of `program.module`."""
    with pytest.raises(Refusal) as error:
        _ = build(plan, batch).module
    return error.value.render()


def test_no_module_of_its_own(threads: Threads) -> None:
    """`program.module` is refused, since a user's loop would give every rank all tokens."""
    plan = make_plan(models.llama(1), LLAMA.format("gather, over=cp"), "cp=2")
    message = threads.run(module_refusal, 2, plan, batches()[0])[0]
    assert "S617" in message and "train_step" in message
    plan_of_one = make_plan(models.llama(1), LLAMA.format("gather, over=cp"), "cp=1")
    assert build(plan_of_one, batches()[0]).module is not None
