"""Tests of `freeze`: what is chosen stays as it is, and everything else trains as before."""

from __future__ import annotations

import pytest
import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.passes.verify.changed_model import KIND
from schedlang.runtime import parameter_changes
from tests import models
from tests.engine import Threads
from tests.proofs import adamw, planned, proven

BATCHES = [models.tokens(rows=8, seed=seed) for seed in range(2)]
ONE_F = 'pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'


def still(rows: str) -> set[str]:
    """Names of the parameters that rows leave untrained in GPT-2."""
    facts = planned(models.gpt2(2), rows, relax="updates").model
    return {name for name, fact in facts.parameters.items() if not fact.requires_grad}


def test_what_is_chosen() -> None:
    """Modules, names by their end or with `*`, exceptions; a tied weight under all its names."""
    block = {n for n in still("transformer.h.* freeze()") if n.startswith("transformer.h.")}
    assert still("transformer.h.* freeze()") == block and len(block) == 24
    biases = still("transformer.h.* freeze(bias)")
    assert biases == {name for name in block if name.endswith(".bias")} and len(biases) == 12
    assert still('transformer.h.0 freeze("mlp.*")') == {
        f"transformer.h.0.mlp.{one}.{end}"
        for one in ("c_fc", "c_proj")
        for end in ("weight", "bias")
    }
    assert still("lm_head freeze()") == {"transformer.wte.weight", "lm_head.weight"}
    everything = still('freeze(keep="ln_f.*")')
    assert "transformer.ln_f.weight" not in everything and "lm_head.weight" in everything


@pytest.mark.parametrize(
    "rows, mesh",
    [
        ("freeze(keep=[bias])\nzero(stage=3, over=dp)", "dp=2"),
        (
            "transformer.wte, transformer.wpe, transformer.h[:1] freeze()\n"
            f"transformer.h {ONE_F}\nzero(stage=1, over=dp)",
            "dp=2, pp=2",
        ),
        (
            "transformer.h[1:] freeze()\nlm_head freeze()\n"
            "transformer.h.*.mlp.c_fc shard(col, over=tp)\n"
            f"transformer.h.*.mlp.c_proj shard(row, over=tp)\ntransformer.h {ONE_F}",
            "pp=2, tp=2",
        ),
    ],
)
def test_the_rest_trains_as_the_original_does(threads: Threads, rows: str, mesh: str) -> None:
    """Sliced, split, in stages of which one trains nothing: equal to the original so frozen."""
    report = proven(threads, planned(models.gpt2(2), rows, mesh, "updates"), BATCHES)
    assert report.equivalence == "relaxed (updates)"
    assert any(row.kind == KIND for row in report.rows)


def test_frozen_stages_send_nothing_back() -> None:
    """Where nothing before a cut is trained no gradient crosses it, and none is summed."""
    from schedlang.passes.analyze.prepare import prepare
    from schedlang.passes.simulate.traffic import list_collectives

    batch, split = models.tokens(rows=4, seed=0), f"transformer.h {ONE_F}"
    front = "lm_head, transformer.wpe, transformer.h[:2] freeze()\n"
    sent = {}
    for rows in (split, front + split):
        plan = planned(models.gpt2(4), rows, "pp=2", "updates")
        made = prepare(plan, batch)
        found = list_collectives(plan, made, batch)
        sent[rows] = sum(one.count for one in found if one.phase == "backward")
    assert sent[split] > 0 and sent[front + split] == 0


def test_nothing_is_kept_for_what_is_frozen() -> None:
    """The optimizer is given what is trained, and has state for that alone."""
    plan = planned(models.gpt2(2), "transformer.h.* freeze()", relax="updates")
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    trained = {name for name, f in plan.model.unique_parameters.items() if f.requires_grad}
    assert set(program.optimizer_state()) == set(program.gradients()) == trained
    assert all(p.requires_grad for p in plan.model.base.model.parameters())


def test_a_change_that_is_not_what_it_says_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy whose frozen modules hold back the gradients of others differs from the untouched."""
    plain = parameter_changes.Freeze.__call__

    def stopping(self: parameter_changes.Freeze, module: torch.nn.Module) -> torch.nn.Module:
        twin = plain(self, module)
        block = twin.get_submodule("transformer.h.1.mlp")
        block.register_forward_hook(lambda module, inputs, output: output.detach())
        return twin

    monkeypatch.setattr(parameter_changes.Freeze, "__call__", stopping)
    plan = planned(models.gpt2(2), "transformer.h.1.mlp freeze()", relax="updates")
    with pytest.raises(AssertionError, match=KIND):
        proven(threads, plan, BATCHES)


@pytest.mark.parametrize(
    "rows, code, said",
    [
        ("transformer.h.* freeze(gain)", "S305", "has no parameter `gain`"),
        ("lm_head freeze()\ntransformer.wte freeze()", "S413", "nothing is left to freeze"),
        ("freeze()", "S413", 'except some: `freeze(keep="*bias")`'),
    ],
)
def test_refusals(rows: str, code: str, said: str) -> None:
    """Names that are not there, rows without effect, and a model of which nothing is left."""
    with pytest.raises(Refusal) as error:
        planned(models.gpt2(2), rows, relax="updates")
    assert code in error.value.render() and said in error.value.render()


def test_it_is_said_in_relax() -> None:
    """Frozen weights change the result, so their step must allow it (S505)."""
    with pytest.raises(Refusal, match=r"relax\(updates\)"):
        planned(models.gpt2(2), "lm_head freeze()")
