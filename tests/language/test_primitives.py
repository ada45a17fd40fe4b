"""Every registered primitive, from its own example alone: a new one is tested on arrival."""

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
    Seen,
    adamw,
    assert_near,
    assert_same,
    planned,
    proven,
    sequential,
    steps,
    trained,
)

load_all()
NAMES = sorted(registry())
# rows that may have to stand beside an example, so that what it leaves split is taken up again
BESIDE = (
    "",
    "layers.*.mlp.down  shard(row, over=tp)",
    "layers.*.mlp.up  shard(col, over=tp)",
    "layers.*.mlp.down  grid(summa, output=R, over=(r, c))",
    "layers.*.mlp.down  grid(summa, output=R, over=(r, c))\nzero(stage=0, over=r)",
)
ABOVE = {"compress": "zero(stage=0, over=dp)"}  # what an example stands on
CLASSES = 21


class MLP(nn.Module):
    """Two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mine(nn.Module):
    """The same in other words; it takes over the projections."""

    def __init__(self, old: MLP) -> None:
        super().__init__()
        self.up, self.down = old.up, old.down

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(x * 0.5 * (1 + torch.erf(x * 0.5**0.5)))


class Attend(nn.Module):
    """Two heads that look back."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Experts(nn.Module):
    """Four experts in one module, called with tokens, the experts of each and their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8) / 8)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for slot in range(index.shape[1]):
            given = torch.bmm(self.weight[index[:, slot]], x[:, :, None])[:, :, 0]
            out = out + torch.tanh(given) * weights[:, slot : slot + 1]
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
    """Attention, a norm, a gated change, experts and dropout beside a shortcut."""

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
    """All names that the examples of primitives use."""

    replacements = {"my_mlp": Mine}

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


def _toy() -> nn.Module:
    torch.manual_seed(0)
    return Toy().double()


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(CLASSES, (17, 5), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[0, :3] = -100
    return {"ids": ids, "labels": labels}


BATCHES = [_batch(seed) for seed in range(2)]


def _row(name: str) -> str:
    """The example as a row at the top of a schedule for Toy."""
    example = registry()[name].example
    path = example.split()[0]
    inside = not path.startswith(("layers", "embed", "again", "side", name))
    return f"at layers.* {{ {example} }}" if inside else example


def _axes(name: str) -> list[str]:
    named = re.findall(r"over=(?:\(([\w, ]+)\)|(\w+))", _row(name))
    return list(
        dict.fromkeys(axis for pair in named for axis in ", ".join(pair).split(", ") if axis)
    )


def _relax(name: str) -> str:
    """What its step must allow."""
    given = registry()[name].gives_up
    return ", ".join(sorted(given - {"rounding"})) if isinstance(given, frozenset) else ""


def _plan(name: str, sizes: dict[str, int], *more: str) -> Plan:
    mesh = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    rows = [ABOVE.get(name, ""), _row(name), *more]
    return planned(_toy(), "\n".join(rows), mesh, _relax(name))


def _buildable(name: str, sizes: dict[str, int], *more: str) -> Plan:
    """The plan of the example, with as few other rows as make it traceable."""
    from schedlang.passes.complete.complete import complete_plan
    from schedlang.passes.propagate.propagate import propagate

    refusals = []
    for beside in BESIDE:
        try:
            plan = _plan(name, sizes, beside, *more)
            propagate(complete_plan(plan, BATCHES[0]), BATCHES[0])
            return plan
        except Refusal as refusal:
            refusals.append(refusal.render())
    raise AssertionError(refusals[0])


@cache
def _plain() -> Seen:
    return sequential(_toy(), BATCHES, adamw, clip=0.5, seed=3)


@pytest.fixture
def expected(name: str) -> Seen:
    """The plain training of Toy; of a copy, where the example changes what is trained."""
    if "trained" not in registry()[name].writes:
        return _plain()
    changed = _plan(name, dict.fromkeys(_axes(name), 2)).model.model
    return sequential(changed, BATCHES, adamw, clip=0.5, seed=3)


@pytest.mark.parametrize("name", NAMES)
def test_the_example_is_a_row(name: str) -> None:
    """An example parses, formats to itself, names its own primitive, and plans on Toy."""
    axes = ", ".join(f"{axis}=2" for axis in _axes(name))
    mesh = f"mesh({axes})\n\n" if axes else ""
    text = f'schedule 1\n\n{mesh}step "all" {{\n  {registry()[name].example}\n}}\n'
    assert fmt(Source("x.sched", text)) == text
    plan = _plan(name, dict.fromkeys(_axes(name), 2))
    assert plan.actions[-1].name == name and len(plan.actions) == 1 + (name in ABOVE)
    assert plan.actions[-1].sites


@pytest.mark.parametrize("name", NAMES)
def test_a_refusal_leaves_the_same_plan(name: str) -> None:
    """Wherever the example's call is refused, plan and text stay the very same objects."""
    plan = _plan(name, dict.fromkeys(_axes(name), 2))
    bound = plan.actions[-1].primitive
    sch = create_schedule(_toy())
    sch.mesh(**dict.fromkeys(_axes(name) or ["dp"], 2))
    refusals = 0
    for site in plan.model.sites:
        before, text = sch.plan(), sch.to_sched()
        scope: Any = sch[site] if site else sch
        try:
            scope.do(bound)
        except Refusal:
            refusals += 1
            assert sch.plan() is before and sch.to_sched() == text
    before = sch.plan()
    with pytest.raises(Refusal):
        getattr(sch["layers.0"], name)(no_such_argument=1)
    assert sch.plan() is before
    assert refusals or bound.takes == "module" or name == "verify"


@pytest.mark.parametrize("name", NAMES)
def test_undo_restores(name: str) -> None:
    """After undo the schedule plans what it planned before the row."""
    sizes = ", ".join(f"{axis}=2" for axis in [*_axes(name), "other"])
    allow = f"relax({_relax(name)}) " if _relax(name) else ""
    head = f'schedule 1\n\nmesh({sizes})\n\nstep "a" {allow}{{\n  verify(loss, within=0.5)\n'
    head += f"  {ABOVE[name]}\n" if name in ABOVE else ""
    before = Schedule(_toy(), parse(Source("x", head + "}\n"))).plan()
    sch = Schedule(_toy(), parse(Source("x", head + f"  {_row(name)}\n}}\n")))
    assert sch.plan() != before
    sch.undo()
    assert sch.plan() == before


@pytest.mark.parametrize("name", NAMES)
def test_axes_of_size_one_are_the_identity(name: str, expected: Seen) -> None:
    """On one rank the program equals the plain module: to the last bit unless it says so."""
    plan = _buildable(name, dict.fromkeys(_axes(name), 1))
    seen = steps(plan, BATCHES, adamw, 0.5, {"seed": 3})
    exact = bool(_axes(name)) or not plan.gives_up - IN_ORACLE
    (assert_same if exact else assert_near)(seen, expected)


def _on_ranks(name: str, world: int) -> Plan:
    axes = _axes(name)
    if not axes or axes == ["dp"]:
        return _buildable(name, {"dp": world}, *([] if axes else ["zero(stage=0, over=dp)"]))
    if world == 2:
        return _buildable(name, {axis: 1 for axis in axes[:-1]} | {axes[-1]: 2})
    if len(axes) > 1:
        return _buildable(name, dict.fromkeys(axes, 2))
    return _buildable(name, {"dp": world // 2, axes[0]: 2}, "zero(stage=0, over=dp)")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_on_ranks_it_equals_the_original(name: str, world: int, pool: Pool, expected: Seen) -> None:
    """Two steps on 2 and on 4 ranks: losses, gradients, norms, state and optimizer state agree."""
    plan = _on_ranks(name, world)
    if "lossy" in plan.gives_up:  # equal to another one, by the same rule in one process
        proven(pool, plan, BATCHES)
        return
    assert_near(trained(pool, plan, BATCHES, adamw, clip=0.5, seed=3), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_not_touched(name: str) -> None:
    """Planning, building and training change neither values nor attributes nor hooks.

    What inductor makes of a graph knows no module: operators of compiled regions run as they are.
    """
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx

    model = _toy()
    row = f"{ABOVE.get(name, '')}\n{_row(name)}"
    mesh = ", ".join(f"{axis}=1" for axis in _axes(name))
    plan = planned(model, row, mesh, _relax(name))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    had = {fqn: set(vars(module)) for fqn, module in model.named_modules()}
    with mock.patch.object(compile_fx, "compile_fx", aot_eager):
        build(plan, BATCHES[0], optimizer=adamw).train_step(BATCHES[0])
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert {fqn: set(vars(module)) for fqn, module in model.named_modules()} == had
    assert all(p.grad is None for p in model.parameters())
