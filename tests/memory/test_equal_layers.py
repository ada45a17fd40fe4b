"""Equal layers run twice in later forwards: with the same results, and only where it is sound."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.analyze.prepare import Prepared, prepare
from schedlang.passes.propagate import equal_units
from schedlang.passes.propagate.original_forward import record_original
from schedlang.passes.simulate import simulated_ranks
from schedlang.passes.simulate.simulated_ranks import estimate_memory
from schedlang.runtime.pipeline.stage import RecordedOutputs, Stub
from schedlang.runtime.propagation.imitated_units import EqualLayouts, EqualTurns, Unmarked
from schedlang.runtime.tracing.equal_units import DifferentUnits, EqualUnits
from schedlang.runtime.tracing.recording import _EqualReads
from tests.proofs import make_plan

LAYERS, WIDTH = 8, 16
BATCH = {"x": torch.ones(8, 4, WIDTH), "mask": torch.ones(8, 4, dtype=torch.int64)}
ROWS = """
  layers.*.up    shard(col, over=tp)
  layers.*.down  shard(row, over=tp)
  layers.*  checkpoint()
  layers    pipeline_split(over=pp)
  zero(stage=1, over=dp)
  pipeline(order="1F1B", micro=4)
"""
MESH = "dp=2, pp=4, tp=2"


class Layer(nn.Module):
    """A layer of two projections; `change` is called with it and its result."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_index, self.scale = number, 1.0
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.change: Callable[[Layer, Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Add the projections, scaled, to the input."""
        result = x + self.scale * self.down(F.gelu(self.up(self.norm(x))))
        return result if self.change is None else self.change(self, x, result)


class Net(nn.Module):
    """A stack of equal layers, whose own code reads the values of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(map(Layer, range(LAYERS)))
        self.last = nn.Linear(WIDTH, 4)
        self.kept: list[Tensor] = []
        self.uses_kept = False

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the loss: a mean of the last layer's result."""
        self.kept.clear()
        x, seen = self.first(x), None if bool(mask.bool().all()) else mask
        for layer in self.layers:
            x = layer(x, mask=seen)
        loss = self.last(x).square().mean()
        for tensor in self.kept if self.uses_kept else ():
            loss = loss + tensor.square().mean()
        return {"loss": loss, "last": x}


def prepared(plan: Plan) -> Prepared:
    """Prepare a plan with one microbatch."""
    return prepare(plan, {name: value[:1] for name, value in BATCH.items()})


def facts_of(plan: Plan) -> dict[str, Any]:
    """Return all that is known of a plan before there are ranks, and the memory of its ranks."""
    result = prepared(plan)
    graph = result.staged.cut.graph
    traced = {f.name: getattr(result.traced, f.name) for f in fields(result.traced)}
    del traced["equal_units"]
    return {
        **{f"traced {name}": value for name, value in traced.items()},
        "order of edges": tuple(result.traced.edges),
        "order of calls": tuple(result.traced.call_counts.items()),
        **{f"graph {f.name}": getattr(graph, f.name) for f in fields(graph)},
        "stages": result.staged.cut.stage_of,
        "holdings": dict(result.holdings),
        "outputs": None if result.staged.recorded is None else len(result.staged.recorded.outputs),
        "memory": estimate_memory(plan, BATCH, None, result),
    }


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts imitated units by the class of what observes them."""
    counts, imitate = Counter[str](), EqualUnits._imitate

    def counting(self: EqualUnits, *args: Any) -> Any:
        counts[type(self.observer).__name__] += 1
        return imitate(self, *args)

    monkeypatch.setattr(EqualUnits, "_imitate", counting)
    return counts


def all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all layers run in all forwards."""
    monkeypatch.setattr(equal_units, "MIN_EQUAL", LAYERS + 1)


ALL_FORWARDS = {"EqualTurns", "EqualLayouts", "Unmarked", "_EqualReads", "UnitObserver"}


@pytest.mark.parametrize("stage", [1, 3])
def test_equal_layers_give_what_all_layers_give(
    stage: int, imitated: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every later forward imitates layers, and nothing that is known of the plan differs."""
    model, rows = Net(), ROWS.replace("stage=1", f"stage={stage}")
    few = facts_of(make_plan(model, rows, MESH))
    assert imitated.keys() == ALL_FORWARDS
    assert all(count >= LAYERS - 2 for count in imitated.values())
    imitated.clear()
    all_run(monkeypatch)
    full = facts_of(make_plan(Net(), rows, MESH))
    assert imitated.keys() <= {"UnitObserver"}  # only where exchanges are counted
    for name, value in full.items():
        assert few[name] == value, name


@pytest.mark.parametrize(
    "observer", [EqualTurns, EqualLayouts, Unmarked, _EqualReads], ids=lambda kind: kind.__name__
)
def test_layers_that_turn_out_to_differ_all_run(
    observer: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that cannot imitate a layer runs again in full, with the same results."""

    def refuse(*_: object) -> None:
        raise DifferentUnits

    with monkeypatch.context() as patch:
        patch.setattr(observer, "imitated", refuse)
        few = facts_of(make_plan(Net(), ROWS.replace("stage=1", "stage=3"), MESH))
    all_run(monkeypatch)
    full = facts_of(make_plan(Net(), ROWS.replace("stage=1", "stage=3"), MESH))
    for name, value in full.items():
        assert few[name] == value, name


# -- layers for which no other layer may stand -----------------------------------------------------


def keeps_inner(net: Net, layer: Layer, x: Tensor, result: Tensor) -> Tensor:
    """Leave a tensor that is not returned in a list of the model, which uses it."""
    net.kept.append(layer.norm(x))
    return result


def sets_attribute(net: Net, layer: Layer, x: Tensor, result: Tensor) -> Tensor:
    """Set an attribute."""
    layer.calls = getattr(layer, "calls", 0) + 1
    return result


def draws(net: Net, layer: Layer, x: Tensor, result: Tensor) -> Tensor:
    """Draw from torch's generator."""
    return F.dropout(result, 0.1)


def draws_in_python(net: Net, layer: Layer, x: Tensor, result: Tensor) -> Tensor:
    """Draw from Python's generator, and do not use the number."""
    random.random()
    return result


def reads_value(net: Net, layer: Layer, x: Tensor, result: Tensor) -> Tensor:
    """Read a value."""
    return result * 2 if float(result.sum()) > 5 else result


def asks(net: Net, layer: Layer, x: Tensor, result: Tensor) -> Tensor:
    """Evaluate a condition on a tensor."""
    return result * 2 if result.sum() > 5 else result


def writes_input(net: Net, layer: Layer, x: Tensor, result: Tensor) -> Tensor:
    """Write into what it was given."""
    x.add_(0.0)
    return result


def uses_other(net: Net, layer: Layer, x: Tensor, result: Tensor) -> Tensor:
    """Use a parameter of another module."""
    return result + net.first.bias


def returns_object(net: Net, layer: Layer, x: Tensor, result: Tensor) -> Tensor:
    """Return a tensor of another class."""
    return result.as_subclass(Marked)


def calls_next(net: Net, layer: Layer, x: Tensor, result: Tensor) -> Tensor:
    """Call the norm of another layer."""
    return net.layers[(layer.layer_index + 1) % LAYERS].norm(result)


class Marked(Tensor):
    """A tensor of another class."""


@pytest.mark.parametrize(
    "change",
    [
        keeps_inner,
        sets_attribute,
        draws,
        draws_in_python,
        reads_value,
        asks,
        writes_input,
        uses_other,
        returns_object,
        calls_next,
    ],
    ids=lambda change: change.__name__,
)
def test_a_layer_with_side_effects_is_no_equal_layer(change: Callable[..., Tensor]) -> None:
    """What a layer leaves or finds beside its arguments and its output makes it run each time."""
    model = Net()
    model.uses_kept = True
    for layer in model.layers:
        layer.change = partial(change, model)
    plan = make_plan(model, "")
    recording = record_original(plan, BATCH, None, {})
    assert recording.original.equal_units == {}


def test_a_layer_that_differs_is_of_another_kind() -> None:
    """A number, a hook, a replaced weight or an operator of one layer alone excludes this layer."""

    def equal(change: Callable[[Net], object]) -> set[str]:
        model = Net()
        change(model)
        return {*record_original(make_plan(model, ""), BATCH, None, {}).original.equal_units}

    names = {f"layers.{k}" for k in range(LAYERS)}
    assert equal(lambda model: None) == names
    third = names - {"layers.3"}
    assert equal(lambda model: setattr(model.layers[3], "scale", 2.0)) == third
    assert equal(lambda m: m.layers[3].register_forward_hook(lambda *_: None)) == third
    assert equal(lambda model: setattr(model.layers[3], "change", lambda s, x, y: y + 1)) == third
    assert equal(lambda model: setattr(model.layers[3], "change", _replaced)) == third
    assert equal(lambda m: setattr(m.layers[3].up, "weight", m.first.weight)) == third
    assert equal(lambda m: m.layers[3].up.weight.requires_grad_(False)) == third


def _replaced(layer: Layer, x: Tensor, result: Tensor) -> Tensor:
    """Call the norm with another weight."""
    weight = {"weight": layer.up.weight[0]}
    normed: Tensor = torch.func.functional_call(layer.norm, weight, (result,))
    return normed


@pytest.mark.parametrize("changed", [False, True])
def test_one_of_each_kind_of_layers_stands_for_those_of_other_stages(
    changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulated step runs one layer of each kind for the shapes of other stages' results: its
    bytes are those with all layers, and the runs do not grow with the layers."""
    model = Net()
    if changed:
        model.layers[5].change = lambda layer, x, result: result + x.relu()
    plan = make_plan(model, ROWS, MESH)
    facts = prepared(plan)
    ran = list[int]()
    run_on_meta = Stub._run_on_meta

    def counted(self: Stub, unit: int, *rest: Any) -> Any:
        ran.append(unit)
        return run_on_meta(self, unit, *rest)

    monkeypatch.setattr(Stub, "_run_on_meta", counted)
    monkeypatch.setattr(RecordedOutputs, "outputs_for", lambda self, model: {})
    few = estimate_memory(plan, BATCH, None, facts)
    count = len(ran)
    monkeypatch.setattr(simulated_ranks, "kinds_of_units", lambda *_: [])
    plan = make_plan(model, ROWS, MESH)
    assert estimate_memory(plan, BATCH, None, prepared(plan)) == few
    assert 0 < count < len(ran) - count


def test_rows_of_one_layer_exclude_it() -> None:
    """A layer with another row of the schedule does not stand for others."""
    plan = make_plan(Net(), "  layers.3.up  shard(col, over=tp, output=R)", "tp=2")
    units = prepared(plan).traced.equal_units
    assert {*units} == {f"layers.{k}" for k in range(LAYERS) if k != 3}


def test_a_refusal_is_that_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that fails behind the equal layers is refused with the same message."""

    def message() -> str:
        rows = "  layers.*.up    shard(col, over=tp)\n  last  shard(col, over=tp, input=S(-1))"
        with pytest.raises(Refusal) as refusal:
            prepared(make_plan(Net(), rows, "tp=2"))
        return refusal.value.render()

    few = message()
    all_run(monkeypatch)
    assert few == message()
