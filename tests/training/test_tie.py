"""Tied and untied weights (`tie`, `untie`): which parameters exist, and that they train right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.plan import Plan
from schedlang.passes.lower.build import build
from schedlang.passes.verify.changed_model import KIND
from schedlang.runtime import parameter_changes
from tests import models
from tests.engine import Threads
from tests.proofs import assert_proven, make_plan, sgd

BATCHES = [models.tokens(rows=8, seed=seed) for seed in range(2)]
EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
STAGES = 'pipeline(order="1F1B", micro=2)'


def plan_of(rows: str, mesh: str = "") -> Plan:
    """Plan GPT-2 with rows that may change the model."""
    return make_plan(models.gpt2(2), rows, mesh, "model, updates")


def test_which_parameters_there_are() -> None:
    """Tied blocks have the first block's parameters, an untied head its own, in the same
    storage."""
    original = models.gpt2(2)
    plan = make_plan(original, "transformer.h.* tie()\nlm_head untie(weight)", "", "model")
    model, base = plan.model, plan.model.base
    assert base.model is original and (EMBEDDING, HEAD) in base.ties
    assert model.parameters[EMBEDDING].names == (EMBEDDING,) and model.parameters[HEAD].names == (
        HEAD,
    )
    inside = [name for name in base.parameters if name.startswith("transformer.h.0.")]
    for name in inside:
        assert model.parameters[name].names == (name, name.replace(".h.0.", ".h.1."))
    assert len(model.unique_parameters) == len(base.unique_parameters) - len(inside) + 1
    parameters = dict(model.model.named_parameters(remove_duplicate=False))
    for name, parameter in original.named_parameters(remove_duplicate=False):
        assert torch.equal(parameters[name], original.get_parameter(name.replace(".h.1.", ".h.0.")))
        stored = (
            parameters[name].data_ptr() == parameter.data_ptr()
        )  # only untied weights need new memory
        assert stored == (name != HEAD and ".h.1." not in name)


@pytest.mark.parametrize(
    "rows, mesh",
    [
        (
            "transformer.h.* tie()\ntransformer.h pipeline_split(over=pp)\nzero(stage=1, over=dp)\n"
            f"{STAGES}",
            "dp=2, pp=2",
        ),
        (
            "transformer.h.* tie()\ntransformer.h.*.mlp.c_fc shard(col, over=tp)\n"
            "transformer.h.*.mlp.c_proj shard(row, over=tp)\nzero(stage=3, over=dp)",
            "dp=2, tp=2",
        ),
        (
            "lm_head untie()\nlm_head pad(out, multiple=2)\nlm_head shard(col, output=R, over=tp)\n"
            f"transformer.h pipeline_split(over=pp)\n{STAGES}",
            "pp=2, tp=2",
        ),
    ],
)
def test_it_trains_as_the_original_so_changed(threads: Threads, rows: str, mesh: str) -> None:
    """Copies on several stages, parts, slices: equal to the original, tied or untied alike."""
    report = assert_proven(threads, plan_of(rows, mesh), BATCHES)
    assert report.equivalence == "relaxed (model)"
    assert any(row.kind == KIND for row in report.rows)


def test_the_gradient_of_a_tie_is_the_sum() -> None:
    """It sums the gradients of the original's layers at equal values (as in ALBERT)."""
    model = models.gpt2(2)
    equal_model = models.gpt2(2)
    with torch.no_grad():
        first_block, tied_block = (block.parameters() for block in equal_model.transformer.h)
        for target, source in zip(tied_block, first_block):
            target.copy_(source)
    equal_model(**BATCHES[0]).loss.backward()
    program = build(
        make_plan(model, "transformer.h.* tie()", "", "model"), BATCHES[0], optimizer=sgd
    )
    program.train_step(BATCHES[0])
    for name, grad in program.gradients().items():
        uses = {name, name.replace(".h.0.", ".h.1.")}
        expected = sum(equal_model.get_parameter(use).grad for use in uses)
        assert torch.allclose(grad, expected, rtol=1e-12, atol=1e-15), name
    state = program.state_dict()
    assert list(state) == list(model.state_dict())
    assert torch.equal(state["transformer.h.0.ln_1.weight"], state["transformer.h.1.ln_1.weight"])


def test_untied_values_part() -> None:
    """After a step both names have different values, and both have changed."""
    program = build(plan_of("lm_head untie(weight)"), BATCHES[0], optimizer=sgd)
    initial = program.state_dict()
    program.train_step(BATCHES[0])
    trained = program.state_dict()
    assert torch.equal(initial[EMBEDDING], initial[HEAD]) and not torch.equal(
        trained[EMBEDDING], trained[HEAD]
    )
    assert not any(torch.equal(initial[name], trained[name]) for name in (EMBEDDING, HEAD))


def test_a_tie_of_the_wrong_values_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy whose tied use gets no gradient differs from the untouched model."""
    original = parameter_changes.Tie.__call__

    def cut(self: parameter_changes.Tie, module: nn.Module) -> nn.Module:
        twin = original(self, module)
        block = twin.get_submodule("transformer.h.1.mlp")
        block.register_forward_hook(lambda module, inputs, output: output.detach())
        return twin

    monkeypatch.setattr(parameter_changes.Tie, "__call__", cut)
    with pytest.raises(AssertionError, match=KIND):
        assert_proven(threads, plan_of("transformer.h.*.mlp tie()"), BATCHES)


class TwoNames(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).sum()


@pytest.mark.parametrize(
    "rows, code, said",
    [
        ("transformer.h.0 tie()", "S416", "needs at least two modules"),
        ("transformer.h.0.ln_1, transformer.h.0.mlp tie()", "S416", "differ in shape or dtype"),
        ("transformer.wte, lm_head tie(weight)", "S416", "nothing is left to tie"),
        ("transformer.wte, lm_head tie(bias)", "S305", "has no parameter `bias`"),
        ("transformer.ln_f untie()", "S416", "shares no parameter"),
        ("lm_head untie(gain)", "S305", "has no parameter `gain`"),
        ("zero(stage=0, over=dp)\nlm_head untie()", "S503", "`untie` must stand above `zero`"),
        ("zero(stage=0, over=dp)\ntransformer.h.* tie()", "S503", "`tie` must stand above `zero`"),
    ],
)
def test_refusals(rows: str, code: str, said: str) -> None:
    """Different shapes, parameters that are not shared, and rows in the wrong order."""
    with pytest.raises(Refusal) as error:
        plan_of(rows, "dp=2")
    assert code in error.value.render() and said in error.value.render()


def test_a_module_under_two_names_is_not_untied() -> None:
    """Its own parameter would be in both places."""
    with pytest.raises(Refusal, match="one module under two names"):
        make_plan(TwoNames(), "b untie()", "", "model")
