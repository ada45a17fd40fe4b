"""Calls that a kernel does not take: counted, told with the reason, and computed all the same."""

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
from tests.proofs import planned


class Layer(nn.Module):
    """A residual sum and the norm of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        """The sum's norm."""
        return self.norm(x + self.up(x))


BATCH = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))}
OWN = """layers.*  replace_kernel(add_norm)
layers.1.norm  replace_kernel(layer_norm)
"""
WHY = "`norm` has hooks, a placement or its own row, and is called separately"


def net() -> nn.Module:
    """Two layers, the same at each call."""
    return Stack((Layer() for _ in range(2)), "layers")


def test_rope_tells_shapes_and_reasons() -> None:
    """Each reason is one entry, with the shapes of its first call and how often it was; a copy
    counts for itself."""
    from tests.kernels.test_rope import Own, drawn

    own = Own()
    replace(own, match(own, "rope"))  # type: ignore[arg-type]
    q, k, cos, sin = drawn(own_form())
    own(q, k, cos, sin)
    assert declined_in(own) == ()
    twin = copy.deepcopy(own)
    for _ in range(2):
        own(q, k, cos[:1].expand(2, 3, 6)[:, :, None].transpose(1, 2)[:, 0], sin)
    assert declined_in(own) == ()  # whatever lies in memory otherwise is taken
    for tokens in (3, 3):
        with torch.no_grad():
            own(q[:, :, :tokens], k[:, :, :tokens], cos[:1, :1], sin[:1, :1])
    (found,) = declined_in(own)
    assert (found.kernel, found.sites, found.calls) == ("rope", ("",), 2)
    assert found.reason == "cosines and sines must have the same shape, with all tokens"
    assert found.first_arguments.startswith("q [2, 4, 3, 6], k [2, 2, 3, 6], cos [1, 1, 6]")
    assert declined_in(twin) == ()
    with torch.no_grad():
        twin(q, k, cos[:1, :1], sin[:1, :1])
    assert declined_in(twin)[0].calls == 1 and declined_in(own)[0].calls == 2


def own_form() -> Any:
    """Halves of whole heads."""
    from schedlang.kernels.rope import Form

    return Form()


def test_a_norm_of_its_own_is_told_by_everyone(threads: Any) -> None:
    """A sum whose norm has a row of its own: `plan`, `verify`, `run` and a program's first step
    say so, of that layer alone."""
    plan = planned(net(), OWN)
    said = [note for note in account(plan, BATCH, memory=True).notes if "W703" in note]
    assert len(said) == 1 and "`layers.1`" in said[0] and WHY in said[0]
    report = prove(Case(plan, (BATCH,) * 3), pool=threads)
    facts = [value for name, value in report.facts if name == "W703"]
    assert len(facts) == 1 and "`layers.1`" in facts[0] and WHY in facts[0]
    course = TrainingRun(plan, lambda seed: BATCH, steps=1)
    (one,) = threads.run(train, 1, course)[0].declined_calls
    assert one.sites == ("layers.1",) and one.calls == 1 and one.reason == WHY


def test_a_program_warns_once() -> None:
    """Of two steps the first warns, with the code's text; without such calls nothing is said."""
    sch = schedlang.create_schedule(net())
    sch["layers.*"].replace_kernel("add_norm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sch.build(batch=BATCH).train_step(BATCH)
    sch["layers.1.norm"].replace_kernel("layer_norm")
    program = sch.build(batch=BATCH)
    with pytest.warns(UserWarning, match=r"warning\[W703\]: `add_norm` leaves some calls") as seen:
        program.train_step(BATCH)
        program.train_step(BATCH)
    seen = [one for one in seen if "W703" in str(one.message)]  # a collected file warns, too
    assert len(seen) == 1 and "drop the row `replace_kernel(add_norm)`" in str(seen[0].message)
    assert "W703" in WARNINGS


def test_sums_that_are_not_of_one_shape_or_too_long() -> None:
    """A sum that broadcasts is left; so is what is longer than a program holds."""

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


class Seen(nn.Module):
    """Attention of nobody's library, under a mask of its own."""

    def __init__(self, seen: Tensor) -> None:
        super().__init__()
        self.qkv, self.out, self.seen = nn.Linear(8, 24), nn.Linear(8, 8), seen

    def forward(self, x: Tensor) -> Tensor:
        """Two heads."""
        q, k, v = (t.view(*x.shape[:2], 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = self.seen[: x.shape[1], : x.shape[1]]
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).flatten(2))


def attending(module: nn.Module, kernel: str) -> nn.Module:
    """The module with the kernel."""
    found: Any = match(module, kernel)
    replace(module, found)
    return module


NO_WINDOW = "its mask is not a window (padding is not one)"


def test_masks_that_are_no_window_are_told() -> None:
    """What flash_attention leaves to plain products is noted, on any device; windows are not, and
    neither is what another kernel, which takes every mask, is given."""
    x, causal = torch.randn(2, 6, 8), torch.ones(6, 6, dtype=torch.bool).tril()
    holed = causal.clone()
    holed[3, 1] = False
    plain, odd = (attending(Seen(mask), "flash_attention") for mask in (causal, holed))
    twin = copy.deepcopy(odd)
    plain(x), odd(x), odd(x)
    assert declined_in(plain) == () and declined_in(twin) == ()
    (found,) = declined_in(odd)
    assert (found.kernel, found.calls, found.reason) == ("flash_attention", 2, NO_WINDOW)
    assert found.first_arguments == "q [2, 2, 6, 4], k [2, 2, 6, 4], mask [1, 1, 6, 6]"
    twin(x)
    assert declined_in(twin)[0].calls == 1 and declined_in(odd)[0].calls == 2
    other = attending(Seen(holed), "flex_attention")
    other(x)
    assert declined_in(other) == ()


def test_masks_of_a_model_that_are_no_window_are_told() -> None:
    """The same in modules that look their attention up: of padded rows, and of none that are
    whole."""
    from tests.kernels.test_kernel import build, gradients

    model = build("Llama", "sdpa")
    attention = attending(model.model.layers[0].self_attn, "flash_attention")
    gradients(model)
    assert declined_in(attention) == ()
    gradients(model, padded=True)
    assert [(one.reason, one.calls) for one in declined_in(attention)] == [(NO_WINDOW, 1)]
