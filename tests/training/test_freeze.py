"""Frozen parameters (`freeze`): the chosen ones do not change, and the others train as before."""

from __future__ import annotations

import pytest
import torch

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.passes.verify.changed_model import KIND
from schedlang.runtime import parameter_changes
from tests import models
from tests.engine import Threads
from tests.proofs import adamw, assert_proven, make_plan

BATCHES = [models.tokens(rows=8, seed=seed) for seed in range(2)]
STAGES = 'pipeline_split(over=pp)\npipeline(order="1F1B", micro=2)'


def frozen_names(rows: str) -> set[str]:
    """Return the names of GPT-2's parameters that these rows leave untrained."""
    model = make_plan(models.gpt2(2), rows, relax="updates").model
    return {name for name, parameter in model.parameters.items() if not parameter.requires_grad}


def test_what_is_chosen() -> None:
    """Modules, names by their end or with `*`, exceptions; a tied weight under all its names."""
    block = {n for n in frozen_names("transformer.h.* freeze()") if n.startswith("transformer.h.")}
    assert frozen_names("transformer.h.* freeze()") == block and len(block) == 24
    biases = frozen_names("transformer.h.* freeze(bias)")
    assert biases == {name for name in block if name.endswith(".bias")} and len(biases) == 12
    assert frozen_names('transformer.h.0 freeze("mlp.*")') == {
        f"transformer.h.0.mlp.{layer}.{end}"
        for layer in ("c_fc", "c_proj")
        for end in ("weight", "bias")
    }
    assert frozen_names("lm_head freeze()") == {"transformer.wte.weight", "lm_head.weight"}
    everything = frozen_names('freeze(keep="ln_f.*")')
    assert "transformer.ln_f.weight" not in everything and "lm_head.weight" in everything


@pytest.mark.parametrize(
    "rows, mesh",
    [
        ("freeze(keep=[bias])\nzero(stage=3, over=dp)", "dp=2"),
        (
            "transformer.wte, transformer.wpe, transformer.h[:1] freeze()\n"
            f"transformer.h {STAGES}\nzero(stage=1, over=dp)",
            "dp=2, pp=2",
        ),
        (
            "transformer.h[1:] freeze()\nlm_head freeze()\n"
            "transformer.h.*.mlp.c_fc shard(col, over=tp)\n"
            f"transformer.h.*.mlp.c_proj shard(row, over=tp)\ntransformer.h {STAGES}",
            "pp=2, tp=2",
        ),
    ],
)
def test_the_rest_trains_as_the_original_does(threads: Threads, rows: str, mesh: str) -> None:
    """Sliced, split, in stages of which one trains nothing: equal to the original frozen alike."""
    report = assert_proven(threads, make_plan(models.gpt2(2), rows, mesh, "updates"), BATCHES)
    assert report.equivalence == "relaxed (updates)"
    assert any(row.kind == KIND for row in report.rows)


def test_frozen_stages_send_nothing_back() -> None:
    """If nothing before a stage boundary trains, no gradient crosses it, and none is summed."""
    from schedlang.passes.analyze.prepare import prepare
    from schedlang.passes.simulate.traffic import list_collectives

    batch, split = models.tokens(rows=4, seed=0), f"transformer.h {STAGES}"
    front = "lm_head, transformer.wpe, transformer.h[:2] freeze()\n"
    sent = {}
    for rows in (split, front + split):
        plan = make_plan(models.gpt2(4), rows, "pp=2", "updates")
        prepared = prepare(plan, batch)
        collectives = list_collectives(plan, prepared, batch)
        sent[rows] = sum(
            collective.count for collective in collectives if collective.phase == "backward"
        )
    assert sent[split] > 0 and sent[front + split] == 0


def test_nothing_is_kept_for_what_is_frozen() -> None:
    """The optimizer receives the trained parameters, and has state for them only."""
    plan = make_plan(models.gpt2(2), "transformer.h.* freeze()", relax="updates")
    program = build(plan, BATCHES[0], optimizer=adamw)
    program.train_step(BATCHES[0])
    trained = {name for name, f in plan.model.unique_parameters.items() if f.requires_grad}
    assert set(program.optimizer_state()) == set(program.gradients()) == trained
    assert all(p.requires_grad for p in plan.model.base.model.parameters())


def test_a_change_that_is_not_what_it_says_is_found(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy whose frozen modules stop the gradients of others differs from the untouched model."""
    original = parameter_changes.Freeze.__call__

    def stopping(self: parameter_changes.Freeze, module: torch.nn.Module) -> torch.nn.Module:
        twin = original(self, module)
        block = twin.get_submodule("transformer.h.1.mlp")
        block.register_forward_hook(lambda module, inputs, output: output.detach())
        return twin

    monkeypatch.setattr(parameter_changes.Freeze, "__call__", stopping)
    plan = make_plan(models.gpt2(2), "transformer.h.1.mlp freeze()", relax="updates")
    with pytest.raises(AssertionError, match=KIND):
        assert_proven(threads, plan, BATCHES)


@pytest.mark.parametrize(
    "rows, code, said",
    [
        ("transformer.h.* freeze(gain)", "S305", "has no parameter `gain`"),
        ("lm_head freeze()\ntransformer.wte freeze()", "S413", "nothing is left to freeze"),
        ("freeze()", "S413", 'except some: `freeze(keep="*bias")`'),
    ],
)
def test_refusals(rows: str, code: str, said: str) -> None:
    """Unknown names, rows without effect, and a model that is frozen completely."""
    with pytest.raises(Refusal) as error:
        make_plan(models.gpt2(2), rows, relax="updates")
    assert code in error.value.render() and said in error.value.render()


def test_it_is_said_in_relax() -> None:
    """Frozen weights change the result, so their step must allow it (S505)."""
    with pytest.raises(Refusal, match=r"relax\(updates\)"):
        make_plan(models.gpt2(2), "lm_head freeze()")
