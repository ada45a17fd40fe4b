"""Router losses in data parallelism: batch statistics, on ranks that have parts of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.passes.propagate.loss_sums import record_many_rows
from schedlang.passes.prove import Case, prove
from schedlang.passes.simulate.account import account
from schedlang.passes.static_checks.static import static
from schedlang.runtime.declined_calls import declined_in
from schedlang.runtime.grad_reduction.batch_statistics import gather_statistics
from schedlang.runtime.propagation.batch_sums import LossSums
from tests import expert_models as models
from tests.experts.test_experts import KINDS
from tests.proofs import assert_proven, make_plan, sgd, static_holds

ZERO = "zero(stage={}, over=dp)"


def pad_batch(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with padding on both sides, which no loss counts."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 5:] = 0
    mask[2, :3] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return {**batch, "attention_mask": mask, "labels": labels}


def pad_right(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with padding at the end of a row, which no loss counts."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 5:] = 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


OTHER_KINDS = ("GptOss", "Olmoe", "Qwen3Moe")


@pytest.mark.parametrize(
    ("kind", "pad"),
    [
        ("Mixtral", True),
        pytest.param("Mixtral", False, marks=pytest.mark.deep),
        *(pytest.param(kind, True, marks=pytest.mark.deep) for kind in OTHER_KINDS),
    ],
)
def test_router_losses_of_transformers(kind: str, pad: bool, threads: Any) -> None:
    """Loss, router gradients and three steps equal those of the whole batch; static checks pass."""
    options = {**KINDS[kind], "output_router_logits": True, "router_aux_loss_coef": 0.5}
    options |= {"layer_types": ["full_attention"]} if kind == "GptOss" else {}
    model, batch = models.transformers_model(kind, **options, num_hidden_layers=1)
    batch = pad_batch(batch) if pad else batch
    plan = make_plan(model, ZERO.format(1), "dp=2")
    report = assert_proven(threads, plan, [batch])
    assert report.equivalence == "algebraic"
    static_holds(plan, batch)


@pytest.mark.parametrize("mesh", ["dp=2, tp=2", "tp=2, dp=2"])
def test_router_losses_beside_a_sharded_vocabulary(mesh: str, threads: Any) -> None:
    """Sums inside the sharded cross-entropy are none of the model's own calls."""
    options = {**KINDS["Mixtral"], "output_router_logits": True, "router_aux_loss_coef": 0.5}
    model, batch = models.transformers_model("Mixtral", **options, num_hidden_layers=1)
    plan = make_plan(model, "lm_head  shard(vocab, over=tp)\n" + ZERO.format(1), mesh)
    assert_proven(threads, plan, [pad_batch(batch)])


@pytest.mark.parametrize(
    "kind", ["Mixtral", *(pytest.param(kind, marks=pytest.mark.deep) for kind in OTHER_KINDS)]
)
def test_router_losses_of_split_sequences(kind: str, threads: Any) -> None:
    """Ranks that have some tokens of some rows share the sums over all."""
    options = {**KINDS[kind], "output_router_logits": True, "router_aux_loss_coef": 0.5}
    options |= {"layer_types": ["full_attention"]} if kind == "GptOss" else {}
    model, batch = models.transformers_model(kind, **options, num_hidden_layers=1)
    rows = "model.layers.*.self_attn  context_parallel(gather, over=cp, layout=zigzag)\n"
    plan = make_plan(model, rows + "zero(stage=1, over=(dp, cp))", "dp=2, cp=2")
    assert_proven(threads, plan, [pad_right(batch)])


class SpreadLoss(models.Balanced):
    """Adds the spread of the logits over the batch to the loss: it is no mean."""

    def balance(self, logits: Tensor) -> Tensor:
        """Return the standard deviation over tokens."""
        return logits.std(0).sum()


EXPERTS = "layers.*.experts  expert_parallel(over=dp)\n"
STAGES = "layers  pipeline_split(over=pp)\n"
LAYOUTS = {
    "own words": (ZERO.format(0), "dp=2", 1),
    "experts sent": (EXPERTS + ZERO.format(0), "dp=2", 1),
    "two axes": ("zero(stage=3, over=a)\nzero(stage=0, over=b)", "a=2, b=2", 1),
    "stages": (
        EXPERTS + STAGES + ZERO.format(0) + '\npipeline(order="1F1B", micro=1)',
        "dp=2, pp=2",
        2,
    ),
}


@pytest.mark.parametrize(
    "name", [w if w == "own words" else pytest.param(w, marks=pytest.mark.deep) for w in LAYOUTS]
)
def test_router_losses_in_own_words(name: str, threads: Any) -> None:
    """Means, sums of choices and a z-loss, over uneven rows of ranks and in stages."""
    rows, mesh, layers = LAYOUTS[name]
    plan = make_plan(models.balanced_model(layers=layers), rows, mesh)
    report = assert_proven(threads, plan, [models.batch(0), models.batch(1, rows=4)])
    assert report.equivalence == "algebraic"
    result = static(plan, models.batch(0))
    assert not result.problems


class BalancedLayer(nn.Module):
    """A mixture of experts, all of which compute, with its load-balancing loss and a z-loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return activations and the auxiliary losses."""
        logits = self.router(x)
        weights = logits.softmax(-1)
        chosen = F.one_hot(weights.argmax(-1), 4).to(x.dtype)
        outputs = self.experts(x).tanh().unflatten(-1, (4, 8))
        balance = 4 * (chosen.mean((0, 1)) * weights.mean((0, 1))).sum()
        y = x + ((chosen * weights).unsqueeze(-1) * outputs).sum(-2)
        return y, balance + logits.logsumexp(-1).square().mean()


class BalancedLayers(nn.Module):
    """Layers with losses of their own; `recomputes`: in checkpoints of the model's own."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recomputes, self.words = recomputes, nn.Embedding(models.WORDS, 8)
        self.layers = nn.ModuleList(BalancedLayer() for _ in range(2))
        self.head = nn.Linear(8, models.WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        x, auxiliary = self.words(ids), torch.zeros(())
        for layer in self.layers:
            x, loss = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
            auxiliary = auxiliary + loss
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.5 * auxiliary


RECOMPUTED = {
    "each layer": ("layers.*  checkpoint()\n", False),
    "within a budget": ('layers.*  checkpoint(plan="dtr", memory=20KiB)\n', False),
    "by the model": ("", True),
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputed_sums(name: str, threads: Any) -> None:
    """A recomputation sums over ranks again, also one of the model's own."""
    rows, own = RECOMPUTED[name]
    plan = make_plan(BalancedLayers(own), rows + ZERO.format(1), "dp=2")
    assert_proven(threads, plan, [models.batch(0), models.batch(1, rows=4)])


# -- what is found -----------------------------------------------------------------------------


def recorded_sums(model: nn.Module) -> LossSums:
    """Return the sums over rows that the model's loss consists of."""
    recorded = record_many_rows(make_plan(model, ""), models.batch(0), None)
    assert recorded is not None and recorded.sums is not None
    return recorded.sums


def test_which_sums_are_found() -> None:
    """Sums over rows that reach the loss, and no sums of norms, labels or choices."""
    recorded = recorded_sums(models.balanced_model())
    assert recorded.weighs_by_labels
    experts = (models.EXPERTS,)
    sums = {(loss_sum.name, loss_sum.fqn, loss_sum.shape) for loss_sum in recorded.sums}
    assert sums == {("sum", "", experts), ("mean", "", experts), ("mean", "", ())}
    assert not recorded_sums(models.tiny_model()).sums


def test_what_is_sent() -> None:
    """Each statistic is one sum of its numbers and a count, forward and backward."""
    plan = make_plan(models.balanced_model(), ZERO.format(0), "dp=2")
    sent = [
        collective
        for collective in account(plan, models.batch(0)).collectives
        if collective.what == "statistics"
    ]
    forward = sum(collective.total for collective in sent if collective.phase == "forward")
    assert forward == 8 * (2 * (models.EXPERTS + 1) + 2)
    assert sum(collective.total for collective in sent if collective.phase == "backward") == 8 * (
        models.EXPERTS + 1 + 2
    )


def test_relaxed_statistics_are_those_of_parts() -> None:
    """If a step allows statistics of parts, none are shared."""
    plan = make_plan(models.balanced_model(), ZERO.format(0), "dp=2", "batch_stats")
    assert prepare(plan, models.batch(0)).traced.statistics is None


def refusal_of(model: nn.Module, rows: str, mesh: str, threads: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        prove(Case(make_plan(model, rows, mesh), (models.batch(0),), dtype="none"), pool=threads)
    return caught.value


def test_microbatches_are_refused(threads: Any) -> None:
    """No microbatch knows the later ones: refused with both solutions."""
    rows = STAGES + '\npipeline(order="GPipe", micro=2)'
    refusal = refusal_of(models.balanced_model(layers=2), rows, "pp=2", threads)
    assert refusal.diagnostic.code == "S668"
    message = refusal.render()
    assert (
        "2 microbatches" in message and "`micro=1`" in message and "relax(batch_stats)" in message
    )


def test_other_statistics_are_refused(threads: Any) -> None:
    """A statistic that is no sum over rows is not shared, and the loss is refused."""
    refusal = refusal_of(models.balanced_model(SpreadLoss), ZERO.format(0), "dp=2", threads)
    assert refusal.diagnostic.code == "S703"


def test_another_way_through_the_model() -> None:
    """A forward that computes other sums than the recorded ones is refused."""
    model = models.balanced_model()
    sums = recorded_sums(model).sums
    gather_statistics(model, [loss_sum for loss_sum in sums if loss_sum.name == "sum"], lambda x: x)
    model(**models.batch(0))
    model.balance = lambda logits: logits.sum()  # type: ignore[assignment]
    with pytest.raises(Refusal, match=r"is not the sum that was recorded\s+there") as caught:
        model(**models.batch(0))
    assert caught.value.diagnostic.code == "S669"


ROUTER_LOSSES: list[Tensor] = []


class Remembering(models.LoggingMixture):
    """A mixture that puts a loss of its router into a global list."""

    def forward(self, x: Tensor) -> Any:
        """Return the output of the experts."""
        output, logits = super().forward(x)
        ROUTER_LOSSES.append(logits.logsumexp(-1).pow(2).mean())
        return output


class GlobalLosses(models.Tiny):
    """A model with such losses; `early`: it empties the list before the layers, not after them."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early
        self.layers = nn.ModuleList(Remembering(models.EXPERTS) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss and the logits."""
        if self.early:
            ROUTER_LOSSES.clear()
        output = super().forward(ids, labels)
        output["loss"] = output["loss"] + 0.1 * sum(ROUTER_LOSSES)
        if not self.early:
            ROUTER_LOSSES.clear()
        return output


@pytest.mark.parametrize("early", [False, True])
def test_losses_in_a_global_list(early: bool, threads: Any) -> None:
    """Parts that run in one process share the list: refused, at once."""
    torch.manual_seed(0)
    refusal = refusal_of(GlobalLosses(early).double(), ZERO.format(0), "dp=2", threads)
    assert refusal.diagnostic.code == "S669" and "a global list" in refusal.render()


class MaskedLosses(nn.Module):
    """A masked mean and an overlap (Dice), beside a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.other = nn.Linear(8, 2)

    def forward(self, x: Tensor, domain: Tensor, y: Tensor) -> Tensor:
        """Few rows are of the first domain; a part of the batch may have none."""
        hidden = torch.tanh(self.up(x))
        logits, in_domain = self.head(hidden), domain == 0
        row_losses = nn.functional.cross_entropy(logits, y, reduction="none")
        masked = (row_losses * in_domain).sum() / in_domain.sum().clamp(min=1)
        p, t = logits.sigmoid()[:, 0], (y == 0).to(x.dtype)
        dice = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
        return masked + dice + nn.functional.cross_entropy(self.other(hidden), domain)


def masked_batch(seed: int, first: int) -> dict[str, Tensor]:
    """Return eight rows, the first `first` of them of the first domain."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, generator=g, dtype=torch.float64)
    y = torch.randint(4, (8,), generator=g)
    return {"x": x, "domain": (torch.arange(8) >= first).long(), "y": y}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_counts_that_are_bounded_and_sums_with_a_number_added(ranks: int, threads: Any) -> None:
    """A clamped count is a statistic; bounds and constants apply to the whole batch.

    One row of the whole batch counts, or none, or more than there are ranks.
    """
    torch.manual_seed(0)
    plan = make_plan(MaskedLosses().double(), ZERO.format(0), f"dp={ranks}")
    batches = [masked_batch(seed, first) for seed, first in enumerate((3, 1, 0, 5))]
    report = assert_proven(threads, plan, batches)
    assert report.equivalence == "algebraic"


class MaskedMean(nn.Module):
    """The mean of the masked rows."""

    def forward(self, row_losses: Tensor, mask: Tensor) -> Tensor:
        """Divide by a count, of which a part of the batch has its share."""
        loss: Tensor = (row_losses * mask).sum() / mask.sum()
        return loss


class MaskedMeanNet(nn.Module):
    """A block, a head, and a masked mean in its own module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 4)
        self.tail = MaskedMean()

    def forward(self, x: Tensor, domain: Tensor, y: Tensor) -> Tensor:
        """Count only rows of the first domain."""
        logits = self.head(self.up(x))
        row_losses = nn.functional.cross_entropy(logits, y, reduction="none")
        loss: Tensor = self.tail(row_losses, domain == 0)
        return loss


def train_both(rows: str, threads: Any, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Train three steps on two ranks and in a plain loop: return both states, and the eager
    regions."""
    batches = [masked_batch(seed, count) for seed, count in enumerate((4, 5, 6))]
    batches = [{k: (v.to(dtype) if k == "x" else v)[:7] for k, v in b.items()} for b in batches]

    def body() -> Any:
        program = build(
            make_plan(MaskedMeanNet().to(dtype), rows, "dp=2"), batches[0], optimizer=sgd
        )
        for batch in batches:
            program.train_step(batch)
        return program.state_dict(), declined_in(program.assembly.module)

    original = MaskedMeanNet().to(dtype)
    steps = sgd(original.named_parameters())
    for batch in batches:
        steps.zero_grad()
        original(**batch).backward()
        steps.step()
    state, eager = threads.run(body, 2)[0]
    return state, original.state_dict(), eager


def test_shares_of_counts_are_as_wide_as_the_parameters(threads: Any) -> None:
    """A float64 model trains in float64 with shared counts."""
    state, expected, _ = train_both(ZERO.format(0), threads, torch.float64)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.deep  # inductor compiles
def test_compiled_regions_beside_sums_over_the_batch(threads: Any) -> None:
    """A region without such sums is compiled; one with a sum runs eagerly."""
    rows = "up  fuse()\ntail  fuse()\n" + ZERO.format(0)
    state, expected, eager = train_both(rows, threads, torch.float32)
    assert [(declined.sites, declined.reason) for declined in eager] == [
        (("tail",), "it sums over the rows of all ranks")
    ]
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
