"""Logical dropout: masks are equal on every layout, in microbatches and in recomputation."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.runtime.modes import enter_modes, restore_forward_context
from schedlang.runtime.rng.logical_dropout import LogicalDropout, LogicalWindow
from schedlang.runtime.scope import Scope, enter_scope, named_sites


def _drawn_mask(shape, samples=None, p=0.5, step=0, seed=0, slices=None, draw=F.dropout) -> Tensor:
    """Return the mask drawn for `samples` (default: one per row)."""
    scope = Scope(step, 0, tuple(samples or range(shape[0])))
    with enter_modes(LogicalDropout(seed, slices)), enter_scope(scope):
        return draw(torch.ones(shape, dtype=torch.float64), p) != 0


def test_a_slice_is_a_slice_of_the_whole() -> None:
    """A rank with some rows, heads and columns draws exactly its part of the logical mask."""
    full_mask = _drawn_mask((4, 6, 5, 7))
    heads, columns = [4, 1], torch.tensor([0, 2, 3])
    window = LogicalWindow((6, 5, 7), (heads, None, columns))
    part = _drawn_mask((2, 2, 5, 3), samples=(3, 1), slices=lambda site, call, shape: window)
    assert torch.equal(part, full_mask[[3, 1]][:, heads][..., columns])


def test_rows_may_be_flattened_sample_by_sample() -> None:
    """A (samples * positions, width) tensor has the mask of (samples, positions, width)."""
    assert torch.equal(
        _drawn_mask((12, 5), samples=(0, 1, 2)), _drawn_mask((3, 4, 5)).reshape(12, 5)
    )


def test_rows_that_are_no_samples_are_refused() -> None:
    """A tensor that cannot be split into samples is refused."""
    with pytest.raises(Refusal, match="samples"):
        _drawn_mask((7, 2), samples=(0, 1))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_keep_rate_is_right(p: float) -> None:
    """The keep rate of 2e5 elements, and of rows and columns, is within 5 standard deviations."""
    mask = _drawn_mask((100, 2000), p=p).double()
    sd = math.sqrt(p * (1 - p))
    assert abs(mask.mean().item() - (1 - p)) < 5 * sd / math.sqrt(mask.numel())
    assert (mask.mean(0) - (1 - p)).abs().max() < 5.5 * sd / math.sqrt(100)
    assert (mask.mean(1) - (1 - p)).abs().max() < 5 * sd / math.sqrt(2000)


@pytest.mark.parametrize("other", ["seed", "step", "sample", "neighbour", "site", "call"])
def test_masks_are_independent(other: str) -> None:
    """Masks that differ in one coordinate agree like coin flips, within 5 standard deviations."""
    model = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])
    named_sites(model)
    first = _drawn_mask((100, 200), draw=lambda x, p: model[0](x))
    second = {
        "seed": lambda: _drawn_mask((100, 200), seed=1, draw=lambda x, p: model[0](x)),
        "step": lambda: _drawn_mask((100, 200), step=1, draw=lambda x, p: model[0](x)),
        "sample": lambda: _drawn_mask((100, 200), range(100, 200), draw=lambda x, p: model[0](x)),
        "neighbour": lambda: first.roll(1, 1),
        "site": lambda: _drawn_mask((100, 200), draw=lambda x, p: model[1](x)),
        "call": lambda: _drawn_mask((100, 200), draw=lambda x, p: (F.dropout(x), F.dropout(x))[1]),
    }[other]()
    agree = (first == second).double().mean().item()
    assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(first.numel())


class Net(nn.Module):
    """Dropout in the root, in modules, and in a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3))
        self.again = ""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.a(x), 0.2, self.training)
        for _ in range(2):
            if self.again == "within a context":
                context = lambda: (nullcontext(), restore_forward_context())  # noqa: E731
                x = checkpoint(self.body, x, use_reentrant=False, context_fn=context)
            elif self.again:
                x = checkpoint(self.body, x, use_reentrant=self.again == "reentrant")
            else:
                x = self.body(x)
        return x

    def body(self, x: Tensor) -> Tensor:
        return F.dropout(self.b(x).relu(), 0.2, self.training)


def _gradients(model: nn.Module, parts: list[list[int]], inputs: Tensor) -> list[Tensor]:
    """Return gradients summed over microbatches: all forwards, then backwards in reverse."""
    model.zero_grad()
    with enter_modes(LogicalDropout(7)):
        scopes = [Scope(2, i, tuple(rows)) for i, rows in enumerate(parts)]
        losses = []
        for scope in scopes:
            with enter_scope(scope):
                losses.append(model(inputs[list(scope.samples)]).pow(2).sum())
        for scope, loss in reversed(list(zip(scopes, losses))):
            with enter_scope(scope):
                loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("again", ["within a context", "as users write it", "reentrant"])
def test_microbatches_and_recomputation_change_nothing(again: str) -> None:
    """Gradients with dropout are equal for full batch, unequal microbatches and recomputation.

    Also where the model calls torch's checkpoint for a part of a module.
    """
    torch.manual_seed(0)
    model = Net().double()
    named_sites(model)
    x = torch.randn(7, 6, dtype=torch.float64)
    full_grads = _gradients(model, [list(range(7))], x)
    parts = _gradients(model, [[4, 0, 1], [2, 3], [5], [6]], x)
    model.again = again
    recomputed = _gradients(model, [[4, 0, 1], [2, 3], [5], [6]], x)
    for w, p, r in zip(full_grads, parts, recomputed):
        assert (w - p).abs().max() < 1e-13 * w.abs().max()
        # a reentrant one sums the gradients of its two calls in another order
        assert (p - r).abs().max() <= (1e-13 if again == "reentrant" else 0.0) * p.abs().max()
    model.eval()
    assert not torch.equal(_gradients(model, [list(range(7))], x)[0], full_grads[0])


@pytest.mark.parametrize("mask", [None, "bool", "float", "causal", "blind"])
@pytest.mark.parametrize("gqa", [False, True])
def test_attention_that_drops_equals_attention_where_it_drops_nothing(mask, gqa: bool) -> None:
    """Our attention with a vanishing dropout rate equals torch's, with gradients."""
    gen = torch.Generator().manual_seed(1)
    kv = 2 if gqa else 4
    q, k, v = (
        torch.randn(2, h, n, 8, generator=gen, dtype=torch.float64).requires_grad_()
        for h, n in ((4, 5), (kv, 6), (kv, 6))
    )
    visible = torch.rand(2, 1, 5, 6, generator=gen) > 0.4
    visible[..., 0] = True
    if mask == "blind":
        visible[0, :, 2] = False
    masks = {"bool": visible, "blind": visible, "float": torch.randn(5, 6, generator=gen).double()}
    options = {"is_causal": mask == "causal", "scale": 0.3, "enable_gqa": gqa}
    results = []
    for p in (0.0, 1e-18):
        with enter_modes(LogicalDropout(0)), enter_scope(Scope(0, 0, (0, 1))):
            attended = F.scaled_dot_product_attention(q, k, v, masks.get(mask), p, **options)
        results.append((attended, *torch.autograd.grad(attended.square().sum(), (q, k, v))))
    for expected, written in zip(*results):
        assert (expected - written).abs().max() < 1e-12


def test_attention_drops_the_logical_heads() -> None:
    """A rank with two of four heads uses the masks of these heads."""
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, 4, 5, 8, generator=gen) for _ in range(3))
    window = LogicalWindow((4, 5, 5), ([2, 3], None, None))
    outs = []
    for slices, heads in ((None, slice(0, 4)), (lambda *_: window, slice(2, 4))):
        with enter_modes(LogicalDropout(0, slices)), enter_scope(Scope(0, 0, (0, 1, 2))):
            local = (t[:, heads] for t in (q, k, v))
            outs.append(F.scaled_dot_product_attention(*local, dropout_p=0.5))
    assert (outs[0][:, 2:] - outs[1]).abs().max() < 1e-6
    assert (outs[0] - F.scaled_dot_product_attention(q, k, v)).abs().max() > 0.01


torch.manual_seed(3)
ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)


def _run_attention(x: Tensor, weights: bool) -> Tensor:
    return ATTENTION(x, x, x, need_weights=weights)[0]


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.5, inplace=True),
        lambda x: F.dropout1d(x, 0.5),
        lambda x: F.alpha_dropout(x, 0.5, training=True),
        lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
        lambda x: torch.native_dropout(x, 0.5, True)[0],
        lambda x: x * torch.rand(x.shape[0], 1, 1),
        lambda x: x * torch.rand_like(x),
        lambda x: x + torch.randn(x.shape),
        lambda x: x + torch.randn_like(x),
        lambda x: torch.empty_like(x).uniform_(-1, 3),
        lambda x: x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5),
        lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: torch.empty_like(x).normal_(2, 3),
        lambda x: F.gumbel_softmax(x, dim=-1),
        lambda x: _run_attention(x, True),
        lambda x: _run_attention(x, False),
    ],
)
def test_random_operators_are_drawn_logically(draw) -> None:
    """Random operators draw the same for a row in any batch, and differ between rows."""
    x = torch.ones(4, 6, 8)

    def drawn(samples: tuple[int, ...]) -> Tensor:
        with enter_modes(LogicalDropout(0)), enter_scope(Scope(0, 0, samples)):
            return draw(x[: len(samples)].clone())

    full = drawn((0, 1, 2, 3))
    assert torch.equal(drawn((2, 1)), full[[2, 1]])
    assert full[0].ne(full[1]).any() or full.unique().numel() > 1


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.randperm(4),
        lambda x: torch.multinomial(x, 1),
        lambda x: torch.rand(()),
        lambda x: torch.rand(2, generator=torch.Generator()),
        lambda x: F.rrelu(x, training=True),
        lambda x: torch.ops.aten.native_dropout(x, 0.5, True),
        lambda x: nn.LSTM(3, 3, 2, dropout=0.5)(x),
    ],
)
def test_what_has_no_logical_form_is_refused(draw) -> None:
    """Random operators that depend on the layout are refused with their names."""
    x = torch.ones(2, 3)
    with enter_modes(LogicalDropout(0)), enter_scope(Scope(0, 0, (0, 1))), pytest.raises(Refusal):
        draw(x)


def test_what_is_not_random_passes() -> None:
    """In eval mode, with p = 0, or outside a scope nothing is drawn or refused."""
    x, mode = torch.ones(2, 3), LogicalDropout(0)
    with enter_modes(mode), enter_scope(Scope(0, 0, (0, 1))):
        assert F.dropout(x, 0.5, training=False) is x
        torch.ops.aten.dropout(x, 0.5, False)
        F.rrelu(x)
        nn.LSTM(3, 3, 2, dropout=0.5).eval()(x)
        F.scaled_dot_product_attention(x, x, x)
    with enter_modes(mode):
        torch.randperm(3)
    assert mode.drawn == 0


def test_normal_numbers_are_normal() -> None:
    """Mean, variance and fourth moment of 1e5 numbers, within 5 standard deviations."""
    with enter_modes(LogicalDropout(0)), enter_scope(Scope(0, 0, (0, 1))):
        x = torch.randn(2, 50000, dtype=torch.float64)
    for power, mean, sd in ((1, 0, 1), (2, 1, math.sqrt(2)), (4, 3, math.sqrt(96))):
        assert abs(x.pow(power).mean().item() - mean) < 5 * sd / math.sqrt(x.numel())
