"""Cross-entropy in the place of the logits: right, once in memory, and nobody else's."""

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
from tests.kernels.looking import kernels_of
from tests.kernels.test_linear_cross_entropy import LABELS, LOSSES, WHOLE
from tests.proofs import refused
from tests.rows import STAGES, llama_proven
from tests.tiers import thinned

ROW = "lm_head replace_kernel(cross_entropy)\n"


def test_kernel_is_as_right_as_eager():
    """The kernels themselves run, interpreted: smoothing, caps, scales, bias, ignored labels."""
    cases = [Case((7, 24), dtype, held=True) for dtype in ("float32", "bfloat16", "float16")]
    cases += [Case((3, 8), classes=5000, smoothing=0.1, held=True)]
    cases += [Case((3, 8), cap=3.0, scale=0.5, bias=True, held=True)]
    for each in run_kernel_check(cases, device="cpu"):
        assert each.backend == "interpreter"
        assert each.ok, each


def test_opcheck():
    """The operators are sound; backward says that it writes."""
    x, weight, target = torch.randn(5, 4), torch.randn(9, 4), torch.arange(5)
    leaves = x.requires_grad_(), weight.requires_grad_()
    torch.library.opcheck(
        held_forward,
        (*leaves, None, target, 0.5, 3.0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    lse, *_, z = (t.detach() for t in held_forward(*leaves, None, target, 1.0, 0.0))
    given = (z, x.detach(), weight.detach(), None, target, lse, lse, lse, lse, 1.0, 0.0, True, True)
    torch.library.opcheck(held_backward, given)


def head():
    torch.manual_seed(0)
    made = nn.Linear(6, 17, bias=True).double()
    return made, torch.randn(10, 6, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", [*LOSSES, *WHOLE])
def test_losses(name):
    """Every loss that models write: value and gradients of a plain head's logits."""
    loss = (LOSSES | WHOLE)[name]
    module, x = head()
    leaves = [x, *module.parameters()]
    expected = loss(module(x))
    grads = torch.autograd.grad(expected, leaves)
    replace(module, match(module, "cross_entropy"))
    assert kernels_of(module) == ("cross_entropy",)
    found = loss(module(x))
    assert abs(found - expected) <= 1e-12 * abs(expected)
    for ours, plain in zip(torch.autograd.grad(found, leaves), grads):
        assert (ours - plain).norm() <= 1e-12 * plain.norm()


def test_logits_stay_right_for_whoever_asks():
    """Before backward and after it, logits are the head's; so is a second backward."""
    module, x = head()
    expected = module(x)
    replace(module, match(module, "cross_entropy"))
    logits = module(x)
    assert isinstance(logits, LazyLogits)
    loss = F.cross_entropy(logits, LABELS)
    loss.backward(retain_graph=True)
    torch.testing.assert_close(logits.full(), expected, rtol=1e-12, atol=1e-12)
    once = [leaf.grad.clone() for leaf in (x, *module.parameters())]
    loss.backward()
    for leaf, grad in zip((x, *module.parameters()), once):
        torch.testing.assert_close(leaf.grad, 2 * grad, rtol=1e-12, atol=1e-12)
    module.eval()
    assert not isinstance(module(x), LazyLogits)


class Halves(TorchDispatchMode):
    """Notes what each backward of the kernel makes: the gradient of x, those of the weights."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.schedlang.held_cross_entropy_backward.default:
            self.made.append(tuple(args[-2:]))
        return func(*args, **(kwargs or {}))


def test_halves_of_a_backward():
    """First for what the head was given, then for its weights: each half makes its own alone."""
    module, x = head()
    F.cross_entropy(module(x), LABELS).backward()
    expected = [leaf.grad.clone() for leaf in (x, *module.parameters())]
    replace(module, match(module, "cross_entropy"))
    module.zero_grad()
    with Halves() as halves:
        loss = F.cross_entropy(module(given := x * 1), LABELS)
        (of_input,) = torch.autograd.grad(loss, given, retain_graph=True)
        torch.autograd.backward(loss, inputs=list(module.parameters()))
    assert halves.made == [(True, False), (False, True)]
    for found, grad in zip((of_input, *(p.grad for p in module.parameters())), expected):
        torch.testing.assert_close(found, grad, rtol=1e-12, atol=1e-12)


def big_allocations(work, size):
    """How many allocations of at least so many bytes were made, and the most held at a time."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        work()
    events = sorted(
        (e.start_ns(), e.nbytes())
        for e in seen.profiler.kineto_results.events()
        if e.name() == "[memory]"
    )
    held, most = 0, 0
    for _, change in events:
        held += change
        most = max(most, held)
    return sum(change >= size for _, change in events), most


def test_one_tensor_of_logits():
    """Forward makes the logits, and eager's own sum of exponentials once more for a moment;
    backward makes none, where eager makes its gradient twice."""
    x, weight = torch.randn(64, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    target, size = torch.arange(64), 64 * 1000 * 4
    made = []

    def forward():
        lse, picked, _, _ = held_forward(x, weight, None, target, 1.0, 0.0)
        made.append((lse - picked).mean())

    def eager():
        made.append(F.cross_entropy(F.linear(x, weight), target))

    count, most = big_allocations(forward, size)
    assert count <= 2 and most < 2.2 * size
    count, _ = big_allocations(lambda: made.pop().backward(), size)
    assert count == 0
    big_allocations(eager, size)
    assert big_allocations(lambda: made.pop().backward(), size)[0] >= 1


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


@pytest.mark.parametrize("name", thinned(ROWS))
def test_models_over_ranks(name, threads):
    """Over split words, sliced state and stages it is the same program."""
    llama_proven(threads, ROW, ROWS[name])


def test_what_is_no_head_is_told():
    """A module that is no linear layer is refused; chunks are the other kernel's."""
    assert "S410" in refused(models.llama(1), "model.norm replace_kernel(cross_entropy)")
    said = refused(models.llama(1), "lm_head replace_kernel(cross_entropy, chunk=1MiB)")
    assert "S870" in said and "replace_kernel(cross_entropy)" in said
