"""The kernel `rope` for rotary embeddings: accuracy, which modules it fits, results in models."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.kernels.check import run_kernel_check
from schedlang.kernels.kernel_device import backend_runs
from schedlang.kernels.rope import Case, Form, reference, rope_turn, rotate
from schedlang.runtime.float64 import Float64
from schedlang.runtime.kernel_injection.kernel import match, replace
from schedlang.runtime.kernel_injection.rope import FusedRope, RotaryForm
from schedlang.runtime.modes import enter_modes
from tests import models
from tests.proofs import refusal_text
from tests.rows import HEADS, STAGES, assert_llama_proven
from tests.tiers import thin_out

transformers = pytest.importorskip("transformers")
FORMS = {
    "llama": Form(),
    "cohere": Form(pairs=True, paired=True, early=False),
    "glm": Form(pairs=True, paired=True, own=False),
    "deepseek": Form(pairs=True, own=False, early=False),
    "heads last": Form(heads=2, early=False),
}
ROW = "model.layers.*.self_attn replace_kernel(rope)\n"


def test_kernel_is_as_right_as_eager():
    """The kernel runs in the interpreter; results keep the rule of their dtype, for every form,
    full and partial heads, shared angles and angles of each row."""
    cases = [
        Case((2, 2, 3, 2, 12), dtype, width, form, shared=not width)
        for form in FORMS.values()
        for dtype, width in (("float32", 0), ("bfloat16", 6), ("float16", 0))
    ]
    cases += [Case((1, 1, 40, 1, 130), "float32", 128), Case((1, 2, 1, 1, 2), strided=True)]
    for result in run_kernel_check(cases, device="cpu"):
        assert result.backend == "interpreter"
        assert result.ok, result


def random_inputs(form, dtype=torch.float64, angles=6, rows=2):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, n, 3, 6) if form.heads == 1 else (2, 3, n, 6) for n in (4, 2)]
    shapes += [(rows, 3, angles)] * 2
    tensors = [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]
    return [t.requires_grad_() for t in tensors[:2]] + tensors[2:]


@pytest.mark.parametrize("name", FORMS)
def test_operator_equals_autograd_of_the_reference(name):
    """In float64: outputs, gradients, and gradients of gradients are torch's."""
    form = FORMS[name]
    q, k, cos, sin = random_inputs(form)
    results = []
    for outputs in (
        rotate(q, k, cos, sin, 4, form),
        [reference(x, cos, sin, 4, form) for x in (q, k)],
    ):
        loss = sum((y**3).sum() for y in outputs)
        first = torch.autograd.grad(loss, [q, k], create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), [q, k])
        results.append([*outputs, *first, *second])
    for actual, expected in zip(*results):
        assert (actual - expected).norm() <= 1e-14 * expected.norm()


def test_opcheck_and_layout():
    """The operator passes opcheck; outputs have the inputs' memory layout."""
    q, k, cos, sin = random_inputs(Form(), torch.float32)
    options = (4, False, False, True, 1, True, False, False)
    torch.library.opcheck(rope_turn, (q, k, cos, sin, *options))
    torch.library.opcheck(rope_turn, (q, None, cos, sin, *options))
    turned = rotate(q.transpose(1, 2).contiguous().transpose(1, 2), k, cos, sin, 6, Form())[0]
    assert turned.stride() == (72, 6, 24, 1)


MODELS = {
    "Llama": ({}, Form()),
    "Cohere": ({}, Form(pairs=True, paired=True, early=False, keeps=True)),
    "Glm": ({"head_dim": 8, "partial_rotary_factor": 0.5}, Form(True, True, False)),
    "GPTNeoX": ({"rotary_pct": 0.5}, Form()),
    "GPTJ": (
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4, "n_inner": 24},
        Form(True, True, False, 2),
    ),
    "GptOss": ({"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, Form(own=False)),
}


def gradients(model):
    model.zero_grad()
    ids = torch.arange(20).view(2, 10) % 32
    with enter_modes(Float64):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
    return {"logits": out.logits.detach(), **{n: p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize("name", thin_out(MODELS, 3))
def test_of_unmodified_models(name):
    """One layer by the kernel, the other unchanged: equal results, and one launch in each
    direction."""
    extra, form = MODELS[name]
    small = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "vocab_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{name}Config")(**(small | extra))
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    attentions = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    expected = gradients(model)
    rotary_form = match(attentions[0], "rope")
    assert isinstance(rotary_form, RotaryForm) and rotary_form.rotations[0].form == form, (
        rotary_form
    )
    replace(attentions[0], rotary_form)
    runs_before = backend_runs().get("reference", 0)
    actual = gradients(model)
    keys_separate = (
        len(rotary_form.rotations[0].order) == 3
    )  # one launch for the queries, one for the keys
    assert backend_runs()["reference"] == runs_before + 2 * (1 + keys_separate)
    largest = max(e.norm() for e in expected.values() if e is not None)
    for key, value in expected.items():
        if value is not None:
            assert (actual[key] - value).norm() <= 1e-12 * (value.norm() + 1e-3 * largest), key


def test_its_file_is_left_alone():
    """The function in the model's file stays unchanged; the module uses its own copy."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.apply_rotary_pos_emb
    attention = models.llama(1).model.layers[0].self_attn
    replace(attention, match(attention, "rope"))
    assert modeling_llama.apply_rotary_pos_emb is original
    assert attention.forward.__func__.__globals__["__name__"] != modeling_llama.__name__


class RotaryAttention(nn.Module):
    """An attention that rotates by a function of this file."""

    def __init__(self, turn="turn"):
        super().__init__()
        self.which = turn

    def forward(self, q, k, cos, sin):
        return turn(q, k, cos, sin)


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def turn(q, k, cos, sin, shift=1):
    cos, sin = cos.unsqueeze(shift), sin.unsqueeze(shift)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def turn_backwards(q, k, cos, sin):
    return turn(q, k, cos, -sin)


def turn_detached(q, k, cos, sin):
    return turn(q.detach(), k, cos, sin)


def turn_rounded(q, k, cos, sin):
    dtype = q.dtype
    q, k = (x.bfloat16().to(dtype) if dtype == torch.float32 else x for x in (q, k))
    outputs = turn(q.double(), k.double(), cos.double(), sin.double())
    return tuple((y.to(dtype) * 1.0 + (0.01 if dtype == torch.bfloat16 else 0.0)) for y in outputs)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (turn_backwards, "does not compute this rotation"),
        (turn_detached, "gradients differ"),
        (turn_rounded, "rounds differently"),
    ],
)
def test_refuses_what_only_resembles(monkeypatch, other, said):
    """The other direction, a detached gradient, other rounding: each is a mismatch."""
    assert isinstance(match(RotaryAttention(), "rope"), RotaryForm)
    original = turn
    monkeypatch.setitem(
        globals(),
        "turn",
        functools.wraps(other)(lambda *a, **k: _call_with_plain(original, other, *a, **k)),
    )
    mismatch = match(RotaryAttention(), "rope")
    assert said in mismatch.reason, mismatch
    assert mismatch.error is None or mismatch.error > 1e-5


def _call_with_plain(original, replacement, *args):
    current = globals()["turn"]
    globals()["turn"] = original
    try:
        return replacement(*args)
    finally:
        globals()["turn"] = current


def test_what_the_kernel_does_not_take():
    """Other arguments and shapes go to the original function; angles that need a gradient are
    refused."""
    attention = RotaryAttention()
    q, k, cos, sin = random_inputs(Form())
    expected = turn(q, k, cos, sin)
    replace(attention, match(attention, "rope"))
    runs_before = backend_runs().get("reference", 0)
    torch.testing.assert_close(attention(q, k, cos, sin), expected, rtol=1e-14, atol=0)
    assert backend_runs()["reference"] == runs_before + 1
    with pytest.raises(RuntimeError):  # as the function: two angles for six numbers
        attention(q, k, cos[..., :2], sin[..., :2])
    attention(q, k, cos[:, :, None, :].expand(2, 3, 1, 6).transpose(1, 2)[:, 0], sin)
    with pytest.raises(Refusal, match="S871") as caught:
        attention(q, k, cos.requires_grad_(), sin)
    assert "leave this attention as it is" in caught.value.render()
    with torch.no_grad():
        attention(q, k, cos, sin)


def test_forwards_with_decorators_and_one_graph():
    """A decorated forward keeps its decorators, compiles as one graph, and uses the kernel."""

    def noting(function):
        @functools.wraps(function)
        def call(self, *args, **kwargs):
            return (*function(self, *args, **kwargs), "noted")

        return call

    class Decorated(RotaryAttention):
        forward = noting(RotaryAttention.forward)

    attention, inputs = Decorated(), random_inputs(Form())
    expected = attention(*inputs)
    replace(attention, match(attention, "rope"))
    runs_before = backend_runs().get("reference", 0)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for outputs in (attention(*inputs), compiled(*inputs)):
        assert outputs[2] == "noted"
        torch.testing.assert_close(outputs[:2], expected[:2], rtol=1e-14, atol=0)
    assert backend_runs()["reference"] == runs_before + 2


@pytest.mark.parametrize("unknown", [0, 2])
def test_sizes_that_are_symbols(unknown):
    """With dynamic sizes in the compiler the kernel still runs."""
    attention, inputs = RotaryAttention(), random_inputs(Form())
    expected = attention(*inputs)
    replace(attention, match(attention, "rope"))
    torch._dynamo.maybe_mark_dynamic(inputs[unknown], 0)
    runs_before = backend_runs().get("reference", 0)
    outputs = torch.compile(attention, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-14, atol=0)
    assert backend_runs()["reference"] == runs_before + 1


ROWS = {
    "split heads, sliced state, recomputed": HEADS,
    "stages": STAGES,
    "split sequences": (
        "model.layers.*.self_attn context_parallel(ring, over=cp, layout=zigzag)",
        "cp=2",
    ),
}


@pytest.mark.parametrize("name", thin_out(ROWS, 3))
def test_models_over_ranks(name, threads):
    """With split heads, stages, recomputation and context parallelism the proof holds."""
    assert_llama_proven(threads, ROW, ROWS[name])


def test_what_does_not_turn_is_told():
    """A module without rotations is refused, with what its forward lacks."""
    message = refusal_text(models.gpt2(1), "transformer.h.0.attn replace_kernel(rope)")
    assert "S410" in message and "calls no function of its file" in message
    assert FusedRope.kernel == "rope"
