"""Regions as rows of a schedule: proven, refused in words, and fitted into memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from schedlang.passes.partition.recomputed_chains import CostSubject, costs_of
from schedlang.remat import places_of
from schedlang.remat.rotor import peak_saved
from tests import models
from tests.engine import Threads
from tests.proofs import planned, proven, refused

BATCHES = [models.tokens(seed=seed) for seed in (1, 2, 3)]
MLP = """
transformer.h.*.mlp.c_fc    shard(col, over=tp)
transformer.h.*.mlp.c_proj  shard(row, over=tp)
"""
CUT = 'transformer.h  pipeline_split(over=pp)\npipeline(order="1F1B", micro=3)'
ROW = "transformer.h.*  checkpoint({})\n"


@pytest.mark.parametrize(
    "rows, mesh",
    [
        (ROW.format("group=2") + CUT, "pp=2"),
        (ROW.format("group=sqrt") + "zero(stage=3, over=dp)", "dp=2"),
        (MLP + ROW.format("group=3, save=[collective, linear]"), "tp=2"),
    ],
    ids=["pipeline", "sliced", "tensor"],
)
def test_regions_train_as_the_original(threads: Threads, rows: str, mesh: str) -> None:
    """Groups under pipelines, slices and tensor parallelism, with dropout."""
    proven(threads, planned(models.gpt2(dropout=0.1), rows, mesh), BATCHES)


@pytest.mark.deep
@pytest.mark.parametrize("way", ["every=2", "group=2, every=2", "plan=rotor, memory=230KiB"])
def test_other_regions_train_as_the_original(threads: Threads, way: str) -> None:
    """Every second module or group, and what a plan chooses, with activations on the host."""
    rows = ROW.format(way) + "transformer.h.*  offload(activations)\nzero(stage=2, over=dp)"
    proven(threads, planned(models.gpt2(dropout=0.1), rows, "dp=2"), BATCHES)


def test_a_plan_fits_each_stage() -> None:
    """What a plan keeps is at most the memory, shared by the microbatches in flight: the first of
    two stages, which has two of them, recomputes more."""
    plan = planned(models.gpt2(6), ROW.format("plan=rotor, memory=500KiB") + CUT, "pp=2")
    made = prepare(plan, BATCHES[0])
    ((names, trees),) = made.chains.items()
    assert names == plan.actions[0].sites and len(trees) == 2
    first, last = (sum(isinstance(item, tuple) for item in tree) for _, tree in trees)
    assert first > last
    costs = costs_of(CostSubject(plan, made.traced, made.staged, BATCHES[0]), names)
    for (chain, tree), alive in zip(trees, (2, 1)):
        mine = [costs[names.index(name)] for name in chain]
        assert len(places_of(tree)) == 3 and peak_saved(tree, mine) * alive <= 500 * 1024


def test_a_plan_is_refused_in_less_than_any_needs() -> None:
    """S841 says how much the least plan needs, and that much is enough."""
    plan = planned(models.gpt2(), ROW.format("plan=rotor, memory=20KiB"))
    with pytest.raises(Refusal) as caught:
        prepare(plan, BATCHES[0])
    told = caught.value.render()
    assert "S841" in told and "no plan for these 4 modules fits into" in told
    need = int(told.split("each microbatch needs ")[1].split()[0])
    for memory, fits in ((need, True), (need - 1, False)):
        plan = planned(models.gpt2(), ROW.format(f"plan=rotor, memory={memory}B"))
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
    """Each refusal says what is wrong and what would be legal."""
    told = refused(models.gpt2(), row)
    assert code in told and words in told and "help:" in told


def test_a_cut_in_a_region() -> None:
    """S603 names the modules of the region, and where a cut may fall."""
    rows = ROW.format("group=4") + "transformer.h[2]  pipeline_split(over=pp)"
    with pytest.raises(Refusal) as caught:
        prepare(planned(models.gpt2(8), rows, "pp=2"), BATCHES[0])
    told = caught.value.render()
    assert "S603" in told and "`transformer.h.0` to `transformer.h.3` as one" in told
    assert "cuts it in two before `transformer.h.2`" in told
    assert "cut before `transformer.h.0` or after `transformer.h.3`" in told


class Odd(nn.Module):
    """Multiplies by a number that `draw` gives."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.lin, self.draw, self.calls = nn.Linear(4, 4), draw, 0
        self.made: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.lin(x)) * self.draw(self)


def layered(*draws: Any) -> Any:
    """A layer for each function that draws."""
    return models.Stack(map(Odd, draws), "layers").double()


def _lazy(module: Odd) -> Tensor:
    if module.made is None:
        module.made = torch.arange(4.0, dtype=torch.float64) + 1.0
    return module.made.to(module.lin.weight.device)


DRAWS = {
    "python": lambda module: random.random(),
    "numpy": lambda module: torch.from_numpy(np.random.rand(4)).to(module.lin.weight.device),
    "counted": lambda module: 1.0 + module.calls,
    "torch": lambda module: torch.rand(4, dtype=torch.float64),
    "made once": _lazy,
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_no_generator_of_torch_gives_is_refused(name: str) -> None:
    """S843 names the operator and the line where a second run has other numbers; what torch draws,
    what a module makes at its first call, and what it counts, is no such thing."""

    plan = planned(layered(DRAWS[name], DRAWS[name]), "layers.*  checkpoint()")
    batch = {"x": torch.ones(3, 4, dtype=torch.float64)}
    if name in ("torch", "made once", "counted"):
        prepare(plan, batch)
        return
    with pytest.raises(Refusal) as caught:
        prepare(plan, batch)
    told = caught.value.render()
    assert "S843" in told and "recomputing `layers.0` gives another result" in told
    assert ("`from_numpy`" if name == "numpy" else "`mul`") in told or "`__mul__`" in told
    assert "test_checkpoint.py:" in told and "torch.rand" in told


@pytest.mark.parametrize("noise", [True, 2, 0.5, "much", (1, 0.5)])
def test_one_layer_that_is_told_to_draw(noise: object) -> None:
    """S843 is about the third of four layers of one class and one shape, and no other."""
    model = layered(*[lambda module: random.random() if module.noise else 1.0] * 4)
    for place, layer in enumerate(model.layers):
        vars(layer).update(number=place, noise=noise if place == 2 else type(noise)())
    plan = planned(model, "layers.*  checkpoint()")
    with pytest.raises(Refusal, match="recomputing `layers.2` gives another result"):
        prepare(plan, {"x": torch.ones(3, 4, dtype=torch.float64)})


class Depth(nn.Module):
    """Leaves out rows by a mask of numpy's, or all of them by a number of Python's, at a rate."""

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
    """Rates rise from layer to layer: the first may be 0, and others give alike twice by luck."""
    model = models.Stack((Depth(rate, numpy) for rate in rates), "layers").double()
    first = next(place for place, rate in enumerate(rates) if rate)
    said = f"recomputing `layers.{first}` gives another result: it draws from"
    with pytest.raises(Refusal, match=said):
        prepare(
            planned(model, "layers.*  checkpoint()"), {"x": torch.ones(3, 4, dtype=torch.float64)}
        )


class Fast(nn.Module):
    """A layer that is called with other weights than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(4, 4), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        made = {name: value * self.gain for name, value in self.layer.named_parameters()}
        return torch.tanh(torch.func.functional_call(self.layer, made, (x,)))


def test_a_module_that_is_called_with_other_weights() -> None:
    """Its recomputation would take its own: refused; around what makes them it is equal."""
    batch = {"x": torch.ones(3, 4, dtype=torch.float64)}
    model = models.Stack((Fast() for _ in range(2)), "fast").double()
    with pytest.raises(Refusal, match="recomputing `fast.0.layer` would use its own weights"):
        prepare(planned(model, "fast.*.layer  checkpoint()"), batch)
    with Threads() as ranks:
        proven(ranks, planned(model, "fast.*  checkpoint()"), (batch,))
