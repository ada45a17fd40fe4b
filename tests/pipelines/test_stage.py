"""Stages by replay: what recording sees and refuses, and what each stage executes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.partition import stage_assignment as cuts
from schedlang.pipeline.timeline.table import Kind, Op, timeline_from_rows
from schedlang.runtime.pipeline.executor import Pipeline
from schedlang.runtime.pipeline.split_backward import SplitBackward
from schedlang.runtime.pipeline.stage import Stage, Stub, as_graph_input
from schedlang.runtime.tracing.meta_runs import meta_model
from schedlang.runtime.tracing.recording import record_forward
from schedlang.runtime.tracing.stage_graph import split_graph
from schedlang.runtime.tracing.units import CallSwitch, is_in_trunk, units_of
from tests import models


def graph_of(model: nn.Module, batch: Any, **options: Any) -> Any:
    return record_forward(model, units_of(model, batch), batch, **options)


def test_units() -> None:
    """Units: trunk elements, and each outermost module with parameters, in call order."""
    model, batch = models.gpt2(2), models.tokens(2)
    names = units_of(model, batch)
    assert names == (
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.0",
        "transformer.h.1",
        "transformer.ln_f",
        "lm_head",
    )
    assert is_in_trunk(model, names) == (False, False, True, True, False, False)


def test_units_at_inner_modules() -> None:
    """A cut inside a block makes its children with parameters units."""
    model, batch = models.llama(2), models.tokens(2)
    names = units_of(model, batch, ["model.layers.1.mlp"])
    assert names[1] == "model.layers.0"
    assert "model.layers.1" not in names and "model.layers.1.mlp" in names
    stage_split = split_graph(
        record_forward(model, names, batch),
        [int(k >= names.index("model.layers.1.mlp")) for k in range(len(names))],
    )
    # the residual stream and the normed input of the MLP both cross
    sent_units = {stage_split.graph.units[u] for u, _ in stage_split.routes[(0, 1)]}
    assert "model.layers.1.post_attention_layernorm" in sent_units and len(sent_units) > 1


def test_record_touches_nothing() -> None:
    """Recording changes no parameter, buffer, hook, gradient or call of the model."""
    model, batch = models.gpt2(2, dropout=0.5), models.tokens(2)
    state = torch.get_rng_state()
    initial = {n: (id(p), p._version) for n, p in model.named_parameters()}
    meta, real = graph_of(model, batch), graph_of(model, batch, meta=False)
    assert initial == {n: (id(p), p._version) for n, p in model.named_parameters()}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert all("_compiled_call_impl" not in vars(m) for m in model.modules())
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    assert meta == real


def test_record_without_weights() -> None:
    """A model on the meta device records the same graph as one with weights, masks included."""
    for make in (models.gpt2, models.llama, models.bert, models.bart):
        batch = models.tokens(2)
        assert graph_of(meta_model(make(), {}), batch) == graph_of(make(), batch)


def test_what_crosses() -> None:
    """Each reader names what it needs: skips, flags, detached uses; ties and glue are reported."""
    graph = graph_of(models.Skipping(), models.points(3))
    name = dict(enumerate(graph.units))
    reads = [{(name[u], k) for u, k in r.tokens} for r in graph.reads]
    assert reads[graph.units.index("blocks.1")] == {("blocks.0", 0)}
    assert reads[graph.units.index("head")] == {
        ("blocks.4", 0),
        ("blocks.1", 1),
        ("blocks.0", 0),
        ("embed", 0),
    }
    leaves = {(name[u], k): leaf for (u, k), leaf in graph.leaves.items()}
    assert leaves[("blocks.1", 1)].dtype == "bool" and not leaves[("blocks.1", 1)].differentiable
    assert leaves[("blocks.0", 0)].mutated and not leaves[("embed", 0)].mutated
    assert graph.glue_parameters == ("gain",)
    stage_split = split_graph(graph, [0, 0, 0, 1, 1, 1, 2])
    assert stage_split.shared == {"gain": (0, 1, 2)}
    assert split_graph(graph_of(models.gpt2(2), models.tokens(2)), [0, 0, 0, 1, 1, 1]).shared == {
        "transformer.wte.weight": (0, 1)
    }


class OddCalls(nn.Module):
    """Blocks that are called in ways that forbid some cuts."""

    def __init__(self, calls: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.how = calls

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        order = {"loop": (0, 1, 1, 2), "reversed": (0, 2, 1), "skipped": (0, 1)}
        for k in order.get(self.how, (0, 1, 2)):
            x = self.layers[k](x)
            if self.how == "value" and x.sum().item() > 0:
                x = x * 2
        if self.how == "batch" and rows is not None:
            x = x[rows.nonzero()[:, 0]]
        return (x**2).mean()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("loop", r"layers.1` is called more than once in one forward: no stage can\s+start at it"),
        ("reversed", "layers.1` is called after `layers.2`"),
        ("skipped", "layers.2` is not called"),
    ],
)
def test_calls_refused(how: str, message: str) -> None:
    """A unit that is called twice, not at all, or against the order given is refused by name."""
    with pytest.raises(Refusal, match=message) as caught:
        record_forward(OddCalls(how), ["layers.0", "layers.1", "layers.2"], {"x": torch.ones(2, 3)})
    assert caught.value.diagnostic.code == "S601"


def test_loop_is_no_trunk() -> None:
    """The choice of units refuses a trunk that is called in a loop."""
    with pytest.raises(Refusal, match="called 2 times in one forward"):
        units_of(OddCalls("loop"), {"x": torch.ones(2, 3)})


def test_value_that_decides() -> None:
    """A value read by Python is refused without data; with data its source is sent to all."""
    batch = {"x": torch.ones(2, 3)}
    with pytest.raises(Refusal, match="reads the value of a tensor between modules") as caught:
        graph_of(OddCalls("value"), batch)
    assert caught.value.diagnostic.code == "S611"
    names = ["layers.0", "layers.1", "layers.2"]
    graph = record_forward(OddCalls("value"), names, batch, meta=False)
    assert graph.final.tokens == {(0, 0), (1, 0), (2, 0)}


def test_a_value_that_the_loss_reads() -> None:
    """If the loss reads a value, the refusal names the loss and offers `detach()`."""
    names, batch = ["layers.0", "layers.1", "layers.2"], {"x": torch.ones(2, 3)}
    with pytest.raises(Refusal, match="the loss, or the end of the forward, reads the") as caught:
        record_forward(
            OddCalls("batch"), names, batch, loss=lambda output, given: output * float(output.sum())
        )
    assert "loss.detach()" in caught.value.render()


def test_values_of_the_batch() -> None:
    """Code between units may read values of the batch, which are known without weights."""
    batch = {"x": torch.ones(4, 3), "rows": torch.tensor([True, False, True, True])}
    graph = graph_of(OddCalls("batch"), batch)
    assert graph.final.tokens == {(2, 0)}


class Choosing(nn.Module):
    """A computation that depends on the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        rows = torch.nonzero(x[:, 0] > 0)[:, 0]
        extra = residual if x.sum() > 0 else torch.zeros_like(residual)
        return self.mix(x).index_add(0, rows, x[rows]) + extra


class Chosen(nn.Module):
    """Units whose computation depends on values, but whose output shape does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Choosing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first_output = x = self.layers[0](x, x)
        for layer in self.layers[1:]:
            x = layer(x, first_output)
        return x.square().mean()


def test_values_inside_units() -> None:
    """A unit that reads values depends on all its arguments; its stub still has a shape."""
    model, batch = Chosen().double(), {"x": torch.rand(4, 3, dtype=torch.float64)}
    graph = graph_of(model, batch)
    assert graph.reads[2].tokens == {(0, 0), (1, 0)}
    model(**batch).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    stage_split = split_graph(graph, [0, 1, 2])
    plan = timeline_from_rows(
        [[Op(k, s, 0) for k, r in ((Kind.F, (0, 1, 2)), (Kind.B, (2, 1, 0))) for s in r]]
    )
    switch, stub = CallSwitch(model, graph.units), Stub(meta_model(model, {}), stage_split)
    stages = {s: Stage(model, stage_split, s, switch=switch, stub=stub) for s in range(3)}
    Pipeline(stages, plan).run([batch])
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-14, atol=0), name


class Leaving(nn.Linear):
    """Appends a value to a shared list."""

    def __init__(self, aside: list[Tensor]) -> None:
        super().__init__(3, 3)
        self.aside = aside

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.aside.append(output.square().mean())
        return output


class Routed(nn.Module):
    """Every layer appends a value for the loss, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.aside: list[Tensor] = []
        self.layers = nn.ModuleList(Leaving(self.aside) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.aside.clear()
        for layer in self.layers:
            x = layer(x)
        return x.mean() + sum(self.aside[1:])


def test_side_channels_refused() -> None:
    """A loss that reads from inside a unit is refused where the unit is on another stage only."""
    graph = graph_of(Routed(), {"x": torch.ones(2, 3)})
    split_graph(graph, [0, 0, 0])
    with pytest.raises(Refusal, match="reads a value inside `layers.1`") as caught:
        split_graph(graph, [0, 0, 1])
    assert caught.value.diagnostic.code == "S610"
    split_graph(graph, [0, 1, 1])  # the layers whose values the loss reads are in its stage


def test_stage_calls_only_its_own() -> None:
    """A stage calls no module of another stage, and nothing at all after its last unit."""
    model, batch = models.gpt2(4), models.tokens(2)
    graph = graph_of(model, batch)
    stage_split = split_graph(graph, [0, 0, 0, 1, 1, 2, 2, 2])
    stub = Stub(meta_model(model, {}), stage_split)
    calls: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, a, o, name=name: calls.append(name))
    stage = Stage(model, stage_split, 1, stub=stub)
    result = stage.forward(batch, {(2, 0): torch.zeros(2, 8, 16, dtype=torch.float64)})
    inner = {".".join(name.split(".")[:3]) for name in calls if name.startswith("transformer.h.")}
    assert inner == {"transformer.h.1", "transformer.h.2"}
    assert not {"transformer.wte", "transformer.ln_f", "lm_head"} & set(calls)
    assert set(result.values) == {(4, 0)} and result.output is None


def test_switch_leaves_no_trace() -> None:
    """A switch that was removed leaves the modules' calls as they were."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    switch = CallSwitch(model, ["0", "1"])
    with switch.using(lambda unit, original, args, kwargs: unit):
        assert model[0](None) == 0 and model[1](None) == 1
    assert model[0](torch.ones(2)).shape == (2,)
    switch.remove()
    assert all("_compiled_call_impl" not in vars(m) for m in model)


def test_enter_may_be_written_into() -> None:
    """A received input may be modified in place; its gradient is that of the original."""
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    x = as_graph_input(leaf)
    x.mul_(3.0)
    x.square().sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [18.0, 36.0]


class Chain(nn.Module):
    """Linear maps: one weight used twice, a weight inside a function, a separate term."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.rand(3, 3)) for _ in range(3))
        self.bias, self.loose = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x @ self.a + self.bias)
        h = torch.tanh(h @ self.b) @ torch.exp(self.c)
        return torch.tanh(h @ self.b), (self.loose**2).sum()


def test_split_equals_whole() -> None:
    """Both halves of a split backward give its gradients; weights used once wait for the second."""
    model, x = Chain(), torch.rand(4, 3, dtype=torch.float64)
    full_input = x.clone().requires_grad_()
    output, extra = model(full_input)
    torch.autograd.backward([output, extra], [torch.ones_like(output), torch.tensor(2.0).double()])
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    output, extra = model(leaf)
    ones = [torch.ones_like(output), torch.tensor(2.0).double()]
    half = SplitBackward([output, extra], ones, [leaf])
    (grad,) = half.backward_inputs()
    assert torch.equal(grad, full_input.grad)
    ready = {n for n, p in model.named_parameters() if p.grad is not None}
    assert ready == {"b"}
    half.backward_weights()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-14, atol=0), name


def test_split_does_no_product_twice() -> None:
    """Both halves of a split backward together take the FLOPs of one backward."""
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    leaf = torch.rand(5, 8, requires_grad=True)

    def flops(backward_parts: Any) -> list[int]:
        output = model(leaf)
        counts = []
        for part in backward_parts(output, torch.ones_like(output)):
            with FlopCounterMode(display=False) as counter:
                part()
            counts.append(counter.get_total_flops())
        return counts

    def apart(output: Tensor, grad: Tensor) -> Any:
        half = SplitBackward([output], [grad], [leaf])
        return half.backward_inputs, half.backward_weights

    (full_flops,) = flops(lambda out, grad: (lambda: torch.autograd.backward(out, grad),))
    inputs_flops, weights_flops = flops(apart)
    assert inputs_flops == weights_flops == full_flops // 2


UNITS = [
    cuts.ChainUnit("embed", 100, False),
    *(cuts.ChainUnit(f"h.{k}", 10 + k) for k in range(5)),
    cuts.ChainUnit("head", 40, False),
]


def test_cuts() -> None:
    """Cuts are even or by name; units before the trunk are first, those after it are last."""
    assert cuts.even_stages(UNITS, 2) == (0, 0, 0, 0, 1, 1, 1)
    assert cuts.even_stages(UNITS, 5) == (0, 0, 1, 2, 3, 4, 4)
    assert cuts.stages_starting_at(UNITS, ["h.1", "h.4"]) == (0, 0, 1, 1, 1, 2, 2)
    assert cuts.stages_starting_at(UNITS, ["h.2", "head"]) == (0, 0, 0, 1, 1, 1, 2)
    assert cuts.stages_starting_at(UNITS, ["head", "h.2"]) == (0, 0, 0, 1, 1, 1, 2)  # any order


def test_balanced_is_best() -> None:
    """No other cut has a smaller largest stage."""
    from itertools import combinations

    for stages in range(1, 6):
        balanced = cuts.balanced_stages(UNITS, stages)

        def largest(stage_of: tuple[int, ...]) -> int:
            sums: dict[int, int] = {}
            for unit, stage in zip(UNITS, stage_of):
                sums[stage] = sums.get(stage, 0) + unit.params
            return max(sums.values())

        starts = combinations(["h.1", "h.2", "h.3", "h.4"], stages - 1)
        all_cuts = (cuts.stages_starting_at(UNITS, names) for names in starts)
        assert largest(balanced) == min(largest(candidate) for candidate in all_cuts)
        assert sorted(set(balanced)) == list(range(stages))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cuts.even_stages(UNITS, 6), "5 modules of the list cannot be cut into 6 stages"),
        (lambda: cuts.stages_starting_at(UNITS, ["h.9"]), "did you mean"),
        (
            lambda: cuts.stages_starting_at(UNITS, ["h.3", "h.1", "h.3"]),
            "two stages start at one module",
        ),
        (lambda: cuts.stages_starting_at(UNITS, ["embed"]), "`embed` is the first module"),
    ],
)
def test_cuts_refused(call: Any, message: str) -> None:
    """Impossible cuts are refused with what would be possible."""
    with pytest.raises(Refusal, match=message):
        call()


class Convolved(nn.Module):
    """Convolutions with biases, of which autocast gives the second a bf16 input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def test_stages_find_shapes_under_the_casts_that_they_run_under() -> None:
    """The shape and dtype of a unit on another stage are found under autocast."""
    model = Convolved()
    x = torch.randn(2, 3, 4, 4)
    graph = record_forward(model, [f"blocks.{k}" for k in range(3)], {"x": x})
    stub = Stub(meta_model(model, {}), split_graph(graph, [0, 1, 1]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert stub(1, (x.bfloat16(),), {}, {}, x.device, model).dtype == torch.bfloat16
    assert stub(1, (x,), {}, {}, x.device, model).dtype == torch.float32


def test_stages_inside_of_a_transform() -> None:
    """A transform of `torch.func` around several stages is refused, with what is legal."""

    class Derived(nn.Module):
        """A directional derivative of two layers."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def through(self, x: Tensor) -> Tensor:
            """Both layers."""
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

        def forward(self, x: Tensor) -> Tensor:
            """Value and derivative."""
            value, along = torch.func.jvp(self.through, (x,), (torch.ones_like(x),))
            loss: Tensor = value.square().mean() + along.square().mean()
            return loss

    with pytest.raises(Refusal, match="inside of a transform of `torch.func`") as caught:
        graph_of(Derived(), {"x": torch.ones(2, 4)})
    assert caught.value.diagnostic.code == "S610" and caught.value.diagnostic.helps
