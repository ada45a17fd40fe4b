"""Calls that a kernel declines: counted, reported with the reason (W703), computed as before."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedlang
from schedlang.diagnostics.codes import WARNINGS
from schedlang.passes.lower.train import TrainingRun, train
from schedlang.passes.prove import Case, prove
from schedlang.passes.simulate.account import account
from schedlang.runtime.declined_calls import declined_in
from schedlang.runtime.kernel_injection.kernel import match, replace
from tests.models import Stack
from tests.proofs import make_plan


class Layer(nn.Module):
    """A residual sum and its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of the sum."""
        return self.norm(x + self.up(x))


BATCH = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))}
SCHEDULE = """layers.*  replace_kernel(add_norm)
layers.1.norm  replace_kernel(layer_norm)
"""
REASON = "`norm` has hooks, a placement or its own row, and is called separately"


def build_net() -> nn.Module:
    """Return two layers with a residual sum and a norm."""
    return Stack((Layer() for _ in range(2)), "layers")


def test_rope_tells_shapes_and_reasons() -> None:
    """One entry for each reason, with the shapes of its first call and a count; a copy counts
    separately."""
    from tests.kernels.test_rope import RotaryAttention, random_inputs

    attention = RotaryAttention()
    replace(attention, match(attention, "rope"))  # type: ignore[arg-type]
    q, k, cos, sin = random_inputs(half_form())
    attention(q, k, cos, sin)
    assert declined_in(attention) == ()
    copied = copy.deepcopy(attention)
    for _ in range(2):
        attention(q, k, cos[:1].expand(2, 3, 6)[:, :, None].transpose(1, 2)[:, 0], sin)
    assert declined_in(attention) == ()  # strided inputs are taken
    for tokens in (3, 3):
        with torch.no_grad():
            attention(q[:, :, :tokens], k[:, :, :tokens], cos[:1, :1], sin[:1, :1])
    (declined,) = declined_in(attention)
    assert (declined.kernel, declined.sites, declined.calls) == ("rope", ("",), 2)
    assert declined.reason == "cosines and sines must have the same shape, with all tokens"
    assert declined.first_arguments.startswith("q [2, 4, 3, 6], k [2, 2, 3, 6], cos [1, 1, 6]")
    assert declined_in(copied) == ()
    with torch.no_grad():
        copied(q, k, cos[:1, :1], sin[:1, :1])
    assert declined_in(copied)[0].calls == 1 and declined_in(attention)[0].calls == 2


def half_form() -> Any:
    """Return the form that rotates halves of complete heads."""
    from schedlang.kernels.rope import Form

    return Form()


def test_a_norm_of_its_own_is_told_by_everyone(threads: Any) -> None:
    """A sum whose norm has its own row: `plan`, `verify`, `run` and the first step report that
    layer only."""
    plan = make_plan(build_net(), SCHEDULE)
    warnings_told = [note for note in account(plan, BATCH, memory=True).notes if "W703" in note]
    assert (
        len(warnings_told) == 1 and "`layers.1`" in warnings_told[0] and REASON in warnings_told[0]
    )
    report = prove(Case(plan, (BATCH,) * 3), pool=threads)
    facts = [value for name, value in report.facts if name == "W703"]
    assert len(facts) == 1 and "`layers.1`" in facts[0] and REASON in facts[0]
    training_run = TrainingRun(plan, lambda seed: BATCH, steps=1)
    (declined,) = threads.run(train, 1, training_run)[0].declined_calls
    assert declined.sites == ("layers.1",) and declined.calls == 1 and declined.reason == REASON


def test_a_program_warns_once() -> None:
    """The first of two steps warns, with the code's text; without such calls there is no
    warning."""
    sch = schedlang.create_schedule(build_net())
    sch["layers.*"].replace_kernel("add_norm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sch.build(batch=BATCH).train_step(BATCH)
    sch["layers.1.norm"].replace_kernel("layer_norm")
    program = sch.build(batch=BATCH)
    with pytest.warns(
        UserWarning, match=r"warning\[W703\]: `add_norm` leaves some calls"
    ) as caught:
        program.train_step(BATCH)
        program.train_step(BATCH)
    caught = [
        warning for warning in caught if "W703" in str(warning.message)
    ]  # pytest's collection may warn, too
    assert len(caught) == 1 and "drop the row `replace_kernel(add_norm)`" in str(caught[0].message)
    assert "W703" in WARNINGS


def test_sums_that_are_not_of_one_shape_or_too_long() -> None:
    """A sum that broadcasts, and rows too long for the kernel, are declined."""

    class Broad(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.up(x) + self.up.bias)

    layer = Broad()
    x = torch.randn(3, 6)
    expected = layer(x)
    replace(layer, match(layer, "add_norm"))  # type: ignore[arg-type]
    torch.testing.assert_close(layer(x), expected)
    assert declined_in(layer)[0].reason == "it adds two tensors of the same shape"
    norm = nn.RMSNorm(16400, eps=1e-6)
    replace(norm, match(norm, "rms_norm"))  # type: ignore[arg-type]
    norm(torch.ones(1, 16400))
    assert declined_in(norm)[0].reason == "its rows have at most 16384 elements"


class MaskedAttention(nn.Module):
    """Attention that is in no library, with its own mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.qkv, self.out, self.seen = nn.Linear(8, 24), nn.Linear(8, 8), mask

    def forward(self, x: Tensor) -> Tensor:
        """Compute attention of two heads."""
        q, k, v = (t.view(*x.shape[:2], 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = self.seen[: x.shape[1], : x.shape[1]]
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).flatten(2))


def with_kernel(module: nn.Module, kernel: str) -> nn.Module:
    """Replace the module's attention by the kernel; return the module."""
    kernel_match: Any = match(module, kernel)
    replace(module, kernel_match)
    return module


NO_WINDOW = "its mask is not a window (padding is not one)"


def test_masks_that_are_no_window_are_told() -> None:
    """A mask that is no window is declined by flash_attention, on any device; windows, and kernels
    that take every mask, have no entry."""
    x, causal = torch.randn(2, 6, 8), torch.ones(6, 6, dtype=torch.bool).tril()
    holed = causal.clone()
    holed[3, 1] = False
    windowed, not_windowed = (
        with_kernel(MaskedAttention(mask), "flash_attention") for mask in (causal, holed)
    )
    copied = copy.deepcopy(not_windowed)
    windowed(x), not_windowed(x), not_windowed(x)
    assert declined_in(windowed) == () and declined_in(copied) == ()
    (declined,) = declined_in(not_windowed)
    assert (declined.kernel, declined.calls, declined.reason) == ("flash_attention", 2, NO_WINDOW)
    assert declined.first_arguments == "q [2, 2, 6, 4], k [2, 2, 6, 4], mask [1, 1, 6, 6]"
    copied(x)
    assert declined_in(copied)[0].calls == 1 and declined_in(not_windowed)[0].calls == 2
    flex = with_kernel(MaskedAttention(holed), "flex_attention")
    flex(x)
    assert declined_in(flex) == ()


def test_masks_of_a_model_that_are_no_window_are_told() -> None:
    """The same in transformers modules: padded rows are declined, full rows are not."""
    from tests.kernels.test_kernel_injection import build_model, gradients

    model = build_model("Llama", "sdpa")
    attention = with_kernel(model.model.layers[0].self_attn, "flash_attention")
    gradients(model)
    assert declined_in(attention) == ()
    gradients(model, padded=True)
    assert [(declined.reason, declined.calls) for declined in declined_in(attention)] == [
        (NO_WINDOW, 1)
    ]
