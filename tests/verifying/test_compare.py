"""Comparison of two observations: equal ones pass, every kind of difference fails."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from schedlang.passes.verify.compare import compare
from schedlang.passes.verify.observe import Key, Observation, observe, standard_conditions
from schedlang.passes.verify.original import Sequential
from schedlang.passes.verify.probe import compare_parts
from schedlang.report import Report
from schedlang.runtime.batch import BatchPart, select_rows, stack_outputs
from schedlang.runtime.float64 import Float64, as_float64
from schedlang.runtime.launch.pool import Pool
from schedlang.runtime.modes import enter_modes
from schedlang.runtime.rng.logical_dropout import LogicalDropout, LogicalWindow
from schedlang.runtime.scope import Scope, enter_scope, named_sites


class Net(nn.Module):
    """Tied embedding and head, dropout, a buffer that is updated, an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        self.drop = nn.Dropout(0.3)
        self.head.weight = self.emb.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.count += len(ids)
        logits = self.head(self.drop(self.mid(self.emb(ids)).float().tanh()))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def _batch(seed: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 7, (4 + seed % 2, 5), generator=gen)
    labels[0, seed:] = -100
    return {"ids": torch.randint(0, 7, labels.shape, generator=gen), "labels": labels}


BATCHES = tuple(_batch(seed) for seed in (2, 3, 4))


class Accumulated(Sequential):
    """The same training with one sample at a time: another order of the same sums."""

    fault = ""

    def forward_backward(self, batch: Any, samples: Any) -> torch.Tensor:
        counts = [int((row != -100).sum()) for row in batch["labels"]]
        parts, losses, outputs = {}, [], []
        old_count = self.module.count.clone()
        for i, n in enumerate(counts):
            part = {k: v[i : i + 1] for k, v in batch.items()}
            losses.append(super().forward_backward(part, [samples[i]]) * n / sum(counts))
            outputs.append(self.output)
            for name, grad in self.gradients().items():
                if grad is not None:
                    parts[name] = parts.get(name, 0) + grad * n / sum(counts)
        for name, parameter in self._parameters:
            parameter.grad = parts.get(name)
        with torch.no_grad():
            self.module.count.copy_(old_count + len(counts))
        self.output = stack_outputs(outputs, [1] * len(counts), counts)
        self.spoil()
        return sum(losses)

    def spoil(self) -> None:
        """Apply `fault` to the gradients."""
        params = dict(self._parameters)
        if self.fault == "missing":
            params["mid.bias"].grad = None
        elif self.fault == "zeros for none":
            params["unused"].grad = torch.zeros(2, dtype=torch.float64)
        elif self.fault == "nan":
            params["mid.weight"].grad[0, 0] = math.nan
        elif self.fault == "one element":
            params["mid.weight"].grad[0, 0] += 1e-6
        elif self.fault == "twice":
            for p in params.values():
                p.grad = None if p.grad is None else 2 * p.grad


def _observe(kind: type[Sequential], fault: str = "", seed: int = 0) -> Observation:
    torch.manual_seed(0)
    model = Net()

    def make(condition: Any) -> Sequential:
        trainer = kind(as_float64(model), condition.optimizer, clip=condition.clip)
        trainer.fault = fault
        return trainer

    with enter_modes(Float64()), enter_modes(LogicalDropout(seed)):
        return observe(make, standard_conditions(BATCHES, 1.0))


@pytest.fixture(scope="module")
def expected() -> Observation:
    """Return the observation of the original."""
    return _observe(Sequential)


def test_another_order_of_sums_is_equal(expected: Observation) -> None:
    """With dropout, ragged labels and clipping, one sample at a time passes far below the gate."""
    report = Report(compare(expected, _observe(Accumulated)))
    assert report.ok, str(report)
    assert report.worst.error < 1e-12
    kinds = {row.kind for row in report.rows}
    assert {"outputs", "loss", "gradients", "gradient norm", "parameters", "other state"} <= kinds
    assert {"tied weights", "trainable set", "state_dict keys", "optimizer exp_avg"} <= kinds


def test_exact_means_the_last_bit(expected: Observation) -> None:
    """The same run is bitwise equal; another order of sums is not."""
    copied = copy.deepcopy(expected)
    assert Report(compare(expected, copied, exact=True)).ok
    assert not Report(compare(expected, _observe(Accumulated), exact=True)).ok


@pytest.mark.parametrize(
    ("fault", "kind", "name"),
    [
        ("missing", "gradients", "mid.bias"),
        ("zeros for none", "gradients", "unused"),
        ("nan", "gradients", None),  # clipping spreads it to all
        ("one element", "gradients", "mid.weight"),
        ("twice", "gradients", None),
    ],
)
def test_wrong_gradients_are_found_where_they_arise(
    expected: Observation, fault: str, kind: str, name: str | None
) -> None:
    """The first difference is the changed gradient, not its consequences."""
    report = Report(compare(expected, _observe(Accumulated, fault)))
    assert report.exit_code == 1
    assert report.first.kind == kind and report.first.step == 0
    assert report.first.name == (name or expected.order[0])


def test_other_dropout_masks_are_found(expected: Observation) -> None:
    """Another dropout seed differs in training, while outputs in eval mode agree."""
    report = Report(compare(expected, _observe(Sequential, seed=1)))
    assert report.first.kind == "training outputs"


def _with_value(observation: Observation, key: Key, value: Any) -> Observation:
    return replace(
        copy.deepcopy(observation), tensors={**copy.deepcopy(observation.tensors), key: value}
    )


def test_each_kind_of_tensor_is_compared(expected: Observation) -> None:
    """A relative change of 1e-8 in any tensor, or its absence, fails and names that tensor."""
    for key, value in expected.tensors.items():
        if value is None or not value.any():
            continue
        changed = value * (1 + 1e-8) if value.is_floating_point() else value + 1
        for spoiled in (changed, None):
            first_failure = Report(compare(expected, _with_value(expected, key, spoiled))).first
            assert first_failure is not None and (first_failure.kind, first_failure.name) == (
                key.kind,
                key.name,
            )


def test_no_gradient_may_be_told_by_none_or_by_silence(expected: Observation) -> None:
    """An unused parameter may have no gradient or no entry: both are equal."""
    present = {k: v for k, v in copy.deepcopy(expected.tensors).items() if v is not None}
    assert len(present) < len(expected.tensors)
    assert Report(compare(expected, replace(expected, tensors=present))).ok


def test_sets_ties_and_replicas_are_compared(expected: Observation) -> None:
    """A lost key, a broken tie and different replicas fail, each under its name."""
    key = Key("SGD", "trainable set", 0, "")
    reduced = replace(expected, tensors=copy.deepcopy(expected.tensors), sets={**expected.sets})
    reduced.sets[key] = reduced.sets[key] - {"mid.bias"}
    assert Report(compare(expected, reduced)).first.note == "lost: mid.bias"
    head = Key("SGD", "other state", 2, "head.weight")
    assert head in expected.tensors
    untied = _with_value(expected, head, expected.tensors[head] * (1 + 1e-15) + 1e-15)
    assert Report(compare(expected, untied)).first.kind == "tied weights"
    key = Key("SGD", "replicas", 0, "mid.weight")
    different = replace(copy.deepcopy(expected), replicas={key: 1e-8})
    assert Report(compare(expected, different)).first.kind == "replicas"
    nan = replace(copy.deepcopy(expected), replicas={key: math.nan})
    assert not Report(compare(expected, nan)).ok


def test_nothing_is_compared_with_itself(expected: Observation) -> None:
    """Comparing observations that share memory is an internal error."""
    with pytest.raises(AssertionError):
        compare(expected, expected)


def test_infinite_scores_may_agree_and_nan_never() -> None:
    """Minus infinity on both sides is equal; NaN on both sides is not, except in masked outputs."""
    for kind in ("outputs", "training outputs", "loss", "gradients", "parameters", "other state"):
        key = Key("", kind, 0, "x")
        masked = "outputs" in kind
        for first, second, ok in (
            (1.0, -math.inf, True),
            (1.0, math.nan, masked),
            (math.nan, math.nan, False),
        ):
            sides = [Observation({key: torch.tensor([first, second]).double()}) for _ in range(2)]
            assert Report(compare(*sides)).ok == ok, (kind, first, second)
    key = Key("", "outputs", 0, "x")
    sides = [Observation({key: torch.tensor([1.0, s * math.inf]).double()}) for s in (1, -1)]
    assert not Report(compare(*sides)).ok


@pytest.mark.parametrize("scale", [1e-14, 1e-8])
def test_zero_but_for_rounding_is_judged_by_its_kind(scale: float) -> None:
    """A gradient as small as rounding errors is judged by the size of its kind."""
    small = Key("", "gradients", 0, "small")
    big = Key("", "gradients", 0, "big")
    sides = [
        Observation({small: torch.full((2,), s * scale).double(), big: torch.ones(9).double()})
        for s in (1.0, -1.0)
    ]
    assert Report(compare(*sides)).ok == (scale == 1e-14)


@pytest.mark.parametrize("weigh", ["labels", "rows"])
def test_parts_weighed_by_labels_agree_and_by_rows_do_not(weigh: str) -> None:
    """The check on the original accepts weights by labels and rejects weights by rows."""
    torch.manual_seed(0)
    trainer = Sequential(as_float64(Net()))
    count = trainer.module.count.clone()
    batch = BATCHES[0]
    parts = [
        BatchPart(select_rows(batch, range(i, j), 4), tuple(range(i, j)))
        for i, j in ((0, 3), (3, 4))
    ]
    weights = [
        int((p.inputs["labels"] != -100).sum()) if weigh == "labels" else len(p.rows) for p in parts
    ]
    with enter_modes(Float64()), enter_modes(LogicalDropout(0)):
        rows = compare_parts(trainer, batch, parts, weights)
    assert all(row.ok for row in rows) == (weigh == "labels")
    assert {row.kind for row in rows} == {"loss of parts", "gradients of parts"}
    assert torch.equal(trainer.module.count, count)


class HalfRank:
    """One of two ranks: half the columns of the first layer, half the rows of the second."""

    def __init__(self, model: nn.Sequential, condition: Any, reduces: bool) -> None:
        rank = dist.get_rank()
        self.clip, self.reduces, self.steps = condition.clip, reduces, 0
        self.up = nn.Parameter(model[0].weight.detach().chunk(2)[rank].clone())
        self.down = nn.Parameter(model[3].weight.detach().chunk(2, 1)[rank].clone())
        self.bias = nn.Parameter(model[3].bias.detach().clone())
        self.named = [("0.weight", self.up), ("3.weight", self.down), ("3.bias", self.bias)]
        self.optimizer = condition.optimizer(self.named)
        self.grad_norm: torch.Tensor | None = None
        self.layers = nn.ModuleDict({"2": nn.Dropout(0.4)})  # with the path of the original
        named_sites(self.layers)

    def forward(self, x: torch.Tensor, training: bool) -> torch.Tensor:
        self.x = x.detach().requires_grad_(training)
        inner = self.layers.train(training)["2"]((self.x @ self.up.T).tanh())
        return Summed.apply(inner @ self.down.T) + self.bias

    def train_step(self, batch: Any) -> torch.Tensor:
        with enter_scope(Scope(self.steps, 0, tuple(range(len(batch["input"]))))):
            self.output = self.forward(batch["input"], True)
            loss = self.output.square().mean()
            self.optimizer.zero_grad()
            loss.backward()
        squares = self.up.grad.square().sum() + self.down.grad.square().sum()
        if self.reduces:
            dist.all_reduce(squares)
        self.grad_norm = (squares + self.bias.grad.square().sum()).sqrt()
        for _, p in self.named:
            p.grad *= (self.clip / (self.grad_norm + 1e-6)).clamp(max=1)
        self.optimizer.step()
        self.steps += 1
        return loss

    def eval_step(self, batch: Any) -> torch.Tensor:
        return self.forward(batch["input"], False)

    def whole(self, values: Any) -> dict[str, torch.Tensor]:
        up, down, bias = values
        return {
            "0.weight": torch.cat(_gather_all(up)),
            "3.weight": torch.cat(_gather_all(down), 1),
            "3.bias": bias,
        }

    def gradients(self) -> Any:
        return self.whole([p.grad for _, p in self.named])

    def input_gradients(self) -> Any:
        grad = self.x.grad.clone()
        dist.all_reduce(grad)
        return {"input": grad}

    def state_dict(self) -> Any:
        return self.whole([p.detach() for _, p in self.named])

    def optimizer_state(self) -> Any:
        states = [self.optimizer.state[p] for _, p in self.named]
        slots: dict[str, Any] = {name: {} for name, _ in self.named}
        for slot in states[0]:
            values = [state[slot] for state in states]
            full_values = self.whole(values) if values[0].dim() else dict(zip(slots, values))
            for name, value in full_values.items():
                slots[name][slot] = value
        return slots

    def trainable(self) -> list[str]:
        return [name for name, _ in self.named]

    def replicas(self) -> dict[str, float]:
        first, second = _gather_all(self.bias.detach())
        return {"3.bias": float((first - second).norm() / first.norm())}


class Summed(torch.autograd.Function):
    """The sum over ranks, with an identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _gather_all(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x.contiguous())
    return parts


def _observe_rank(model: nn.Sequential, batches: Any, norm: float, reduces: bool) -> Observation:
    """Observe on a rank, with its slice of the logical dropout mask."""
    rank = dist.get_rank()
    window = LogicalWindow((6,), (range(3 * rank, 3 * rank + 3),))
    modes = enter_modes(Float64()), enter_modes(LogicalDropout(5, lambda *_: window))
    with modes[0], modes[1]:
        kinds = standard_conditions(batches, norm)
        return observe(lambda c: HalfRank(model, c, reduces), kinds, keep=rank == 0)


@pytest.mark.parametrize("reduces", [True, False], ids=["right", "local norm"])
def test_a_program_on_two_ranks(reduces: bool) -> None:
    """Tensor parallelism with dropout equals the original; a local norm is found."""
    torch.manual_seed(0)
    up, down = nn.Linear(4, 6, bias=False), nn.Linear(6, 2)
    model = as_float64(nn.Sequential(up, nn.Tanh(), nn.Dropout(0.4), down))
    batches = tuple({"input": torch.randn(n, 4, dtype=torch.float64)} for n in (4, 3, 4))

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.square().mean()

    def make(condition: Any) -> Sequential:
        return Sequential(copy.deepcopy(model), condition.optimizer, loss=loss, clip=condition.clip)

    with enter_modes(Float64()), enter_modes(LogicalDropout(5)):
        norm = Sequential(copy.deepcopy(model), loss=loss).gradient_norm(batches[0])
        expected = observe(make, standard_conditions(batches, norm))
    with Pool() as pool:
        actual = pool.run(_observe_rank, 2, model, batches, norm, reduces)[0]
    report = Report(compare(expected, actual))
    if reduces:
        assert report.ok and report.worst.error < 1e-12, str(report)
    else:
        assert report.first.kind == "gradient norm"
