"""Queries that see no key, in torch's fused attention: equal to the model's eager attention."""

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
from tests.proofs import assert_proven, make_plan

pytest.importorskip("transformers")

ROWS, HEADS, TOKENS, SIZE = 3, 4, 7, 8
LOWEST = torch.finfo(torch.float64).min


def eager_attention() -> Any:
    """Return the eager attention of transformers, which Llama-like models use."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return eager_attention_forward


def random_heads(key_heads: int = HEADS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return random queries, and keys and values of some heads."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(ROWS, heads, TOKENS, SIZE, generator=generator, dtype=dtype)
        for heads in (HEADS, key_heads, key_heads)
    ]


def run_attention(
    call: Any, qkv: list[Tensor], mask: Tensor | None, **options: Any
) -> list[Tensor]:
    """Return the output, and gradients of queries, keys, values, and a mask or bias that learns."""
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    module = SimpleNamespace(
        num_key_value_groups=qkv[0].shape[1] // qkv[1].shape[1], training=True, is_causal=True
    )
    learned = [x for x in (mask, *options.values()) if isinstance(x, Tensor) and x.requires_grad]
    with enter_modes(Float64):
        out = call(module, *leaves, mask, scaling=0.3, **options)[0]
    grad_output = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * grad_output).sum(), [*leaves, *learned])]


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-13) -> None:
    """Assert that tensors are equal within a tolerance, and NaN at the same places."""
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected):
        assert torch.equal(x.isnan(), y.isnan())
        assert (x - y).nan_to_num().norm() <= tolerance * y.nan_to_num().norm()


def visible_mask(form: str) -> Tensor:
    """Return a mask that is true at visible keys; some queries of the second row see none."""
    visible = torch.ones(ROWS, 1, TOKENS, TOKENS, dtype=torch.bool)
    if form == "a row of padding":  # as encoders mask: equal for all queries
        visible[1], visible[2, :, :, 4:] = False, False
        return visible[:, :, :1]
    visible = visible.tril()
    visible[1, :, :, :3] = False
    if form == "by heads":
        visible = visible.repeat(1, HEADS, 1, 1)
        visible[2, 1, 5] = False
    return visible


FORMS = ["a row of padding", "padding on the left", "by heads"]


@pytest.mark.parametrize("keys", [HEADS, 2, 1])
@pytest.mark.parametrize("lowest", [LOWEST, torch.finfo(torch.float32).min, -math.inf, -1e4])
@pytest.mark.parametrize("form", FORMS)
def test_as_eager(form: str, lowest: float, keys: int) -> None:
    """Output and gradients, for each value that hides keys: a mean of values, or NaN."""
    visible, qkv = visible_mask(form), random_heads(keys)
    mask = torch.zeros(visible.shape).double().masked_fill(~visible, lowest)
    expected = run_attention(eager_attention(), qkv, mask)
    assert expected[0].isnan().any() == (lowest == -math.inf)
    assert_close(run_attention(sdpa_attention._register(), qkv, mask), expected, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_masks_and_biases_that_learn(form: str) -> None:
    """Gradients of a mask, and of a bias beside a mask, where a query sees no key."""
    visible, qkv = visible_mask(form), random_heads()
    mask = torch.zeros(visible.shape).double().masked_fill(~visible, LOWEST)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(1, HEADS, TOKENS, TOKENS, generator=generator).double().requires_grad_()
    schedlang_sdpa = sdpa_attention._register()
    learned = (bias.detach() + mask).requires_grad_()
    assert_close(
        run_attention(schedlang_sdpa, qkv, learned), run_attention(eager_attention(), qkv, learned)
    )

    def biased(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        return eager_attention()(module, q, k, v, options.pop("position_bias") + mask, **options)

    expected = run_attention(biased, qkv, mask, position_bias=bias)
    assert_close(run_attention(schedlang_sdpa, qkv, mask, position_bias=bias), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowest", [None, -1e9])
@pytest.mark.parametrize("form", FORMS)
def test_in_fewer_bits(form: str, lowest: float | None, dtype: torch.dtype) -> None:
    """At least as near to float64 as eager attention, for low dtypes and a mask that loses bits of
    scores."""
    visible, qkv = visible_mask(form), random_heads()
    lowest_value = torch.finfo(dtype).min if lowest is None else lowest
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, lowest_value)
    rounded = [x.to(dtype) for x in qkv]
    exact = run_attention(eager_attention(), [x.double() for x in rounded], mask.double())
    with enter_modes():
        eager_results, schedlang_results = (
            _run_in_dtype(call, rounded, mask)
            for call in (eager_attention(), sdpa_attention._register())
        )
    for actual, eager_result, true in zip(schedlang_results, eager_results, exact):
        error, eager_error = (
            float((x.double() - true).norm() / true.norm()) for x in (actual, eager_result)
        )
        assert error <= 2 * eager_error + 4 * torch.finfo(dtype).eps


def _run_in_dtype(call: Any, qkv: list[Tensor], mask: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    module = SimpleNamespace(num_key_value_groups=1, training=True, is_causal=True)
    out = call(module, *leaves, mask, scaling=0.3)[0]
    grad_output = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * grad_output).sum(), leaves)]


def test_a_mask_that_each_step_writes_into() -> None:
    """Hidden keys are found once for a mask, and again after it changes."""
    qkv, schedlang_sdpa = random_heads(), sdpa_attention._register()
    mask = torch.zeros(ROWS, 1, 1, TOKENS).double()
    run_attention(schedlang_sdpa, qkv, mask)
    assert blind_queries.find_hidden_keys(mask) is blind_queries.find_hidden_keys(mask)
    mask.masked_fill_(~visible_mask("a row of padding"), LOWEST)
    assert_close(
        run_attention(schedlang_sdpa, qkv, mask), run_attention(eager_attention(), qkv, mask)
    )
    with torch.inference_mode():
        other = torch.zeros(1, 1, 1, TOKENS).double()
        blind_queries.find_hidden_keys(mask), blind_queries.find_hidden_keys(other)
    assert_close(
        run_attention(schedlang_sdpa, qkv, mask), run_attention(eager_attention(), qkv, mask)
    )


def test_hidden_by_numbers_that_differ() -> None:
    """Two added masks: the output equals eager's, and a gradient that would be wrong is refused."""
    visible, qkv = visible_mask("padding on the left"), random_heads()
    mask = torch.zeros(visible.shape).double().masked_fill(~visible, LOWEST)
    mask[1, :, 0, 1:] = -math.inf
    with torch.no_grad(), enter_modes(Float64):
        module = SimpleNamespace(num_key_value_groups=1, training=True, is_causal=True)
        calls = (eager_attention(), sdpa_attention._register())
        expected, actual = (call(module, *qkv, mask, scaling=0.3)[0] for call in calls)
    assert_close([actual], [expected])
    with pytest.raises(RuntimeError, match="hides all keys from a query by numbers that differ"):
        run_attention(sdpa_attention._register(), qkv, mask)


def test_torch_is_wrong_there() -> None:
    """The reason for the kernel: with the same mask torch's attention gives wrong gradients."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    visible, qkv = visible_mask("padding on the left"), random_heads()
    mask = torch.zeros(visible.shape).double().masked_fill(~visible, LOWEST)
    expected, actual = (
        run_attention(call, qkv, mask) for call in (eager_attention(), sdpa_attention_forward)
    )
    assert_close(actual[:1], expected[:1])
    for x, y in zip(actual[1:], expected[1:]):
        assert (x - y).norm() > 1e-2 * y.norm()


def test_what_is_dropped_by_torch() -> None:
    """With torch's own dropout the gradients equal eager's in the mean."""
    visible, qkv = visible_mask("a row of padding"), random_heads()
    mask = torch.zeros(visible.shape).double().masked_fill(~visible, LOWEST)
    sums: list[list[Tensor]] = []
    for call in (eager_attention(), sdpa_attention._register()):
        torch.manual_seed(0)
        runs = [run_attention(call, qkv, mask, dropout=0.5) for _ in range(400)]
        assert not torch.allclose(runs[0][0][1], runs[1][0][1])
        sums.append([torch.stack(results).mean(0) for results in zip(*runs)])
    undropped = run_attention(eager_attention(), qkv, mask)
    for actual, expected, reference in zip(sums[1], sums[0], undropped):
        difference = (actual - expected).norm() / reference.norm()
        assert difference < 0.15, difference


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_a_model_whose_rows_begin_with_padding(threads: Any, drop: float) -> None:
    """Llama with left padding and labels on every token, with and without dropout of attention."""
    model = models.llama(2, attend="eager")
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.attention_dropout = drop
    batches = [models.pad_left(models.tokens(rows=6, seed=seed)) for seed in range(3)]
    for batch in batches:
        batch["labels"] = batch["input_ids"].clone()
    assert_proven(
        threads, make_plan(model, "model.layers.*.self_attn  replace_kernel(sdpa)"), batches
    )
