"""Facts of a model, and that reading, building and training leave it as it was."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.model import ModelFacts
from schedlang.ir.modelfile import load_model_file
from schedlang.passes.lower.build import build
from tests import models
from tests.proofs import adamw, planned
from tests.training.test_build import _all


def _hash(model: nn.Module, batch: Any) -> str:
    """All that a user could notice: values, flags, hooks, attributes, and a forward's result."""
    digest = hashlib.sha256()
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for name, tensor in tensors:
        flags = (name, id(tensor), tensor.dtype, tensor.requires_grad, tensor.grad is None)
        digest.update(repr(flags).encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for fqn, module in model.named_modules():
        hooks = [(name, len(value)) for name, value in vars(module).items() if "hooks" in name]
        digest.update(repr((fqn, type(module), module.training, sorted(vars(module)))).encode())
        digest.update(repr(hooks).encode())
    torch.manual_seed(3)
    with torch.no_grad():
        digest.update(model(**batch).logits.numpy().tobytes())
    return digest.hexdigest()


def test_the_users_model_is_never_changed() -> None:
    """Plan, build, train, evaluate and undo: the model hashes as before."""
    model, batch = models.gpt2(3, 0.1), models.tokens(rows=6)
    before = _hash(model, batch)
    plan = planned(model, _all(), "dp=1, pp=1, tp=1")
    assert _hash(model, batch) == before
    program = build(plan, batch, optimizer=adamw, clip=0.1)
    for _ in range(2):
        program.train_step(batch)
    program.eval_step(batch)
    program.state_dict()
    assert _hash(model, batch) == before
    program.load_state_dict({k: torch.zeros_like(v) for k, v in program.state_dict().items()})
    assert _hash(model, batch) == before


def test_facts() -> None:
    """Names, shapes, ties and named dims are those of the module; the meta device will do."""
    with torch.device("meta"):
        facts = ModelFacts(models.gpt2(2))
    assert facts.ties == (("transformer.wte.weight", "lm_head.weight"),)
    fact = facts.parameters["lm_head.weight"]
    assert (
        fact is facts.parameters["transformer.wte.weight"] and fact.name in facts.unique_parameters
    )
    assert fact.shape == (models.VOCAB, 16) and fact.numel == models.VOCAB * 16
    site = facts.sites["transformer.h.1.mlp.c_fc"]
    assert site.is_a("Conv1D") and site.dims["weight"] == ("in", "out")
    assert facts.owner("transformer.h.1.mlp.c_fc.bias") is site
    assert facts.sites["transformer.h.0.mlp.c_fc"].kind == site.kind
    total = sum(p.numel() for p in models.gpt2(2).parameters())
    assert facts.numel("") == total, "a tied weight counts once"


def test_a_forward_of_its_own_is_noticed() -> None:
    """A subclass that overrides forward, or a patched object, does not compute as its base."""

    class Loud(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 2

    class Quiet(nn.Linear):
        pass

    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    facts = ModelFacts(nn.Sequential(Loud(2, 2), Quiet(2, 2), patched))
    assert [facts.computes_as(str(k), "Linear") for k in range(3)] == [False, True, False]


def test_a_model_that_asks_for_values_as_it_is_made(tmp_path: Path) -> None:
    """It is made with values where its shapes are wanted; another error is shown as it is."""
    head = (
        "import torch\nfrom torch import nn\n\n\ndef model():\n    {}\n    return nn.Linear(3, 4)\n"
    )

    def made(line: str) -> Any:
        path = tmp_path / f"named_{len(line)}.py"
        path.write_text(head.format(line))
        return load_model_file(str(path)).model(meta=True)

    assert not made("torch.ones(2).tolist()").weight.is_meta
    assert made("pass").weight.is_meta
    with pytest.raises(Refusal, match="undefined"):
        made("undefined")
