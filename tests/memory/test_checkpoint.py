"""Rows of `checkpoint`: regions train as the original, plans fit the memory, refusals."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.lower.build import build
from schedlang.passes.partition.recomputed_chains import CostSubject, costs_of
from schedlang.remat import places_of
from schedlang.remat.rotor import peak_saved
from tests import models
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan, refusal_text

BATCHES = [models.tokens(seed=seed) for seed in (1, 2, 3)]
MLP = """
transformer.h.*.mlp.c_fc    shard(col, over=tp)
transformer.h.*.mlp.c_proj  shard(row, over=tp)
"""
STAGE_SPLIT = 'transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro=3)'
ROW = "transformer.h.*  checkpoint({})\n"


@pytest.mark.parametrize(
    "rows, mesh",
    [
        (ROW.format("group=2") + STAGE_SPLIT, "pp=2"),
        (ROW.format("group=sqrt") + "zero(stage=3, over=dp)", "dp=2"),
        (MLP + ROW.format("group=3, save=[collective, linear]"), "tp=2"),
    ],
    ids=["pipeline", "sliced", "tensor"],
)
def test_regions_train_as_the_original(threads: Threads, rows: str, mesh: str) -> None:
    """Groups with pipelines, ZeRO and tensor parallelism, with dropout."""
    assert_proven(threads, make_plan(models.gpt2(dropout=0.1), rows, mesh), BATCHES)


@pytest.mark.deep
@pytest.mark.parametrize("way", ["every=2", "group=2, every=2", "plan=rotor, memory=230KiB"])
def test_other_regions_train_as_the_original(threads: Threads, way: str) -> None:
    """Every second module or group, and a plan, with offloaded activations."""
    rows = ROW.format(way) + "transformer.h.*  offload(activations)\nzero(stage=2, over=dp)"
    assert_proven(threads, make_plan(models.gpt2(dropout=0.1), rows, "dp=2"), BATCHES)


def test_a_plan_fits_each_stage() -> None:
    """A plan keeps at most the memory, shared by microbatches in flight: the first of two stages,
    with two of them, recomputes more."""
    plan = make_plan(models.gpt2(6), ROW.format("plan=rotor, memory=500KiB") + STAGE_SPLIT, "pp=2")
    prepared = prepare(plan, BATCHES[0])
    ((names, trees),) = prepared.chains.items()
    assert names == plan.actions[0].sites and len(trees) == 2
    first, last = (sum(isinstance(item, tuple) for item in tree) for _, tree in trees)
    assert first > last
    costs = costs_of(CostSubject(plan, prepared.traced, prepared.staged, BATCHES[0]), names)
    for (chain, tree), in_flight in zip(trees, (2, 1)):
        chain_costs = [costs[names.index(name)] for name in chain]
        assert len(places_of(tree)) == 3 and peak_saved(tree, chain_costs) * in_flight <= 500 * 1024


def test_a_plan_is_refused_in_less_than_any_needs() -> None:
    """S841 gives the least memory, and that is enough."""
    plan = make_plan(models.gpt2(), ROW.format("plan=rotor, memory=20KiB"))
    with pytest.raises(Refusal) as caught:
        prepare(plan, BATCHES[0])
    message = caught.value.render()
    assert "S841" in message and "no plan for these 4 modules fits into" in message
    needed = int(message.split("each microbatch needs ")[1].split()[0])
    for memory, fits in ((needed, True), (needed - 1, False)):
        plan = make_plan(models.gpt2(), ROW.format(f"plan=rotor, memory={memory}B"))
        if fits:
            prepare(plan, BATCHES[0])
        else:
            with pytest.raises(Refusal, match="S841"):
                prepare(plan, BATCHES[0])


@pytest.mark.parametrize(
    "row, code, words",
    [
        (ROW.format("group=0"), "S840", "`group` must be 1 or more, not 0"),
        (ROW.format("every=0"), "S840", "`every` is a number of modules"),
        ("transformer.h[::2]  checkpoint(group=2)", "S840", "are not consecutive"),
        (ROW.format("plan=rotor"), "S842", "`plan` needs `memory`"),
        (ROW.format("memory=1GiB"), "S842", "`memory` needs `plan`"),
        (
            ROW.format("plan=rotor, memory=1GiB, group=2"),
            "S842",
            "a plan chooses what is recomputed together",
        ),
        (
            "transformer.h[0,2]  checkpoint(plan=rotor, memory=1GiB)",
            "S842",
            "consecutive modules of one list",
        ),
        (
            "transformer.h.0, transformer.h.0.mlp  checkpoint()",
            "S502",
            "and `transformer.h.0` around it",
        ),
        (ROW.format("group=2") * 2, "S501", "already checkpointed"),
    ],
)
def test_what_means_nothing_is_refused(row: str, code: str, words: str) -> None:
    """Each refusal says what is wrong and what is legal."""
    message = refusal_text(models.gpt2(), row)
    assert code in message and words in message and "help:" in message


def test_a_cut_in_a_region() -> None:
    """S603 names the region's modules, and where a stage may begin."""
    rows = ROW.format("group=4") + "transformer.h[2]  pipeline_split(over=pp)"
    with pytest.raises(Refusal) as caught:
        prepare(make_plan(models.gpt2(8), rows, "pp=2"), BATCHES[0])
    message = caught.value.render()
    assert "S603" in message and "`transformer.h.0` to `transformer.h.3` as one" in message
    assert "cuts it in two before `transformer.h.2`" in message
    assert "cut before `transformer.h.0` or after `transformer.h.3`" in message


class Scaled(nn.Module):
    """Multiplies by a number that `draw` returns."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.lin, self.draw, self.calls = nn.Linear(4, 4), draw, 0
        self.made: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.lin(x)) * self.draw(self)


def scaled_layers(*draws: Any) -> Any:
    """Return a layer for each drawing function."""
    return models.Stack(map(Scaled, draws), "layers").double()


def _created_once(module: Scaled) -> Tensor:
    if module.made is None:
        module.made = torch.arange(4.0, dtype=torch.float64) + 1.0
    return module.made.to(module.lin.weight.device)


FACTORS = {
    "python": lambda module: random.random(),
    "numpy": lambda module: torch.from_numpy(np.random.rand(4)).to(module.lin.weight.device),
    "counted": lambda module: 1.0 + module.calls,
    "torch": lambda module: torch.rand(4, dtype=torch.float64),
    "made once": _created_once,
}


@pytest.mark.parametrize("name", FACTORS)
def test_what_no_generator_of_torch_gives_is_refused(name: str) -> None:
    """S843 names the operator and line whose second run gives other numbers; torch's random
    numbers, tensors made in the first call, and counters are fine."""

    plan = make_plan(scaled_layers(FACTORS[name], FACTORS[name]), "layers.*  checkpoint()")
    batch = {"x": torch.ones(3, 4, dtype=torch.float64)}
    if name in ("torch", "made once", "counted"):
        prepare(plan, batch)
        return
    with pytest.raises(Refusal) as caught:
        prepare(plan, batch)
    message = caught.value.render()
    assert "S843" in message and "recomputing `layers.0` gives another result" in message
    assert ("`from_numpy`" if name == "numpy" else "`mul`") in message or "`__mul__`" in message
    assert "test_checkpoint.py:" in message and "torch.rand" in message


@pytest.mark.parametrize("noise", [True, 2, 0.5, "much", (1, 0.5)])
def test_one_layer_that_is_told_to_draw(noise: object) -> None:
    """S843 names the third of four equal layers, the only one that draws."""
    model = scaled_layers(*[lambda module: random.random() if module.noise else 1.0] * 4)
    for index, layer in enumerate(model.layers):
        vars(layer).update(number=index, noise=noise if index == 2 else type(noise)())
    plan = make_plan(model, "layers.*  checkpoint()")
    with pytest.raises(Refusal, match="recomputing `layers.2` gives another result"):
        prepare(plan, {"x": torch.ones(3, 4, dtype=torch.float64)})


class StochasticDepth(nn.Module):
    """Drops rows by a numpy mask, or all rows by a Python number, at a rate."""

    def __init__(self, rate: float, numpy: bool) -> None:
        super().__init__()
        self.lin, self.rate, self.numpy = nn.Linear(4, 4), rate, numpy

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lin(x))
        if self.rate and self.numpy:
            y = y * torch.from_numpy(np.random.rand(len(x), 1) > self.rate).to(y.device)
        elif self.rate:
            y = y * torch.tensor(float(random.random() > self.rate), dtype=y.dtype)
        return x + y


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("rates", [(0.0, 1e-9, 2e-9, 3e-9), (1e-9, 2e-9, 3e-9, 4e-9)])
def test_draws_that_seldom_differ(rates: tuple[float, ...], numpy: bool) -> None:
    """Rates rise from layer to layer: the first may be 0, and two draws may be equal by chance."""
    model = models.Stack((StochasticDepth(rate, numpy) for rate in rates), "layers").double()
    first = next(index for index, rate in enumerate(rates) if rate)
    message = f"recomputing `layers.{first}` gives another result: it draws from"
    with pytest.raises(Refusal, match=message):
        prepare(
            make_plan(model, "layers.*  checkpoint()"), {"x": torch.ones(3, 4, dtype=torch.float64)}
        )


class CalledWithWeights(nn.Module):
    """Calls its layer with other weights than the layer's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: value * self.gain for name, value in self.layer.named_parameters()}
        return torch.tanh(torch.func.functional_call(self.layer, weights, (x,)))


def test_a_module_that_is_called_with_other_weights() -> None:
    """Its recomputation would use its own weights: refused; a checkpoint around both is equal."""
    batch = {"x": torch.ones(3, 4, dtype=torch.float64)}
    model = models.Stack((CalledWithWeights() for _ in range(2)), "fast").double()
    with pytest.raises(Refusal, match="recomputing `fast.0.layer` would use its own weights"):
        prepare(make_plan(model, "fast.*.layer  checkpoint()"), batch)
    with Threads() as ranks:
        assert_proven(ranks, make_plan(model, "fast.*  checkpoint()"), (batch,))


class Noting(nn.Module):
    """Keeps a tensor of its forward, which it computes with gradients on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            self.seen = self.inner(x)
        return self.seen.tanh()


@pytest.mark.parametrize("verb", ["checkpoint()", "offload(activations)"])
@pytest.mark.parametrize("path", ["1", "1.inner"])
def test_modules_evaluate_in_inference_mode(path: str, verb: str) -> None:
    """Twice, where a module keeps a tensor of its first call, and switches gradients on."""
    model = nn.Sequential(nn.Linear(4, 4), Noting(), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    plan = make_plan(model, f"{path}  {verb}")
    program = build(plan, {"input": x}, loss=lambda output, batch: output.sum())
    program.module.eval()
    model.eval()
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(program.module(x), model(x))
    assert torch.equal(program.module(x), model(x))  # the tensor that is kept is of that mode
