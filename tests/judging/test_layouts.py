"""What ranks hold is found by values however it lies, or else by names; what is not is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from schedlang import TrainingProgram
from schedlang.diagnostics.diagnostic import Refusal
from schedlang.passes.judge import layouts
from schedlang.passes.judge.layouts import (
    ElementIndex,
    RankLayouts,
    RankTensor,
    candidate_names,
    join_layouts,
    match_parameters,
)
from schedlang.passes.judge.regions import Region


class Original(nn.Module):
    """Three weights and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(4, 6, dtype=torch.float64)
        self.table = nn.Embedding(5, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 5, bias=False, dtype=torch.float64)
        self.head.weight = self.table.weight


def offered(**parameters: Any) -> TrainingProgram:
    """A program of these parameters."""
    options = parameters.pop("options", {})
    module = nn.Module()
    for name, value in parameters.items():
        module.register_parameter(name, nn.Parameter(value.detach().clone()))
    return TrainingProgram(module, print, **options)


CUTS = {
    "rows": lambda o: {"w": o.q.weight[2:4]},
    "columns": lambda o: {"w": o.q.weight[:, 1:]},
    "transposed": lambda o: {"w": o.q.weight.T},
    "fused": lambda o: {"w": torch.cat([o.q.weight, o.k.weight])},
    "interleaved": lambda o: {"w": torch.stack([o.q.weight, o.k.weight], 1).flatten(0, 1)},
    "flat, across two": lambda o: {
        "w": torch.cat([o.q.weight.flatten(), o.k.weight.flatten()])[9:31]
    },
    "padded at the end": lambda o: {"w": nn.functional.pad(o.table.weight, (0, 0, 0, 3))},
    "padded with other numbers": lambda o: {
        "w": nn.functional.pad(o.table.weight, (0, 0, 0, 1), value=42.0)
    },
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_any_cut_is_found_by_values(cut: Any) -> None:
    """Each element of what a rank holds is told by its value: put back, it is the original's."""
    torch.manual_seed(0)
    original = Original()
    parts = cut(original)
    (one,), lost = match_parameters(offered(**parts), table := ElementIndex(original))
    assert not lost and one.matched_by == "values"
    flat = next(iter(parts.values())).reshape(-1)
    assert one.padding == {"padded at the end": 12, "padded with other numbers": 4}.get(
        next(name for name, c in CUTS.items() if c is cut), 0
    )
    seen = torch.zeros(len(flat), dtype=torch.long)
    for name, (here, there) in one.pieces.items():
        whole = table.parameters[name].detach().reshape(-1)
        assert torch.equal(whole[there.numbers], flat[here.numbers])
        assert torch.equal(there.read(whole).reshape(-1), here.read(flat).reshape(-1))
        seen[here.numbers] += 1
    assert int(seen.max()) == 1 and int((seen == 0).sum()) == one.padding


NUMBERS = {
    "rows": (torch.arange(24).reshape(6, 4)[2:5], 0),
    "columns": (torch.arange(24).reshape(6, 4)[:, 1:3], 0),
    "a transposed one": (torch.arange(24).reshape(6, 4).T, 0),
    "every other row": (torch.arange(24).reshape(6, 4)[::2], 0),
    "one": (torch.tensor(7), 0),
    "none": (torch.arange(0), 0),
    "backwards": (torch.arange(6).flip(0), 6),
    "shuffled": (torch.tensor([[0, 1], [2, 4]]), 4),
}


@pytest.mark.parametrize("numbers, listed", NUMBERS.values(), ids=NUMBERS)
def test_a_grid_of_numbers_takes_no_memory(numbers: torch.Tensor, listed: int) -> None:
    """A region has the numbers that it was made of, reads and writes these, and no others."""
    flat = torch.arange(24.0)
    one = Region.from_numbers(numbers.reshape(-1), numbers.shape)
    assert torch.equal(one.numbers, numbers.reshape(-1)) and len(one) == numbers.numel()
    assert (0 if one.listed is None else len(one.listed)) == listed
    assert torch.equal(one.read(flat).reshape(-1), flat[numbers.reshape(-1)])
    one.write(flat, -1 - one.read(flat).reshape(-1))
    assert int((flat < 0).sum()) == numbers.numel()
    assert torch.equal(flat[numbers.reshape(-1)], -1.0 - numbers.reshape(-1))
    assert one.equals(Region.from_numbers(numbers.reshape(-1))) and not one.equals(
        Region.from_numbers(torch.arange(5))
    )


def test_one_changed_element_is_no_padding() -> None:
    """A tensor of the original's shape with another value anywhere goes by its name, or is lost."""
    original = Original()
    table = ElementIndex(original)
    for place in ((0, 0), (5, 3)):
        changed = original.q.weight.detach().clone()
        changed[place] += 1
        found, lost = match_parameters(offered(w=changed), table)
        assert not found and lost == ["`w` (6, 4)"]
        options = {"names": {"w": "q.weight"}}
        (one,), lost = match_parameters(offered(w=changed, options=options), table)
        assert not lost and one.matched_by == "name"
        assert torch.equal(one.pieces["q.weight"][1].numbers, torch.arange(24))


def test_rows_that_nobody_has_are_missing() -> None:
    """What all ranks hold together is counted against the original, element by element."""
    original = Original()
    table = ElementIndex(original)
    ranks = [
        match_parameters(offered(w=original.q.weight[rows]), table)
        for rows in (slice(2), slice(3, 6))
    ]
    missing = join_layouts(ranks, table).missing
    assert missing["q.weight"] == 4 and "k.weight" in missing and missing["table.weight"] == 20


def test_what_is_fused_trains_as_one() -> None:
    """Names of weights that lie in one tensor somewhere are one group, all others their own."""
    original = Original()
    table = ElementIndex(original)
    fused = offered(w=torch.cat([original.q.weight, original.k.weight]))
    groups = RankLayouts((tuple(match_parameters(fused, table)[0]),), table).groups
    assert groups["k.weight"] == groups["q.weight"] == groups["w"] == "q.weight"
    assert groups["q.bias"] == "q.bias"


def test_what_is_not_found_is_named() -> None:
    """The refusal has the tensor, the rank, and what of the original nobody holds."""
    original = Original()
    table = ElementIndex(original)
    right, wrong = offered(w=original.q.weight), offered(v=torch.ones(3, dtype=torch.float64))
    with pytest.raises(Refusal) as refusal:
        join_layouts([match_parameters(right, table), match_parameters(wrong, table)], table)
    text = refusal.value.render()
    assert "S763" in text and "`v` (3,) on rank 1" in text and "`k.weight`" in text


@pytest.mark.parametrize(
    "name",
    [
        "module.q.weight",
        "_orig_mod.module.q.weight",
        "module._orig_mod.q.weight",
        "_fsdp_wrapped_module.q._checkpoint_wrapped_module.weight",
        "1:module.q.weight",
    ],
)
def test_wrappers_leave_the_name(name: str) -> None:
    """Of a wrapped parameter's name, the original's is found."""
    assert "q.weight" in candidate_names(name)


def test_a_module_of_that_name_keeps_it() -> None:
    """What the original itself calls `module` is not taken for a wrapper's word first."""
    assert next(candidate_names("module.weight")) == "module.weight"
    assert "deep.module.weight" in candidate_names("module.deep.module.weight")


def test_padding_is_counted_on_all_ranks() -> None:
    """Ranks that hold a tensor of one name may each have padding in it, or none."""
    ranks = tuple(
        (RankTensor("weight", (3,), torch.float64, True, "values", padding=count),)
        for count in (1, 2, 0)
    )
    assert RankLayouts(ranks, ElementIndex(nn.Linear(2, 3, bias=False))).padding == {"weight": 3}


TOLD = {  # what is said of a weight of six rows, on which of four ranks, and its rows there
    "rows over all ranks": (Shard(0), 1, [2, 3]),
    "none are left": (Shard(0), 3, []),
    "rows over a pair": ((Shard(0), [1, 2]), 2, [3, 4, 5]),
    "a copy": (Replicate(), 3, [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("said, rank, rows", TOLD.values(), ids=TOLD)
def test_a_split_that_is_told(monkeypatch: Any, said: Any, rank: int, rows: list[int]) -> None:
    """A plain tensor whose values are others' goes by its name; the user says which part it is."""
    monkeypatch.setattr(layouts.comm, "rank", lambda: rank)
    monkeypatch.setattr(layouts.comm, "size", lambda: 4)
    original = Original()
    options = {"names": {"w": "q.weight"}, "layouts": {"w": said}}
    other = torch.rand(len(rows), 4, dtype=torch.float64)
    (one,), lost = match_parameters(offered(w=other, options=options), ElementIndex(original))
    assert not lost and one.matched_by == "name"
    numbers = torch.arange(24).reshape(6, 4)[rows].reshape(-1)
    found = [there.numbers for _, there in one.pieces.values()]
    assert list(one.pieces) == ["q.weight"] * bool(rows)
    assert torch.equal(torch.cat([*found, torch.arange(0)]), numbers)
