"""Every registered primitive, tested by its example: plan, undo, equality on 1, 2 and 4 ranks."""

from __future__ import annotations

import re
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.ir.plan import Plan
from schedlang.ir.primitive import load_all, registry
from schedlang.language.printer import fmt
from schedlang.language.syntax import parse
from schedlang.passes.lower.build import build
from schedlang.passes.verify.requirements import IN_ORACLE
from schedlang.runtime.launch.pool import Pool
from schedlang.schedule import Schedule, create_schedule
from tests.proofs import (
    Observed,
    adamw,
    assert_near,
    assert_proven,
    assert_same,
    make_plan,
    train_on_ranks,
    train_sequential,
    train_steps,
)

load_all()
NAMES = sorted(registry())
# rows that an example may need after it, so that its sharded output is used correctly
COMPANION_ROWS = (
    "",
    "layers.*.mlp.down  shard(row, over=tp)",
    "layers.*.mlp.up  shard(col, over=tp)",
    "layers.*.mlp.down  grid(summa, output=R, over=(r, c))",
    "layers.*.mlp.down  grid(summa, output=R, over=(r, c))\nzero(stage=0, over=r)",
)
# rows that an example needs above it
ROWS_ABOVE = dict.fromkeys(("compress", "gather_rows"), "zero(stage=0, over=dp)")
CLASSES = 21


class MLP(nn.Module):
    """Two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class SameMLP(nn.Module):
    """An MLP with an equal forward written otherwise; it takes over the projections."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.up, self.down = mlp.up, mlp.down

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(x * 0.5 * (1 + torch.erf(x * 0.5**0.5)))


class Attend(nn.Module):
    """Causal attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Experts(nn.Module):
    """Four experts in one module, called with tokens, expert indices and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8) / 8)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for slot in range(index.shape[1]):
            activation = torch.bmm(self.weight[index[:, slot]], x[:, :, None])[:, :, 0]
            out = out + torch.tanh(activation) * weights[:, slot : slot + 1]
        return out


class Mixture(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, index = self.router(flat).softmax(-1).topk(2, -1)
        out: Tensor = self.experts(flat, index, weights)
        return out.reshape(x.shape)


class Layer(nn.Module):
    """Attention, a norm, an MLP, experts and dropout, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.RMSNorm(8, eps=1e-6), MLP(), nn.Dropout(0.2)
        self.attn = Attend()
        self.moe = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        x = x + self.drop(self.mlp(self.norm(x)))
        return x + self.moe(x)


class Toy(nn.Module):
    """A model with all module names that the primitives' examples use."""

    replacements = {"my_mlp": SameMLP}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.again = nn.Linear(8, 8)
        self.side = nn.Linear(8, 8, bias=False)
        self.side.weight = self.again.weight
        self.head = nn.Linear(8, CLASSES, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        for _ in range(3):
            x = x + torch.tanh(self.again(x))
        logits = self.head(x - self.side(x))
        loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
        return {"loss": loss, "logits": logits}


class PairedToy(Toy):
    """A Toy whose loss compares all rows of a batch, too."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(CLASSES, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = super().forward(ids, labels)
        features = self.projection(output["logits"].mean(1))
        pairs = F.log_softmax(features @ features.t(), -1)
        return {**output, "loss": output["loss"] - pairs.diagonal().mean()}


MODELS = {"gather_rows": PairedToy}  # models that an example needs


def _build_toy(name: str = "") -> nn.Module:
    """The model for an example, with fixed values, in float64."""
    torch.manual_seed(0)
    return MODELS.get(name, Toy)().double()


def _batch(seed: int) -> dict[str, Tensor]:
    """A batch whose size is odd, with some labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(CLASSES, (17, 5), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[0, :3] = -100
    return {"ids": ids, "labels": labels}


BATCHES = [_batch(seed) for seed in range(2)]


def _example_row(name: str) -> str:
    """The example as a row at the top of a schedule for Toy."""
    example = registry()[name].example
    path = example.split()[0]
    in_layers = not path.startswith(("layers", "embed", "again", "side", "projection", name))
    return f"at layers.* {{ {example} }}" if in_layers else example


def _example_axes(name: str) -> list[str]:
    """The mesh axes that an example names."""
    matches = re.findall(r"over=(?:\(([\w, ]+)\)|(\w+))", _example_row(name))
    return list(
        dict.fromkeys(axis for pair in matches for axis in ", ".join(pair).split(", ") if axis)
    )


def _relax_words(name: str) -> str:
    """What the step of an example must relax."""
    gives_up = registry()[name].gives_up
    return ", ".join(sorted(gives_up - {"rounding"})) if isinstance(gives_up, frozenset) else ""


def _example_plan(name: str, sizes: dict[str, int], *extra_rows: str) -> Plan:
    """The plan of an example on a mesh, with further rows."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    rows = [ROWS_ABOVE.get(name, ""), _example_row(name), *extra_rows]
    return make_plan(_build_toy(name), "\n".join(rows), mesh, _relax_words(name))


def _buildable_plan(name: str, sizes: dict[str, int], *extra_rows: str) -> Plan:
    """The plan of an example with as few further rows as make it traceable."""
    from schedlang.passes.complete.complete import complete_plan
    from schedlang.passes.propagate.propagate import propagate

    refusals = []
    for companions in COMPANION_ROWS:
        try:
            plan = _example_plan(name, sizes, companions, *extra_rows)
            propagate(complete_plan(plan, BATCHES[0]), BATCHES[0])
            return plan
        except Refusal as refusal:
            refusals.append(refusal.render())
    raise AssertionError(refusals[0])


@cache
def _plain_training(model: type[nn.Module]) -> Observed:
    """The unmodified training of a toy model."""
    torch.manual_seed(0)
    return train_sequential(model().double(), BATCHES, adamw, clip=0.5, seed=3)


@pytest.fixture
def expected(name: str) -> Observed:
    """The unmodified training of Toy, or of its changed copy if the example changes what is
    trained."""
    if "trained" not in registry()[name].writes:
        return _plain_training(MODELS.get(name, Toy))
    changed = _example_plan(name, dict.fromkeys(_example_axes(name), 2)).model.model
    return train_sequential(changed, BATCHES, adamw, clip=0.5, seed=3)


@pytest.mark.parametrize("name", NAMES)
def test_the_example_is_a_row(name: str) -> None:
    """An example parses, is formatted, names its own primitive, and can be planned on Toy."""
    axes = ", ".join(f"{axis}=2" for axis in _example_axes(name))
    mesh = f"mesh({axes})\n\n" if axes else ""
    text = f'schedule 1\n\n{mesh}step "all" {{\n  {registry()[name].example}\n}}\n'
    assert fmt(Source("x.sched", text)) == text
    plan = _example_plan(name, dict.fromkeys(_example_axes(name), 2))
    assert plan.actions[-1].name == name and len(plan.actions) == 1 + (name in ROWS_ABOVE)
    assert plan.actions[-1].sites


@pytest.mark.parametrize("name", NAMES)
def test_a_refusal_leaves_the_same_plan(name: str) -> None:
    """Where the example's call is refused, plan and text are the very same objects as before."""
    plan = _example_plan(name, dict.fromkeys(_example_axes(name), 2))
    primitive = plan.actions[-1].primitive
    sch = create_schedule(_build_toy(name))
    sch.mesh(**dict.fromkeys(_example_axes(name) or ["dp"], 2))
    refusals = 0
    for site in plan.model.sites:
        before, text = sch.plan(), sch.to_sched()
        scope: Any = sch[site] if site else sch
        try:
            scope.do(primitive)
        except Refusal:
            refusals += 1
            assert sch.plan() is before and sch.to_sched() == text
    before = sch.plan()
    with pytest.raises(Refusal):
        getattr(sch["layers.0"], name)(no_such_argument=1)
    assert sch.plan() is before
    assert refusals or primitive.takes == "module" or name == "verify"


@pytest.mark.parametrize("name", NAMES)
def test_undo_restores(name: str) -> None:
    """After `undo` the plan equals the one before the row."""
    sizes = ", ".join(f"{axis}=2" for axis in [*_example_axes(name), "other"])
    allow = f"relax({_relax_words(name)}) " if _relax_words(name) else ""
    head = f'schedule 1\n\nmesh({sizes})\n\nstep "a" {allow}{{\n  verify(loss, within=0.5)\n'
    head += f"  {ROWS_ABOVE[name]}\n" if name in ROWS_ABOVE else ""
    before = Schedule(_build_toy(name), parse(Source("x", head + "}\n"))).plan()
    sch = Schedule(_build_toy(name), parse(Source("x", head + f"  {_example_row(name)}\n}}\n")))
    assert sch.plan() != before
    sch.undo()
    assert sch.plan() == before


@pytest.mark.parametrize("name", NAMES)
def test_axes_of_size_one_are_the_identity(name: str, expected: Observed) -> None:
    """On one rank the program equals the model, bit for bit unless the row changes rounding."""
    plan = _buildable_plan(name, dict.fromkeys(_example_axes(name), 1))
    observed = train_steps(plan, BATCHES, adamw, 0.5, {"seed": 3})
    exact = bool(_example_axes(name)) or not plan.gives_up - IN_ORACLE
    (assert_same if exact else assert_near)(observed, expected)


def _plan_on_ranks(name: str, world: int) -> Plan:
    """The plan of an example on 2 or 4 ranks."""
    axes = _example_axes(name)
    if not axes or axes == ["dp"]:
        return _buildable_plan(name, {"dp": world}, *([] if axes else ["zero(stage=0, over=dp)"]))
    if world == 2:
        return _buildable_plan(name, {axis: 1 for axis in axes[:-1]} | {axes[-1]: 2})
    if len(axes) > 1:
        return _buildable_plan(name, dict.fromkeys(axes, 2))
    return _buildable_plan(name, {"dp": world // 2, axes[0]: 2}, "zero(stage=0, over=dp)")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_on_ranks_it_equals_the_original(
    name: str, world: int, pool: Pool, expected: Observed
) -> None:
    """Two steps on 2 and 4 ranks: losses, gradients, norms, parameters and optimizer state are
    equal."""
    plan = _plan_on_ranks(name, world)
    if "lossy" in plan.gives_up:  # compared with training in one process under the same compression
        assert_proven(pool, plan, BATCHES)
        return
    assert_near(train_on_ranks(pool, plan, BATCHES, adamw, clip=0.5, seed=3), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_not_touched(name: str) -> None:
    """Planning, building and training change no values, attributes or hooks of the user's model.

    What inductor makes of a graph knows no module: operators of compiled regions run as they are.
    """
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx

    model = _build_toy(name)
    row = f"{ROWS_ABOVE.get(name, '')}\n{_example_row(name)}"
    mesh = ", ".join(f"{axis}=1" for axis in _example_axes(name))
    plan = make_plan(model, row, mesh, _relax_words(name))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {fqn: set(vars(module)) for fqn, module in model.named_modules()}
    with mock.patch.object(compile_fx, "compile_fx", aot_eager):
        build(plan, BATCHES[0], optimizer=adamw).train_step(BATCHES[0])
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert {fqn: set(vars(module)) for fqn, module in model.named_modules()} == attributes
    assert all(p.grad is None for p in model.parameters())
