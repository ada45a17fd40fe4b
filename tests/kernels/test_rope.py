"""Rotary embeddings by one kernel: against float64, in the modules chosen, and in no others."""

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
from tests.proofs import refused
from tests.rows import HEADS, STAGES, llama_proven
from tests.tiers import thinned

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
    """The kernel itself runs, interpreted; output and gradients keep the rule of their type, for
    every form, whole heads and a part of them, angles of all rows and of each."""
    cases = [
        Case((2, 2, 3, 2, 12), dtype, width, form, shared=not width)
        for form in FORMS.values()
        for dtype, width in (("float32", 0), ("bfloat16", 6), ("float16", 0))
    ]
    cases += [Case((1, 1, 40, 1, 130), "float32", 128), Case((1, 2, 1, 1, 2), strided=True)]
    for each in run_kernel_check(cases, device="cpu"):
        assert each.backend == "interpreter"
        assert each.ok, each


def drawn(form, dtype=torch.float64, angles=6, rows=2):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, n, 3, 6) if form.heads == 1 else (2, 3, n, 6) for n in (4, 2)]
    shapes += [(rows, 3, angles)] * 2
    made = [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]
    return [t.requires_grad_() for t in made[:2]] + made[2:]


@pytest.mark.parametrize("name", FORMS)
def test_operator_equals_autograd_of_the_reference(name):
    """In float64, also twice: forward, gradients, and gradients of a gradient are torch's."""
    form = FORMS[name]
    q, k, cos, sin = drawn(form)
    sides = []
    for made in (
        rotate(q, k, cos, sin, 4, form),
        [reference(x, cos, sin, 4, form) for x in (q, k)],
    ):
        loss = sum((y**3).sum() for y in made)
        first = torch.autograd.grad(loss, [q, k], create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), [q, k])
        sides.append([*made, *first, *second])
    for ours, plain in zip(*sides):
        assert (ours - plain).norm() <= 1e-14 * plain.norm()


def test_opcheck_and_layout():
    """The operator is sound; what it gives lies in memory as what it was given."""
    q, k, cos, sin = drawn(Form(), torch.float32)
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


@pytest.mark.parametrize("name", thinned(MODELS, 3))
def test_of_unmodified_models(name):
    """One layer's rotation by the kernel, the other's as it was: equal, and run once each way."""
    more, form = MODELS[name]
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
    config = getattr(transformers, f"{name}Config")(**(small | more))
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    attentions = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    expected = gradients(model)
    found = match(attentions[0], "rope")
    assert isinstance(found, RotaryForm) and found.rotations[0].form == form, found
    replace(attentions[0], found)
    before = backend_runs().get("reference", 0)
    seen = gradients(model)
    times = len(found.rotations[0].order) == 3  # a launch for the queries, one for the keys
    assert backend_runs()["reference"] == before + 2 * (1 + times)
    top = max(e.norm() for e in expected.values() if e is not None)
    for key, value in expected.items():
        if value is not None:
            assert (seen[key] - value).norm() <= 1e-12 * (value.norm() + 1e-3 * top), key


def test_its_file_is_left_alone():
    """The function keeps its name in the model's file; a copy of the module turns by the kernel."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.apply_rotary_pos_emb
    attention = models.llama(1).model.layers[0].self_attn
    replace(attention, match(attention, "rope"))
    assert modeling_llama.apply_rotary_pos_emb is plain
    assert attention.forward.__func__.__globals__["__name__"] != modeling_llama.__name__


class Own(nn.Module):
    """An attention that turns by a function of this file."""

    def __init__(self, turn="turn"):
        super().__init__()
        self.which = turn

    def forward(self, q, k, cos, sin):
        return turn(q, k, cos, sin)


def half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def turn(q, k, cos, sin, shift=1):
    cos, sin = cos.unsqueeze(shift), sin.unsqueeze(shift)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def backwards(q, k, cos, sin):
    return turn(q, k, cos, -sin)


def detached(q, k, cos, sin):
    return turn(q.detach(), k, cos, sin)


def rough(q, k, cos, sin):
    kind = q.dtype
    q, k = (x.bfloat16().to(kind) if kind == torch.float32 else x for x in (q, k))
    made = turn(q.double(), k.double(), cos.double(), sin.double())
    return tuple((y.to(kind) * 1.0 + (0.01 if kind == torch.bfloat16 else 0.0)) for y in made)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (backwards, "does not compute this rotation"),
        (detached, "gradients differ"),
        (rough, "rounds differently"),
    ],
)
def test_refuses_what_only_resembles(monkeypatch, other, said):
    """Another sense of turning, a cut gradient, other roundings: each is a mismatch."""
    assert isinstance(match(Own(), "rope"), RotaryForm)
    plain = turn
    monkeypatch.setitem(
        globals(), "turn", functools.wraps(other)(lambda *a, **k: _by(plain, other, *a, **k))
    )
    found = match(Own(), "rope")
    assert said in found.reason, found
    assert found.error is None or found.error > 1e-5


def _by(plain, other, *args):
    held = globals()["turn"]
    globals()["turn"] = plain
    try:
        return other(*args)
    finally:
        globals()["turn"] = held


def test_what_the_kernel_does_not_take():
    """Other arguments and shapes are the function's; angles that need a gradient are refused."""
    own = Own()
    q, k, cos, sin = drawn(Form())
    expected = turn(q, k, cos, sin)
    replace(own, match(own, "rope"))
    before = backend_runs().get("reference", 0)
    torch.testing.assert_close(own(q, k, cos, sin), expected, rtol=1e-14, atol=0)
    assert backend_runs()["reference"] == before + 1
    with pytest.raises(RuntimeError):  # as the function does, of two angles for six numbers
        own(q, k, cos[..., :2], sin[..., :2])
    own(q, k, cos[:, :, None, :].expand(2, 3, 1, 6).transpose(1, 2)[:, 0], sin)
    with pytest.raises(Refusal, match="S871") as caught:
        own(q, k, cos.requires_grad_(), sin)
    assert "leave this attention as it is" in caught.value.render()
    with torch.no_grad():
        own(q, k, cos, sin)


def test_forwards_with_decorators_and_one_graph():
    """A decorated forward keeps its decorators; the whole is one graph, and turns by the kernel."""

    def noting(function):
        @functools.wraps(function)
        def call(self, *args, **kwargs):
            return (*function(self, *args, **kwargs), "noted")

        return call

    class Decorated(Own):
        forward = noting(Own.forward)

    own, given = Decorated(), drawn(Form())
    expected = own(*given)
    replace(own, match(own, "rope"))
    before = backend_runs().get("reference", 0)
    whole = torch.compile(own, fullgraph=True, backend="aot_eager")
    for made in (own(*given), whole(*given)):
        assert made[2] == "noted"
        torch.testing.assert_close(made[:2], expected[:2], rtol=1e-14, atol=0)
    assert backend_runs()["reference"] == before + 2


@pytest.mark.parametrize("unknown", [0, 2])
def test_sizes_that_are_symbols(unknown):
    """Where the compiler does not know some sizes, the kernel still turns."""
    own, given = Own(), drawn(Form())
    expected = own(*given)
    replace(own, match(own, "rope"))
    torch._dynamo.maybe_mark_dynamic(given[unknown], 0)
    before = backend_runs().get("reference", 0)
    made = torch.compile(own, fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(made, expected, rtol=1e-14, atol=0)
    assert backend_runs()["reference"] == before + 1


ROWS = {
    "split heads, sliced state, recomputed": HEADS,
    "stages": STAGES,
    "split sequences": (
        "model.layers.*.self_attn context_parallel(ring, over=cp, layout=zigzag)",
        "cp=2",
    ),
}


@pytest.mark.parametrize("name", thinned(ROWS, 3))
def test_models_over_ranks(name, threads):
    """Beside split heads, stages, recomputation and split sequences it is the same program."""
    llama_proven(threads, ROW, ROWS[name])


def test_what_does_not_turn_is_told():
    """A module without rotations is refused, with what its forward lacks."""
    said = refused(models.gpt2(1), "transformer.h.0.attn replace_kernel(rope)")
    assert "S410" in said and "calls no function of its file" in said
    assert FusedRope.kernel == "rope"
