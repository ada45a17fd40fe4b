"""`ModelFacts`: shapes, ties, dims; and the user's model is unchanged by planning and training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.ir.model import ModelFacts
from schedlang.ir.modelfile import ModelFile, load_model_file
from schedlang.passes.lower.build import build
from schedlang.schedule import create_schedule
from tests import models
from tests.proofs import adamw, make_plan
from tests.training.test_build import all_axes_rows


def _hash_model(model: nn.Module, batch: Any) -> str:
    """A hash of all that a user could notice: values, flags, hooks, attributes, and a forward's
    output."""
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
    """After plan, build, training, evaluation and loading, the model has the same hash."""
    model, batch = models.gpt2(3, 0.1), models.tokens(rows=6)
    before = _hash_model(model, batch)
    plan = make_plan(model, all_axes_rows(), "dp=1, pp=1, tp=1")
    assert _hash_model(model, batch) == before
    program = build(plan, batch, optimizer=adamw, clip=0.1)
    for _ in range(2):
        program.train_step(batch)
    program.eval_step(batch)
    program.state_dict()
    assert _hash_model(model, batch) == before
    program.load_state_dict({k: torch.zeros_like(v) for k, v in program.state_dict().items()})
    assert _hash_model(model, batch) == before


def test_facts() -> None:
    """Names, shapes, ties and named dims are the module's own, on the meta device too."""
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
    """A subclass or an instance that overrides forward does not count as its base class."""

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
    """A model that reads values while it is built is built with values; other errors are shown."""
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


class Wrapper(nn.Module):
    """A stand-in for a wrapper of the name; the real one needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Placed(nn.Parameter):
    placements = ("of a DTensor",)


def _sharded(module: nn.Module) -> nn.Module:
    module.weight = Placed(module.weight.detach())
    return module


WRAPPED: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "compiled": (lambda m: torch.compile(m), "a result of `torch.compile`"),
    "scripted": (lambda m: nn.Sequential(torch.jit.script(m)), "`0` is a module of `torch.jit`"),
    "DDP": (type("DistributedDataParallel", (Wrapper,), {}), "wrapped by `DistributedDataPara"),
    "FSDP2": (_sharded, "`weight` is a DTensor"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("kind", WRAPPED)
def test_models_that_are_wrapped_are_refused(kind: str, tmp_path: Path) -> None:
    """A model that is compiled, scripted or parallel already is refused for that, in Python and
    from a file; what is compiled in place is the module that it was."""
    wrap, text = WRAPPED[kind]
    file = ModuleType("wrapped")
    model = wrap(nn.Linear(2, 2))
    file.model = lambda: model  # type: ignore[attr-defined]
    for make in (lambda: create_schedule(model), ModelFile(file, "wrapped", None).model):
        with pytest.raises(Refusal) as refused:
            make()
        assert refused.value.diagnostic.code == "S401" and text in str(refused.value)
    inside = nn.Linear(2, 2)
    inside.compile()
    vars(inside.weight)["placements"] = "a user's own note"
    create_schedule(inside)
