"""sum_in_parts equals its model on four ranks, and sends each part before the next is computed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import schedlang
from schedlang.cli import app
from schedlang.ir.modelfile import load_model_file
from schedlang.ir.placement import P, R, S
from schedlang.passes.simulate.account import account
from schedlang.runtime.comm.collectives import Group
from schedlang.runtime.sharding.edges import Edge

SCHEDULE = Path(__file__).parent / "sum_in_parts.sched"


def test_it_equals_the_model() -> None:
    """Outputs, loss, gradients and three steps on four ranks, in float64."""
    result = CliRunner().invoke(app, ["verify", str(SCHEDULE)])
    assert result.exit_code == 0, result.output


def test_a_plan_tells_of_the_parts() -> None:
    """Ten tokens of six numbers are sent as four, four and two."""
    file = load_model_file(None, SCHEDULE)
    costs = account(schedlang.load(SCHEDULE, file.model()).plan(), file.batch(0))
    sent = [(c.count, c.bytes) for c in costs.collectives if c.fqn == "blocks.0.down"]
    assert sent == [(2, 4 * 6 * 4), (1, 2 * 6 * 4)]


@pytest.mark.parametrize("tokens", [5, 1, 0])
def test_sums_start_between_products(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle: two ranks that hold the same, one number at a time; what runs in which order."""
    load_model_file(None, SCHEDULE)
    import sum_in_parts

    from schedlang.runtime.comm import world

    events: list[tuple[str, int]] = []

    def all_reduce(x: Any, group: Any, wait: bool) -> Any:
        events.append(("sum", len(x)))

        def arrive() -> None:
            events.append(("wait", len(x)))
            x.mul_(2)

        return SimpleNamespace(wait=arrive)

    def product(x: Any, weight: Any) -> Any:
        events.append(("product", len(x)))
        return plain(x, weight)

    plain = nn.functional.linear
    monkeypatch.setattr(world, "all_reduce", all_reduce)
    monkeypatch.setattr(nn.functional, "linear", product)
    layer = nn.Linear(4, 6).double()
    edge = Edge(Group(("tp",), (0, 1), 0), S(-1), S(-1), P("sum"), R, differ=True)
    x = torch.randn(2, tokens, 4, dtype=torch.float64, requires_grad=True)
    y = sum_in_parts.InParts(layer, edge, 3)(layer.forward, x)
    expected = 2 * (x[..., None, :] * layer.weight).sum(-1) + layer.bias
    torch.testing.assert_close(y, expected)
    sizes = {5: [4, 4, 2], 1: [1, 1], 0: [0, 0, 0]}[tokens]
    expected_events = [(kind, size) for size in sizes for kind in ("product", "sum")]
    assert events == [*expected_events, *(("wait", size) for size in sizes)]
    grads = torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
    output = plain(x, layer.weight, layer.bias)  # each rank has the gradient of its own part
    for grad, reference in zip(grads, torch.autograd.grad(output.sum(), [x, *layer.parameters()])):
        torch.testing.assert_close(grad, reference)


def test_what_ends_in_no_sum_is_refused() -> None:
    """One part, no linear layer, and layers that are whole or split by their outputs."""
    sch = schedlang.create_schedule(load_model_file(None, SCHEDULE).model())
    sch.mesh(tp=2)
    with pytest.raises(schedlang.Refusal, match="1 parts"):
        sch["blocks.*.down"].sum_in_parts(1)
    with pytest.raises(schedlang.Refusal, match="not a linear layer"):
        sch["blocks.*"].sum_in_parts(2)
    sch["blocks.*.up"].shard("col", over="tp")
    for name in ("up", "down"):
        with pytest.raises(schedlang.Refusal, match="does not end in one sum"):
            sch[f"blocks.*.{name}"].sum_in_parts(2)
