"""DTensor rules of our operators: sharded results and gradients equal the unsharded ones."""

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


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    """A standard normal tensor in float64."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.double)


def grouped_products(x: Tensor, weight: Tensor, across: bool = False) -> Tensor:
    """Grouped products for plain tensors or DTensors, with `ENDS` of the same type."""
    if isinstance(x, DTensor):
        return grouped_product(x, weight, distribute_tensor(ENDS, x.device_mesh, [R]), across)
    return grouped_product(x, weight, ENDS, across)


def rotated(q: Tensor) -> Tensor:
    """Rotary embedding of heads, for plain tensors or DTensors."""
    angle = random_tensor(1, 3, 8)
    if isinstance(q, DTensor):
        angle = distribute_tensor(angle, q.device_mesh, [R])
    rotated_q: Tensor = rotate(q, None, angle.cos(), angle.sin(), 8, Turn())
    return rotated_q


# name -> (operator, its tensors, their placements, placements of the result and of gradients)
X, W = random_tensor(*ROWS, WIDTH), random_tensor(WIDTH)
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
    "heads that turn": (rotated, [random_tensor(2, 4, 3, 8)], [S(1)], S(1), [S(1)]),
    "whole": (lambda x, w: norm(x, w, None, Norm()), [X, W], [R, R], R, [R, R]),
    "columns of a gate": (
        lambda a, b: gated_product(a, b, "gelu"),
        [X, X + 1],
        [S(2), S(2)],
        S(2),
        [S(2), S(2)],
    ),
    "columns of matrices": (
        grouped_products,
        [random_tensor(4, 6), random_tensor(3, 6, 8)],
        [R, S(2)],
        S(1),
        [Partial(), S(2)],
    ),
    "sums over columns": (
        lambda x, w: grouped_products(x, w, True),
        [random_tensor(4, 6), random_tensor(3, 8, 6)],
        [S(1), S(2)],
        Partial(),
        [S(1), S(2)],
    ),
    "rows of square matrices": (
        grouped_products,
        [random_tensor(4, 6), random_tensor(3, 6, 6)],
        [S(1), S(1)],
        Partial(),
        [S(1), S(1)],
    ),
    "the same matrices, the other way round": (
        lambda x, w: grouped_products(x, w, True),
        [random_tensor(4, 6), random_tensor(3, 6, 6)],
        [S(1), S(1)],
        S(1),
        [Partial(), S(1)],
    ),
}


def _check_cases(names: list[str]) -> list[str]:
    """On every rank: differences from the unsharded result, and wrong placements."""
    sharding_rules.register_rules()
    mesh = init_device_mesh("cpu", (2,))
    failures = []
    for name in names:
        call, tensors, split, expected_placement, grads = CASES[name]
        full = [t.clone().requires_grad_() for t in tensors]
        parts = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(tensors, split)]
        y, z = call(*full), call(*parts)
        if z.placements != (expected_placement,):
            failures.append(f"{name} gives {z.placements}")
        output_grad = random_tensor(*y.shape, seed=5)
        expected = torch.autograd.grad(y, full, output_grad)
        actual = torch.autograd.grad(
            z,
            parts,
            distribute_tensor(output_grad, mesh, [R]).redistribute(
                placements=[R if isinstance(expected_placement, Partial) else expected_placement]
            ),
        )
        for index, (a, b) in enumerate(zip([y, *expected], [z, *actual])):
            if (b.full_tensor() - a).norm() > 1e-12 * a.norm():
                failures.append(f"{name}: tensor {index} differs")
            if index and b.placements != (grads[index - 1],):
                failures.append(f"{name}: gradient {index} lies {b.placements}")
    return failures


def _check_rotations(_: None) -> list[str]:
    """On every rank: differences of rotated queries and keys, split by rows, tokens or heads."""
    sharding_rules.register_rules()
    mesh = init_device_mesh("cpu", (2,))
    failures = []
    queries_keys = random_tensor(2, 4, 6, 8), random_tensor(2, 2, 6, 8)
    angles = random_tensor(2, 6, 8), random_tensor(2, 6, 8, seed=1)
    full = [t.clone().requires_grad_() for t in queries_keys]
    expected = rotate(*full, *angles, 8, Turn())
    expected_grads = torch.autograd.grad(expected, full, queries_keys)
    for split, table_split in ((S(0), S(0)), (S(2), S(1)), (S(1), R)):
        parts = [distribute_tensor(t, mesh, [split]).requires_grad_() for t in queries_keys]
        tables = [distribute_tensor(t, mesh, [table_split]) for t in angles]
        actual = rotate(*parts, *tables, 8, Turn())
        actual_grads = torch.autograd.grad(
            actual, parts, [distribute_tensor(t, mesh, [split]) for t in queries_keys]
        )
        for a, b in zip((*expected, *expected_grads), (*actual, *actual_grads), strict=True):
            if b.placements != (split,) or not torch.equal(a, b.full_tensor()):
                failures.append(f"by {split}")
    return failures


def _check_losses(_: None) -> list[str]:
    """On every rank: differences of the loss and statistics over split rows."""
    sharding_rules.register_rules()
    mesh = init_device_mesh("cpu", (2,))
    x, weight, bias, row_weights = (
        random_tensor(4, WIDTH),
        random_tensor(WORDS, WIDTH),
        random_tensor(WORDS),
        random_tensor(4, seed=3),
    )
    failures = []

    def losses(
        x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, row_weights: Tensor
    ) -> Tensor:
        lse, picked, total = statistics(x, weight, bias, target, Form(cap=2.0))
        loss: Tensor = weighted_loss(x, weight, bias, target, row_weights, 0.1, Form())
        return loss + (lse - picked).sum() + total.sum()

    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    full_loss = losses(*leaves, TARGET, row_weights)
    split = [
        distribute_tensor(t, mesh, [p]).requires_grad_()
        for t, p in zip((x, weight, bias), (S(0), R, R))
    ]
    sharded = [distribute_tensor(t, mesh, [S(0)]) for t in (TARGET, row_weights)]
    part = losses(*split, *sharded)
    pairs = zip(
        [full_loss, *torch.autograd.grad(full_loss, leaves)],
        [part, *torch.autograd.grad(part, split)],
    )
    for index, (a, b) in enumerate(pairs):
        assert isinstance(b, DTensor)
        if (b.full_tensor() - a).norm() > 1e-12 * a.norm():
            failures.append(f"tensor {index} differs")
    return failures


def test_every_way_gives_what_the_whole_gives(pool: Any) -> None:
    """Results and gradients are right; gradients of weights are partial sums, not gathered."""
    assert pool.run(_check_cases, 2, list(CASES)) == [[], []]


def test_turns_of_split_rows(pool: Any) -> None:
    """RoPE of split rows, tokens or heads gathers nothing."""
    assert pool.run(_check_rotations, 2, None) == [[], []]


def test_losses_of_split_rows(pool: Any) -> None:
    """The head's operators with split rows: loss and gradients are right."""
    assert pool.run(_check_losses, 2, None) == [[], []]


def test_every_operator_has_a_rule() -> None:
    """Every operator of our library has a rule for DTensor."""
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
    """A rule has a placement for each argument and result."""
    schema = getattr(torch.ops.schedlang, name).default._schema
    arguments_given = [
        torch.zeros(2, 3, 4) if "Tensor" in str(a.type) else 1 for a in schema.arguments
    ]
    for results, arguments in sharding_rules.RULES[name](*arguments_given):
        assert len(results) == len(schema.returns) and len(arguments) == len(arguments_given)
