"""Queries that see no key beside torch's fused attention: as the model's own eager attention."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from schedlang.runtime.float64 import Float64
from schedlang.runtime.kernel_injection import blind_queries, sdpa_attention
from schedlang.runtime.modes import enter_modes
from tests import models
from tests.proofs import planned, proven

pytest.importorskip("transformers")

ROWS, HEADS, TOKENS, SIZE = 3, 4, 7, 8
LOWEST = torch.finfo(torch.float64).min


def eager() -> Any:
    """transformers' own, which Llama and its kin use."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return eager_attention_forward


def drawn(keys: int = HEADS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, and keys and values of some heads."""
    drawing = torch.Generator().manual_seed(0)
    return [
        torch.randn(ROWS, heads, TOKENS, SIZE, generator=drawing, dtype=dtype)
        for heads in (HEADS, keys, keys)
    ]


def attended(call: Any, lines: list[Tensor], mask: Tensor | None, **more: Any) -> list[Tensor]:
    """The output, and gradients of queries, keys and values, and of a mask or bias that learns."""
    leaves = [x.detach().clone().requires_grad_() for x in lines]
    module = SimpleNamespace(
        num_key_value_groups=lines[0].shape[1] // lines[1].shape[1], training=True, is_causal=True
    )
    learning = [x for x in (mask, *more.values()) if isinstance(x, Tensor) and x.requires_grad]
    with enter_modes(Float64):
        out = call(module, *leaves, mask, scaling=0.3, **more)[0]
    toward = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * toward).sum(), [*leaves, *learning])]


def close(found: list[Tensor], wanted: list[Tensor], most: float = 1e-13) -> None:
    """Each tensor as near as that, and NaN where the other is."""
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted):
        assert torch.equal(x.isnan(), y.isnan())
        assert (x - y).nan_to_num().norm() <= most * y.nan_to_num().norm()


def padded(form: str) -> Tensor:
    """Where keys are seen: some queries of the second row see none."""
    seen = torch.ones(ROWS, 1, TOKENS, TOKENS, dtype=torch.bool)
    if form == "a row of padding":  # as encoders mask: the same for all queries
        seen[1], seen[2, :, :, 4:] = False, False
        return seen[:, :, :1]
    seen = seen.tril()
    seen[1, :, :, :3] = False
    if form == "by heads":
        seen = seen.repeat(1, HEADS, 1, 1)
        seen[2, 1, 5] = False
    return seen


FORMS = ["a row of padding", "padding on the left", "by heads"]


@pytest.mark.parametrize("keys", [HEADS, 2, 1])
@pytest.mark.parametrize("lowest", [LOWEST, torch.finfo(torch.float32).min, -math.inf, -1e4])
@pytest.mark.parametrize("form", FORMS)
def test_as_eager(form: str, lowest: float, keys: int) -> None:
    """Values and every gradient, of whatever number hides keys: a mean of values, or NaN."""
    seen, lines = padded(form), drawn(keys)
    mask = torch.zeros(seen.shape).double().masked_fill(~seen, lowest)
    wanted = attended(eager(), lines, mask)
    assert wanted[0].isnan().any() == (lowest == -math.inf)
    close(attended(sdpa_attention._register(), lines, mask), wanted, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_masks_and_biases_that_learn(form: str) -> None:
    """Their gradient, too, where a query sees nothing: of a mask, and of a bias beside one."""
    seen, lines = padded(form), drawn()
    mask = torch.zeros(seen.shape).double().masked_fill(~seen, LOWEST)
    drawing = torch.Generator().manual_seed(1)
    bias = torch.randn(1, HEADS, TOKENS, TOKENS, generator=drawing).double().requires_grad_()
    ours = sdpa_attention._register()
    learned = (bias.detach() + mask).requires_grad_()
    close(attended(ours, lines, learned), attended(eager(), lines, learned))

    def biased(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **more: Any) -> Any:
        return eager()(module, q, k, v, more.pop("position_bias") + mask, **more)

    wanted = attended(biased, lines, mask, position_bias=bias)
    close(attended(ours, lines, mask, position_bias=bias), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowest", [None, -1e9])
@pytest.mark.parametrize("form", FORMS)
def test_in_fewer_bits(form: str, lowest: float | None, dtype: torch.dtype) -> None:
    """As near to float64 as eager attention, or nearer: a mask that loses some bits of scores
    counts keys all the same in the gradients."""
    seen, lines = padded(form), drawn()
    low = torch.finfo(dtype).min if lowest is None else lowest
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, low)
    few = [x.to(dtype) for x in lines]
    exact = attended(eager(), [x.double() for x in few], mask.double())
    with enter_modes():
        eagers, ours = (_plainly(call, few, mask) for call in (eager(), sdpa_attention._register()))
    for found, plain, true in zip(ours, eagers, exact):
        error, known = (float((x.double() - true).norm() / true.norm()) for x in (found, plain))
        assert error <= 2 * known + 4 * torch.finfo(dtype).eps


def _plainly(call: Any, lines: list[Tensor], mask: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in lines]
    module = SimpleNamespace(num_key_value_groups=1, training=True, is_causal=True)
    out = call(module, *leaves, mask, scaling=0.3)[0]
    toward = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * toward).sum(), leaves)]


def test_a_mask_that_each_step_writes_into() -> None:
    """Where keys are hidden is found once for a mask, and again when it has changed."""
    lines, ours = drawn(), sdpa_attention._register()
    mask = torch.zeros(ROWS, 1, 1, TOKENS).double()
    attended(ours, lines, mask)
    assert blind_queries.find_hidden_keys(mask) is blind_queries.find_hidden_keys(mask)
    mask.masked_fill_(~padded("a row of padding"), LOWEST)
    close(attended(ours, lines, mask), attended(eager(), lines, mask))
    with torch.inference_mode():
        other = torch.zeros(1, 1, 1, TOKENS).double()
        blind_queries.find_hidden_keys(mask), blind_queries.find_hidden_keys(other)
    close(attended(ours, lines, mask), attended(eager(), lines, mask))


def test_hidden_by_numbers_that_differ() -> None:
    """Two masks that were added: what such a query gives is eager's, and a gradient of keys that
    would be wrong is refused."""
    seen, lines = padded("padding on the left"), drawn()
    mask = torch.zeros(seen.shape).double().masked_fill(~seen, LOWEST)
    mask[1, :, 0, 1:] = -math.inf
    with torch.no_grad(), enter_modes(Float64):
        module = SimpleNamespace(num_key_value_groups=1, training=True, is_causal=True)
        ways = (eager(), sdpa_attention._register())
        wanted, found = (call(module, *lines, mask, scaling=0.3)[0] for call in ways)
    close([found], [wanted])
    with pytest.raises(RuntimeError, match="hides all keys from a query by numbers that differ"):
        attended(sdpa_attention._register(), lines, mask)


def test_torch_is_wrong_there() -> None:
    """The reason for it all: with the mask as it is, torch's kernel gives other gradients."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen, lines = padded("padding on the left"), drawn()
    mask = torch.zeros(seen.shape).double().masked_fill(~seen, LOWEST)
    wanted, found = (attended(call, lines, mask) for call in (eager(), sdpa_attention_forward))
    close(found[:1], wanted[:1])
    for x, y in zip(found[1:], wanted[1:]):
        assert (x - y).norm() > 1e-2 * y.norm()


def test_what_is_dropped_by_torch() -> None:
    """Torch's own dropout drops of a mean, too; the gradients are eager's in the mean."""
    seen, lines = padded("a row of padding"), drawn()
    mask = torch.zeros(seen.shape).double().masked_fill(~seen, LOWEST)
    sums: list[list[Tensor]] = []
    for call in (eager(), sdpa_attention._register()):
        torch.manual_seed(0)
        runs = [attended(call, lines, mask, dropout=0.5) for _ in range(400)]
        assert not torch.allclose(runs[0][0][1], runs[1][0][1])
        sums.append([torch.stack(each).mean(0) for each in zip(*runs)])
    still = attended(eager(), lines, mask)
    for found, wanted, once in zip(sums[1], sums[0], still):
        apart = (found - wanted).norm() / once.norm()
        assert apart < 0.15, apart


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_a_model_whose_rows_begin_with_padding(threads: Any, drop: float) -> None:
    """Llama with all tokens labelled: what padding predicts counts, and so does what it sees; with
    weights of attention that are dropped, too."""
    model = models.llama(2, attend="eager")
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.attention_dropout = drop
    batches = [models.left(models.tokens(rows=6, seed=seed)) for seed in range(3)]
    for batch in batches:
        batch["labels"] = batch["input_ids"].clone()
    proven(threads, planned(model, "model.layers.*.self_attn  replace_kernel(sdpa)"), batches)
