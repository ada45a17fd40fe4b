"""Attention by FlexAttention and flash_attn: equal results in modules, masks, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.kernels import flash_attention as flash
from schedlang.kernels.flex_attention import (
    AttentionCall,
    Case,
    ScoreRule,
    flex_attention,
    reference,
)
from schedlang.kernels.kernel_device import backend_runs
from schedlang.passes.analyze.prepare import prepare
from schedlang.runtime.kernel_injection.attention_kernels import KernelAttention, query_of_call
from schedlang.runtime.kernel_injection.kernel import match, replace
from tests import models
from tests.kernels.kernels_in_use import kernels_of
from tests.kernels.test_kernel_injection import assert_close, build_model, gradients
from tests.proofs import assert_proven, make_plan, refusal_text

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "implementation", "more"),
    [
        ("Llama", "sdpa", {}),
        ("Mistral", "sdpa", {"sliding_window": 4}),
        ("Gemma2", "eager", {"sliding_window": 4, "attn_logit_softcapping": 0.5}),
        ("GptOss", "eager", {"sliding_window": 4, "num_local_experts": 4}),
    ],
)
def test_attention_of_transformers(name: str, implementation: str, more: dict[str, Any]) -> None:
    """Windows, soft caps, sinks, grouped keys, left padding: equal in float64."""
    model = build_model(name, implementation, **more)
    expected, expected_padded = gradients(model), gradients(model, padded=True)
    attentions = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    for module in attentions:
        kernel = match(module, "flex_attention")
        assert isinstance(kernel, KernelAttention) and kernel.error < 1e-12
        assert kernel.forms[0].sinks == (name == "GptOss")
        assert kernel.forms[0].cap == (0.5 if name == "Gemma2" else 0.0)
        replace(module, kernel)
        assert kernels_of(module) == ("flex_attention",)
    assert model.config._attn_implementation == implementation
    before = backend_runs().get("reference", 0)
    assert_close(gradients(model), expected)
    assert backend_runs()["reference"] == before + len(attentions)
    assert_close(gradients(model, padded=True), expected_padded)


class CustomAttention(nn.Module):
    """Attention that is in no library and calls torch's function."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), drop

    def forward(self, x: Tensor) -> Tensor:
        """Compute causal attention of two heads."""
        heads = (t.view(*x.shape[:2], 2, 4) for t in self.qkv(x).chunk(3, -1))
        q, k, v = (t.transpose(1, 2) for t in heads)
        drop = self.drop if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def test_a_module_that_calls_torch() -> None:
    """Only calls inside the replaced module use the kernel."""
    torch.manual_seed(0)
    module = CustomAttention().double()
    x = torch.randn(3, 5, 8, dtype=torch.double)
    expected = module(x)
    replace(module, match(module, "flex_attention"))
    runs_before = backend_runs().get("reference", 0)
    assert (module(x) - expected).abs().max() < 1e-14
    assert backend_runs()["reference"] == runs_before + 1
    CustomAttention().double()(x)
    assert backend_runs()["reference"] == runs_before + 1


@pytest.mark.deep
class CrossAttention(nn.Module):
    """Attention to tokens of another width, as diffusers' to a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        parts = (self.q(hidden_states), self.k(context), self.v(context))
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in parts)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_attention_to_tokens_of_another_width() -> None:
    """It is probed with tokens of that width, and not refused."""
    module = CrossAttention().double()
    x, context = (torch.randn(3, n, w, dtype=torch.float64) for n, w in ((6, 8), (4, 12)))
    expected = module(x, context)
    kernel = match(module, "flex_attention")
    assert isinstance(kernel, KernelAttention), kernel
    replace(module, kernel)
    runs_before = backend_runs().get("reference", 0)
    torch.testing.assert_close(module(x, context), expected, rtol=1e-12, atol=1e-12)
    assert backend_runs()["reference"] == runs_before + 1


def test_compiles_as_one_graph() -> None:
    """Both ways of replacing attention work in torch.compile(fullgraph=True)."""
    custom, x = CustomAttention(), torch.randn(2, 5, 8)
    layer = build_model("Llama", "sdpa").float().model.layers[0].self_attn
    tables = (torch.randn(1, 5, 4), torch.randn(1, 5, 4))
    for module, inputs in [
        (custom, {"x": x}),
        (
            layer,
            {
                "hidden_states": torch.randn(2, 5, 16),
                "position_embeddings": tables,
                "attention_mask": None,
            },
        ),
    ]:
        replace(module, match(module, "flex_attention"))
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        actual, expected = compiled(**inputs), module(**inputs)
        pair = (actual, expected) if module is custom else (actual[0], expected[0])
        torch.testing.assert_close(*pair)
        pair[0].sum().backward()


def test_what_does_not_fit_is_refused() -> None:
    """Dropout, no attention, sinks for a kernel without them: each refusal gives its reason."""
    assert "has dropout in training" in match(CustomAttention(0.1), "flex_attention").reason
    assert "calls neither an attention" in match(nn.Linear(4, 4), "flex_attention").reason
    with_sinks = build_model("GptOss", num_local_experts=4).model.layers[0].self_attn
    assert "adds sinks" in match(with_sinks, "flash_attention").reason
    with pytest.raises(Refusal, match="S877|`page_table`"):
        heads = tuple(torch.zeros(1, 2, 3, 4) for _ in range(3))
        query_of_call("flex_attention", heads, None, True, {"page_table": torch.ones(1)})  # type: ignore[arg-type]


def test_split_sequences_have_their_own_kernel() -> None:
    """Context parallelism has its own kernel: another one is refused, not ignored."""
    rows = """model.layers.*.self_attn replace_kernel(flex_attention)
        model.layers.*.self_attn context_parallel(gather, over=cp)"""
    with pytest.raises(Refusal) as error:
        prepare(make_plan(models.llama(1), rows, "cp=2"), models.tokens())
    message = error.value.render()
    assert "S878" in message and "drop the row `model.layers.0.self_attn replace_kernel(" in message


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal says what to install and which kernel needs no package; with it the row is
    accepted."""
    row = "model.layers.*.self_attn replace_kernel(flash_attention)"
    message = refusal_text(models.llama(1), row)
    assert "S876" in message and "pip install flash-attn" in message and "flex_attention" in message
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "fakes")
    assert make_plan(models.llama(1), row).actions


def test_over_ranks(threads: Any) -> None:
    """Heads split over two ranks: the proof holds for a model with flex_attention."""
    rows = """model.layers.*.self_attn replace_kernel(flex_attention)
        at model.layers.* {
          self_attn.{q,k,v}_proj  shard(col, over=tp)
          self_attn.o_proj        shard(row, over=tp)
        }"""
    plan = make_plan(models.llama(1), rows, "tp=2")
    assert_proven(threads, plan, [models.tokens(rows=4, seed=seed) for seed in (1, 2)])


WINDOWS = {
    "causal": (lambda far: far >= 0, (-1, 0)),
    "all": (lambda far: far == far, (-1, -1)),
    "window": (lambda far: (far >= 0) & (far < 3), (2, 0)),
    "both ways": (lambda far: far.abs() < 3, (2, 2)),
    "blocks": (lambda far: (far >= 0) & (far % 2 == 0), None),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_is_read_as_a_window(name: str, additive: bool) -> None:
    """Masks that are a window of flash_attn are recognized; others, and biases, are not."""
    is_visible, window = WINDOWS[name]
    distance = torch.arange(6)[:, None] - torch.arange(6)[None]
    visible = is_visible(distance)[None, None].expand(2, 1, 6, 6).clone()
    q = torch.zeros(2, 2, 6, 4)
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min) if additive else visible
    assert flash.window_of(AttentionCall(q, q, q, ScoreRule(), mask)) == window
    padded = mask.clone()
    padded[0, :, :, 0] = torch.finfo(torch.float32).min if additive else False
    assert flash.window_of(AttentionCall(q, q, q, ScoreRule(), padded)) is None
    if additive:
        assert flash.window_of(AttentionCall(q, q, q, ScoreRule(), mask + 1.0)) is None


def test_flash_attention_is_called_with_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale, cap, window and heads reach the package; its result is that of the reference."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "fakes")
    monkeypatch.setattr(flash, "runs_flash", lambda q: True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 7, 4, generator=generator) for heads in (4, 2, 2))
    distance = torch.arange(7)[:, None] - torch.arange(7)[None]
    mask = ((distance >= 0) & (distance < 3))[None, None].expand(2, 1, 7, 7).clone()
    for rule, call_mask in [
        (ScoreRule(0.3, 2.0, True), None),
        (ScoreRule(), mask),
        (ScoreRule(causal=True), mask),
        (ScoreRule(), None),
    ]:
        before = backend_runs().get("torch", 0)
        query = AttentionCall(q, k, v, rule, call_mask)
        actual = flash.flash_attention(query)
        assert backend_runs()["torch"] == before + 1
        torch.testing.assert_close(actual, reference(query))


@pytest.mark.parametrize("kind", ["causal", "bool", "additive"])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_form_that_is_given_to_torch(
    kind: str, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Score function, blocks, scale and sinks mean what the reference computes, uncompiled.

    torch has the forward of FlexAttention on a CPU, and the backward only on a GPU.
    """
    from torch.nn.attention.flex_attention import flex_attention as flex

    from schedlang.kernels import flex_attention as file

    monkeypatch.setattr(file, "runs_flex", lambda q: True)
    monkeypatch.setattr(file, "compiled_flex", lambda: flex)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 16, generator=generator) for heads in (4, 2, 2))
    sink = torch.randn(4, generator=generator) if sinks else None
    visible = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    visible[0, :, :, 0] = False  # the first query of this row sees no key
    additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    mask = {"causal": None, "bool": visible, "additive": additive}[kind]
    bias = torch.randn(1, 4, 9, 9, generator=generator) if kind == "additive" else None
    rule = ScoreRule(0.2, 3.0 if kind != "bool" else 0.0, kind == "causal")
    with torch.no_grad():
        query = AttentionCall(q, k, v, rule, mask, bias, sink)
        torch.testing.assert_close(flex_attention(query), reference(query))


def test_a_trial_here_says_that_it_was_not_run() -> None:
    """Without a GPU a check uses the reference, and says so."""
    from schedlang.kernels.check import check_case

    assert check_case(Case((1, 4, 9, 16), cap=3.0, sinks=True), "cpu").backend == "reference"


def test_calls_that_a_module_does_not_take_are_left_out() -> None:
    """A module that needs a mask is probed by calls with a mask; it fails if there are none."""
    from schedlang.runtime.kernel_injection.attention_kernels import _run_calls

    class Masked(nn.Linear):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(x) + attention_mask.sum()  # type: ignore[union-attr]

    module, x = Masked(4, 4), torch.randn(2, 4)
    calls: Any = [([x], {"attention_mask": torch.ones(2)}), ([x], {"attention_mask": None})]
    assert [call for call, _ in _run_calls(module, iter(calls))] == calls[:1]
    with pytest.raises(AttributeError):
        list(_run_calls(module, iter(calls[::-1])))


def test_a_config_whose_layers_differ() -> None:
    """If the config has no head size, the module's is used."""
    from schedlang.runtime.kernel_injection.sdpa_attention import _head_size

    class Config:
        @property
        def head_dim(self) -> int:
            raise KeyError("it may vary across layers")

    module = nn.Linear(4, 4)
    module.head_dim = 12  # type: ignore[assignment]
    assert _head_size(module, Config()) == 12 and _head_size(nn.Linear(4, 4), Config()) is None
