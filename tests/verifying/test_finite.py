"""Tests of what the original itself lacks: a finite loss, finite gradients, any gradient."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case, prove
from schedlang.passes.verify.compare import compare
from schedlang.passes.verify.conditioning import OVERFLOWS, ErrorBounds
from schedlang.passes.verify.observe import Key, Observation
from schedlang.passes.verify.probe import check_if_cheap
from schedlang.report import Report
from tests.engine import Threads
from tests.proofs import planned, sgd

DP, ALONE = ("zero(stage=0, over=dp)", "dp=2"), ("body checkpoint()", "")
NAN = float("nan")


class Net(nn.Module):
    """Two layers and a loss, with one thing that is not finite, or not trained."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.how = nn.Linear(4, 8), nn.Linear(8, 5), how
        if how == "frozen":
            self.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.body(x)
        if self.how == "root of nothing":
            h = torch.where(x[:, :1] > 0, (h * 0).sqrt(), h)
        if self.how == "logarithm":
            h = h.log()
        out = self.head(h.tanh())
        loss = F.cross_entropy(out, y)
        if self.how == "large":
            loss = (out * 300).square().mean()
        if self.how == "detached":
            loss = loss.detach()
        if self.how == "of inputs":
            loss = x.square().mean()
        if self.how == "exploding":
            loss = (1e4 * out).pow(12).mean()
        if self.how == "masked":
            out = out.masked_fill(x[:, :1] > 0, NAN)
        return {"out": out} if self.how == "no loss" else {"loss": loss, "out": out}


def batches(bad: int = -1, **other: Tensor) -> tuple[dict[str, Tensor], ...]:
    """Two batches; one of them with other inputs."""
    made = []
    for k in range(2):
        g = torch.Generator().manual_seed(k)
        batch = {"x": torch.randn(6, 4, generator=g), "y": torch.randint(5, (6,), generator=g)}
        made.append(batch | other if k == bad else batch)
    return tuple(made)


def refusal(model: nn.Module, given: Any, rows: tuple[str, str]) -> str:
    """What is said of it."""
    with pytest.raises(Refusal) as error:
        prove(Case(planned(model, *rows), given, dtype="float32"), pool=Threads())
    return error.value.render()


@pytest.mark.parametrize("rows", [DP, ALONE], ids=["parts", "whole"])
@pytest.mark.parametrize("place", [0, 1])
def test_no_label_counts(rows: tuple[str, str], place: int) -> None:
    """A mean over no label is that of the original, whatever rows say: the batch and why."""
    said = refusal(Net(), batches(place, y=torch.full((6,), -100)), rows)
    assert "error[S707]: the original's loss is nan" in said and "S703" not in said
    assert "no label of `y` counts, all are -100" in said and f"batch {place + 1} of 2" in said
    assert "leave out batches" in said


@pytest.mark.parametrize("rows", [DP, ALONE], ids=["parts", "whole"])
@pytest.mark.parametrize(
    "how, words",
    [
        ("logarithm", "arises first in the input of `head`"),
        ("root of nothing", "the gradient of `body.weight`, `body.bias` is not finite"),
    ],
)
def test_where_it_arises(rows: tuple[str, str], how: str, words: str) -> None:
    """In a module, or in the backward alone."""
    said = refusal(Net(how), batches(), rows)
    assert "S707" in said and words in said, said


def test_a_batch_that_is_not_finite() -> None:
    """What is wrong with the batch is not said of the model."""
    x = torch.ones(6, 4)
    x[2] = NAN
    said = refusal(Net(), batches(1, x=x), DP)
    assert "`x` of the batch: 4 of 24 elements are not finite" in said, said


def test_a_loss_that_training_makes_infinite() -> None:
    """Each batch is finite by itself; a step that goes too far is told from that."""
    said = refusal(Net("exploding"), batches(), ALONE)
    assert "S707" in said and "not finite in step 2" in said, said


@pytest.mark.parametrize(
    "how, code, words",
    [
        ("frozen", "S710", "no parameter of the original is trained"),
        ("detached", "S615", "the loss has no gradient"),
        ("of inputs", "S615", "a backward from it reaches no parameter"),
    ],
)
def test_nothing_is_trained(how: str, code: str, words: str) -> None:
    """Nothing would be compared."""
    for rows in (DP, ALONE):
        said = refusal(Net(how), batches(), rows)
        assert code in said and words in said, said


def test_a_program_is_built_all_the_same() -> None:
    """On a batch without labels `build` cannot ask whether parts make the whole: it trains."""
    given = batches(0, y=torch.full((6,), -100))

    def trained() -> float:
        program = build(planned(Net(), *DP), given[0], optimizer=sgd, check=check_if_cheap)
        return float(program.train_step(given[1]))

    first, second = Threads().run(trained, 2)
    assert first == second and first == first


def test_parts_with_equal_sums_by_chance() -> None:
    """A loss over a sum of its own is no mean of parts, also where these happen to add up alike."""
    chance, alike = torch.tensor([1.0, 2, 3, 3, 2, 1]), torch.ones(6)
    plan = planned(Net("no loss"), 'pipeline(order="GPipe", micro=2)')

    def mean(output: Any, batch: Any) -> Tensor:
        each = F.cross_entropy(output["out"], batch["y"], reduction="none")
        return (each * batch["kept"]).sum() / batch["kept"].sum()

    def refused(kept: Tensor) -> str:
        try:
            build(
                plan, batches(0, kept=kept)[0], loss=mean, check=partial(check_if_cheap, loss=mean)
            )
        except Refusal as error:
            return error.diagnostic.code
        return ""

    assert refused(chance) == "S703" and refused(alike) == ""
    with pytest.raises(Refusal, match="S703"):
        prove(Case(plan, batches(0, kept=chance)[:1], mean, dtype="none"), pool=Threads())


def test_a_program_that_only_evaluates_is_built() -> None:
    """Of a model of which nothing is trained `build` asks for no gradient."""
    given = {"x": torch.ones(6, 4), "y": torch.zeros(6, dtype=torch.long)}

    def evaluated() -> Tensor:
        program = build(planned(Frozen(), *DP), given, check=check_if_cheap)
        return torch.as_tensor(program.eval_step(given)["out"])

    one, other = Threads().run(evaluated, 2)
    assert torch.equal(one, other) and torch.equal(one, Frozen()(**given)["out"])


class Frozen(Net):
    """Nothing of it, nor of its inputs, asks for a gradient."""

    def __init__(self) -> None:
        super().__init__("frozen")

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x.detach(), y)


# -- what is legal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [DP, ALONE], ids=["parts", "whole"])
def test_masked_outputs_may_be_no_numbers(rows: tuple[str, str]) -> None:
    """NaN in the same places of outputs, in float64 and in the working dtype, is no difference."""
    report = prove(Case(planned(Net("masked"), *rows), batches(), dtype="float32"), pool=Threads())
    assert report.ok, str(report)
    assert any(row.kind == "outputs" and row.name == "out" for row in report.rows)


@pytest.mark.parametrize("kind, same", [("outputs", True), ("gradients", False)])
def test_not_a_number_in_other_places(kind: str, same: bool) -> None:
    """NaN on one side alone fails, and everywhere but in outputs on both."""
    key = Key("SGD", kind, 0, "a")
    want, other = torch.tensor([NAN, 1.0, 2.0]), torch.tensor([NAN, NAN, 2.0])

    def holds(value: Tensor, exact: bool = False) -> bool:
        sides = (Observation({key: v.double()}) for v in (want, value.clone()))
        return Report(compare(*sides, exact=exact)).ok

    for exact in (False, True):
        assert holds(want, exact) is same
        assert not holds(other, exact) and not holds(torch.ones(3), exact)
    seen = [Observation({key: v.clone()}) for v in (want, want, other)]
    for casts in (False, True) if kind == "outputs" else (False,):
        assert not Report(ErrorBounds(seen[0], lambda draw: seen[1]).rows(seen[2], casts=casts)).ok


def test_an_original_that_overflows_in_its_dtype_is_not_checked_there() -> None:
    """Finite in float64, too large for float16: no difference, and no pass."""
    report = prove(Case(planned(Net("large"), *DP), batches(), dtype="float16"), pool=Threads())
    assert report.exit_code == 3 and all(row.ok for row in report.rows)
    assert any(OVERFLOWS in said and "working dtype" in said for said in report.unchecked)


@pytest.mark.parametrize("place, ok", [("a", True), ("b", True), ("", False)])
def test_a_step_that_a_cast_skips(place: str, ok: bool) -> None:
    """Where a gradient of the original overflows one of the program's must, whichever it is.

    A step later both are compared again, in every tensor; in that step those that are finite.
    """
    inf, names = float("inf"), ("a", "b")

    def seen(bad: str, at: int, off: float = 0.0, step_off: int = 1) -> Observation:
        tensors = {}
        for step, name in ((s, n) for s in (0, 1) for n in names):
            over = step == at and name == bad
            value = torch.tensor([inf, 2.0]) if over else torch.tensor([1.0, 2.0])
            tensors[Key("SGD", "gradients", step, name)] = value + (
                off if step == step_off else 0.0
            )
        return Observation(tensors)

    exact = Observation({k: v.double() for k, v in seen("", 0).tensors.items() if v is not None})
    bounds = ErrorBounds(exact, lambda draw: seen("a", 0))
    assert Report(bounds.rows(seen(place, 0), casts=True)).ok is ok
    assert not Report(bounds.rows(seen(place, 1), casts=True)).ok
    assert not Report(bounds.rows(seen(place, 0, off=0.1), casts=True)).ok
    # `b` is finite on both sides, and wrong: that the step is skipped does not hide it
    assert not Report(bounds.rows(seen("a", 0, off=0.1, step_off=0), casts=True)).ok


def test_an_original_that_is_no_number_decides_nothing() -> None:
    """NaN in float64 where the original in its dtype has numbers: neither right nor wrong."""
    key = Key("SGD", "outputs", 3, "logits")
    exact = Observation({key: torch.tensor([NAN, 1.0]).double()})
    low = Observation({key: torch.tensor([2.0, 1.0])})
    (row,) = ErrorBounds(exact, lambda draw: low).rows(Observation({key: torch.tensor([2.0, 1.0])}))
    assert not row.ok and row.note == OVERFLOWS and row.error != row.error
    hidden = Observation({key: torch.tensor([NAN, 1.0])})
    (row,) = ErrorBounds(exact, lambda draw: hidden).rows(
        Observation({key: torch.tensor([NAN, 1.0])})
    )
    assert row.ok
