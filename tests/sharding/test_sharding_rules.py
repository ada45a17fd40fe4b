"""Our operators on DTensors: each way to split them gives what the whole gives, gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from schedlang.kernels import sharding_rules
from schedlang.kernels.gated import gated_product, packed_gated_product
from schedlang.kernels.grouped import grouped_product
from schedlang.kernels.linear_cross_entropy import Form, statistics, weighted_loss
from schedlang.kernels.norm import Form as Norm
from schedlang.kernels.norm import add_norm, norm
from schedlang.kernels.rope import Form as Turn
from schedlang.kernels.rope import rotate

ROWS, WIDTH, WORDS = (4, 6), 8, 10
S, R = Shard, Replicate()
ENDS = torch.tensor([1, 1, 4], dtype=torch.int32)
TARGET = torch.tensor([3, 0, 9, 1])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal, in float64."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.double)


def multiplied(x: Tensor, weight: Tensor, across: bool = False) -> Tensor:
    """Grouped products of either kind of tensor: ends are one too."""
    if isinstance(x, DTensor):
        return grouped_product(x, weight, distribute_tensor(ENDS, x.device_mesh, [R]), across)
    return grouped_product(x, weight, ENDS, across)


def turned(q: Tensor) -> Tensor:
    """Heads by angles of either kind of tensor."""
    angle = drawn(1, 3, 8)
    if isinstance(q, DTensor):
        angle = distribute_tensor(angle, q.device_mesh, [R])
    made: Tensor = rotate(q, None, angle.cos(), angle.sin(), 8, Turn())
    return made


# name -> (operator, its tensors, how they are split, how the result and each gradient then lie)
X, W = drawn(*ROWS, WIDTH), drawn(WIDTH)
CASES: dict[str, Any] = {
    **{
        f"{name} by {split}": (
            call,
            [X, *more],
            [split, *[R] * len(more)],
            split,
            [split, *[Partial()] * len(more)],
        )
        for split in (S(0), S(1))
        for name, call, more in [
            ("rms_norm", lambda x, w: norm(x, w, None, Norm(offset=1.0, rounding="early")), [W]),
            ("layer_norm", lambda x, w, b: norm(x, w, b, Norm(True)), [W, W + 1]),
            ("layer_norm without bias", lambda x, w: norm(x, w, None, Norm(True)), [W]),
            ("packed", lambda x: packed_gated_product(x, "silu", False), []),
        ]
    },
    **{
        f"add_norm by {split}": (
            lambda a, b, *w, form=form: sum(add_norm(a, b, *w, *[None] * (2 - len(w)), form)),
            [X, X + 1, *more],
            [split, split, *[R] * len(more)],
            split,
            [split, split, *[Partial()] * len(more)],
        )
        for split, form, more in [(S(0), Norm(True), [W, W + 1]), (S(1), Norm(False), [W])]
    },
    **{
        f"a norm with a gate by {split}": (
            lambda x, gate, w, form=form: norm(x, w, None, form, gate),
            [X, X + 1, W],
            [split, split, R],
            split,
            [split, split, Partial()],
        )
        for split, form in [
            (S(0), Norm(act="silu", first=True, groups=2)),
            (S(1), Norm(act="silu", rounding="early")),
        ]
    },
    "a sum and its norm": (
        lambda a, b, w: torch.stack(add_norm(a, b, w, None, Norm(rounding="early"))),
        [X, X + 1, W],
        [S(1), S(1), R],
        S(2),
        [S(1), S(1), Partial()],
    ),
    "heads that turn": (turned, [drawn(2, 4, 3, 8)], [S(1)], S(1), [S(1)]),
    "whole": (lambda x, w: norm(x, w, None, Norm()), [X, W], [R, R], R, [R, R]),
    "columns of a gate": (
        lambda a, b: gated_product(a, b, "gelu"),
        [X, X + 1],
        [S(2), S(2)],
        S(2),
        [S(2), S(2)],
    ),
    "columns of matrices": (
        multiplied,
        [drawn(4, 6), drawn(3, 6, 8)],
        [R, S(2)],
        S(1),
        [Partial(), S(2)],
    ),
    "sums over columns": (
        lambda x, w: multiplied(x, w, True),
        [drawn(4, 6), drawn(3, 8, 6)],
        [S(1), S(2)],
        Partial(),
        [S(1), S(2)],
    ),
    "rows of square matrices": (
        multiplied,
        [drawn(4, 6), drawn(3, 6, 6)],
        [S(1), S(1)],
        Partial(),
        [S(1), S(1)],
    ),
    "the same matrices, the other way round": (
        lambda x, w: multiplied(x, w, True),
        [drawn(4, 6), drawn(3, 6, 6)],
        [S(1), S(1)],
        S(1),
        [Partial(), S(1)],
    ),
}


def _on_ranks(names: list[str]) -> list[str]:
    """On every rank: what differs from the whole, or lies otherwise than said."""
    sharding_rules.register_rules()
    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    for name in names:
        call, tensors, split, lies, grads = CASES[name]
        whole = [t.clone().requires_grad_() for t in tensors]
        parts = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(tensors, split)]
        y, z = call(*whole), call(*parts)
        if z.placements != (lies,):
            wrong.append(f"{name} gives {z.placements}")
        by = drawn(*y.shape, seed=5)
        expected = torch.autograd.grad(y, whole, by)
        found = torch.autograd.grad(
            z,
            parts,
            distribute_tensor(by, mesh, [R]).redistribute(
                placements=[R if isinstance(lies, Partial) else lies]
            ),
        )
        for place, (a, b) in enumerate(zip([y, *expected], [z, *found])):
            if (b.full_tensor() - a).norm() > 1e-12 * a.norm():
                wrong.append(f"{name}: tensor {place} differs")
            if place and b.placements != (grads[place - 1],):
                wrong.append(f"{name}: gradient {place} lies {b.placements}")
    return wrong


def _turning(_: None) -> list[str]:
    """Queries and keys turned: by rows, by tokens with their angles, by heads."""
    sharding_rules.register_rules()
    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    lines = drawn(2, 4, 6, 8), drawn(2, 2, 6, 8)
    angles = drawn(2, 6, 8), drawn(2, 6, 8, seed=1)
    whole = [t.clone().requires_grad_() for t in lines]
    expected = rotate(*whole, *angles, 8, Turn())
    pulled = torch.autograd.grad(expected, whole, lines)
    for split, told in ((S(0), S(0)), (S(2), S(1)), (S(1), R)):
        parts = [distribute_tensor(t, mesh, [split]).requires_grad_() for t in lines]
        tables = [distribute_tensor(t, mesh, [told]) for t in angles]
        found = rotate(*parts, *tables, 8, Turn())
        back = torch.autograd.grad(
            found, parts, [distribute_tensor(t, mesh, [split]) for t in lines]
        )
        for a, b in zip((*expected, *pulled), (*found, *back), strict=True):
            if b.placements != (split,) or not torch.equal(a, b.full_tensor()):
                wrong.append(f"by {split}")
    return wrong


def _heads(_: None) -> list[str]:
    """The same of the loss over rows: its sum, and three numbers of each row."""
    sharding_rules.register_rules()
    mesh = init_device_mesh("cpu", (2,))
    x, weight, bias, by = drawn(4, WIDTH), drawn(WORDS, WIDTH), drawn(WORDS), drawn(4, seed=3)
    wrong = []

    def losses(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, by: Tensor) -> Tensor:
        lse, picked, total = statistics(x, weight, bias, target, Form(cap=2.0))
        loss: Tensor = weighted_loss(x, weight, bias, target, by, 0.1, Form())
        return loss + (lse - picked).sum() + total.sum()

    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    whole = losses(*leaves, TARGET, by)
    split = [
        distribute_tensor(t, mesh, [p]).requires_grad_()
        for t, p in zip((x, weight, bias), (S(0), R, R))
    ]
    others = [distribute_tensor(t, mesh, [S(0)]) for t in (TARGET, by)]
    part = losses(*split, *others)
    pairs = zip(
        [whole, *torch.autograd.grad(whole, leaves)], [part, *torch.autograd.grad(part, split)]
    )
    for place, (a, b) in enumerate(pairs):
        assert isinstance(b, DTensor)
        if (b.full_tensor() - a).norm() > 1e-12 * a.norm():
            wrong.append(f"tensor {place} differs")
    return wrong


def test_every_way_gives_what_the_whole_gives(pool: Any) -> None:
    """Results and gradients of split rows; those of weights are parts of a sum, not gathered."""
    assert pool.run(_on_ranks, 2, list(CASES)) == [[], []]


def test_turns_of_split_rows(pool: Any) -> None:
    """RoPE of rows, tokens and heads that lie apart gathers nothing."""
    assert pool.run(_turning, 2, None) == [[], []]


def test_losses_of_split_rows(pool: Any) -> None:
    """The head's operators, with rows split: loss and gradients of hidden states and weights."""
    assert pool.run(_heads, 2, None) == [[], []]


def test_every_operator_has_a_rule() -> None:
    """An operator that is added without one would fail under DTensor alone."""
    library = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("schedlang::")
    }
    kernels = {
        op for op in library if any(hasattr(module, op) for module in sharding_rules.MODULES)
    }
    assert kernels and kernels <= set(sharding_rules.RULES)


@pytest.mark.parametrize("name", sorted(sharding_rules.RULES))
def test_a_rule_names_every_argument(name: str) -> None:
    """As many placements as the operator has arguments and results."""
    schema = getattr(torch.ops.schedlang, name).default._schema
    given = [torch.zeros(2, 3, 4) if "Tensor" in str(a.type) else 1 for a in schema.arguments]
    for results, arguments in sharding_rules.RULES[name](*given):
        assert len(results) == len(schema.returns) and len(arguments) == len(given)
