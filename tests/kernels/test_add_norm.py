"""The kernel `add_norm`, a residual sum and its norm: where it fits, results in models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.kernels.kernel_device import backend_runs
from schedlang.runtime.kernel_injection.add_norm import AddNorms
from schedlang.runtime.kernel_injection.kernel import match, replace
from tests import models
from tests.proofs import assert_proven, make_plan, refusal_text
from tests.rows import HEADS
from tests.tiers import thin_out

ROW = "model.layers.* replace_kernel(add_norm)\n"


class Block(nn.Module):
    """Two norms and a linear layer, combined by a function that the test gives."""

    def __init__(self, form):
        super().__init__()
        self.first, self.second = nn.LayerNorm(6), nn.LayerNorm(6)
        self.mid, self.form = nn.Linear(6, 6), form

    def forward(self, x):
        return self.form(self, x)


def test_what_data_flow_shows():
    """A sum right before a norm is found; anything between them is named in the refusal."""
    kernel = match(Block(lambda m, x: m.second(x + m.mid(m.first(x)))), "add_norm")
    assert isinstance(kernel, AddNorms) and set(kernel.norms) == {"second"}
    for form, reason in [
        (lambda m, x: m.second((x + m.mid(m.first(x))).relu()), "before `second` is `relu`"),
        (lambda m, x: m.second(m.mid(x) + 1.0), "before `second` is `add`"),
        (lambda m, x: m.mid(x), "calls no norm"),
        (lambda m, x: m.second(x + m.mid(x)) if x.sum() > 0 else x, "cannot be followed"),
    ]:
        assert reason in match(Block(form), "add_norm").reason
    assert "no child that is a norm" in match(nn.Linear(2, 2), "add_norm").reason


def test_a_norm_with_a_hook_is_called():
    """A norm with a hook is called as before, outside of the kernel."""
    block, hook_calls = Block(lambda m, x: m.second(x + m.mid(m.first(x)))), []
    x = torch.randn(3, 6)
    expected = block(x)
    replace(block, match(block, "add_norm"))
    before = backend_runs().get("reference", 0)
    torch.testing.assert_close(block(x), expected)
    assert backend_runs()["reference"] == before + 1
    block.second.register_forward_hook(lambda *_: hook_calls.append(1))
    vars(block)["_schedlang_forward"].kinds["kernel"].made.clear()
    torch.testing.assert_close(block(x), expected)
    assert hook_calls == [1] and backend_runs()["reference"] == before + 1


ROWS = {
    "split heads, sliced state, recomputed": (models.llama, ROW + HEADS[0], HEADS[1]),
    "stages": (
        models.gpt2,
        """transformer.h.* replace_kernel(add_norm)
        transformer.h pipeline_split(over=pp)
        pipeline(order="1F1B", micro=2)""",
        "pp=2",
    ),
}


@pytest.mark.parametrize("name", thin_out(ROWS, 3))
def test_models_over_ranks(name, threads):
    """With tensor parallelism, stages, recomputation and sharded state the proof holds."""
    build_model, rows, mesh = ROWS[name]
    plan = make_plan(build_model(2), rows, mesh)
    assert_proven(threads, plan, [models.tokens(rows=6, seed=seed) for seed in (1, 2, 3)])


def test_what_has_no_sum_is_told():
    """A module without a sum before a norm is refused."""
    message = refusal_text(models.llama(1), "model replace_kernel(add_norm)")
    assert "S410" in message


def test_outputs_that_are_dicts_with_names_stay_what_they_are() -> None:
    """An output class of transformers keeps its type; a module with another dict is refused."""
    from collections import OrderedDict

    from transformers.modeling_outputs import BaseModelOutput

    class Named(nn.Module):
        def __init__(self, kind: type) -> None:
            super().__init__()
            self.up, self.norm, self.kind = nn.Linear(6, 6), nn.LayerNorm(6), kind

        def forward(self, x: Tensor) -> Any:
            return self.kind(last_hidden_state=self.norm(x + self.up(x)))

    torch.manual_seed(0)
    module, x = Named(BaseModelOutput), torch.randn(3, 6)
    expected = module(x).last_hidden_state
    kernel: Any = match(module, "add_norm")
    replace(module, kernel)
    output = module(x)
    assert type(output) is BaseModelOutput and output[0] is output.last_hidden_state
    torch.testing.assert_close(output.last_hidden_state, expected)
    assert "gives a `OrderedDict`" in match(Named(OrderedDict), "add_norm").reason  # type: ignore[union-attr]
