"""The row `replace`: a user's module trains as the model's did, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.diagnostics.source import Source
from schedlang.language.syntax import parse
from schedlang.passes.elaborate.state import Settings
from schedlang.passes.lower.build import build
from schedlang.passes.prove import Case, prove
from schedlang.passes.reduce_model.shrink import plan_full_size
from schedlang.schedule import create_schedule
from tests import models
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan, refusal_text, sgd

BATCHES = [models.tokens(rows=8, seed=seed) for seed in range(2)]
MLP = "transformer.h.*.mlp  replace(mine)\n"


class Mine(nn.Module):
    """GPT-2's MLP written differently; it keeps the projections."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.drop = (
            original.c_fc,
            original.c_proj,
            nn.Dropout(original.dropout.p),
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden = F.gelu(self.c_fc(hidden_states), approximate="tanh")
        return self.drop(self.c_proj(hidden))


class MatrixMlp(nn.Module):
    """The same MLP from plain matrices with other names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.zeros(width, 4 * width)),
            nn.Parameter(torch.zeros(4 * width, width)),
        )
        self.a, self.b = nn.Parameter(torch.zeros(4 * width)), nn.Parameter(torch.zeros(width))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.gelu(hidden_states @ self.up + self.a, approximate="tanh") @ self.down + self.b


class ReluMlp(Mine):
    """An MLP with another activation."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.drop(self.c_proj(F.relu(self.c_fc(hidden_states))))


NAMES = {"up": "c_fc.weight", "a": "c_fc.bias", "down": "c_proj.weight", "b": "c_proj.bias"}


def gpt2(make: Any, **options: Any) -> nn.Module:
    """Return GPT-2 and what `mine` means in its schedule."""
    model = models.gpt2(2, **options)
    model.replacements = {"mine": make}
    return model


def matrix_mlp(original: Any) -> Any:
    return MatrixMlp(original.c_fc.weight.shape[0]), NAMES


TP = (
    "transformer.h.*.mlp.c_fc shard(col, over=tp)\ntransformer.h.*.mlp.c_proj shard(row, over=tp)\n"
)


@pytest.mark.parametrize(
    "make, rows, mesh",
    [
        (Mine, TP + "transformer.h.*.mlp checkpoint()\nzero(stage=3, over=dp)", "dp=2, tp=2"),
        (
            matrix_mlp,
            "transformer.h pipeline_split(over=pp)\nzero(stage=2, over=dp)\n"
            'pipeline(order="1F1B", micro=2)',
            "dp=2, pp=2",
        ),
    ],
)
def test_it_trains_as_the_model_did(threads: Threads, make: Any, rows: str, mesh: str) -> None:
    """With parameters kept or renamed, under sharding, recomputation and stages."""
    model = gpt2(make)
    plan = make_plan(model, MLP + rows, mesh)
    assert assert_proven(threads, plan, BATCHES).equivalence == "algebraic"
    assert list(plan.model.parameters) == list(plan.model.base.parameters)


def test_another_computation_is_found(threads: Threads) -> None:
    """A replacement that computes something else fails the proof, which blames its row."""
    report = prove(
        Case(make_plan(gpt2(ReluMlp), MLP), tuple(BATCHES), None, None, 0, "none"), pool=threads
    )
    assert not report.ok
    assert any("replace" in line for line in report.blamed), report.blamed


def test_values_are_the_models() -> None:
    """State has the model's names and values; the program has its own copy."""
    model = gpt2(matrix_mlp)
    program = build(make_plan(model, MLP), BATCHES[0], optimizer=sgd)
    state = program.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    torch.nn.init.zeros_(model.transformer.h[0].mlp.c_proj.weight)  # of the model, not the program
    assert program.state_dict()["transformer.h.0.mlp.c_proj.weight"].norm() > 0


def test_in_python() -> None:
    """A class, function or module is given; the schedule's text names it, and later rows see it."""
    sch = create_schedule(models.gpt2(2))
    sch["transformer.h.0.mlp"].replace(Mine)
    sch["transformer.h.1.mlp"].replace(Mine(sch.plan().model.base.model.transformer.h[1].mlp))
    assert "transformer.h.0.mlp  replace(Mine)\n" in sch.to_sched()
    assert "transformer.h.1.mlp  replace(Mine_2)\n" in sch.to_sched()
    assert sch["transformer.h.*.mlp:Mine"].modules == ("transformer.h.0.mlp", "transformer.h.1.mlp")
    sch.undo()
    sch.undo()
    with pytest.raises(Refusal, match="Mine"):
        assert sch["transformer.h.*.mlp:Mine"].modules


class PackedMlp(nn.Module):
    """An MLP of Llama with gate and up projection in one layer."""

    def __init__(self, original: Any, down: nn.Module) -> None:
        super().__init__()
        width, hidden = original.down_proj.weight.shape
        self.both = nn.Linear(width, 2 * hidden, bias=False)
        self.down_proj = down

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


def packed_llama(down: Any) -> Any:
    """Return a Llama with that replacement; `down` makes its last projection from the old one."""
    model = models.llama(1)
    names = {"both.weight": ["gate_proj.weight", "up_proj.weight"]}
    model.replacements = {
        "mine": lambda original: (PackedMlp(original, down(original.down_proj)), names)
    }
    return model


def test_several_names_are_joined(threads: Threads) -> None:
    """A weight joined from several keeps the gradients of each."""

    model = packed_llama(lambda old: nn.Linear(*reversed(old.weight.shape), bias=False))
    plan = make_plan(model, "model.layers.*.mlp  replace(mine)\nzero(stage=1, over=dp)", "dp=2")
    assert assert_proven(threads, plan, BATCHES).ok
    message = refusal_text(
        model,
        "model.layers.*.mlp  replace(mine)\nmodel.layers.*.mlp.gate_proj  shard(col, over=tp)",
        "tp=2",
        BATCHES[0],
    )
    assert "gate_proj" in message


def test_a_child_that_is_taken_over_keeps_its_values() -> None:
    """Beside renamed parameters, a child of the model keeps its values, in plan and model."""

    model = packed_llama(lambda old: old)
    changed = make_plan(model, "model.layers.*.mlp  replace(mine)").model.model
    assert not any(p.is_meta for variant in (model, changed) for p in variant.parameters())
    x = torch.randn(2, model.config.hidden_size, dtype=model.dtype)
    mlp = [variant.get_submodule("model.layers.0.mlp") for variant in (model, changed)]
    torch.testing.assert_close(mlp[0](x), mlp[1](x))


def test_a_reduced_model_knows_them_too() -> None:
    """A model that `--shrink` reduces has the replacements of the model file too."""
    tree = parse(Source("rows.sched", f'schedule 1\nstep "all" {{\n{MLP}}}\n'))
    full = plan_full_size(tree, Settings(), gpt2(Mine))
    assert full.plan_for(models.gpt2(1), {}).actions[0].sites == ("transformer.h.0.mlp",)


class MissingProjection(nn.Module):
    def __init__(self, original: Any) -> None:
        super().__init__()
        self.c_fc = nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_fc(x)


class NeedsScale(Mine):
    def forward(self, hidden_states: Tensor, scale: Tensor) -> Tensor:
        return hidden_states * scale


def raise_error(original: Any) -> Any:
    raise ValueError("no such width")


@pytest.mark.parametrize(
    "make, rows, said",
    [
        (Mine, "transformer.h.*.mlp  replace(others)", ("S880", "`others`", "there are `mine`")),
        (Mine, "replace(mine)", ("S408", "the model itself")),
        (Mine, f"{TP}{MLP}", ("S503", "move `replace` above this `shard`")),
        (Mine, f"{MLP}{MLP}", ("S501", "computed by a kernel twice")),
        (MissingProjection, MLP, ("S881", "its forward takes no `hidden_states`", "take the same")),
        (NeedsScale, MLP, ("S881", "needs `scale`")),
        (raise_error, MLP, ("S881", "ValueError: no such width")),
        (
            lambda old: MatrixMlp(16),
            MLP,
            ("S881", "has no parameter `c_fc.weight`", "return module, {"),
        ),
        (lambda old: MatrixMlp(8), MLP, ("S881",)),
        (lambda old: (MatrixMlp(8), NAMES), MLP, ("S881", "[16, 64]", "[8, 32]")),
        (lambda old: (MatrixMlp(16), {**NAMES, "b": "c"}), MLP, ("S881", "its mapping names `c`")),
        (lambda old: (MatrixMlp(16), {**NAMES, "b": "c_fc.bias"}), MLP, ("S881", "c_proj.bias")),
        (lambda old: old, MLP, ("S881", "that it should replace")),
        (lambda old: 3, MLP, ("S881", "returns int, not a module")),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, rows: str, said: tuple[str, ...]) -> None:
    """Names, shapes and arguments are checked before anything runs; the message has all details."""
    message = refusal_text(gpt2(make), rows, "tp=2")
    for part in said:
        assert part in message, message
