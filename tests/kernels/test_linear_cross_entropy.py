"""The kernel `linear_cross_entropy`: accuracy, lazy logits, models over ranks, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.kernels.check import run_kernel_check
from schedlang.kernels.kernel_device import autocast_dtype
from schedlang.kernels.linear_cross_entropy import (
    Case,
    Form,
    linear_statistics_forward,
    linear_weighed,
    statistics,
    weighted_loss,
)
from schedlang.passes.analyze.prepare import prepare
from schedlang.runtime.kernel_injection.kernel import match, replace
from schedlang.runtime.lazy_logits.lazy import Head, LazyLogits, probe_head
from tests import models
from tests.kernels.kernels_in_use import kernels_of
from tests.proofs import assert_proven, make_plan, refusal_text

CASES = [
    Case((7, 40), dtype, 300, bias, smoothing, scale, cap, rows=3, spread=spread)
    for dtype in ("float32", "bfloat16", "float16")
    for bias, smoothing, scale, cap, spread in [
        (False, 0.0, 1.0, 0.0, 1.0),
        (True, 0.1, 0.25, 0.0, 3.0),
        (False, 0.0, 1 / 3, 3.0, 3.0),  # as Gemma caps logits
    ]
]
# rows of several blocks; a single row would be a product of vectors, whose rounding is the BLAS's
CASES.append(Case((4, 8), classes=5000, rows=2))


def test_kernels_are_as_right_as_eager():
    """The row kernels run in the interpreter: loss and gradients keep the rule of their dtype."""
    for result in run_kernel_check(CASES, device="cpu"):
        assert result.backend == "interpreter"
        assert result.ok, result


def random_leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(s, generator=generator).to(dtype) for s in ((10, 6), (17, 6), (17,))]
    return [t.requires_grad_() for t in tensors]


LABELS = torch.tensor([3, -100, 16, 0, 5, 5, -100, 9, 1, 2])


def lazy_logits(x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int = 0) -> LazyLogits:
    """Return the logits of a head with these parameters."""
    head = nn.Linear(6, 17, bias=bias is not None, dtype=x.dtype)
    head.weight = weight  # type: ignore[assignment]
    if bias is not None:
        head.bias = bias  # type: ignore[assignment]
    head_form = match(head, "linear_cross_entropy")
    assert isinstance(head_form, Head)
    replace(head, head_form, chunk)
    logits = head(x)
    assert isinstance(logits, LazyLogits) and kernels_of(head) == ("linear_cross_entropy",)
    return logits


LOSSES = {
    "mean": lambda z: F.cross_entropy(z, LABELS),
    "sum": lambda z: F.cross_entropy(z, LABELS, reduction="sum"),
    "each": lambda z: F.cross_entropy(z, LABELS, reduction="none").square().sum(),
    "smoothed": lambda z: F.cross_entropy(z.double(), LABELS, label_smoothing=0.2),
    "ignoring 5": lambda z: F.cross_entropy(z, LABELS.clamp_min(0), ignore_index=5),
    "scaled": lambda z: F.cross_entropy(z * 0.3 / 2, LABELS),
    "capped": lambda z: F.cross_entropy(2 * torch.tanh(z / 2), LABELS),
    "capped, then scaled": lambda z: F.cross_entropy((z / 2).tanh() * 2 * 3, LABELS),
    "shifted": lambda z: F.cross_entropy(
        z.view(2, 5, 17)[..., :-1, :].contiguous().view(-1, 17), LABELS.view(2, 5)[:, 1:].flatten()
    ),
    "z-loss": lambda z: F.cross_entropy(z, LABELS) + 0.1 * torch.logsumexp(z, -1).pow(2).mean(),
    "keywords": lambda z: F.cross_entropy(input=z, target=LABELS, reduction="mean"),
}
NEED_LOGITS = {
    "weighted": lambda z: F.cross_entropy(z, LABELS, weight=torch.arange(17.0, dtype=z.dtype)),
    "another loss": lambda z: (z - 1).square().mean() + z.softmax(-1).max(),
    "capped twice": lambda z: F.cross_entropy(z.tanh().tanh(), LABELS),
    "masked": lambda z: F.cross_entropy(_without_a_class(z), LABELS.clamp_min(1)),
}


def _without_a_class(z):
    z = z * 1.0
    z[:, 0] = -1e4
    return z


@pytest.mark.parametrize("name", [*LOSSES, *NEED_LOGITS])
def test_losses_of_lazy_logits(name, monkeypatch):
    """Losses equal torch's, in chunks of three rows; full logits are computed only if needed."""
    computed = []
    full = LazyLogits.full
    record = lambda self: [computed.append(self.computed is None), full(self)][1]  # noqa: E731
    monkeypatch.setattr(LazyLogits, "full", record)
    loss = (LOSSES | NEED_LOGITS)[name]
    x, weight, bias = random_leaves()
    expected = loss(F.linear(x, weight, bias))
    actual = loss(lazy_logits(x, nn.Parameter(weight), nn.Parameter(bias), chunk=3 * 17 * 8))
    assert abs(actual - expected) <= 1e-12 * abs(expected)
    assert any(computed) == (name in NEED_LOGITS)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_lazy_logits(name):
    """Gradients of input, weight and bias equal autograd's through full logits."""
    leaves = random_leaves()
    expected = torch.autograd.grad(LOSSES[name](F.linear(*leaves)), leaves)
    x = leaves[0]
    weight, bias = (nn.Parameter(t.detach()) for t in leaves[1:])
    actual = torch.autograd.grad(LOSSES[name](lazy_logits(x, weight, bias, 400)), (x, weight, bias))
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


def test_no_labels_give_no_gradient():
    """If no label counts the loss is NaN and gradients are zero, as torch's."""
    x, weight, _ = random_leaves()
    loss = F.cross_entropy(lazy_logits(x, nn.Parameter(weight), None), torch.full((10,), -100))
    assert loss.isnan() and torch.autograd.grad(loss, x)[0].abs().max() == 0


def test_a_frozen_head_and_eval():
    """A frozen weight gets no gradient; under no_grad or in eval mode logits are plain."""
    x, weight, _ = random_leaves()
    frozen = nn.Parameter(weight.detach(), requires_grad=False)
    loss = F.cross_entropy(lazy_logits(x, frozen, None), LABELS)
    expected = torch.autograd.grad(F.cross_entropy(F.linear(x, frozen), LABELS), x)[0]
    assert (torch.autograd.grad(loss, x)[0] - expected).norm() <= 1e-12 * expected.norm()
    head = nn.Linear(6, 17).double()
    replace(head, match(head, "linear_cross_entropy"))
    assert isinstance(head.eval()(x), Tensor)
    with torch.no_grad():
        assert isinstance(head.train()(x), Tensor)


def test_opcheck():
    """The operators pass opcheck: schema, fake tensors, autograd, ahead-of-time tracing."""
    x, weight, bias = random_leaves(torch.float32)
    target, row_weights = LABELS.clamp_min(-1), torch.rand(10)
    torch.library.opcheck(linear_statistics_forward, (x, weight, bias, target, 0.5, 2.0, 3))
    args = (x, weight, None, target, row_weights, 0.1, 1.0, 0.0, 4, True, True)
    torch.library.opcheck(linear_weighed, args)


def test_compiles_as_one_graph():
    """Both operators compile without a graph break, with eager's gradients."""
    x, weight, bias = random_leaves(torch.float32)
    row_weights = torch.rand(10)

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        first = weighted_loss(x, weight, bias, LABELS.clamp_min(-1), row_weights, 0.1, Form())
        return first + statistics(x, weight, bias, LABELS.clamp_min(-1), Form(cap=2.0))[0].mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaves = (x, weight, bias)
    pairs = zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (loss, compiled)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


HEADS = {
    "split over the vocabulary": (
        models.gpt2,
        """lm_head replace_kernel(linear_cross_entropy, chunk=1KiB)
        transformer.wte pad(vocab, multiple=8)
        lm_head shard(vocab, over=tp)
        transformer.wte shard(vocab, over=tp)""",
        "tp=2",
    ),
    "sliced, in stages": (
        models.llama,
        """lm_head replace_kernel(linear_cross_entropy)
        model.layers pipeline_split(over=pp)
        zero(stage=3, over=dp)
        pipeline(order="1F1B", micro=2)""",
        "pp=2, dp=2",
    ),
    "sliced, recomputed": (
        models.gemma2,
        """lm_head replace_kernel(linear_cross_entropy)
        model.layers.* checkpoint()
        zero(stage=3, over=dp)""",
        "dp=2",
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_over_ranks(name, pool):
    """The full proof: outputs, loss, gradients and three steps of unmodified models."""
    build_model, rows, mesh = HEADS[name]
    plan = make_plan(build_model(), rows, mesh)
    assert_proven(pool, plan, [models.tokens(rows=6, seed=seed) for seed in (1, 2, 3)])


@pytest.mark.parametrize(
    "row",
    [
        "shard(col, output=R, uneven=pad, over=tp)",
        "shard(row, over=tp)",
        "shard(input=S(seq), output=R, over=tp)",
    ],
)
def test_a_head_that_would_not_wait_is_refused(row):
    """Sharded other than over the vocabulary: the refusal names both rows and what is legal."""
    rows = f"lm_head replace_kernel(linear_cross_entropy)\nlm_head {row}"
    plan = make_plan(models.llama(1), rows, "tp=2")
    with pytest.raises(Refusal) as error:
        prepare(plan, models.tokens())
    message = error.value.render()
    assert "S875" in message and "by `shard(" in message and "^^^" in message
    assert (
        "`lm_head shard(vocab, over=tp)`" in message and "or drop the row `lm_head repl" in message
    )


def test_what_is_no_head_is_told():
    """A module that is no linear layer, and another kernel's argument, are refused."""
    model = models.llama(1)
    assert "a head has a matrix" in refusal_text(
        model, "model.norm replace_kernel(linear_cross_entropy)"
    )
    message = refusal_text(model, "model.norm replace_kernel(rms_norm, chunk=1MiB)")
    assert "S870" in message and "`rms_norm` takes no `chunk`" in message

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    mismatch = probe_head(Scaled(4, 6))
    assert "differs from a linear layer" in mismatch.reason and mismatch.error > 0.1


@pytest.mark.parametrize(
    "row, said",
    [
        ("lm_head replace_kernel(linear_cross_entropy)", "hook on gradients"),
        ("lm_head replace_kernel(cross_entropy)", "hook on gradients"),
        ("lm_head shard(vocab, over=tp)", "hook on gradients"),
        ("lm_head replace_kernel(cross_entropy)", "computes its weight from `weight_orig`"),
    ],
)
def test_heads_whose_gradients_or_weights_are_made_elsewhere(row, said):
    """A backward hook of a head would not run; a weight that a hook computes would not be
    updated."""
    model = models.llama(1)
    if "hook" in said:
        model.lm_head.register_full_backward_hook(lambda *unused: None)
    else:
        nn.utils.spectral_norm(model.lm_head)
    assert said in " ".join(refusal_text(model, row, "tp=2" if "tp" in row else "").split())


def test_the_last_backward_writes_over_what_was_saved():
    """The gradient that forward computed is not stored twice; a retained graph gives it again."""
    x, weight, _ = random_leaves(torch.float32)
    labels, row_weights = LABELS.clamp_min(-1), torch.arange(10) / 10 * (LABELS >= 0)
    loss = weighted_loss(x, weight, None, labels, row_weights, 0.0, Form())
    saved = [tensor.data_ptr() for tensor in loss.grad_fn.saved_tensors]
    leaves = (x, weight)
    twice = [torch.autograd.grad(3 * loss, leaves, retain_graph=True) for _ in range(2)]
    last = torch.autograd.grad(3 * loss, leaves)
    for first, second, third in zip(*twice, last):
        assert torch.equal(first, second) and torch.equal(first, third)
        assert not third.requires_grad
    assert [tensor.data_ptr() for tensor in last] == saved[:2]
    assert not {tensor.data_ptr() for tensor in twice[0]} & set(saved)
    leaves = (x.double().detach().requires_grad_(), weight.double().detach().requires_grad_())
    exact = torch.autograd.grad(
        3 * (F.cross_entropy(F.linear(*leaves), LABELS, reduction="none") * row_weights).sum(),
        leaves,
    )
    for actual, expected in zip(last, exact, strict=True):
        assert (actual - expected).norm() <= 1e-6 * expected.norm()


def test_rows_in_parts_are_the_same_bits(monkeypatch):
    """Plain operations on a few rows at a time give the same bits as on all rows."""
    from schedlang.kernels import cross_entropy as rows

    for dtype, cap in ((torch.float32, 0.0), (torch.bfloat16, 2.0)):
        z = torch.randn(11, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
        target = torch.arange(11) - 1
        expected = [*rows._statistics(z, target, 0.5, cap)]
        row_sums = expected[0], expected[1], expected[2]
        gradient = z.clone().copy_(
            rows._gradient(z.clone(), target, expected[0], row_sums, 0.5, cap)
        )
        with monkeypatch.context() as patch:
            patch.setattr(rows, "_AT_ONCE", 3 * 40 * 4)
            assert len(rows._parts(z)) == 4
            actual = rows.statistics(z, target, 0.5, cap)
            buffer = z.clone()
            result = rows.gradient_(buffer, target, actual[0], actual, 0.5, cap)
        assert result is buffer and torch.equal(result, gradient)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_autocast_casts_no_float64() -> None:
    """As in torch: in float64, a head under `cast(bf16)` computes what it computes alone."""
    x = torch.ones(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocast_dtype(x) == torch.bfloat16 and autocast_dtype(x.double()) is None
