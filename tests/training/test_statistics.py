"""Router losses under data parallelism: statistics of the whole batch, on ranks that see parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.passes.propagate.original_forward import record_many_rows
from schedlang.passes.prove import Case, prove
from schedlang.passes.simulate.account import account
from schedlang.passes.static_checks.static import static
from schedlang.runtime.declined_calls import declined_in
from schedlang.runtime.grad_reduction.batch_statistics import LossSums, gather_statistics
from tests import expert_models as models
from tests.experts.test_experts import KINDS
from tests.proofs import planned, proven, sgd, static_holds

ZERO = "zero(stage={}, over=dp)"


def padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with some padding on both sides, which neither loss counts."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 5:] = 0
    mask[2, :3] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return {**batch, "attention_mask": mask, "labels": labels}


OTHERS = ("GptOss", "Olmoe", "Qwen3Moe")


@pytest.mark.parametrize(
    ("kind", "pad"),
    [
        ("Mixtral", True),
        pytest.param("Mixtral", False, marks=pytest.mark.deep),
        *(pytest.param(kind, True, marks=pytest.mark.deep) for kind in OTHERS),
    ],
)
def test_router_losses_of_transformers(kind: str, pad: bool, threads: Any) -> None:
    """Loss, router gradients and three steps are those of the whole batch; static proofs hold."""
    more = {**KINDS[kind], "output_router_logits": True, "router_aux_loss_coef": 0.5}
    more |= {"layer_types": ["full_attention"]} if kind == "GptOss" else {}
    model, batch = models.transformers_model(kind, **more, num_hidden_layers=1)
    batch = padded(batch) if pad else batch
    plan = planned(model, ZERO.format(1), "dp=2")
    report = proven(threads, plan, [batch])
    assert report.equivalence == "algebraic"
    static_holds(plan, batch)


class Spread(models.Balanced):
    """The same, but for the spread of the logits over the batch, which is no mean."""

    def balance(self, logits: Tensor) -> Tensor:
        """The standard deviation over tokens."""
        return logits.std(0).sum()


EXPERTS = "layers.*.experts  expert_parallel(over=dp)\n"
STAGES = "layers  pipeline_split(over=pp)\n"
WAYS = {
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
    "name", [w if w == "own words" else pytest.param(w, marks=pytest.mark.deep) for w in WAYS]
)
def test_router_losses_in_own_words(name: str, threads: Any) -> None:
    """Means, sums of choices and a z-loss, of rows that ranks share unevenly and in stages."""
    rows, mesh, layers = WAYS[name]
    plan = planned(models.balanced(layers=layers), rows, mesh)
    report = proven(threads, plan, [models.batch(0), models.batch(1, rows=4)])
    assert report.equivalence == "algebraic"
    found = static(plan, models.batch(0))
    assert not found.problems


# -- what is found -----------------------------------------------------------------------------


def sums_of(model: nn.Module) -> LossSums:
    """The sums over rows that the model's loss is made of."""
    found = record_many_rows(planned(model, ""), models.batch(0), None)
    assert found is not None and found.sums is not None
    return found.sums


def test_which_sums_are_found() -> None:
    """Sums over rows that reach the loss, and no others: not those of norms, labels, choices."""
    found = sums_of(models.balanced())
    assert found.labels
    experts = (models.EXPERTS,)
    sums = {(one.name, one.fqn, one.shape) for one in found.sums}
    assert sums == {("sum", "", experts), ("mean", "", experts), ("mean", "", ())}
    assert not sums_of(models.tiny()).sums


def test_what_is_sent() -> None:
    """Each statistic is one sum of its numbers and a count, forward and backward."""
    plan = planned(models.balanced(), ZERO.format(0), "dp=2")
    sent = [one for one in account(plan, models.batch(0)).collectives if one.what == "statistics"]
    forward = sum(one.total for one in sent if one.phase == "forward")
    assert forward == 8 * (2 * (models.EXPERTS + 1) + 2)
    assert sum(one.total for one in sent if one.phase == "backward") == 8 * (models.EXPERTS + 1 + 2)


def test_relaxed_statistics_are_those_of_parts() -> None:
    """Where a step allows statistics of parts, none are shared."""
    plan = planned(models.balanced(), ZERO.format(0), "dp=2", "batch_stats")
    assert prepare(plan, models.batch(0)).traced.statistics is None


def _refusal(model: nn.Module, rows: str, mesh: str, threads: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        prove(Case(planned(model, rows, mesh), (models.batch(0),), dtype="none"), pool=threads)
    return caught.value


def test_microbatches_are_refused(threads: Any) -> None:
    """No microbatch sees what later ones hold: refused with both ways out."""
    rows = STAGES + '\npipeline(order="GPipe", micro=2)'
    found = _refusal(models.balanced(layers=2), rows, "pp=2", threads)
    assert found.diagnostic.code == "S668"
    said = found.render()
    assert "2 microbatches" in said and "`micro=1`" in said and "relax(batch_stats)" in said


def test_other_statistics_are_refused(threads: Any) -> None:
    """What is no sum over rows is not shared, and the loss is refused as before."""
    found = _refusal(models.balanced(Spread), ZERO.format(0), "dp=2", threads)
    assert found.diagnostic.code == "S703"


def test_another_way_through_the_model() -> None:
    """A forward that makes other sums where these were found is refused, not summed."""
    model = models.balanced()
    sums = sums_of(model).sums
    gather_statistics(model, [one for one in sums if one.name == "sum"], lambda x: x)
    model(**models.batch(0))
    model.balance = lambda logits: logits.sum()  # type: ignore[assignment]
    with pytest.raises(Refusal, match=r"is not the sum that was recorded\s+there") as caught:
        model(**models.batch(0))
    assert caught.value.diagnostic.code == "S669"


class Masked(nn.Module):
    """Two parts of a loss beside a mean: over rows that a mask keeps, and an overlap (Dice)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.other = nn.Linear(8, 2)

    def forward(self, x: Tensor, domain: Tensor, y: Tensor) -> Tensor:
        """Few rows are of the first domain; a part of the batch may have none."""
        hidden = torch.tanh(self.up(x))
        logits, kept = self.head(hidden), domain == 0
        each = nn.functional.cross_entropy(logits, y, reduction="none")
        masked = (each * kept).sum() / kept.sum().clamp(min=1)
        p, t = logits.sigmoid()[:, 0], (y == 0).to(x.dtype)
        dice = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
        return masked + dice + nn.functional.cross_entropy(self.other(hidden), domain)


def masked_batch(seed: int, first: int) -> dict[str, Tensor]:
    """Eight rows, `first` of them of the first domain, in front."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, generator=g, dtype=torch.float64)
    y = torch.randint(4, (8,), generator=g)
    return {"x": x, "domain": (torch.arange(8) >= first).long(), "y": y}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_counts_that_are_bounded_and_sums_with_a_number_added(ranks: int, threads: Any) -> None:
    """A count that is clamped is a statistic; bounds and numbers are those of the whole batch.

    One row of the whole batch counts, or none, or more than there are ranks.
    """
    torch.manual_seed(0)
    plan = planned(Masked().double(), ZERO.format(0), f"dp={ranks}")
    batches = [masked_batch(seed, first) for seed, first in enumerate((3, 1, 0, 5))]
    report = proven(threads, plan, batches)
    assert report.equivalence == "algebraic"


class Tail(nn.Module):
    """The mean of what a mask keeps."""

    def forward(self, each: Tensor, kept: Tensor) -> Tensor:
        """A count, of which a part of the batch has its share."""
        loss: Tensor = (each * kept).sum() / kept.sum()
        return loss


class Tailed(nn.Module):
    """A block, a head, and a masked mean in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 4)
        self.tail = Tail()

    def forward(self, x: Tensor, domain: Tensor, y: Tensor) -> Tensor:
        """Only rows of the first domain count."""
        logits = self.head(self.up(x))
        each = nn.functional.cross_entropy(logits, y, reduction="none")
        loss: Tensor = self.tail(each, domain == 0)
        return loss


def _trained(rows: str, threads: Any, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """What three steps on two ranks leave, and what a plain loop does; what was left eager."""
    batches = [masked_batch(seed, first) for seed, first in enumerate((4, 5, 6))]
    batches = [{k: (v.to(dtype) if k == "x" else v)[:7] for k, v in b.items()} for b in batches]

    def body() -> Any:
        program = build(planned(Tailed().to(dtype), rows, "dp=2"), batches[0], optimizer=sgd)
        for batch in batches:
            program.train_step(batch)
        return program.state_dict(), declined_in(program.assembly.module)

    plain = Tailed().to(dtype)
    steps = sgd(plain.named_parameters())
    for batch in batches:
        steps.zero_grad()
        plain(**batch).backward()
        steps.step()
    state, left = threads.run(body, 2)[0]
    return state, plain.state_dict(), left


def test_shares_of_counts_are_as_wide_as_the_parameters(threads: Any) -> None:
    """A model in float64 trains in float64 beside a share of a count."""
    found, expected, _ = _trained(ZERO.format(0), threads, torch.float64)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.deep  # inductor compiles
def test_compiled_regions_beside_sums_over_the_batch(threads: Any) -> None:
    """A region is compiled without the mode that makes such sums; one with a sum runs eagerly."""
    rows = "up  fuse()\ntail  fuse()\n" + ZERO.format(0)
    found, expected, left = _trained(rows, threads, torch.float32)
    assert [(one.sites, one.why) for one in left] == [
        (("tail",), "it sums over the rows of all ranks")
    ]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
