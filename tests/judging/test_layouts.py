"""Matching ranks' parameters to the original: by values, else by names; misses are reported."""

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
    """Three weights, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(4, 6, dtype=torch.float64)
        self.table = nn.Embedding(5, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 5, bias=False, dtype=torch.float64)
        self.head.weight = self.table.weight


def program_of(**parameters: Any) -> TrainingProgram:
    """Return a program with these parameters."""
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
    """Each element of a rank's tensor is located by its value in the original."""
    torch.manual_seed(0)
    original = Original()
    parts = cut(original)
    (tensor,), lost = match_parameters(program_of(**parts), table := ElementIndex(original))
    assert not lost and tensor.matched_by == "values"
    flat = next(iter(parts.values())).reshape(-1)
    assert tensor.padding == {"padded at the end": 12, "padded with other numbers": 4}.get(
        next(name for name, c in CUTS.items() if c is cut), 0
    )
    counts = torch.zeros(len(flat), dtype=torch.long)
    for name, (local_region, original_region) in tensor.pieces.items():
        parameter = table.parameters[name].detach().reshape(-1)
        assert torch.equal(parameter[original_region.numbers], flat[local_region.numbers])
        assert torch.equal(
            original_region.read(parameter).reshape(-1), local_region.read(flat).reshape(-1)
        )
        counts[local_region.numbers] += 1
    assert int(counts.max()) == 1 and int((counts == 0).sum()) == tensor.padding


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
    """A region stores regular indices as a grid, and reads and writes just these elements."""
    flat = torch.arange(24.0)
    region = Region.from_numbers(numbers.reshape(-1), numbers.shape)
    assert torch.equal(region.numbers, numbers.reshape(-1)) and len(region) == numbers.numel()
    assert (0 if region.listed is None else len(region.listed)) == listed
    assert torch.equal(region.read(flat).reshape(-1), flat[numbers.reshape(-1)])
    region.write(flat, -1 - region.read(flat).reshape(-1))
    assert int((flat < 0).sum()) == numbers.numel()
    assert torch.equal(flat[numbers.reshape(-1)], -1.0 - numbers.reshape(-1))
    assert region.equals(Region.from_numbers(numbers.reshape(-1))) and not region.equals(
        Region.from_numbers(torch.arange(5))
    )


def test_one_changed_element_is_no_padding() -> None:
    """A tensor with one changed value is matched by name, or not at all."""
    original = Original()
    table = ElementIndex(original)
    for index in ((0, 0), (5, 3)):
        changed = original.q.weight.detach().clone()
        changed[index] += 1
        matched, lost = match_parameters(program_of(w=changed), table)
        assert not matched and lost == ["`w` (6, 4)"]
        options = {"names": {"w": "q.weight"}}
        (tensor,), lost = match_parameters(program_of(w=changed, options=options), table)
        assert not lost and tensor.matched_by == "name"
        assert torch.equal(tensor.pieces["q.weight"][1].numbers, torch.arange(24))


def test_values_are_freed_after_the_lookup() -> None:
    """An index keeps no sorted copy of all weights, and sends none to other ranks."""
    original = Original()
    table = ElementIndex(original)
    assert bool((table.find(original.q.weight) >= 0).all()) and "_sorted_values" in vars(table)
    assert "_sorted_values" not in table.__getstate__()
    match_parameters(program_of(w=original.q.weight.detach()), table)
    assert "_sorted_values" not in vars(table)


def test_rows_that_nobody_has_are_missing() -> None:
    """Elements that no rank holds are counted."""
    original = Original()
    table = ElementIndex(original)
    ranks = [
        match_parameters(program_of(w=original.q.weight[rows]), table)
        for rows in (slice(2), slice(3, 6))
    ]
    missing = join_layouts(ranks, table).missing
    assert missing["q.weight"] == 4 and "k.weight" in missing and missing["table.weight"] == 20


def test_what_is_fused_trains_as_one() -> None:
    """Weights that are fused in one tensor form one group."""
    original = Original()
    table = ElementIndex(original)
    fused = program_of(w=torch.cat([original.q.weight, original.k.weight]))
    groups = RankLayouts((tuple(match_parameters(fused, table)[0]),), table).groups
    assert groups["k.weight"] == groups["q.weight"] == groups["w"] == "q.weight"
    assert groups["q.bias"] == "q.bias"


def test_what_is_not_found_is_named() -> None:
    """The refusal names the tensor, the rank, and the original's weights that nobody holds."""
    original = Original()
    table = ElementIndex(original)
    right, wrong = program_of(w=original.q.weight), program_of(v=torch.ones(3, dtype=torch.float64))
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
    """Wrapper prefixes are removed from parameter names."""
    assert "q.weight" in candidate_names(name)


def test_a_module_of_that_name_keeps_it() -> None:
    """A module that is itself named `module` keeps its name."""
    assert next(candidate_names("module.weight")) == "module.weight"
    assert "deep.module.weight" in candidate_names("module.deep.module.weight")


def test_padding_is_counted_on_all_ranks() -> None:
    """Padding of a tensor is summed over ranks."""
    ranks = tuple(
        (RankTensor("weight", (3,), torch.float64, True, "values", padding=count),)
        for count in (1, 2, 0)
    )
    assert RankLayouts(ranks, ElementIndex(nn.Linear(2, 3, bias=False))).padding == {"weight": 3}


GIVEN_SPLITS = {  # the given layout of a weight of six rows, the rank (of four), and its rows there
    "rows over all ranks": (Shard(0), 1, [2, 3]),
    "none are left": (Shard(0), 3, []),
    "rows over a pair": ((Shard(0), [1, 2]), 2, [3, 4, 5]),
    "a copy": (Replicate(), 3, [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("said, rank, rows", GIVEN_SPLITS.values(), ids=GIVEN_SPLITS)
def test_a_split_that_is_told(monkeypatch: Any, said: Any, rank: int, rows: list[int]) -> None:
    """A plain tensor with unknown values is matched by name and by a given layout."""
    monkeypatch.setattr(layouts.comm, "rank", lambda: rank)
    monkeypatch.setattr(layouts.comm, "size", lambda: 4)
    original = Original()
    options = {"names": {"w": "q.weight"}, "layouts": {"w": said}}
    other = torch.rand(len(rows), 4, dtype=torch.float64)
    (tensor,), lost = match_parameters(program_of(w=other, options=options), ElementIndex(original))
    assert not lost and tensor.matched_by == "name"
    numbers = torch.arange(24).reshape(6, 4)[rows].reshape(-1)
    regions = [original_region.numbers for _, original_region in tensor.pieces.values()]
    assert list(tensor.pieces) == ["q.weight"] * bool(rows)
    assert torch.equal(torch.cat([*regions, torch.arange(0)]), numbers)
