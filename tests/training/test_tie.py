"""Tests of `tie` and `untie`: which parameters there are, and that they train as if always so."""

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
from tests.proofs import planned, proven, sgd

BATCHES = [models.tokens(rows=8, seed=seed) for seed in range(2)]
WTE, HEAD = "transformer.wte.weight", "lm_head.weight"
ONE_F = 'pipeline(order="1F1B", micro=2)'


def told(rows: str, mesh: str = "") -> Plan:
    """The plan of rows for GPT-2, which may change the model."""
    return planned(models.gpt2(2), rows, mesh, "model, updates")


def test_which_parameters_there_are() -> None:
    """Tied blocks hold the first one's parameters, an untied head its own, on the same storage."""
    plain = models.gpt2(2)
    plan = planned(plain, "transformer.h.* tie()\nlm_head untie(weight)", "", "model")
    facts, base = plan.model, plan.model.base
    assert base.model is plain and (WTE, HEAD) in base.ties
    assert facts.parameters[WTE].names == (WTE,) and facts.parameters[HEAD].names == (HEAD,)
    inside = [name for name in base.parameters if name.startswith("transformer.h.0.")]
    for name in inside:
        assert facts.parameters[name].names == (name, name.replace(".h.0.", ".h.1."))
    assert len(facts.unique_parameters) == len(base.unique_parameters) - len(inside) + 1
    own = dict(facts.model.named_parameters(remove_duplicate=False))
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        assert torch.equal(own[name], plain.get_parameter(name.replace(".h.1.", ".h.0.")))
        stored = own[name].data_ptr() == parameter.data_ptr()  # no memory but for what is untied
        assert stored == (name != HEAD and ".h.1." not in name)


@pytest.mark.parametrize(
    "rows, mesh",
    [
        (
            "transformer.h.* tie()\ntransformer.h pipeline_split(over=pp)\nzero(stage=1, over=dp)\n"
            f"{ONE_F}",
            "dp=2, pp=2",
        ),
        (
            "transformer.h.* tie()\ntransformer.h.*.mlp.c_fc shard(col, over=tp)\n"
            "transformer.h.*.mlp.c_proj shard(row, over=tp)\nzero(stage=3, over=dp)",
            "dp=2, tp=2",
        ),
        (
            "lm_head untie()\nlm_head pad(out, multiple=2)\nlm_head shard(col, output=R, over=tp)\n"
            f"transformer.h pipeline_split(over=pp)\n{ONE_F}",
            "pp=2, tp=2",
        ),
    ],
)
def test_it_trains_as_the_original_so_changed(threads: Threads, rows: str, mesh: str) -> None:
    """Copies on several stages, parts, slices: equal to the original that was tied or untied."""
    report = proven(threads, told(rows, mesh), BATCHES)
    assert report.equivalence == "relaxed (model)"
    assert any(row.kind == KIND for row in report.rows)


def test_the_gradient_of_a_tie_is_the_sum() -> None:
    """Of the gradients that the original's layers have under the same values (ALBERT's)."""
    model = models.gpt2(2)
    twin = models.gpt2(2)
    with torch.no_grad():
        first, second = (block.parameters() for block in twin.transformer.h)
        for mine, other in zip(second, first):
            mine.copy_(other)
    twin(**BATCHES[0]).loss.backward()
    program = build(planned(model, "transformer.h.* tie()", "", "model"), BATCHES[0], optimizer=sgd)
    program.train_step(BATCHES[0])
    for name, grad in program.gradients().items():
        uses = {name, name.replace(".h.0.", ".h.1.")}
        wanted = sum(twin.get_parameter(one).grad for one in uses)
        assert torch.allclose(grad, wanted, rtol=1e-12, atol=1e-15), name
    state = program.state_dict()
    assert list(state) == list(model.state_dict())
    assert torch.equal(state["transformer.h.0.ln_1.weight"], state["transformer.h.1.ln_1.weight"])


def test_untied_values_part() -> None:
    """After a step both names have values of their own, and both have been trained."""
    program = build(told("lm_head untie(weight)"), BATCHES[0], optimizer=sgd)
    before = program.state_dict()
    program.train_step(BATCHES[0])
    after = program.state_dict()
    assert torch.equal(before[WTE], before[HEAD]) and not torch.equal(after[WTE], after[HEAD])
    assert not any(torch.equal(before[name], after[name]) for name in (WTE, HEAD))


def test_a_tie_of_the_wrong_values_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy in which a tied use is cut off from its gradient differs from the untouched model."""
    plain = parameter_changes.Tie.__call__

    def cut(self: parameter_changes.Tie, module: nn.Module) -> nn.Module:
        twin = plain(self, module)
        block = twin.get_submodule("transformer.h.1.mlp")
        block.register_forward_hook(lambda module, inputs, output: output.detach())
        return twin

    monkeypatch.setattr(parameter_changes.Tie, "__call__", cut)
    with pytest.raises(AssertionError, match=KIND):
        proven(threads, told("transformer.h.*.mlp tie()"), BATCHES)


class Twice(nn.Module):
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
    """What is not alike, not shared, or stands below what relies on it."""
    with pytest.raises(Refusal) as error:
        told(rows, "dp=2")
    assert code in error.value.render() and said in error.value.render()


def test_a_module_under_two_names_is_not_untied() -> None:
    """A parameter of its own would stand in both places."""
    with pytest.raises(Refusal, match="one module under two names"):
        planned(Twice(), "b untie()", "", "model")
