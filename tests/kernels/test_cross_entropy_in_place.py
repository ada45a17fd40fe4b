"""The kernel `cross_entropy`, which keeps logits in place: accuracy, memory, models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang.kernels.check import run_kernel_check
from schedlang.kernels.linear_cross_entropy import Case, held_backward, held_forward
from schedlang.runtime.kernel_injection.kernel import match, replace
from schedlang.runtime.lazy_logits.lazy import LazyLogits
from tests import models
from tests.kernels.kernels_in_use import kernels_of
from tests.kernels.test_linear_cross_entropy import LABELS, LOSSES, NEED_LOGITS
from tests.proofs import refusal_text
from tests.rows import STAGES, assert_llama_proven
from tests.tiers import thin_out

ROW = "lm_head replace_kernel(cross_entropy)\n"


def test_kernel_is_as_right_as_eager():
    """The kernels run in the interpreter: smoothing, caps, scales, bias, ignored labels."""
    cases = [Case((7, 24), dtype, held=True) for dtype in ("float32", "bfloat16", "float16")]
    cases += [Case((3, 8), classes=5000, smoothing=0.1, held=True)]
    cases += [Case((3, 8), cap=3.0, scale=0.5, bias=True, held=True)]
    for result in run_kernel_check(cases, device="cpu"):
        assert result.backend == "interpreter"
        assert result.ok, result


def test_opcheck():
    """The operators pass opcheck; the schema of backward says that it writes."""
    x, weight, target = torch.randn(5, 4), torch.randn(9, 4), torch.arange(5)
    leaves = x.requires_grad_(), weight.requires_grad_()
    torch.library.opcheck(
        held_forward,
        (*leaves, None, target, 0.5, 3.0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    lse, *_, z = (t.detach() for t in held_forward(*leaves, None, target, 1.0, 0.0))
    backward_args = (
        z,
        x.detach(),
        weight.detach(),
        None,
        target,
        lse,
        lse,
        lse,
        lse,
        1.0,
        0.0,
        True,
        True,
    )
    torch.library.opcheck(held_backward, backward_args)


def make_head():
    torch.manual_seed(0)
    layer = nn.Linear(6, 17, bias=True).double()
    return layer, torch.randn(10, 6, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", [*LOSSES, *NEED_LOGITS])
def test_losses(name):
    """For every loss that models use: value and gradients equal those of plain logits."""
    loss = (LOSSES | NEED_LOGITS)[name]
    module, x = make_head()
    leaves = [x, *module.parameters()]
    expected = loss(module(x))
    grads = torch.autograd.grad(expected, leaves)
    replace(module, match(module, "cross_entropy"))
    assert kernels_of(module) == ("cross_entropy",)
    actual = loss(module(x))
    assert abs(actual - expected) <= 1e-12 * abs(expected)
    for grad, expected_grad in zip(torch.autograd.grad(actual, leaves), grads):
        assert (grad - expected_grad).norm() <= 1e-12 * expected_grad.norm()


def test_logits_stay_right_for_whoever_asks():
    """Logits are right before and after backward, and in a second backward."""
    module, x = make_head()
    expected = module(x)
    replace(module, match(module, "cross_entropy"))
    logits = module(x)
    assert isinstance(logits, LazyLogits)
    loss = F.cross_entropy(logits, LABELS)
    loss.backward(retain_graph=True)
    torch.testing.assert_close(logits.full(), expected, rtol=1e-12, atol=1e-12)
    first_grads = [leaf.grad.clone() for leaf in (x, *module.parameters())]
    loss.backward()
    for leaf, grad in zip((x, *module.parameters()), first_grads):
        torch.testing.assert_close(leaf.grad, 2 * grad, rtol=1e-12, atol=1e-12)
    module.eval()
    assert not isinstance(module(x), LazyLogits)


class BackwardRecorder(TorchDispatchMode):
    """Records which gradients each backward of the kernel computes: x, weights."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.schedlang.held_cross_entropy_backward.default:
            self.made.append(tuple(args[-2:]))
        return func(*args, **(kwargs or {}))


def test_halves_of_a_backward():
    """First for the input, then for the weights: each half computes its own only."""
    module, x = make_head()
    F.cross_entropy(module(x), LABELS).backward()
    expected = [leaf.grad.clone() for leaf in (x, *module.parameters())]
    replace(module, match(module, "cross_entropy"))
    module.zero_grad()
    with BackwardRecorder() as halves:
        loss = F.cross_entropy(module(head_input := x * 1), LABELS)
        (input_grad,) = torch.autograd.grad(loss, head_input, retain_graph=True)
        torch.autograd.backward(loss, inputs=list(module.parameters()))
    assert halves.made == [(True, False), (False, True)]
    for actual, grad in zip((input_grad, *(p.grad for p in module.parameters())), expected):
        torch.testing.assert_close(actual, grad, rtol=1e-12, atol=1e-12)


def count_allocations(work, size):
    """Return the number of allocations of at least `size` bytes, and the peak bytes."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    events = sorted(
        (e.start_ns(), e.nbytes())
        for e in profile.profiler.kineto_results.events()
        if e.name() == "[memory]"
    )
    held_bytes, peak = 0, 0
    for _, change in events:
        held_bytes += change
        peak = max(peak, held_bytes)
    return sum(change >= size for _, change in events), peak


def test_one_tensor_of_logits():
    """Forward allocates the logits, and once more for a moment as eager does; backward allocates
    none, where eager allocates their gradient twice."""
    x, weight = torch.randn(64, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    target, size = torch.arange(64), 64 * 1000 * 4
    losses = []

    def forward():
        lse, picked, _, _ = held_forward(x, weight, None, target, 1.0, 0.0)
        losses.append((lse - picked).mean())

    def eager():
        losses.append(F.cross_entropy(F.linear(x, weight), target))

    count, peak = count_allocations(forward, size)
    assert count <= 2 and peak < 2.2 * size
    count, _ = count_allocations(lambda: losses.pop().backward(), size)
    assert count == 0
    count_allocations(eager, size)
    assert count_allocations(lambda: losses.pop().backward(), size)[0] >= 1


ROWS = {
    "split words, sliced state": (
        """lm_head pad(out, multiple=8)
        lm_head shard(vocab, over=tp)
        zero(stage=3, over=dp)""",
        "dp=2, tp=2",
    ),
    "stages": STAGES,
    "stages, backward in halves": (STAGES[0].replace("1F1B", "ZB-H1"), STAGES[1]),
}


@pytest.mark.parametrize("name", thin_out(ROWS))
def test_models_over_ranks(name, threads):
    """With a split vocabulary, sharded state and stages the proof holds."""
    assert_llama_proven(threads, ROW, ROWS[name])


def test_what_is_no_head_is_told():
    """A module that is no linear layer is refused; `chunk` belongs to the other kernel."""
    assert "S410" in refusal_text(models.llama(1), "model.norm replace_kernel(cross_entropy)")
    message = refusal_text(models.llama(1), "lm_head replace_kernel(cross_entropy, chunk=1MiB)")
    assert "S870" in message and "replace_kernel(cross_entropy)" in message
