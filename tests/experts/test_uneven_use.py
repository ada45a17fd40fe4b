"""Parameters that only some ranks use in a step, such as experts without tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.analyze.prepare import prepare
from tests.engine import Threads
from tests.proofs import assert_near, assert_proven, make_plan, sgd, train_sequential, train_steps


class Block(nn.Module):
    """Each row goes through the layer that its first number chooses; a third layer is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.idle = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the chosen layers."""
        output = x
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if rows.numel():
                output = output.index_add(0, rows, expert(x[rows]))
        return output.tanh()


class Chosen(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the outputs."""
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


def chosen_batches() -> list[dict[str, Tensor]]:
    """Batches whose halves choose different layers."""
    signs = torch.tensor([[-3.0, -2, 3, 2], [-3, 2, -2, 3], [3, 2, -2, -3]], dtype=torch.float64)
    torch.manual_seed(1)
    batches = [{"x": torch.randn(4, 4).double()} for _ in signs]
    for batch, first_column in zip(batches, signs):
        batch["x"][:, 0] = first_column
    return batches


class Nested(nn.Module):
    """Layers in lists within a list, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.groups = nn.ModuleList(
            nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the outputs."""
        for group in self.groups:
            for layer in group:  # type: ignore[attr-defined]
                x = layer(x).tanh()
        return x.square().mean()


def test_lists_in_lists_are_sliced_by_what_is_called(threads: Threads) -> None:
    """ZeRO gathers the layers of nested lists, as lists themselves are never called."""
    batches = [{"x": torch.randn(4, 4, dtype=torch.float64)} for _ in range(3)]
    plan = make_plan(Nested().double(), "  zero(stage=3, over=dp)", "dp=2")
    assert_proven(threads, plan, batches)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_nobody_uses_in_a_later_stage(threads: Threads, stage: int) -> None:
    """Unused parameters in a later stage are sharded and saved with their unit."""
    rows = f"""  blocks  pipeline_split(over=pp)
  zero(stage={stage}, over=dp)
  pipeline(order="GPipe", micro=2)"""
    assert_proven(threads, make_plan(Chosen().double(), rows, "dp=2, pp=2"), chosen_batches())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_one_rank_alone_uses(threads: Threads, stage: int) -> None:
    """A parameter that one rank uses has its full gradient on all; an unused one has none."""
    plan = make_plan(Chosen().double(), f"  zero(stage={stage}, over=dp)", "dp=2")
    assert_proven(threads, plan, chosen_batches())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_nobody_uses_in_one_step(threads: Threads, stage: int) -> None:
    """A layer that no row of a step chooses has no gradient in it, as in the plain loop.

    Momentum and weight decay would move it otherwise: it is used in the steps before and after.
    """
    batches = chosen_batches()
    batches[1]["x"][:, 0] = torch.tensor([3.0, 2, 2, 3])  # all rows choose the second layer
    plan = make_plan(Chosen().double(), f"  zero(stage={stage}, over=dp)", "dp=2")
    observed = threads.run(train_steps, 2, plan, tuple(batches), sgd, None, {})[0]
    assert_near(observed, train_sequential(Chosen().double(), batches))


class Counted(Block):
    """The same, by the number of rows of each layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the chosen layers."""
        chosen, output = (x[:, 0] > 0).long(), x
        counts = torch.bincount(chosen, minlength=2)
        for number, layer in enumerate(self.experts):
            if counts[number].item() == 0:
                continue
            (rows,) = torch.where(chosen == number)
            output = output.index_add(0, rows, layer(x[rows]))
        return output.tanh()


@pytest.mark.parametrize("order", ["GPipe", "ZB-H1"])
def test_a_first_stage_whose_values_choose_all_its_weights(threads: Threads, order: str) -> None:
    """It gets gradients, although a forward without values reaches none of its weights."""

    def counted() -> nn.Module:
        model = Chosen()
        model.blocks = nn.ModuleList(Counted() for _ in range(2))
        return model.double()

    rows = f'blocks  pipeline_split(over=pp)\npipeline(order="{order}", micro=2)'
    torch.manual_seed(0)
    model, batches = counted(), chosen_batches()
    observed = threads.run(
        train_steps, 2, make_plan(model, rows, "pp=2"), tuple(batches), sgd, None, {}
    )[0]
    assert_near(observed, train_sequential(model, batches))


class Parallel(nn.Module):
    """Parallel layers in the outermost list; values choose one for each row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the outputs."""
        output = x
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if rows.numel():
                output = output.index_add(0, rows, expert(x[rows]))
        return output.square().mean()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_units_that_not_every_rank_calls(threads: Threads, stage: int) -> None:
    """Modules that values choose are no ZeRO units: ranks would gather different ones."""
    plan = make_plan(Parallel().double(), f"  zero(stage={stage}, over=dp)", "dp=2")
    assert_proven(threads, plan, chosen_batches())


class Guarded(Block):
    """The same, behind two conditions, of which numbers without values meet one at a time."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the chosen layers."""
        chosen, output = (x[:, 0] > 0).long(), x
        counts = torch.bincount(chosen, minlength=2)
        for number, layer in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if counts[number].item() > 0 and len(rows) > 0:
                output = output.index_add(0, rows, layer(x[rows]))
        return output.tanh()


class Listed(Block):
    """The same, by lists of numbers: which layers are chosen, and by how many rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the chosen layers."""
        chosen, output = (x[:, 0] > 0).long(), x
        counts = torch.bincount(chosen, minlength=2)
        for number in (counts > 0).nonzero().flatten().tolist():
            if counts.tolist()[number] == 0:
                continue
            (rows,) = torch.where(chosen == number)
            output = output.index_add(0, rows, self.experts[number](x[rows]))
        return output.tanh()


class Cut(Block):
    """Rows that are sorted by their layer, and cut by the numbers of rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the chosen layers."""
        chosen = (x[:, 0] > 0).long()
        parts = x[chosen.argsort()].split(torch.bincount(chosen, minlength=2).tolist())
        return torch.cat([layer(part) for layer, part in zip(self.experts, parts)]).tanh()


class Offset(Block):
    """The same rows, cut by running sums of numbers of rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the chosen layers."""
        chosen = (x[:, 0] > 0).long()
        ends = torch.bincount(chosen, minlength=2).cumsum(0).tolist()
        parts = zip([0, *ends], ends, self.experts)
        in_order = x[chosen.argsort()]
        outputs = torch.cat([layer(in_order[start:end]) for start, end, layer in parts])
        return (outputs + in_order).tanh()


GPIPE = 'blocks  pipeline_split(over=pp)\npipeline(order="GPipe", micro=2)'
CHOSEN_BY_NUMBERS = [
    *((kind, f"zero(stage={stage}, over=dp)") for kind in (Guarded, Listed) for stage in (0, 1, 3)),
    (Listed, GPIPE),
    (Cut, "zero(stage=0, over=dp)"),
    (Cut, "zero(stage=3, over=dp)"),
    (Cut, GPIPE),
]


@pytest.mark.parametrize(("kind", "rows"), CHOSEN_BY_NUMBERS)
def test_layers_that_numbers_choose(threads: Threads, kind: type[Block], rows: str) -> None:
    """Layers that a forward without values does not call are trained as in a plain loop."""
    torch.manual_seed(0)
    model = Chosen()
    model.blocks = nn.ModuleList(kind() for _ in range(2))
    plan = make_plan(model.double(), rows, "pp=2" if rows == GPIPE else "dp=2")
    batches = chosen_batches()
    observed = threads.run(train_steps, 2, plan, tuple(batches), sgd, None, {})[0]
    assert_near(observed, train_sequential(model, batches))


def test_numbers_of_rows_are_not_known(threads: Threads) -> None:
    """A forward that needs them to run is refused at the line that reads them."""
    model = Chosen()
    model.blocks = nn.ModuleList(Offset() for _ in range(2))
    with pytest.raises(Refusal) as caught:
        prepare(make_plan(model.double(), "zero(stage=1, over=dp)", "dp=2"), chosen_batches()[0])
    assert caught.value.diagnostic.code == "S612" and "torch.where" in caught.value.render()
    assert "test_uneven_use.py" in caught.value.render()


class Turned(nn.Module):
    """Equal layers, which each row passes forward or in reverse, by its first number.

    `strict`: batches of another kind raise, so that a trial with other values fails.
    """

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.strict = strict
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        """The mean square of the outputs."""
        if self.strict and int(kind[0]) != 7:
            raise ValueError("another kind")
        layers, outputs = list(self.layers), []
        for row in x:
            for layer in layers if row[0] > 0 else layers[::-1]:
                row = layer(row).tanh()
            outputs.append(row)
        return torch.stack(outputs).square().mean()


def turned_batches() -> list[dict[str, Tensor]]:
    """Batches whose rows pass the layers in two orders, or all in one."""
    return [
        {"x": batch["x"].sort(0).values, "kind": torch.full((4,), 7)} for batch in chosen_batches()
    ]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_units_that_ranks_call_in_other_orders(threads: Threads, stage: int) -> None:
    """Ranks call units in different orders, and each gradient is summed with its own."""
    plan = make_plan(Turned().double(), f"  zero(stage={stage}, over=dp)", "dp=2")
    observed = threads.run(train_steps, 2, plan, tuple(turned_batches()), sgd, None, {})[0]
    assert_near(observed, train_sequential(Turned().double(), turned_batches()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_orders_that_nobody_could_see_before(threads: Threads, stage: int) -> None:
    """Different orders that the trial could not see are detected before a step (S663)."""
    plan = make_plan(Turned(strict=True).double(), f"  zero(stage={stage}, over=dp)", "dp=2")
    with pytest.raises(Exception, match="S663"):
        threads.run(train_steps, 2, plan, tuple(turned_batches()), sgd, None, {})


class Adapters(nn.Module):
    """Blocks with an adapter for every language; each row chooses one."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.inside = inside
        adapters = [
            nn.ModuleDict({name: nn.Linear(4, 4) for name in ("de", "en", "fr")})
            for _ in self.blocks
        ]
        if inside:
            for block, block_adapters in zip(self.blocks, adapters):
                block.adapters = block_adapters
        else:
            self.adapters = nn.ModuleList(adapters)

    def forward(self, x: Tensor, languages: Tensor) -> Tensor:
        """The mean square of the outputs."""
        for number, block in enumerate(self.blocks):
            x = block(x).tanh()
            block_adapters: Any = block.adapters if self.inside else self.adapters[number]
            names = list(block_adapters)
            x = x + torch.stack(
                [block_adapters[names[int(k)]](row) for row, k in zip(x, languages)]
            )
        return x.square().mean()


def language_batches() -> list[dict[str, Tensor]]:
    """Batches of one language, then of two."""
    torch.manual_seed(1)
    languages = [[0, 0, 0, 0], [0, 0, 1, 1], [2, 1, 1, 2], [2, 2, 0, 0]]
    return [{"x": torch.randn(4, 4).double(), "languages": torch.tensor(k)} for k in languages]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adapters_that_numbers_of_the_batch_choose(
    threads: Threads, stage: int, inside: bool
) -> None:
    """Adapters are summed correctly, also one that the batch of `build` did not choose."""
    plan = make_plan(Adapters(inside).double(), f"  zero(stage={stage}, over=dp)", "dp=2")
    observed = threads.run(train_steps, 2, plan, tuple(language_batches()), sgd, None, {})[0]
    assert_near(observed, train_sequential(Adapters(inside).double(), language_batches()))
