"""Values of a batch with an entry for each row that are no tensors: texts, boxes, numpy arrays."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.lower.build import build
from schedlang.runtime.batch import select_rows
from schedlang.runtime.propagation.trace import repeat_rows
from tests.engine import Threads
from tests.proofs import make_plan

ROWS = 8
LAYOUTS = {
    "dp": ("zero(stage=2, over=dp)", "dp=2"),
    "micro": ('zero(stage=0, over=dp)\npipeline(order="GPipe", micro=2)', "dp=2"),
    "pp": ('layers  pipeline_split(over=pp)\npipeline(order="1F1B", micro=3)', "pp=2"),
}


class Net(nn.Module):
    """Two layers, and a loss in which each row has its own entry of `given`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.double()

    def forward(self, x: Tensor, given: Any) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        losses = [F.mse_loss(row, self.target(entry)) for row, entry in zip(x, given, strict=True)]
        return torch.stack(losses).mean()

    def target(self, entry: Any) -> Tensor:
        """Return the target of a row."""
        if self.kind == "texts":
            return torch.full((4,), float(len(entry)), dtype=torch.float64)
        if self.kind == "boxes":
            return entry["boxes"].mean(0)
        return torch.as_tensor(entry).double()


def batch(kind: str, seed: int = 0) -> dict[str, Any]:
    """Return a batch whose `given` has entries of unequal sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    given: Any = ["a" * ((3 * row + seed) % 5) for row in range(ROWS)]
    if kind == "boxes":  # one image has as many boxes as the batch has rows
        sizes = [(5 * row + seed) % ROWS + 1 for row in range(ROWS)]
        given = [{"boxes": torch.rand(n, 4, generator=generator).double()} for n in sizes]
    elif kind == "array":
        given = torch.rand(ROWS, 4, generator=generator).numpy()
    return {"x": x, "given": tuple(given) if kind == "texts" and seed else given}


def sgd(named: Any) -> torch.optim.Optimizer:
    """Return SGD."""
    return torch.optim.SGD([p for _, p in named], lr=0.1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["texts", "boxes", "array"])
def test_each_part_has_the_entries_of_its_rows(kind: str, layout: str, threads: Threads) -> None:
    """A program gives the losses and parameters of a plain loop."""
    rows, mesh = LAYOUTS[layout]

    def body() -> Any:
        program = build(make_plan(Net(kind), rows, mesh), batch(kind), optimizer=sgd)
        losses = [program.train_step(batch(kind, seed)) for seed in range(3)]
        return losses, program.state_dict()

    model, losses = Net(kind), []
    optimizer = sgd(model.named_parameters())
    for seed in range(3):
        optimizer.zero_grad()
        losses.append(model(**batch(kind, seed)))
        losses[-1].backward()
        optimizer.step()
    for found, state in threads.run(body, 2):
        torch.testing.assert_close(found, [x.detach() for x in losses], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-9, atol=1e-12)


def test_what_has_an_entry_for_each_row() -> None:
    """Features of all rows in a list are split inside; sizes and other lists are not."""
    levels = [torch.arange(2 * n).view(2, n) for n in (1, 3)]
    given = {
        "x": torch.zeros(2, 4),
        "texts": ["a", "b"],
        "levels": levels,
        "size": [224, 224],
        "names": ("a", "b", "c"),
        "images": (torch.ones(1, 3), torch.ones(2, 3)),
        "inside": {"array": np.arange(4.0).reshape(2, 2), "axes": np.arange(3)},
    }
    part = select_rows(given, [1], 2)
    assert part["texts"] == ["b"] and part["names"] == given["names"]
    assert [level.shape for level in part["levels"]] == [(1, 1), (1, 3)]
    assert part["size"] == [224, 224] and [t.shape for t in part["images"]] == [(2, 3)]
    assert part["inside"]["array"].tolist() == [[2.0, 3.0]] and len(part["inside"]["axes"]) == 3
    longer = repeat_rows(given, 5)
    assert longer["texts"] == ["a", "b", "a", "b", "a"] and len(longer["images"]) == 5
    assert longer["inside"]["array"].shape == (5, 2) and longer["size"] == [224, 224]


def test_a_list_of_numbers_is_named(threads: Threads) -> None:
    """It is not split, since it may be a size: the refusal says so."""
    given = {"x": batch("array")["x"], "given": [float(n) for n in range(ROWS)]}
    plan = make_plan(copy.deepcopy(Net("array")), *LAYOUTS["dp"])
    with pytest.raises(Refusal, match="`given` is a list of 8 numbers: it is not split"):
        threads.run(lambda: build(plan, given), 2)
