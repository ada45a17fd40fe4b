"""Proofs of originals with defects: non-finite loss or gradients, or nothing trained."""

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
from tests.proofs import make_plan, sgd

DP, ONE_RANK = ("zero(stage=0, over=dp)", "dp=2"), ("body checkpoint()", "")
NAN = float("nan")


class Net(nn.Module):
    """Two layers and a loss with one fault: something is not finite, or not trained."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.how = nn.Linear(4, 8), nn.Linear(8, 5), fault
        if fault == "frozen":
            self.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.body(x)
        if self.how == "root of nothing":
            h = torch.where(x[:, :1] > 0, (h * 0).sqrt(), h)
        if self.how == "logarithm":
            h = h.log()
        output = self.head(h.tanh())
        loss = F.cross_entropy(output, y)
        if self.how == "large":
            loss = (output * 300).square().mean()
        if self.how == "detached":
            loss = loss.detach()
        if self.how == "of inputs":
            loss = x.square().mean()
        if self.how == "exploding":
            loss = (1e4 * output).pow(12).mean()
        if self.how == "masked":
            output = output.masked_fill(x[:, :1] > 0, NAN)
        return {"out": output} if self.how == "no loss" else {"loss": loss, "out": output}


def make_batches(changed_index: int = -1, **inputs: Tensor) -> tuple[dict[str, Tensor], ...]:
    """Return two batches; `inputs` replace entries of one of them."""
    result = []
    for k in range(2):
        g = torch.Generator().manual_seed(k)
        batch = {"x": torch.randn(6, 4, generator=g), "y": torch.randint(5, (6,), generator=g)}
        result.append(batch | inputs if k == changed_index else batch)
    return tuple(result)


def refusal_text(model: nn.Module, inputs: Any, rows: tuple[str, str]) -> str:
    """Prove and return the text of the refusal."""
    with pytest.raises(Refusal) as error:
        prove(Case(make_plan(model, *rows), inputs, dtype="float32"), pool=Threads())
    return error.value.render()


@pytest.mark.parametrize("rows", [DP, ONE_RANK], ids=["parts", "whole"])
@pytest.mark.parametrize("place", [0, 1])
def test_no_label_counts(rows: tuple[str, str], place: int) -> None:
    """If a batch has no counted label, the message names the batch and the reason."""
    message = refusal_text(Net(), make_batches(place, y=torch.full((6,), -100)), rows)
    assert "error[S707]: the original's loss is nan" in message and "S703" not in message
    assert (
        "no label of `y` counts, all are -100" in message and f"batch {place + 1} of 2" in message
    )
    assert "leave out batches" in message


@pytest.mark.parametrize("rows", [DP, ONE_RANK], ids=["parts", "whole"])
@pytest.mark.parametrize(
    "how, words",
    [
        ("logarithm", "arises first in the input of `head`"),
        ("root of nothing", "the gradient of `body.weight`, `body.bias` is not finite"),
    ],
)
def test_where_it_arises(rows: tuple[str, str], how: str, words: str) -> None:
    """The message names the module, or the gradient, that is first not finite."""
    message = refusal_text(Net(how), make_batches(), rows)
    assert "S707" in message and words in message, message


def test_a_batch_that_is_not_finite() -> None:
    """A non-finite batch is named instead of the model."""
    x = torch.ones(6, 4)
    x[2] = NAN
    message = refusal_text(Net(), make_batches(1, x=x), DP)
    assert "`x` of the batch: 4 of 24 elements are not finite" in message, message


def test_a_loss_that_training_makes_infinite() -> None:
    """A loss that becomes infinite in training is distinguished from a non-finite batch."""
    message = refusal_text(Net("exploding"), make_batches(), ONE_RANK)
    assert "S707" in message and "not finite in step 2" in message, message


@pytest.mark.parametrize(
    "how, code, words",
    [
        ("frozen", "S710", "no parameter of the original is trained"),
        ("detached", "S615", "the loss has no gradient"),
        ("of inputs", "S615", "a backward from it reaches no parameter"),
    ],
)
def test_nothing_is_trained(how: str, code: str, words: str) -> None:
    """A model without trained parameters is refused: nothing would be compared."""
    for rows in (DP, ONE_RANK):
        message = refusal_text(Net(how), make_batches(), rows)
        assert code in message and words in message, message


def test_a_program_is_built_all_the_same() -> None:
    """A batch without labels does not stop `build`: the program is built and trains."""
    inputs = make_batches(0, y=torch.full((6,), -100))

    def trained() -> float:
        program = build(make_plan(Net(), *DP), inputs[0], optimizer=sgd, check=check_if_cheap)
        return float(program.train_step(inputs[1]))

    rank0_loss, rank1_loss = Threads().run(trained, 2)
    assert rank0_loss == rank1_loss and rank0_loss == rank0_loss


def test_parts_with_equal_sums_by_chance() -> None:
    """A loss that is no mean of parts is refused, even if parts have equal sums by chance."""
    uneven_counts, equal_counts = torch.tensor([1.0, 2, 3, 3, 2, 1]), torch.ones(6)
    plan = make_plan(Net("no loss"), 'pipeline(order="GPipe", micro=2)')

    def mean(output: Any, batch: Any) -> Tensor:
        losses = F.cross_entropy(output["out"], batch["y"], reduction="none")
        return (losses * batch["kept"]).sum() / batch["kept"].sum()

    def refused(weights: Tensor) -> str:
        try:
            build(
                plan,
                make_batches(0, kept=weights)[0],
                loss=mean,
                check=partial(check_if_cheap, loss=mean),
            )
        except Refusal as error:
            return error.diagnostic.code
        return ""

    assert refused(uneven_counts) == "S703" and refused(equal_counts) == ""
    with pytest.raises(Refusal, match="S703"):
        prove(
            Case(plan, make_batches(0, kept=uneven_counts)[:1], mean, dtype="none"), pool=Threads()
        )


def test_a_program_that_only_evaluates_is_built() -> None:
    """`build` needs no gradient for a model that is only evaluated."""
    inputs = {"x": torch.ones(6, 4), "y": torch.zeros(6, dtype=torch.long)}

    def evaluated() -> Tensor:
        program = build(make_plan(Frozen(), *DP), inputs, check=check_if_cheap)
        return torch.as_tensor(program.eval_step(inputs)["out"])

    rank0, rank1 = Threads().run(evaluated, 2)
    assert torch.equal(rank0, rank1) and torch.equal(rank0, Frozen()(**inputs)["out"])


class Frozen(Net):
    """A network without any gradient, not even of its inputs."""

    def __init__(self) -> None:
        super().__init__("frozen")

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x.detach(), y)


# -- legal cases -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [DP, ONE_RANK], ids=["parts", "whole"])
def test_masked_outputs_may_be_no_numbers(rows: tuple[str, str]) -> None:
    """NaN at the same places of outputs is equal, in float64 and in the working dtype."""
    report = prove(
        Case(make_plan(Net("masked"), *rows), make_batches(), dtype="float32"), pool=Threads()
    )
    assert report.ok, str(report)
    assert any(row.kind == "outputs" and row.name == "out" for row in report.rows)


@pytest.mark.parametrize("kind, same", [("outputs", True), ("gradients", False)])
def test_not_a_number_in_other_places(kind: str, same: bool) -> None:
    """NaN on one side fails; NaN on both sides passes only in outputs."""
    key = Key("SGD", kind, 0, "a")
    one_nan, more_nan = torch.tensor([NAN, 1.0, 2.0]), torch.tensor([NAN, NAN, 2.0])

    def holds(value: Tensor, exact: bool = False) -> bool:
        sides = (Observation({key: v.double()}) for v in (one_nan, value.clone()))
        return Report(compare(*sides, exact=exact)).ok

    for exact in (False, True):
        assert holds(one_nan, exact) is same
        assert not holds(more_nan, exact) and not holds(torch.ones(3), exact)
    observations = [Observation({key: v.clone()}) for v in (one_nan, one_nan, more_nan)]
    for casts in (False, True) if kind == "outputs" else (False,):
        assert not Report(
            ErrorBounds(observations[0], lambda draw: observations[1]).rows(
                observations[2], casts=casts
            )
        ).ok


def test_an_original_that_overflows_in_its_dtype_is_not_checked_there() -> None:
    """Finite in float64 but overflowing in float16: neither a difference nor a pass."""
    report = prove(
        Case(make_plan(Net("large"), *DP), make_batches(), dtype="float16"), pool=Threads()
    )
    assert report.exit_code == 3 and all(row.ok for row in report.rows)
    assert any(OVERFLOWS in text and "working dtype" in text for text in report.unchecked)


@pytest.mark.parametrize("place, ok", [("a", True), ("b", True), ("", False)])
def test_a_step_that_a_cast_skips(place: str, ok: bool) -> None:
    """If a gradient of the original overflows, some gradient of the program must overflow, too.

    The next step compares all tensors again; the skipped step only finite ones.
    """
    inf, names = float("inf"), ("a", "b")

    def seen(bad_name: str, bad_step: int, off: float = 0.0, step_off: int = 1) -> Observation:
        tensors = {}
        for step, name in ((s, n) for s in (0, 1) for n in names):
            overflows = step == bad_step and name == bad_name
            value = torch.tensor([inf, 2.0]) if overflows else torch.tensor([1.0, 2.0])
            tensors[Key("SGD", "gradients", step, name)] = value + (
                off if step == step_off else 0.0
            )
        return Observation(tensors)

    exact = Observation({k: v.double() for k, v in seen("", 0).tensors.items() if v is not None})
    bounds = ErrorBounds(exact, lambda draw: seen("a", 0))
    assert Report(bounds.rows(seen(place, 0), casts=True)).ok is ok
    assert not Report(bounds.rows(seen(place, 1), casts=True)).ok
    assert not Report(bounds.rows(seen(place, 0, off=0.1), casts=True)).ok
    # `b` is finite on both sides and wrong: the skipped step must not hide it
    assert not Report(bounds.rows(seen("a", 0, off=0.1, step_off=0), casts=True)).ok


def test_an_original_that_is_no_number_decides_nothing() -> None:
    """NaN in float64 where the working dtype has numbers: neither right nor wrong."""
    key = Key("SGD", "outputs", 3, "logits")
    exact = Observation({key: torch.tensor([NAN, 1.0]).double()})
    working = Observation({key: torch.tensor([2.0, 1.0])})
    (row,) = ErrorBounds(exact, lambda draw: working).rows(
        Observation({key: torch.tensor([2.0, 1.0])})
    )
    assert not row.ok and row.note == OVERFLOWS and row.error != row.error
    hidden = Observation({key: torch.tensor([NAN, 1.0])})
    (row,) = ErrorBounds(exact, lambda draw: hidden).rows(
        Observation({key: torch.tensor([NAN, 1.0])})
    )
    assert row.ok
